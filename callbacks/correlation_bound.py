"""The correlation of features and the generalisation bound that rests on it."""

from __future__ import annotations

import lightning.pytorch as L
from matplotlib.figure import Figure
from torch import Tensor

from lightning_ssl import metrics
from lightning_ssl.callbacks._ranks import is_distributed
from lightning_ssl.callbacks._report import log_figure
from lightning_ssl.callbacks._watcher import FeatureWatcher


class CorrelationBound(FeatureWatcher):
    r"""Logs ``train/l_cor`` and ``train/l_bound``, and draws the correlation matrix of the features.

    :math:`L_{cor} = \|\Lambda - I\|_F^2` with :math:`\Lambda = E[x x^T]` of rows scaled to norm :math:`\sqrt d`, over
    all views; :math:`L_{bound} = \frac{2}{d^2} L_{cor} + \frac{K - d}{d^2}` (Bound Eq. 11). An indicator: it falls as
    kNN accuracy rises. Under ``val/`` and ``test/`` for held-out data.

    Args:
        features: dotted path of the submodule whose outputs are the features.
        num_classes: the number of latent classes K; by default the DataModule's `num_classes`.
        unbiased: correct L_cor for the number of rows in a batch.
        views: how many views a step holds, where calls and batch size do not tell.
        every_n_steps: log every that many training steps, the first included.
        every_n_epochs: log the first step of every that many epochs.
        picture_every: draw the matrix every that many observations; 0 never does.
        held_out: log validation and test features as well.
        name: keeps several instances apart: ``train/<name>/l_cor``.
    """

    def __init__(
        self,
        features: str = "projector",
        num_classes: int | None = None,
        unbiased: bool = True,
        views: int | None = None,
        every_n_steps: int | None = 50,
        every_n_epochs: int | None = None,
        picture_every: int = 20,
        held_out: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(features, views, every_n_steps, every_n_epochs, held_out, name)
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"`num_classes` must be at least 1, got {num_classes}")
        if picture_every < 0:
            raise ValueError(f"`picture_every` must not be negative, got {picture_every}")
        self.num_classes, self.unbiased, self.picture_every = num_classes, unbiased, picture_every
        self._classes = num_classes
        self._matrix: Tensor | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._classes = self.num_classes or getattr(getattr(trainer, "datamodule", None), "num_classes", None)

    def reset(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Without a number of classes L_bound is left out.
        self._metric = metrics.CorrelationBound(
            self._classes or 1, self.unbiased, sync_on_compute=is_distributed(trainer)
        ).to(pl_module.device)

    def take(self, views: list[Tensor]) -> None:
        for view in views:
            self._metric.update(view)

    def compute(self, trainer: L.Trainer, pl_module: L.LightningModule, views: int, stage: str) -> dict[str, float]:
        values = self._metric.compute()
        self._matrix = values["correlation"].float().cpu()
        logged = {self.key(stage, "l_cor"): float(values["l_cor"])}
        if self._classes:
            logged[self.key(stage, "l_bound")] = float(values["l_bound"])
        return logged

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        if self._matrix is not None and self.draws(step, stage, self.picture_every):
            matrix = self._matrix
            log_figure(trainer, self.folder, self.key(stage, "correlation"), lambda: draw(matrix, step), step)


def draw(matrix: Tensor, step: int) -> Figure:
    """The matrix, with 1 on its diagonal where features are decorrelated and evenly spread."""
    figure = Figure(figsize=(4, 3.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes)
    axes.set_title(f"correlation of features, step {step}", fontsize=9)
    return figure
