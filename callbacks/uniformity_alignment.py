"""Uniformity and alignment of any submodule's features while it trains."""

from __future__ import annotations

from itertools import combinations

import lightning.pytorch as L
from torch import Tensor

from lightning_ssl.callbacks._ranks import is_distributed
from lightning_ssl.callbacks._watcher import FeatureWatcher
from lightning_ssl.metrics import Alignment, Uniformity


class UniformityAlignment(FeatureWatcher):
    r"""Logs where the features lie on the sphere (RAFT Defs 2.1-2.2).

    ``train/alignment`` is :math:`E \|\hat x - \hat y\|^\alpha` over the two views of a sample (over all pairs of views
    where there are more); ``train/uniformity`` is :math:`\log E\, e^{-t \|\hat x_i - \hat x_j\|^2}` over pairs of
    different samples of one view, averaged over the views. The same under ``val/`` and ``test/`` for held-out data;
    alignment only where a step shows two views.

    Args:
        features: dotted path of the submodule whose outputs are the features.
        alpha: alignment's exponent.
        t: uniformity's inverse width.
        views: how many views a step holds, where calls and batch size do not tell.
        every_n_steps: log every that many training steps, the first included.
        every_n_epochs: log the first step of every that many epochs.
        held_out: log validation and test features as well.
        name: keeps several instances apart: ``train/<name>/uniformity``.
    """

    def __init__(
        self,
        features: str = "projector",
        alpha: float = 2.0,
        t: float = 2.0,
        views: int | None = None,
        every_n_steps: int | None = 50,
        every_n_epochs: int | None = None,
        held_out: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(features, views, every_n_steps, every_n_epochs, held_out, name)
        self.alpha, self.t = alpha, t
        Alignment(alpha=alpha), Uniformity(t=t)  # refuse bad values here and now

    def reset(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._synced, self._device = is_distributed(trainer), pl_module.device
        self._alignment = Alignment(alpha=self.alpha, sync_on_compute=self._synced).to(self._device)
        self._uniformity: list[Uniformity] = []

    def take(self, views: list[Tensor]) -> None:
        self._expect(len(views))
        for metric, view in zip(self._uniformity, views, strict=True):
            metric.update(view)
        for first, second in combinations(views, 2):
            self._alignment.update(first, second)

    def _expect(self, views: int) -> None:
        """One uniformity for each view, on a rank that saw none as well."""
        while len(self._uniformity) < views:
            self._uniformity.append(Uniformity(t=self.t, sync_on_compute=self._synced).to(self._device))

    def compute(self, trainer: L.Trainer, pl_module: L.LightningModule, views: int, stage: str) -> dict[str, float]:
        self._expect(views)
        values = {self.key(stage, "uniformity"): sum(float(metric.compute()) for metric in self._uniformity) / views}
        if views > 1:
            values[self.key(stage, "alignment")] = float(self._alignment.compute())
        return values
