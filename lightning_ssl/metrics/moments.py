"""Second moments seen batch by batch: F of DirectPred, Lambda and the bound of Bound."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_ssl.functional.checks import check_rows
from lightning_ssl.functional.geometry import unit_rows
from lightning_ssl.functional.moments import check_counts, correlation_loss_of_moment, generalization_bound
from lightning_ssl.metrics._base import ReducedMetric


class SecondMoment(ReducedMetric):
    """The uncentred second moment of all features, see :func:`lightning_ssl.functional.second_moment`.

    Example:
        >>> metric = SecondMoment()
        >>> metric.update(torch.tensor([[1.0, 0.0]]))
        >>> metric.update(torch.tensor([[0.0, 2.0]]))
        >>> metric.compute().tolist()
        [[0.5, 0.0], [0.0, 2.0]]
    """

    higher_is_better = None
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("total")
        self.add_sum("count")

    def update(self, x: Tensor) -> None:
        """Add the rows of `x`, ``[N, d]``."""
        check_rows(x, "x")
        x = x.detach().double()
        self.total = self.total + x.T @ x
        self.count = self.count + len(x)

    def compute(self) -> Tensor:
        self._check_updated(self.count)
        return self.total / self.count


class CorrelationBound(ReducedMetric):
    r"""L_cor and L_bound of all features, see :func:`lightning_ssl.functional.correlation_loss`.

    `compute` gives a dict: `l_cor`, `l_bound` and `correlation`, the matrix :math:`\Lambda` itself.

    Args:
        num_classes: The number of latent classes K.
        unbiased: Correct L_cor for the number of rows.

    Example:
        >>> metric = CorrelationBound(num_classes=4)
        >>> metric.update(torch.eye(4))
        >>> values = metric.compute()
        >>> values["l_cor"].item(), values["l_bound"].item()
        (0.0, 0.0)
    """

    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, num_classes: int, unbiased: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_counts(num_classes=num_classes)
        self.num_classes = num_classes
        self.unbiased = unbiased
        self.add_sum("total")
        self.add_sum("count")

    def update(self, x: Tensor) -> None:
        """Add the rows of `x`, ``[N, d]``."""
        x = unit_rows(x.detach().double(), "x") * math.sqrt(x.shape[1])
        self.total = self.total + x.T @ x
        self.count = self.count + len(x)

    def compute(self) -> dict[str, Tensor]:
        self._check_updated(self.count)
        if self.unbiased and int(self.count) < 2:
            raise ValueError("`unbiased` needs at least 2 rows over all ranks, got 1; pass a larger batch")
        correlation = self.total / self.count
        l_cor = correlation_loss_of_moment(correlation, self.count if self.unbiased else None)
        l_bound = generalization_bound(l_cor, len(correlation), self.num_classes)
        return {"l_cor": l_cor, "l_bound": l_bound, "correlation": correlation}
