"""How many dimensions the features use."""

from __future__ import annotations

import lightning.pytorch as L
from torch import Tensor

from lightning_ssl import functional
from lightning_ssl.callbacks._spread import Rows, effective_rank
from lightning_ssl.callbacks._watcher import FeatureWatcher


class EffectiveRank(FeatureWatcher):
    r"""Logs ``train/effective_rank``, ``train/alive_dimensions`` and ``train/feature_std``.

    The effective rank is the exponential of the entropy of the normalised singular values of the features (not
    centred), over all views. A dimension is alive when the standard deviation of the l2-normalised features along it
    exceeds a hundredth of :math:`1/\sqrt d`, the value at which all dimensions share the sphere; ``feature_std`` is
    the mean of those deviations in units of it: 1 when spread, 0 when collapsed. Under ``val/`` and ``test/`` for
    held-out data.

    Args:
        features: dotted path of the submodule whose outputs are the features.
        views: how many views a step holds, where calls and batch size do not tell.
        every_n_steps: log every that many training steps, the first included.
        every_n_epochs: log the first step of every that many epochs.
        held_out: log validation and test features as well.
        name: keeps several instances apart: ``train/<name>/effective_rank``.
    """

    def __init__(
        self,
        features: str = "projector",
        views: int | None = None,
        every_n_steps: int | None = 50,
        every_n_epochs: int | None = None,
        held_out: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(features, views, every_n_steps, every_n_epochs, held_out, name)

    def reset(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rows = Rows()

    def take(self, views: list[Tensor]) -> None:
        for view in views:
            self._rows.update(view)

    def compute(self, trainer: L.Trainer, pl_module: L.LightningModule, views: int, stage: str) -> dict[str, float]:
        rows = self._rows.gather(trainer)
        found = functional.spread(rows)
        return {
            self.key(stage, "effective_rank"): effective_rank(rows),
            self.key(stage, "alive_dimensions"): float(found.alive),
            self.key(stage, "feature_std"): float(found.std),
        }
