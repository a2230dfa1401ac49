"""Linear accuracy of an encoder while it trains."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks.knn_probe import shared_accuracy
from lightning_ssl.callbacks.probe import Features, Probe
from lightning_ssl.functional import fit_linear_probe
from lightning_ssl.quantities import Quantity


class LinearProbe(Probe):
    r"""Logs ``val/linear_top1`` and ``val/linear_top5``: a logistic regression on clean, eval-mode features.

    Fitted to convergence on the cached features of the train split, anew each time: it does not lag behind the
    encoder as a head trained alongside does.

    Args:
        encoder: Dotted path of the submodule to evaluate.
        data: A DataModule with `probe_dataloaders()`, or (train_loader, test_loader) of clean, labelled images; by
            default the trainer's DataModule.
        l2: Penalty :math:`\frac{\lambda}{2} \|W\|^2` on standardised features.
        num_classes: By default the DataModule's, or as many as the labels name.
        every_n_epochs: Probe at the end of every n-th epoch, and of the last.
        every_n_steps: Probe before every n-th step.
        baseline: Probe the untrained encoder as well.
        name: Keeps several instances apart: ``val/<name>/linear_top1``.
        features: Dotted path of a part of the encoder whose output counts; by default the encoder's own.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.

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
    )

    def __init__(
        self,
        encoder: str = "backbone",
        data: L.LightningDataModule | tuple[DataLoader[Any], DataLoader[Any]] | None = None,
        l2: float = 1e-4,
        num_classes: int | None = None,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        baseline: bool = True,
        name: str | None = None,
        features: str | None = None,
        layout: Layout | None = None,
    ) -> None:
        super().__init__(encoder, data, num_classes, every_n_epochs, every_n_steps, baseline, name, features, layout)
        if not l2 > 0:
            raise ValueError(f"`l2` must be positive, got {l2}")
        self.l2 = l2

    def evaluate(self, train: Features, test: Features, num_classes: int, trainer: L.Trainer) -> dict[str, float]:
        weight, bias = fit_linear_probe(train.rows, train.labels, num_classes, self.l2)

        def predict(queries: Tensor) -> Tensor:
            return (queries @ weight.T + bias).argsort(dim=1, descending=True)

        top1, top5 = shared_accuracy(trainer, test, predict)
        return {"linear_top1": top1, "linear_top5": top5}
