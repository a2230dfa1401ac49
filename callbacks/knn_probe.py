"""Nearest-neighbour accuracy of an encoder while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
from torch.utils.data import DataLoader

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks.probe import Probe, Shard
from lightning_ssl.metrics.evaluation import Targets, knn_evaluation
from lightning_ssl.quantities import Quantity


class KNNProbe(Probe):
    r"""Logs ``val/knn_top1`` and ``val/knn_top5``: weighted k nearest neighbours on clean, eval-mode features.

    Neighbours under the cosine vote with weight :math:`e^{\cos / T}`. The bank is the whole train split, embedded
    anew each time; every rank keeps its shard of it, and queries travel. Of attributes ``val/knn_map`` is logged, the
    mean average precision, of continuous targets ``val/knn_r2`` and ``val/knn_mse``.

    Args:
        encoder: Dotted path of the submodule to evaluate.
        data: A DataModule with `probe_dataloaders()`, or (train_loader, test_loader) of clean, labelled images; by
            default the trainer's DataModule.
        k: Neighbours that vote; more than the bank holds are clamped with a warning.
        temperature: T.
        num_classes: By default the DataModule's, or as many as the labels name.
        every_n_epochs: Probe at the end of every n-th epoch, and of the last.
        every_n_steps: Probe before every n-th step.
        baseline: Probe the untrained encoder as well.
        name: Keeps several instances apart: ``val/<name>/knn_top1``.
        features: Dotted path of a part of the encoder whose output counts; by default the encoder's own.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        targets: What labels are: "class", "multilabel" or "continuous"; see :class:`Probe`, as for the next two.
        dtype: The precision in which features are kept.
        num_samples: How many samples iterables of train and test data have.

    Example:
        >>> probe = KNNProbe("backbone", k=20)
    """

    quantities = (
        Quantity(
            "*/knn_top1",
            "kNN probe, top-1",
            "The share of held-out samples classified right; compare with the first value, the untrained encoder's.",
            "learning",
            better="higher",
            form="{:.1%}",
            best=True,
            headline=True,
        ),
        Quantity(
            "*/knn_top5",
            "kNN probe, top-5",
            "The share of held-out samples whose class is among the five likeliest.",
            "learning",
            better="higher",
            form="{:.1%}",
            best=True,
        ),
        Quantity(
            "*/knn_map",
            "kNN probe, mean average precision",
            "The mean over attributes of the area under precision and recall; 1 is perfect.",
            "learning",
            better="higher",
            best=True,
        ),
        Quantity(
            "*/knn_r2",
            "kNN probe, R²",
            "The share of the targets' variance that is explained; 0 is as good as their mean.",
            "learning",
            better="higher",
            best=True,
        ),
        Quantity(
            "*/knn_mse",
            "kNN probe, squared error",
            "The mean squared error on held-out samples, in the targets' own units.",
            "learning",
            better="lower",
        ),
    )

    def __init__(
        self,
        encoder: str = "backbone",
        data: L.LightningDataModule | tuple[DataLoader[Any], DataLoader[Any]] | None = None,
        k: int = 200,
        temperature: float = 0.1,
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
    ) -> None:
        times = (every_n_epochs, every_n_steps, baseline)
        super().__init__(encoder, data, num_classes, *times, name, features, layout, targets, dtype, num_samples)
        if k < 1:
            raise ValueError(f"`k` must be at least 1, got {k}")
        if not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}")
        self.k, self.temperature = k, temperature

    def evaluate_shards(self, train: Shard, test: Shard, num_classes: int, trainer: L.Trainer) -> dict[str, float]:
        if self.k > train.total and not self._trying:
            self.warn(f"`k={self.k}` is more than the {train.total} samples of the bank: all vote")
        values = knn_evaluation(
            train,
            test,
            num_classes,
            self.k,
            self.temperature,
            self.together(trainer),
            self.targets,
            self.budget(trainer),
        )
        return {f"knn_{name}": value for name, value in values.items()}

    def operations(self, train: int, test: int, dim: int, num_classes: int) -> float:
        return float(train) * test * dim
