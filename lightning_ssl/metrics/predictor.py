"""The predictor against the second moment of its inputs, seen batch by batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_rows, check_square
from lightning_ssl.functional.predictor import effective_predictor_of_moments, predictor_values
from lightning_ssl.metrics._base import ReducedMetric


class EigenspaceAlignment(ReducedMetric):
    """Whether the predictor's eigenspaces are F's, see :func:`lightning_ssl.functional.eigenspace_alignment`.

    `update` takes what enters the predictor, and either its weight (a linear predictor) or what leaves it (any
    predictor; W is then the least-squares map, see :func:`lightning_ssl.functional.effective_predictor`).

    `compute` gives a dict: the vectors `eigenvalues` (s_j, falling), `predictor_values` (p_j) and `cosines`; and the
    numbers `cosine_mean`, `cosine_weighted` (by s_j), `commutator_norm`, `asymmetry` and `smallest_symmetric_value`
    (the smallest eigenvalue of W's symmetric part).

    Args:
        bias: Fit an intercept too where W is fitted; for predictors with a bias or normalisation.

    Example:
        >>> metric = EigenspaceAlignment()
        >>> x = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> metric.update(x, outputs=3 * x)
        >>> values = metric.compute()
        >>> values["eigenvalues"].tolist(), values["predictor_values"].tolist()
        ([2.0, 0.5], [3.0, 3.0])
    """

    higher_is_better = True
    xx: Tensor
    yx: Tensor
    x_sum: Tensor
    y_sum: Tensor
    count: Tensor
    weight: Tensor
    weights: Tensor

    def __init__(self, bias: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bias = bias
        for name in ("xx", "yx", "x_sum", "y_sum", "count", "weight", "weights"):
            self.add_sum(name)

    def update(self, inputs: Tensor, outputs: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Add rows that entered the predictor, ``[N, d]``, with its outputs ``[N, d]`` or its weight ``[d, d]``."""
        if (outputs is None) == (weight is None):
            raise ValueError("`update` takes either `outputs` or `weight`; pass one of them")
        check_rows(inputs, "inputs")
        x = inputs.detach().double()
        dim = x.shape[1]
        if weight is not None:
            check_square(weight, "weight")
            if len(weight) != dim:
                raise ValueError(f"`weight` must be [{dim}, {dim}] for these `inputs`, got {tuple(weight.shape)}")
            self.weight = self.weight + weight.detach().double()
            self.weights = self.weights + 1
        elif outputs is not None:
            check_rows(outputs, "outputs")
            if outputs.shape != inputs.shape:
                raise ValueError(
                    f"`outputs` must be shaped as `inputs`, {tuple(inputs.shape)}, got {tuple(outputs.shape)}; "
                    "only a predictor from a space to itself has eigenspaces to compare"
                )
            y = outputs.detach().double()
            self.yx = self.yx + y.T @ x
            self.y_sum = self.y_sum + y.sum(dim=0)
        self.x_sum = self.x_sum + x.sum(dim=0)
        self.xx = self.xx + x.T @ x
        self.count = self.count + len(x)

    def compute(self) -> dict[str, Tensor]:
        self._check_updated(self.count)
        return predictor_values(self.xx / self.count, self._predictor())

    def _predictor(self) -> Tensor:
        if int(self.weights):
            return self.weight / self.weights
        xx, yx = self.xx, self.yx
        if self.bias:
            xx = xx - torch.outer(self.x_sum, self.x_sum) / self.count
            yx = yx - torch.outer(self.y_sum, self.x_sum) / self.count
        return effective_predictor_of_moments(xx, yx)
