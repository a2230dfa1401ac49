"""The rows that the effective rank and the collapse monitor look at, of all ranks."""

from __future__ import annotations

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_ssl import metrics
from lightning_ssl.callbacks._ranks import gather_rows


class Rows:
    """Rows of all ranks; every quantity is taken of all of them, after the gathering."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        if not bool(rows.isfinite().all()):
            raise ValueError("the features have non-finite rows")
        self._kept.append(rows.float())  # features come in single precision at most; sums are double

    def gather(self, trainer: L.Trainer) -> Tensor:
        """Collective: the rows in double precision, where the device has it."""
        rows = gather_rows(trainer, torch.cat(self._kept) if self._kept else None)
        self._kept = []
        if rows is None or not len(rows):
            raise ValueError("no rows on any rank")
        return rows if rows.device.type == "mps" else rows.double()


def effective_rank(rows: Tensor) -> float:
    """The effective rank, through the smaller of the two Gram matrices; 0 if all rows are zero."""
    if not bool(rows.any()):
        return 0.0
    metric = metrics.EffectiveRank(sync_on_compute=False).to(rows.device)
    metric.update(rows.T if len(rows) < rows.shape[1] else rows)
    return float(metric.compute())
