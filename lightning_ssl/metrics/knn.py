"""Accuracies of classifiers of features: nearest neighbours and a linear model, of rows that stay on their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.distributed import Together
from lightning_ssl.functional.checks import check_labels, check_positive, check_rows
from lightning_ssl.metrics._base import ReducedMetric
from lightning_ssl.metrics.evaluation import (
    Shard,
    Targets,
    first_of_each_class,
    knn_evaluation,
    linear_evaluation,
    place,
)


class SplitMetric(ReducedMetric):
    """A metric of two labelled splits whose rows are never gathered: its `compute` is the collective.

    Args:
        num_classes: The number of classes, attributes or targets.
        targets: What labels are: "class" (integers [N]), "multilabel" (zeros and ones [N, C]) or "continuous" [N, T].
        splits: The names of the splits.
    """

    def __init__(self, num_classes: int, targets: Targets, splits: tuple[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(num_classes, "num_classes")
        if targets not in ("class", "multilabel", "continuous"):
            raise ValueError(f'`targets` must be "class", "multilabel" or "continuous", got {targets!r}')
        self.num_classes, self.targets, self.splits = num_classes, targets, splits
        self._spread, self._group = False, None
        for split in splits:
            for name in ("features", "labels", "indices"):
                self.add_rows(f"{split}_{name}")

    def update(self, features: Tensor, labels: Tensor, indices: Tensor, split: str) -> None:
        """Add rows ``[N, d]`` with their labels ``[N]`` and dataset indices ``[N]`` to a split."""
        if split not in self.splits:
            raise ValueError(f"`split` must be {' or '.join(map(repr, self.splits))}, got {split!r}".replace("'", '"'))
        features = features.detach()
        check_rows(features, "features", min_rows=0)
        if self.targets == "class":
            check_labels(labels, self.num_classes, len(features))
            labels = labels.long()
        elif labels.shape != (len(features), self.num_classes):
            raise ValueError(f"`labels` must have shape {(len(features), self.num_classes)}, got {tuple(labels.shape)}")
        if indices.shape != (len(features),):
            raise ValueError(f"`indices` must have shape ({len(features)},), got {tuple(indices.shape)}")
        getattr(self, f"{split}_features").append(features)
        getattr(self, f"{split}_labels").append(labels.to(features.device))
        getattr(self, f"{split}_indices").append(indices.to(features.device, torch.long))

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Add rows: a part of one split has no value of its own."""
        self.update(*args, **kwargs)

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] | None = None, process_group: Any | None = None) -> None:
        """Rows stay: `compute` works on all ranks together instead."""
        self._spread, self._group = True, process_group or self.process_group

    def _copy_state_dict(self) -> dict[str, Any]:
        """Rows are only ever added: other lists of them are copy enough."""
        return {name: list(getattr(self, name)) for name in self._defaults}

    def _rows(self, name: str) -> Tensor:
        pieces = getattr(self, name)
        if len(pieces) > 1:
            if self._cache is not None:  # what the state is after `compute`
                self._cache[name] = pieces
            _join(pieces)
        return super()._rows(name) if len(pieces) != 1 else pieces[0]

    def _shards(self) -> tuple[Together, list[Shard]]:
        together = Together(self.device, sharded=self._spread, group=self._group)
        self._spread = False
        shards = []
        for split in self.splits:

            def made(split: str = split) -> dict[Any, tuple[Tensor, Tensor, Tensor]]:
                columns = [self._rows(f"{split}_{name}") for name in ("features", "labels", "indices")]
                return {("",): (columns[0], columns[1], columns[2])}

            shards.append(place(together, made, keep=True)[("",)])
            self._check_updated(shards[-1].total)
        return together, shards


def _join(pieces: list[Tensor]) -> None:
    """Make one tensor of a list's, there and piece by piece: both at once would be twice the memory."""
    if len({(piece.dtype, piece.shape[1:], piece.device) for piece in pieces}) > 1:
        pieces[:] = [torch.cat(pieces)]
        return
    at, whole = 0, pieces[0].new_empty(sum(map(len, pieces)), *pieces[0].shape[1:])
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        whole[at : at + len(piece)] = piece
        at += len(piece)
    pieces.append(whole)


