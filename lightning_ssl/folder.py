"""The folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as L

from lightning_ssl._lightning import is_a


def run_dir(trainer: L.Trainer) -> Path | None:
    """Collective: the folder of this run's files; None where nothing should be written (`fast_dev_run`)."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    first = trainer.loggers[0] if trainer.loggers else None
    if first is None or is_a(first, "CSVLogger") or is_a(first, "TensorBoardLogger"):
        return Path(trainer.log_dir or trainer.default_root_dir)
    # `trainer.log_dir` of other loggers is shared by all runs: keep them apart as ModelCheckpoint does.
    folder = os.path.join(str(first.save_dir or trainer.default_root_dir), str(first.name), str(first.version))
    return Path(trainer.strategy.broadcast(folder))
