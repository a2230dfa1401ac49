"""A verdict on collapse while there is time to stop."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.pair import Pairing
from lightning_ssl.callbacks.watcher import Watcher
from lightning_ssl.functional import effective_rank, spread
from lightning_ssl.quantities import Quantity


class Verdict(IntEnum):
    HEALTHY = 0
    DIMENSIONAL = 1
    COMPLETE = 2


class CollapseMonitor(Watcher):
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
        features: Dotted path of the submodule whose outputs are watched.
        complete: The deviation below which features count as one point.
        dimensional: The effective rank below which features count as flat (half the dimension, where that is less).
        patience: Observations in a row before the verdict turns.
        stop: End training (`trainer.should_stop`) at complete collapse.
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Look every n-th training step, the first included.
        every_n_epochs: Look at the first step of every n-th epoch.
        name: Keeps several instances apart: ``collapse/<name>/verdict``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        target: Dotted path of the target network's twin of `features`, for the second view of an online network that
            sees one view only.

    Example:
        >>> monitor = CollapseMonitor("projection_head", stop=True)
    """

    quantities = (
        Quantity(
            "collapse/verdict",
            "verdict: 0 healthy, 1 dimensional, 2 complete collapse",
            "0 while features stay spread; 1 when they lie in a few dimensions, 2 when they are one point.",
            "health",
            better="lower",
            healthy="0",
            form="{:.0f}",
        ),
        Quantity(
            "collapse/std",
            "spread of what the loss sees",
            "1 when features are spread over the sphere, 0 when they are one point.",
            "health",
            better="higher",
            healthy="0.5 to 1",
        ),
        Quantity(
            "collapse/rank",
            "participation ratio",
            "The number of dimensions that most of the variance is in.",
            "health",
            better="higher",
        ),
    )
    prefix = "collapse"

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
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__(features, views, pairing, layout, target, every_n_steps, every_n_epochs, False, name)
        if not 0 < complete < 1:
            raise ValueError(f"`complete` must lie in (0, 1), got {complete}")
        if not dimensional > 1:
            raise ValueError(f"`dimensional` must be above 1, the least rank there is, got {dimensional}")
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, got {patience}")
        self.complete, self.dimensional, self.patience, self.stop = complete, dimensional, patience, stop

    def begin_run(self) -> None:
        super().begin_run()
        self.verdict = self._announced = Verdict.HEALTHY
        self._baseline: float | None = None
        self._recent: list[tuple[int, float, float]] = []  # suspicion, std and rank of the last observations

    def measure(self, rows: Tensor) -> dict[str, Tensor | float]:
        found = spread(rows)
        std, participation = torch.stack([found.std, found.participation]).tolist()
        if not math.isfinite(std):
            raise ValueError(f"{self.features!r} has non-finite rows; find where they come from")
        # The participation ratio is a lower bound of the effective rank: above it, no eigenvalues are needed.
        rank = math.inf
        if participation < self.dimensional:
            rank = float(effective_rank(found.centred)) if participation > 0 else 0.0
        # So few rows have no more dimensions: that is not the network's doing.
        self._judge(std, rank, min(found.centred.shape[1], len(rows) - 1))
        return {"verdict": float(self.verdict), "std": std, "rank": participation}

    def _judge(self, std: float, rank: float, dim: int) -> None:
        self._baseline = std if self._baseline is None else self._baseline
        point = std < max(min(self.complete, self._baseline / 2), self.complete / 20)
        flat = rank < min(self.dimensional, dim / 2)
        suspicion = Verdict.COMPLETE if point else Verdict.DIMENSIONAL if flat else Verdict.HEALTHY
        self._recent = [*self._recent, (int(suspicion), std, rank)][-max(2, self.patience) :]
        if not suspicion:
            self.verdict = Verdict.HEALTHY
            return
        if len(self._recent) < self.patience or not all(kind for kind, *_ in self._recent[-self.patience :]):
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
