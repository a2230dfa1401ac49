"""Nearest-neighbour accuracy of features collected over the ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_labels, check_positive
from lightning_ssl.functional.geometry import unit_rows
from lightning_ssl.functional.probes import knn_predict
from lightning_ssl.metrics._base import ReducedMetric


class KNNAccuracy(ReducedMetric):
    """The accuracy of a weighted nearest-neighbour vote, see :func:`lightning_ssl.functional.knn_predict`.

    Feed the bank and the queries with their dataset indices: a sample that a padding sampler repeats, on one rank or
    on several, counts once. `compute` gives a dict with `top1` and `top5`.

    Args:
        num_classes: The number of classes.
        k: How many neighbours vote.
        temperature: Of the votes.

    Example:
        >>> metric = KNNAccuracy(num_classes=2, k=1)
        >>> metric.update(torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 1]), split="bank")
        >>> metric.update(torch.tensor([[2.0, 1.0]]), torch.tensor([0]), torch.tensor([0]), split="query")
        >>> metric.compute()["top1"]
        tensor(1., dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, num_classes: int, k: int = 200, temperature: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, value in (("num_classes", num_classes), ("k", k), ("temperature", temperature)):
            check_positive(value, name)
        self.num_classes = num_classes
        self.k = k
        self.temperature = temperature
        for split in ("bank", "query"):
            for name in ("features", "labels", "indices"):
                self.add_rows(f"{split}_{name}")

    def update(self, features: Tensor, labels: Tensor, indices: Tensor, split: Literal["bank", "query"]) -> None:
        """Add rows ``[N, d]`` with their labels ``[N]`` and dataset indices ``[N]`` to the bank or the queries."""
        if split not in ("bank", "query"):
            raise ValueError(f'`split` must be "bank" or "query", got {split!r}')
        features = unit_rows(features.detach(), "features").float()
        check_labels(labels, self.num_classes, len(features))
        if indices.shape != labels.shape:
            raise ValueError(f"`indices` must be shaped as `labels`, {tuple(labels.shape)}, got {tuple(indices.shape)}")
        getattr(self, f"{split}_features").append(features)
        getattr(self, f"{split}_labels").append(labels.to(features.device, torch.long))
        getattr(self, f"{split}_indices").append(indices.to(features.device, torch.long))

    def compute(self) -> dict[str, Tensor]:
        bank, bank_labels = self._distinct("bank")
        queries, labels = self._distinct("query")
        ranked = knn_predict(queries, bank, bank_labels, self.num_classes, self.k, self.temperature)
        hits = ranked[:, :5] == labels[:, None]
        return {"top1": hits[:, 0].double().mean(), "top5": hits.any(dim=1).double().mean()}

    def _distinct(self, split: str) -> tuple[Tensor, Tensor]:
        """Features and labels of a split in the order of their indices, each index once."""
        indices = self._rows(f"{split}_indices")
        self._check_updated(len(indices))
        order = indices.argsort(stable=True)
        ordered = indices[order]
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        keep = order[first]
        return self._rows(f"{split}_features")[keep], self._rows(f"{split}_labels")[keep]
