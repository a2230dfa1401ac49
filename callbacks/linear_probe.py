"""Linear accuracy of an encoder while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks.probe import Probe, Shard
from lightning_ssl.functional.regression import LinearProbeResult
from lightning_ssl.metrics.evaluation import Targets, first_of_each_class, linear_evaluation
from lightning_ssl.quantities import Quantity


class LinearProbe(Probe):
    r"""Logs ``val/linear_top1`` and ``val/linear_top5``: a logistic regression on clean, eval-mode features.

    Fitted to convergence on the features of the train split, each time: it does not lag behind the encoder as a head
    trained alongside does. Every rank keeps its own rows; sums over them cross. Of attributes ``val/linear_map`` is
    logged, the mean average precision; of continuous targets, by ridge regression, ``val/linear_r2`` and
    ``val/linear_mse``; of several penalties the chosen one, ``val/linear_l2``.

    Args:
        encoder: Dotted path of the submodule to evaluate.
        data: A DataModule with `probe_dataloaders()`, or (train_loader, test_loader) of clean, labelled images; by
            default the trainer's DataModule.
        l2: Penalty :math:`\frac{\lambda}{2} \|W\|^2` on standardised features; or several, of which the one is taken
            that does best on a tenth of the train split, held out of the others' fit.
        num_classes: By default the DataModule's, or as many as the labels name.
        every_n_epochs: Probe at the end of every n-th epoch, and of the last.
        every_n_steps: Probe before every n-th step.
        baseline: Probe the untrained encoder as well.
        name: Keeps several instances apart: ``val/<name>/linear_top1``.
        features: Dotted path of a part of the encoder whose output counts; by default the encoder's own.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        targets: What labels are: "class", "multilabel" or "continuous"; see :class:`Probe`, as for the next two.
        dtype: The precision in which features are kept.
        num_samples: How many samples iterables of train and test data have.
        shots: Fit that many samples of each class alone, the same ones at any number of ranks.
        warm_start: Begin with the weights of the probe before; the optimum is the same.

    Example:
        >>> probe = LinearProbe("backbone", l2=1e-3)
    """

    quantities = (
        Quantity(
            "*/linear_top1",
            "linear probe, top-1",
            "The share of held-out samples classified right; compare with the first value, the untrained encoder's.",
            "learning",
            better="higher",
            form="{:.1%}",
            best=True,
            headline=True,
        ),
        Quantity(
            "*/linear_top5",
            "linear probe, top-5",
            "The share of held-out samples whose class is among the five likeliest.",
            "learning",
            better="higher",
            form="{:.1%}",
            best=True,
        ),
        Quantity(
            "*/linear_map",
            "linear probe, mean average precision",
            "The mean over attributes of the area under precision and recall; 1 is perfect.",
            "learning",
            better="higher",
            best=True,
        ),
        Quantity(
            "*/linear_r2",
            "linear probe, R²",
            "The share of the targets' variance that is explained; 0 is as good as their mean.",
            "learning",
            better="higher",
            best=True,
        ),
        Quantity(
            "*/linear_mse",
            "linear probe, squared error",
            "The mean squared error on held-out samples, in the targets' own units.",
            "learning",
            better="lower",
        ),
        Quantity(
            "*/linear_l2",
            "linear probe, penalty",
            "The penalty that did best on a held-out part of the training split.",
            "learning",
        ),
    )

    def __init__(
        self,
        encoder: str = "backbone",
        data: L.LightningDataModule | tuple[DataLoader[Any], DataLoader[Any]] | None = None,
        l2: float | Sequence[float] = 1e-4,
        num_classes: int | None = None,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        baseline: bool = True,
        name: str | None = None,
        features: str | None = None,
        layout: Layout | None = None,
        targets: Targets = "class",
        dtype: str = "float32",
        num_samples: Sequence[int] | None = None,
        shots: int | None = None,
        warm_start: bool = True,
    ) -> None:
        times = (every_n_epochs, every_n_steps, baseline)
        super().__init__(encoder, data, num_classes, *times, name, features, layout, targets, dtype, num_samples)
        penalties = list(l2) if isinstance(l2, Sequence) else [l2]
        if not penalties or any(not value > 0 for value in penalties):
            raise ValueError(f"`l2` must be positive, got {l2}")
        if shots is not None and (shots < 1 or targets != "class"):
            raise ValueError(f"`shots` must be at least 1 and needs classes, got {shots} of targets={targets!r}")
        self.l2, self.shots, self.warm_start = l2, shots, warm_start
        self._penalties = penalties

    def begin_run(self) -> None:
        super().begin_run()
        self._last: LinearProbeResult | None = None

    def evaluate_shards(self, train: Shard, test: Shard, num_classes: int, trainer: L.Trainer) -> dict[str, float]:
        together = self.together(trainer)
        if self.shots is not None:
            train = first_of_each_class(train, self.shots, num_classes, together)
        outcome = linear_evaluation(
            train,
            test,
            num_classes,
            self._penalties,
            together,
            self.targets,
            start=self._start(num_classes, train.rows),
            budget=self.budget(trainer),
        )
        if self.warm_start and not self._trying:
            self._last = outcome.fitted
        values = {f"linear_{name}": value for name, value in outcome.values.items()}
        return {**values, "linear_l2": outcome.l2} if len(self._penalties) > 1 else values

    def _start(self, num_classes: int, rows: Tensor) -> LinearProbeResult | None:
        last = self._last
        if last is None or self._trying or last.weight.shape != (num_classes, rows.shape[1]):
            return None
        return LinearProbeResult(*(part.to(rows.device) for part in last))

    def operations(self, train: int, test: int, dim: int, num_classes: int) -> float:
        passes = 50 if len(self._penalties) == 1 else 150
        return 2.0 * passes * (train if self.shots is None else self.shots * num_classes) * dim * num_classes

    def state_dict(self) -> dict[str, Any]:
        last = None if self._last is None else [part.cpu() for part in self._last]
        return {**super().state_dict(), "last": last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        last = state_dict.get("last")
        self._last = None if last is None else LinearProbeResult(*last)
