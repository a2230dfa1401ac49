"""Linear accuracy of an encoder while it trains."""

from __future__ import annotations

import lightning.pytorch as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssl.callbacks._probe import Features, Probe
from lightning_ssl.callbacks.knn_probe import shared_accuracy
from lightning_ssl.functional import fit_linear_probe


class LinearProbe(Probe):
    r"""Logs ``val/linear_top1`` and ``val/linear_top5``: a logistic regression on clean, eval-mode features.

    Fitted to convergence on the cached features of the train split, anew each time: it does not lag behind the
    encoder as a head trained alongside does.

    Args:
        encoder: dotted path of the submodule to evaluate.
        data: a DataModule with `probe_dataloaders()`, or (train_loader, test_loader) of clean, labelled images; by
            default the trainer's DataModule.
        l2: penalty :math:`\frac{\lambda}{2} \|W\|^2` on standardised features.
        num_classes: by default the DataModule's, or as many as the labels name.
        every_n_epochs: probe at the end of every that many epochs, and of the last.
        every_n_steps: probe before every that many steps.
        baseline: probe the untrained encoder as well.
        name: keeps several instances apart: ``val/<name>/linear_top1``.
    """

    def __init__(
        self,
        encoder: str = "backbone",
        data: L.LightningDataModule | tuple[DataLoader, DataLoader] | None = None,
        l2: float = 1e-4,
        num_classes: int | None = None,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        baseline: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(encoder, data, num_classes, every_n_epochs, every_n_steps, baseline, name)
        if not l2 > 0:
            raise ValueError(f"`l2` must be positive, got {l2}")
        self.l2 = l2

    def evaluate(self, train: Features, test: Features, num_classes: int, trainer: L.Trainer) -> dict[str, float]:
        weight, bias = fit_linear_probe(train.rows, train.labels, num_classes, self.l2)

        def predict(queries: Tensor) -> Tensor:
            return (queries @ weight.T + bias).argsort(dim=1, descending=True)

        top1, top5 = shared_accuracy(trainer, test, predict)
        return {"linear_top1": top1, "linear_top5": top5}
