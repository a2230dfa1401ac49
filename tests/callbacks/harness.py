"""Trainers for the tests: in this process, or on each rank of the pool's gloo group."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

_root = tempfile.mkdtemp(prefix="callbacks_")
atexit.register(shutil.rmtree, _root, ignore_errors=True)


def trainer(callbacks: list[L.Callback], **kwargs: Any) -> L.Trainer:
    settings: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        default_root_dir=_root,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1000,
    )
    return L.Trainer(callbacks=callbacks, **{**settings, **kwargs})


def ddp_trainer(rank: int, world_size: int, callbacks: list[L.Callback], **kwargs: Any) -> L.Trainer:
    """A Trainer on the process group that is there already, inside `tests.ddp.run_ranks`."""
    if world_size == 1:
        return trainer(callbacks, **kwargs)
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="29500"
    )
    return trainer(callbacks, devices=world_size, strategy="ddp", **kwargs)


class History(Logger):
    """Keeps everything that is logged: rows of (step, values)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name, version, save_dir = "history", "0", None  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((int(step or 0), dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def series(self, key: str) -> dict[int, float]:
        return {step: float(row[key]) for step, row in self.rows if key in row}


def tape(module: nn.Module) -> list[tuple[bool, torch.Tensor, torch.Tensor]]:
    """Record (with gradients?, input, output) of each call without hooks, by wrapping this instance's forward."""
    calls: list[tuple[bool, torch.Tensor, torch.Tensor]] = []
    forward = module.forward

    def taped(x: torch.Tensor) -> torch.Tensor:
        before = x.detach().clone()
        y = forward(x)
        calls.append((torch.is_grad_enabled(), before, y.detach().clone()))
        return y

    module.forward = taped  # type: ignore[method-assign]
    return calls


def same_state(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
