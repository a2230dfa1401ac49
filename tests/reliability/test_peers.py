"""What ranks say of the states they resume from; two hosts that do not agree are in test_two_hosts.py."""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import torch

from lightning_ssl.runs.peers import Peers, digest, disagreement
from lightning_ssl.runs.run import started_again


def test_ranks_of_other_states_do_not_go_on():
    same = {"host": "a", "path": "/runs/last.ckpt", "step": 7, "hash": "1" * 64}
    assert disagreement({0: same, 1: {**same, "host": "b", "path": "/elsewhere/last.ckpt"}}, 2, 9) == ""
    assert disagreement({0: {"host": "a", "path": None}, 1: {"host": "b", "path": None}}, 2, 9) == ""
    for other in ({"host": "b", "path": None}, {**same, "step": 8}, {**same, "hash": "2" * 64}):
        words = disagreement({0: same, 1: {"host": "b", **other}}, 2, 9)
        assert "do not resume from the same state" in words and "rank 0 on a: /runs/last.ckpt, step 7" in words
    missing = {"host": "b", "path": "/runs/last.ckpt"}
    assert "rank 1 on b: /runs/last.ckpt, which is not there" in disagreement({0: same, 1: missing}, 2, 9)


def test_a_hash_tells_states_apart():
    state = {"a": torch.arange(3.0), "b": [1, {"c": torch.zeros(0)}]}
    assert digest(state) == digest({"b": [1, {"c": torch.zeros(0)}], "a": torch.arange(3.0)})
    others = [
        {**state, "a": torch.arange(3)},
        {**state, "a": torch.arange(3.0) + 1e-7},
        {**state, "b": [1, {"c": None}]},
    ]
    assert len({digest(other) for other in [state, *others]}) == 4
    assert digest({"a": torch.ones(2, dtype=torch.bfloat16)}) != digest({"a": torch.ones(2, dtype=torch.float16)})


def test_a_checkpoint_younger_than_the_agent_means_another_start(tmp_path, monkeypatch):
    last = tmp_path / "last.ckpt"
    last.write_bytes(b"")
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert not started_again(last)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert started_again(last)  # written after the process that started this one
    os.utime(last, (0, 0))
    assert not started_again(last)  # an earlier run's
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert started_again(last)


class Ended(Exception):
    pass


class Store:
    """Answers as a board would: in turn, the last answer for good."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def read(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def watch(monkeypatch, store, steps=False, looks=30):
    """Let a rank look at the store; steps: whether it trains on meanwhile. Whether it was ended."""
    trainer = SimpleNamespace(
        global_step=0, checkpoint_callback=None, strategy=SimpleNamespace(_timeout=timedelta(seconds=0.05))
    )
    seen = []

    class Over(threading.Event):
        def wait(self, timeout=None):
            seen.append(timeout)
            trainer.global_step += steps
            return len(seen) > looks or super().wait(timeout)

    def end(code):
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    peers = Peers(every=0.01, grace=0.02)
    peers._board = store
    try:
        peers._watch(trainer, Over())
    except Ended:
        return True
    return False


def test_a_rank_that_hangs_ends_when_another_has_or_the_store_is_gone(monkeypatch, capsys):
    assert watch(monkeypatch, Store("", "", "rank 0 on a ended first"))
    assert "because it lost another rank: rank 0 on a ended first" in capsys.readouterr().err
    assert watch(monkeypatch, Store("", None))
    assert "the store that the ranks meet at" in capsys.readouterr().err


def test_a_rank_that_trains_on_is_not_ended_for_a_store_out_of_reach(monkeypatch, capsys):
    assert not watch(monkeypatch, Store(""))
    assert not watch(monkeypatch, Store(None), steps=True)
    assert not watch(monkeypatch, Store(None), looks=3)  # not before the timeout
    assert not watch(monkeypatch, Store(*[None, None, ""] * 20))  # it answers again
    assert capsys.readouterr().err == ""
