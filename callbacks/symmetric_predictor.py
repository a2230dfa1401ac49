"""Keeps any module's linear predictor symmetric."""

from __future__ import annotations

import lightning.pytorch as L
from torch import nn

from lightning_ssl.callbacks._engine.action import PredictorAction
from lightning_ssl.nn.predictor_actions import linear_of, symmetrize_


class SymmetricPredictor(PredictorAction):
    r"""Replaces the predictor's weight by its symmetric part after each step: :math:`W \leftarrow (W + W^T)/2`.

    DirectPred Sec. 4: with EMA it matches a free predictor, without it collapses unless the predictor learns faster
    or decays more.

    Args:
        predictor: Dotted path of a predictor with one square linear layer.

    Example:
        >>> action = SymmetricPredictor("predictor")
    """

    def __init__(self, predictor: str = "predictor") -> None:
        super().__init__(predictor)

    def check(self, predictor: nn.Module) -> None:
        linear_of(predictor, "symmetrising")

    def act(self, trainer: L.Trainer, predictor: nn.Module) -> None:
        symmetrize_(predictor)
