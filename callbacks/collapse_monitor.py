"""A verdict on collapse while there is time to stop."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ssl import functional
from lightning_ssl.callbacks._spread import Rows, effective_rank
from lightning_ssl.callbacks._watcher import FeatureWatcher


class Verdict(IntEnum):
    HEALTHY = 0
    DIMENSIONAL = 1
    COMPLETE = 2


class CollapseMonitor(FeatureWatcher):
    r"""Warns when the features collapse, to a point or into a few dimensions.

    Watches the projector, which is what the loss sees: a BatchNorm backbone keeps its own features spread even while
    they collapse behind it. Logs ``collapse/verdict`` (0 healthy, 1 dimensional, 2 complete), ``collapse/std`` (the
    mean standard deviation of the l2-normalised features in units of :math:`1/\sqrt d`: 1 spread, 0 collapsed) and
    ``collapse/rank``, the participation ratio :math:`(\mathrm{tr}\, C)^2 / \mathrm{tr}\, C^2` of their covariance C:
    the number of dimensions most of their variance is in.

    Complete collapse: `std` below `complete` and still falling by a tenth an observation, or below half of that; and
    below half of where the network started: one without normalisation layers may start narrow and open up.
    Dimensional collapse: the effective rank of the centred normalised features below `dimensional`. Either has to
    hold for `patience` observations in a row.

    Args:
        features: dotted path of the submodule whose outputs are watched.
        complete: the deviation below which features count as one point.
        dimensional: the effective rank below which features count as flat (half the dimension, where that is less).
        patience: observations in a row before the verdict turns.
        stop: end training (`trainer.should_stop`) at complete collapse.
        views: how many views a step holds, where calls and batch size do not tell.
        every_n_steps: look every that many training steps, the first included.
        every_n_epochs: look at the first step of every that many epochs.
        name: keeps several instances apart: ``collapse/<name>/verdict``.
    """

    def __init__(
        self,
        features: str = "projector",
        complete: float = 0.15,
        dimensional: float = 3.0,
        patience: int = 2,
        stop: bool = False,
        views: int | None = None,
        every_n_steps: int | None = 5,
        every_n_epochs: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(features, views, every_n_steps, every_n_epochs, held_out=False, name=name)
        if not 0 < complete < 1:
            raise ValueError(f"`complete` must lie in (0, 1), got {complete}")
        if not dimensional > 1:
            raise ValueError(f"`dimensional` must be above 1, the least rank there is, got {dimensional}")
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, got {patience}")
        self.complete, self.dimensional, self.patience, self.stop = complete, dimensional, patience, stop
        self.verdict = self._announced = Verdict.HEALTHY
        self._baseline: float | None = None
        self._recent: list[tuple[int, float, float]] = []  # suspicion, std and rank of the last observations

    def reset(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rows = Rows()

    def take(self, views: list[Tensor]) -> None:
        for view in views:
            self._rows.update(view)

    def compute(self, trainer: L.Trainer, pl_module: L.LightningModule, views: int, stage: str) -> dict[str, float]:
        found = functional.spread(self._rows.gather(trainer))
        std, participation = float(found.std), float(found.participation)
        # The participation ratio is a lower bound of the effective rank: above it, no eigenvalues are needed.
        rank = effective_rank(found.centred) if participation < self.dimensional else math.inf
        self._judge(std, rank, found.centred.shape[1])
        return {
            self.key("collapse", "verdict"): float(self.verdict),
            self.key("collapse", "std"): std,
            self.key("collapse", "rank"): participation,
        }

    def _judge(self, std: float, rank: float, dim: int) -> None:
        self._baseline = std if self._baseline is None else self._baseline
        point = std < max(min(self.complete, self._baseline / 2), self.complete / 20)
        flat = rank < min(self.dimensional, dim / 2)
        suspicion = Verdict.COMPLETE if point else Verdict.DIMENSIONAL if flat else Verdict.HEALTHY
        self._recent = [*self._recent, (int(suspicion), std, rank)][-self.patience :]
        if not suspicion:
            self.verdict = Verdict.HEALTHY
            return
        if len(self._recent) < self.patience or not all(kind for kind, *_ in self._recent):
            return
        # A slow start levels off and opens up again; a collapse goes on.
        quantity = 1 if suspicion == Verdict.COMPLETE else 2
        change = self._recent[-1][quantity] / max(self._recent[-2:][0][quantity], 1e-12)
        if change <= (1.1 if suspicion == Verdict.DIMENSIONAL or std < self.complete / 2 else 0.9):
            self.verdict = Verdict(suspicion)

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        if self.verdict == self._announced:
            return
        self._announced = self.verdict
        _, std, rank = self._recent[-1]
        where = f"at step {step} (epoch {trainer.current_epoch})"
        if self.verdict == Verdict.COMPLETE:
            rank_zero_warn(
                f"complete collapse of {self.features!r} {where}: all features lie within {std:.2g} of one point "
                "(1 is spread over the sphere); look for a missing predictor, stop-gradient or negatives"
            )
        elif self.verdict == Verdict.DIMENSIONAL:
            rank_zero_warn(
                f"dimensional collapse of {self.features!r} {where}: the features spread over {rank:.2g} dimensions; "
                "compare train/effective_rank and predictor/eigenvalue_min"
            )
        if self.stop and self.verdict == Verdict.COMPLETE:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        recent = [list(seen) for seen in self._recent]
        return {
            **super().state_dict(),
            "verdict": int(self.verdict),
            "announced": int(self._announced),
            "baseline": self._baseline,
            "recent": recent,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.verdict, self._announced = Verdict(state_dict["verdict"]), Verdict(state_dict["announced"])
        self._baseline = state_dict["baseline"]
        self._recent = [(int(kind), std, rank) for kind, std, rank in state_dict["recent"]]
