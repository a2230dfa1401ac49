"""The common part of the callbacks that act on a predictor: after each optimizer step, once, on all ranks alike."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ssl.callbacks._engine.places import check_path, find_module
from lightning_ssl.callbacks._engine.ranks import refuse_sharded


class PredictorAction(L.Callback):
    """Finds the predictor, and calls `act` after each optimizer step.

    Args:
        predictor: Dotted path of the predictor.
    """

    def __init__(self, predictor: str) -> None:
        super().__init__()
        self.predictor = predictor
        self._global_step = 0

    def check(self, predictor: nn.Module) -> None:
        """Refuse a predictor the action is not meant for."""

    def act(self, trainer: L.Trainer, predictor: nn.Module) -> None:
        """Change the predictor, after an optimizer step."""

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{dict(predictor=self.predictor)}"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        refuse_sharded(trainer, self)
        module = check_path(pl_module, self.predictor, "predictor")
        if module is not None:
            self._check(module)

    def _check(self, predictor: nn.Module) -> None:
        if not any(True for _ in predictor.parameters()):
            raise MisconfigurationException(
                f"`predictor` names {self.predictor!r} ({type(predictor).__name__}), which has no weights to act on"
            )
        try:
            self.check(predictor)
        except ValueError as error:
            raise MisconfigurationException(f"{type(self).__name__}(predictor={self.predictor!r}): {error}") from None

    def find(self, pl_module: L.LightningModule) -> nn.Module:
        return find_module(pl_module, self.predictor, "predictor")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(self.find(pl_module))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._global_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Micro-batches of an accumulated step do not count; nor does a batch whose step was skipped.
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.act(trainer, self.find(pl_module))
