"""What both the effective rank and the collapse monitor read from features."""

from __future__ import annotations

import math
from typing import NamedTuple

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_ssl import metrics
from lightning_ssl.callbacks._ranks import gather_rows

ALIVE = 0.01
SUSPICIOUS = 3.0  # a participation ratio below which the eigenvalues are worth computing


class Deviations(NamedTuple):
    """Of l2-normalised rows: the share of dimensions alive, the mean standard deviation in units of 1/sqrt(d), and
    the participation ratio (tr C)^2 / tr C^2 of their covariance C, a number of dimensions; and their effective rank
    after centring, or infinity where the participation ratio, a lower bound of it, is no cause to look."""

    alive: float
    std: float
    participation: float
    effective_rank: float
    dim: int


class Rows:
    """Rows of all ranks; every quantity below is taken of all of them, after the gathering."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        if not bool(rows.isfinite().all()):
            raise ValueError("the features have non-finite rows")
        self._kept.append(rows.float())  # features come in single precision at most; sums below are double

    def gather(self, trainer: L.Trainer) -> Tensor:
        """Collective."""
        rows = gather_rows(trainer, torch.cat(self._kept) if self._kept else None)
        self._kept = []
        if rows is None or not len(rows):
            raise ValueError("no rows on any rank")
        return rows


def effective_rank(rows: Tensor) -> float:
    """The effective rank, through the smaller of the two Gram matrices; 0 if all rows are zero."""
    if not bool(rows.any()):
        return 0.0
    metric = metrics.EffectiveRank(sync_on_compute=False).to(rows.device)
    metric.update(rows.T if len(rows) < rows.shape[1] else rows)
    return float(metric.compute())


def deviations(rows: Tensor) -> Deviations:
    """How rows [N, d] spread around their mean on the sphere. Zero rows stay zero: they have no direction."""
    rows = rows if rows.device.type == "mps" else rows.double()
    norms = rows.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, rows / norms.clamp_min(torch.finfo(rows.dtype).tiny), 0)
    centred = unit - unit.mean(dim=0)
    n, dim = centred.shape
    std = (centred.square().mean(dim=0) * dim).sqrt()
    gram = centred @ centred.T if n < dim else centred.T @ centred
    total = centred.square().sum()
    participation = total.square() / gram.square().sum().clamp_min(torch.finfo(rows.dtype).tiny)
    rank = effective_rank(centred) if float(participation) < SUSPICIOUS else math.inf
    return Deviations(float((std > ALIVE).double().mean()), float(std.mean()), float(participation), rank, dim)
