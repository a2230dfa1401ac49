"""Ranks that begin from the same state or not at all, and that end together, with a word on what is known."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_ssl._lightning import group_timeout
from lightning_ssl.distributed import Board, RankError, last_collective, rank, world_size
from lightning_ssl.runs.signals import RunStopped

# The content that must be equal on all ranks; callbacks may keep what is their rank's own.
SHARED = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step")


class Disagreement(RankError):
    """Ranks that would not resume from the same state."""


class Peers(L.Callback):
    """Lets the ranks of a fit agree on what they resume from, and end when one of them does.

    Before the first step every rank tells where its checkpoint is, its step and a hash of its content; unless all are
    the same, all ranks end, naming host, path and remedy. While it runs, a rank that fails tells the others why: those
    that wait for it, in a collective or anywhere else, end within seconds. Where nobody could tell, as when a host is
    gone or its link is cut, the strategy's timeout ends the wait. Either way each rank's last line names the rank, the
    step, what it was doing, and how to go on. In a single process it does nothing.

    Args:
        missing: A checkpoint that the command names but that is not on this host.
        every: Seconds between two looks for other ranks' last words.
        grace: Seconds that a rank is given to end by itself when another one has.

    Example:
        >>> trainer = L.Trainer(callbacks=[Peers()])
    """

    def __init__(self, missing: str = "", every: float = 2.0, grace: float = 8.0) -> None:
        self.missing, self.every, self.grace = missing, every, grace
        self.doing = "before the first step"
        self.ended_by_others = False
        self._board: Board | None = None
        self._found: dict[str, Any] = {}
        self._over = threading.Event()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and world_size() > 1:
            # The store may hold what was written before torchrun started its workers again, or in an earlier fit.
            name = trainer.strategy.broadcast(uuid.uuid4().hex)
            self._board, self._found, self._over = Board(f"lightning_ssl/{name}"), {}, threading.Event()
            self.doing, self.ended_by_others = "before the first step", False

    # What they resume from ---------------------------------------------------------------------------------------

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._board is not None:
            content = {name: checkpoint.get(name) for name in SHARED}
            self._found = {"step": checkpoint.get("global_step"), "hash": digest(content)}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._board is None:
            return
        path = self.missing or trainer.ckpt_path  # type: ignore[attr-defined]
        path = str(os.path.abspath(path)) if path and "://" not in str(path) else path
        mine = {"host": socket.gethostname(), "path": path, **self._found}
        seconds = group_timeout(trainer)
        notes = {r: json.loads(note) for r, note in self._board.collect(json.dumps(mine), seconds).items()}
        if problem := disagreement(notes, world_size(), seconds.total_seconds()):
            raise Disagreement(problem)
        if self._found:
            rank_zero_info(f"all {world_size()} ranks resume from step {self._found['step']}")
        threading.Thread(target=self._watch, args=(trainer, self._over), daemon=True).start()

    # While they run ----------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.doing = "in forward"

    def on_before_backward(self, *_: Any) -> None:
        self.doing = "in backward, which sums gradients over ranks"

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.doing = "in the optimizer's step"

    def on_train_batch_end(self, *_: Any) -> None:
        self.doing = "between two steps"

    def on_validation_start(self, *_: Any) -> None:
        self.doing = "in validation"

    def _watch(self, trainer: L.Trainer, over: threading.Event) -> None:
        """Look for last words of others; a main thread that does not end by itself is ended."""
        assert self._board is not None
        standing, since = None, 0.0  # where this rank stands, out of the store's reach, and since when
        while not over.wait(self.every):
            words = self._board.read()
            here = (trainer.global_step, self.doing, last_collective().number) if words is None else None
            if here is None or here != standing:
                standing, since = here, time.monotonic()
            elif time.monotonic() - since > group_timeout(trainer).total_seconds():  # a collective would have told
                words = "the store that the ranks meet at, which rank 0 or its agent holds, does not answer"
            if words:
                if not over.wait(0 if here else self.grace):
                    print(self._line(trainer, words), file=sys.stderr, flush=True)
                    os._exit(1)
                return

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._board is None or isinstance(exception, (RunStopped, Disagreement)):
            self._over.set()
            return
        self.ended_by_others = is_a_lost_peer(exception)
        words: str | None = None
        if self.ended_by_others:
            time.sleep(min(1.0, self.grace / 4))  # another rank may be about to say why
            words = self._board.read()
        error = f"{type(exception).__name__}: {(str(exception).strip() or '-').splitlines()[0][:200]}"
        self._board.post(f"rank {rank()} on {socket.gethostname()} ended first, {self.doing}: {error}")
        self._over.set()
        if self.ended_by_others:
            print(self._line(trainer, words or error), file=sys.stderr, flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._over.set()

    def _line(self, trainer: L.Trainer, why: str) -> str:
        """What is known, in one line."""
        last, saved = last_collective(), getattr(trainer.checkpoint_callback, "last_model_path", "")
        return (
            f"lightning-ssl: rank {rank()} of {world_size()} on {socket.gethostname()} ended at step "
            f"{trainer.global_step}, {self.doing} (last collective of ours: {last.name}, number {last.number}), "
            f"because it lost another rank: {why}. "
            + (f"{saved} is whole: " if saved else "")
            + "when all hosts are back, the same command with --ckpt_path last goes on"
        )


def is_a_lost_peer(error: BaseException) -> bool:
    """Whether an error is gloo's, NCCL's or the store's, of a process that is gone or does not answer.

    Example:
        >>> is_a_lost_peer(RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        True
        >>> is_a_lost_peer(ConnectionResetError("Connection reset by peer"))  # the dataset's, say
        False
    """
    named = "gloo/transport" in str(error) or "NCCL" in str(error)
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and named)


def disagreement(notes: dict[int, dict[str, Any]], ranks: int, seconds: float) -> str:
    """What keeps the ranks from going on together, in words; empty if nothing does.

    Args:
        notes: What the ranks that answered resume from, with their hosts.
        ranks: How many there are.
        seconds: How long the others were waited for.

    Example:
        >>> same = {"host": "a", "path": "last.ckpt", "step": 7, "hash": "12"}
        >>> disagreement({0: same, 1: {**same, "host": "b"}}, 2, 10)
        ''
        >>> disagreement({0: same}, 2, 10).split(";")[0]
        'rank(s) 1 did not say within 10 s what they resume from'
    """
    silent = sorted(set(range(ranks)) - set(notes))
    told = "; ".join(f"rank {r} on {note['host']}: {_source(note)}" for r, note in notes.items())
    if silent:
        return f"rank(s) {', '.join(map(str, silent))} did not say within {seconds:g} s what they resume from; {told}"
    if len({(note.get("step"), note.get("hash"), note["path"] is None) for note in notes.values()}) == 1:
        return ""
    return (
        f"the ranks do not resume from the same state, so none of them does: {told}. Put --root on a disk that all "
        "hosts share, or copy the checkpoint to the same place on each host, and repeat the command"
    )


def _source(note: dict[str, Any]) -> str:
    if "step" in note:
        return f"{note['path']}, step {note['step']}, content {note['hash'][:12]}"
    return f"{note['path']}, which is not there" if note["path"] else "no checkpoint"


def digest(value: Any) -> str:
    """A hash of tensors and plain values in nested dicts and lists.

    Example:
        >>> digest({"a": torch.ones(2)}) == digest({"a": torch.ones(2)}) != digest({"a": torch.ones(2, 1)})
        True
    """
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().flatten()
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif isinstance(value, dict):
            found.update(b"{")
            for key in sorted(value, key=str):
                found.update(f"{key}:".encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        else:
            found.update(f"{value!r};".encode())

    add(value)
    return found.hexdigest()
