"""Starts any module's predictor anew now and then."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as L
from torch import nn

from lightning_ssl.callbacks._engine.action import PredictorAction
from lightning_ssl.nn.predictor_actions import linear_of, reset_parameters_


class PredictorReset(PredictorAction):
    """Draws the predictor's weights anew at the start of every T-th epoch (DDN-v1 Table 5).

    The draw is a function of (seed, epoch): the same on all ranks, in a resumed run, and on any device; the global
    random state is left alone. The optimizer keeps its state.

    Args:
        predictor: Dotted path of any predictor.
        every_n_epochs: T.
        init: "default" (each layer's own), "identity" (one square linear layer), "uniform" or "positive".
        init_range: The range of "uniform", [-r, r], and of "positive", [0, r].
        seed: Seed of the draws.

    Example:
        >>> action = PredictorReset("predictor", every_n_epochs=10, init="identity")
    """

    def __init__(
        self,
        predictor: str = "predictor",
        every_n_epochs: int = 10,
        init: Literal["default", "identity", "uniform", "positive"] = "default",
        init_range: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(predictor)
        if every_n_epochs < 1:
            raise ValueError(f"`every_n_epochs` must be at least 1, got {every_n_epochs}")
        if init not in ("default", "identity", "uniform", "positive"):
            raise ValueError(f"`init` must be default, identity, uniform or positive, got {init!r}")
        if init in ("uniform", "positive") and not (init_range is not None and init_range > 0):
            raise ValueError(f"`init={init!r}` needs a positive `init_range`, got {init_range}")
        self.every_n_epochs, self.init, self.init_range, self.seed = every_n_epochs, init, init_range, seed
        self._last_epoch: int | None = None

    def check(self, predictor: nn.Module) -> None:
        if self.init == "identity":
            linear_of(predictor, "identity initialisation")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch
        # A run resumed in the middle of an epoch begins it a second time.
        if epoch > 0 and epoch % self.every_n_epochs == 0 and epoch != self._last_epoch:
            self._last_epoch = epoch
            reset_parameters_(self.find(pl_module), self.init, self.init_range, seed=self.seed + epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_epoch = state_dict["last_epoch"]