class KNNAccuracy(SplitMetric):
    """The accuracy of a weighted nearest-neighbour vote, see :func:`lightning_ssl.functional.knn_predict`.

    Feed the bank and the queries with their dataset indices: a sample that a padding sampler repeats, on one rank or
    on several, counts once. Rows stay on their ranks. `compute` gives a dict with `top1` and `top5`; of attributes
    with `map`, the mean average precision; of continuous targets with `r2` and `mse`.

    Args:
        num_classes: The number of classes.
        k: How many neighbours vote.
        temperature: Of the votes.
        targets: What labels are: "class" (integers [N]), "multilabel" (zeros and ones [N, C]) or "continuous" [N, T].

    Example:
        >>> metric = KNNAccuracy(num_classes=2, k=1)
        >>> metric.update(torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 1]), split="bank")
        >>> metric.update(torch.tensor([[2.0, 1.0]]), torch.tensor([0]), torch.tensor([0]), split="query")
        >>> metric.compute()["top1"]
        tensor(1., dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(
        self, num_classes: int, k: int = 200, temperature: float = 0.1, targets: Targets = "class", **kwargs: Any
    ) -> None:
        super().__init__(num_classes, targets, ("bank", "query"), **kwargs)
        for name, value in (("k", k), ("temperature", temperature)):
            check_positive(value, name)
        self.k = k
        self.temperature = temperature

    def update(self, features: Tensor, labels: Tensor, indices: Tensor, split: str) -> None:
        """Add rows ``[N, d]`` with their labels ``[N]`` and dataset indices ``[N]`` to the bank or the queries."""
        check_rows(features, "features", min_rows=0, nonzero=True)
        super().update(features, labels, indices, split)

    def compute(self) -> dict[str, Tensor]:
        together, (bank, queries) = self._shards()
        found = knn_evaluation(bank, queries, self.num_classes, self.k, self.temperature, together, self.targets)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


class LinearProbeAccuracy(SplitMetric):
    """The accuracy of a linear model of features, see :func:`lightning_ssl.functional.fit_linear_probe`.

    Feed the train and the test split with their dataset indices; rows stay on their ranks. `compute` gives a dict with
    `top1` and `top5`; of attributes with `map`, the mean average precision; of continuous targets, by ridge regression,
    with `r2` and `mse`; and with `l2`, the penalty that was taken.

    Args:
        num_classes: The number of classes, attributes or targets.
        l2: The penalty; or several, of which the one is taken that does best on a tenth of the train split.
        targets: What labels are: "class" (integers [N]), "multilabel" (zeros and ones [N, C]) or "continuous" [N, T].
        shots: Fit that many samples of each class alone.

    Example:
        >>> metric = LinearProbeAccuracy(num_classes=2)
        >>> x, y, at = torch.tensor([[-1.0], [-2.0], [1.0], [3.0]]), torch.tensor([0, 0, 1, 1]), torch.arange(4)
        >>> metric.update(x, y, at, split="train")
        >>> metric.update(x, y, at, split="test")
        >>> metric.compute()["top1"]
        tensor(1., dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(
        self,
        num_classes: int,
        l2: float | Sequence[float] = 1e-4,
        targets: Targets = "class",
        shots: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes, targets, ("train", "test"), **kwargs)
        self.l2 = list(l2) if isinstance(l2, Sequence) else [l2]
        for value in self.l2:
            check_positive(value, "l2")
        if shots is not None and (shots < 1 or targets != "class"):
            raise ValueError(f"`shots` must be at least 1 and needs classes, got {shots} of targets={targets!r}")
        self.shots = shots

    def compute(self) -> dict[str, Tensor]:
        together, (train, test) = self._shards()
        if self.shots is not None:
            train = first_of_each_class(train, self.shots, self.num_classes, together)
        found = linear_evaluation(train, test, self.num_classes, self.l2, together, self.targets)
        values = {**found.values, "l2": found.l2}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
