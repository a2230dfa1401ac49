"""What ranks say of the states they resume from; two hosts that do not agree are in test_two_hosts.py."""

import os

import torch

from lightning_ssl.runs.peers import digest, disagreement
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
