"""Nearest-neighbour accuracy of an encoder while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.ranks import ranks_of
from lightning_ssl.callbacks.probe import Features, Probe
from lightning_ssl.distributed import agree, all_reduce_sum
from lightning_ssl.functional import knn_predict
from lightning_ssl.quantities import Quantity


class KNNProbe(Probe):
    r"""Logs ``val/knn_top1`` and ``val/knn_top5``: weighted k nearest neighbours on clean, eval-mode features.

    Neighbours under the cosine vote with weight :math:`e^{\cos / T}`. The bank is the whole train split, embedded
    anew each time; every rank embeds its shard and classifies its share of the queries.

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
    ) -> None:
        super().__init__(encoder, data, num_classes, every_n_epochs, every_n_steps, baseline, name, features, layout)
        if k < 1:
            raise ValueError(f"`k` must be at least 1, got {k}")
        if not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}")
        self.k, self.temperature = k, temperature

    def evaluate(self, train: Features, test: Features, num_classes: int, trainer: L.Trainer) -> dict[str, float]:
        if self.k > len(train.rows):
            self.warn(f"`k={self.k}` is more than the {len(train.rows)} samples of the bank: all vote")

        def predict(queries: Tensor) -> Tensor:
            return knn_predict(queries, train.rows, train.labels, num_classes, self.k, self.temperature)

        top1, top5 = shared_accuracy(trainer, test, predict)
        return {"knn_top1": top1, "knn_top5": top5}


def shared_accuracy(trainer: L.Trainer, test: Features, predict: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Collective: top-1 and top-5 accuracy, each rank classifying its share of the queries.

    `predict` maps queries [Q, d] to classes by falling score [Q, C].
    """
    rank, world_size = trainer.global_rank, trainer.world_size
    rows, labels = test.rows[rank::world_size], test.labels[rank::world_size]
    hits = torch.zeros(2, dtype=torch.long, device=test.rows.device)
    problem: ValueError | None = None
    if len(rows):
        try:
            correct = predict(rows)[:, :5] == labels[:, None]
            hits = torch.stack([correct[:, 0].sum(), correct.any(dim=1).sum()])
        except ValueError as error:  # a bad row in this rank's share alone must not leave the others waiting
            problem = error
    if ranks_of(trainer) > 1:
        if not agree(problem is None, device=hits.device)[0]:
            raise problem or ValueError("another rank could not classify its share of the queries")
        hits = all_reduce_sum(hits)
    elif problem is not None:
        raise problem
    top1, top5 = (hits / len(test.rows)).tolist()
    return top1, top5
