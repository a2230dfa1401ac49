"""Parts that break in the middle of a run, for the tests of what happens then."""

from __future__ import annotations

import os
import time

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_ssl.data import ImageDataModule, MixtureDataModule
from lightning_ssl.data.pipeline import RawImages
from lightning_ssl.methods import BYOL


class RaisingLogger(CSVLogger):
    """A service that goes away after the second row."""

    def __init__(self, save_dir: str = "elsewhere", name: str = "raising") -> None:
        super().__init__(save_dir, name)
        self.rows = 0

    def log_metrics(self, metrics, step=None):
        self.rows += 1
        if self.rows > 2:
            raise ConnectionError("the service is away")
        super().log_metrics(metrics, step)

    def finalize(self, status):
        raise ConnectionError("the service is still away")


class DyingWorker(ImageDataModule):
    """Digits whose loader's worker process dies, without a word, at the fifth batch."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        loader.dataset.__class__ = _Dying
        return loader


class _Dying(RawImages):
    calls = 0

    def __getitems__(self, rows):
        self.calls += 1
        if self.calls == 5 and torch.utils.data.get_worker_info() is not None:
            os._exit(3)
        return super().__getitems__(rows)


class NaNInSecondEpoch(MixtureDataModule):
    """Points one of which is not a number, from the second epoch on."""

    def epoch_draws(self, epoch):
        draws = super().epoch_draws(epoch)
        if epoch == 1:
            draws.views[1][5, 0] = float("nan")
        return draws


class RaisesOnRankOne(BYOL):
    """Fails on one rank while the other waits for its gradients."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 5 and self.global_rank == 1:
            raise RuntimeError("rank 1 is broken")
        return super().training_step(batch, batch_idx)


class Slowly(L.Callback):
    """Leaves time to break something: a moment in each step, and one rank that hangs at a step, if asked to."""

    def __init__(self, seconds: float = 0.1, hang: int = -1) -> None:
        self.seconds, self.hang = seconds, hang

    def on_train_batch_start(self, trainer, *_):
        time.sleep(self.seconds)
        if trainer.global_step == self.hang and trainer.global_rank == 1:
            time.sleep(3600)


class Seen(L.Callback):
    """Writes down which samples each step saw, one file a rank."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with open(f"seen-{trainer.world_size}-{trainer.global_rank}.txt", "a") as file:
            file.write(f"{trainer.current_epoch} {trainer.global_step} {' '.join(map(str, batch.index.tolist()))}\n")
