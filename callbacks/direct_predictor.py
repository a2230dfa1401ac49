"""Sets any module's linear predictor from the second moment of its inputs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_ssl.callbacks._engine.action import PredictorAction
from lightning_ssl.callbacks._engine.ranks import ranks_of
from lightning_ssl.callbacks._engine.record import Recorder
from lightning_ssl.callbacks.watcher import precise
from lightning_ssl.distributed import agree
from lightning_ssl.nn.predictor_actions import DirectPredictorUpdate, linear_of


class DirectPredictor(PredictorAction):
    r"""DirectPred for any module (Eqs. 18-19): after each optimizer step the predictor is set from F.

    :math:`\hat F \leftarrow \rho \hat F + (1 - \rho) E[f f^T]` over all rows that entered the predictor with gradients
    on all ranks, and :math:`W = U \mathrm{diag}(\sqrt{s_j / s_{max}} + \varepsilon) U^T`.

    Args:
        predictor: Dotted path of a predictor with one square linear layer.
        rho: Weight of the past in the moving average.
        eps: The boost of small eigenvalues, relative to the largest.
        freq: Set the predictor every n-th step; in between its optimizer trains it.
        shift: The constant c of Table 7, relative to the largest eigenvalue.
        partitions: 0. Random partitions make the predictor depend on the features, and a callback cannot change what a
            module's own linear layer computes: use the method :class:`lightning_ssl.methods.DirectPred` for them.

    Example:
        >>> action = DirectPredictor("predictor", rho=0.3, freq=5)
    """

    def __init__(
        self,
        predictor: str = "predictor",
        rho: float = 0.3,
        eps: float = 0.1,
        freq: int = 1,
        shift: float = 0.0,
        partitions: int = 0,
    ) -> None:
        super().__init__(predictor)
        if partitions:
            raise ValueError(
                f"`partitions` must be 0 here, got {partitions}: with partitions each sample has its own predictor, "
                "which no weight of the module's linear layer can be; use "
                "lightning_ssl.methods.DirectPred(partitions=...), or lightning_ssl.nn.PartitionedLinear as predictor"
            )
        self.rho, self.eps, self.freq, self.shift = rho, eps, freq, shift
        self._update = DirectPredictorUpdate(rho, eps, freq, shift)
        self._recorder = Recorder()
        self._seen, self._warned = 0, False

    def check(self, predictor: nn.Module) -> None:
        linear_of(predictor, "DirectPred")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._recorder.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._recorder.stop()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._recorder.want(self.predictor, self.find(pl_module), inputs=True)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._recorder.backward(True)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._recorder.backward(False)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        place = self._recorder.stop().get(self.predictor)
        for call in place.views() if place is not None else []:
            if call.entered is not None and len(call.entered):
                self._update.update(precise(call.entered))
                self._seen += 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def act(self, trainer: L.Trainer, predictor: nn.Module) -> None:
        seen = self._seen > 0
        if ranks_of(trainer) > 1:
            seen, _ = agree(seen, device=trainer.strategy.root_device)
        self._seen = 0
        if not seen:
            if not self._warned:
                rank_zero_warn(
                    f"{type(self).__name__}: {self.predictor!r} was not called with gradients on every rank: not set"
                )
            self._warned = True
            return
        with torch.no_grad():
            self._update.step(predictor)

    def state_dict(self) -> dict[str, Any]:
        return self._update.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._update.load_state_dict(state_dict)
