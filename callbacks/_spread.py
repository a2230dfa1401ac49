"""What both the effective rank and the collapse monitor read from features: rank, deviations, uniformity."""

from __future__ import annotations

from typing import NamedTuple

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_ssl.callbacks._ranks import is_distributed
from lightning_ssl.metrics import EffectiveRank, SecondMoment

ALIVE = 0.01


class SpreadValues(NamedTuple):
    """Effective rank and dimension of the features; of the normalised ones the share of live dimensions, the mean
    standard deviation in units of 1/sqrt(d), and the effective rank after centring."""

    effective_rank: float
    dim: int
    alive: float
    std: float
    centred_rank: float


class Spread:
    """Sums over rows, reduced over ranks before anything is decomposed. Zero rows stay zero: they have no direction."""

    def __init__(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        synced = is_distributed(trainer)
        self.rank = EffectiveRank(sync_on_compute=synced).to(pl_module.device)
        # With a constant 1 appended, the second moment holds the mean as well.
        self.moment = SecondMoment(sync_on_compute=synced).to(pl_module.device)

    def update(self, rows: Tensor) -> None:
        self.rank.update(rows)
        norms = rows.norm(dim=1, keepdim=True)
        unit = torch.where(norms > 0, rows / norms.clamp_min(torch.finfo(rows.dtype).tiny), 0)
        self.moment.update(torch.cat([unit, torch.ones_like(norms)], dim=1))

    def compute(self) -> SpreadValues:
        moment = self.moment.compute()
        mean = moment[:-1, -1]
        covariance = moment[:-1, :-1] - torch.outer(mean, mean)
        dim = len(mean)
        deviations = covariance.diagonal().clamp_min(0).sqrt() * dim**0.5
        singular = torch.linalg.eigvalsh(covariance).clamp_min(0).sqrt()
        q = singular / singular.sum().clamp_min(torch.finfo(singular.dtype).tiny)
        centred_rank = float(torch.exp(torch.special.entr(q).sum()))
        # Rows that are all zero use no dimension; the ranks agree on it, as the moment is global.
        rank = float(self.rank.compute()) if bool(moment[:-1, :-1].any()) else 0.0
        alive = float((deviations > ALIVE).double().mean())
        return SpreadValues(rank, dim, alive, float(deviations.mean()), centred_rank)
