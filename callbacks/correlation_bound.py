"""The correlation of features and the generalisation bound that rests on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
from matplotlib.figure import Figure
from torch import Tensor

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.pair import Pairing
from lightning_ssl.callbacks._engine.report import log_figure
from lightning_ssl.callbacks.watcher import Watcher
from lightning_ssl.functional import correlation_loss, correlation_matrix, generalization_bound
from lightning_ssl.quantities import Quantity

MOST_DRAWN = 512  # features in the picture of the matrix: of wider ones the first


class CorrelationBound(Watcher):
    r"""Logs ``train/l_cor`` and ``train/l_bound``, and draws the correlation matrix of the features.

    :math:`L_{cor} = \|\Lambda - I\|_F^2` with :math:`\Lambda = E[x x^T]` of rows scaled to norm :math:`\sqrt d`, over
    all views; :math:`L_{bound} = \frac{2}{d^2} L_{cor} + \frac{K - d}{d^2}` (Bound Eq. 11). An indicator: it falls as
    kNN accuracy rises. Under ``val/`` and ``test/`` for held-out data.

    Args:
        features: Dotted path of the submodule whose outputs are the features.
        num_classes: The number of latent classes K; by default the DataModule's `num_classes`.
        unbiased: Correct L_cor for the number of rows in a batch.
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Log every n-th training step, the first included.
        every_n_epochs: Log the first step of every n-th epoch.
        picture_every: Draw the matrix every n-th observation; 0 never does.
        held_out: Log validation and test features as well.
        name: Keeps several instances apart: ``train/<name>/l_cor``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        target: Dotted path of the target network's twin of `features`, for the second view of an online network that
            sees one view only.

    Example:
        >>> watch = CorrelationBound("projection_head", num_classes=10)
    """

    quantities = (
        Quantity(
            "*/l_cor",
            "correlation loss",
            "How far features are from decorrelated and evenly spread: 0 is ideal, d(d - 1) one point.",
            better="lower",
        ),
        Quantity(
            "*/l_bound",
            "generalisation bound",
            "An indicator that falls as nearest-neighbour accuracy rises; no guarantee.",
            better="lower",
            best=True,
        ),
    )

    def __init__(
        self,
        features: str = "projector",
        num_classes: int | None = None,
        unbiased: bool = True,
        views: int | None = None,
        every_n_steps: int | None = 50,
        every_n_epochs: int | None = None,
        picture_every: int = 20,
        held_out: bool | Mapping[str, Any] = True,
        name: str | None = None,
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__(features, views, pairing, layout, target, every_n_steps, every_n_epochs, held_out, name)
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

    def measure(self, rows: Tensor) -> dict[str, Tensor | float]:
        l_cor = correlation_loss(rows, self.unbiased)
        self._matrix = correlation_matrix(rows, MOST_DRAWN) if self.picture_every else None
        values: dict[str, Tensor | float] = {"l_cor": l_cor}
        if self._classes:  # without a number of classes L_bound is left out
            values["l_bound"] = generalization_bound(l_cor, rows.shape[1], self._classes)
        return values

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        if self._matrix is not None and self.draws(stage, self.picture_every):
            matrix = self._matrix.float().cpu()
            log_figure(trainer, self.folder, self.key(stage, "correlation"), lambda: draw(matrix, step), step)
        self._matrix = None


def draw(matrix: Tensor, step: int) -> Figure:
    """The matrix, with 1 on its diagonal where features are decorrelated and evenly spread."""
    figure = Figure(figsize=(4, 3.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes)
    axes.set_title(f"correlation of features, step {step}", fontsize=9)
    return figure
