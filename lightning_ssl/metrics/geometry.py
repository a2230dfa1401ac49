"""Alignment, uniformity and effective rank of features seen batch by batch, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_positive, check_rows
from lightning_ssl.functional.geometry import effective_rank_of_values, pair_distances, uniformity, unit_rows
from lightning_ssl.metrics._base import ReducedMetric


class Alignment(ReducedMetric):
    """The mean distance of two views' features, see :func:`lightning_ssl.functional.alignment`.

    Example:
        >>> metric = Alignment()
        >>> metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]]))
        >>> metric.compute()
        tensor(2., dtype=torch.float64)
    """

    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, alpha: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(alpha, "alpha")
        self.alpha = alpha
        self.add_sum("total")
        self.add_sum("count")

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add the pairs of rows of `x` and `y`, both ``[N, d]``."""
        distances = pair_distances(x, y, self.alpha)
        self.total = self.total + distances.sum(dtype=torch.float64)
        self.count = self.count + len(x)

    def compute(self) -> Tensor:
        self._check_updated(self.count)
        return self.total / self.count


class Uniformity(ReducedMetric):
    """How evenly all features cover the sphere, see :func:`lightning_ssl.functional.uniformity`.

    It is a mean over pairs of rows, so the rows are kept, and gathered at `compute`.

    Example:
        >>> metric = Uniformity()
        >>> metric.update(torch.tensor([[1.0, 0.0]]))
        >>> metric.update(torch.tensor([[-2.0, 0.0]]))
        >>> metric.compute()
        tensor(-8.)
    """

    higher_is_better = False
    rows: list[Tensor]

    def __init__(self, t: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(t, "t")
        self.t = t
        self.add_rows("rows")

    def update(self, x: Tensor) -> None:
        """Add the rows of `x`, ``[N, d]``."""
        self.rows.append(unit_rows(x.detach(), "x"))

    def compute(self) -> Tensor:
        rows = self._rows("rows")
        self._check_updated(len(rows))
        return uniformity(rows, self.t)


class EffectiveRank(ReducedMetric):
    """The effective rank of all features, see :func:`lightning_ssl.functional.effective_rank`.

    The singular values come from the sum of outer products, in double precision.

    Example:
        >>> metric = EffectiveRank()
        >>> metric.update(torch.eye(3)[:1])
        >>> metric.update(torch.eye(3)[1:])
        >>> metric.compute()
        tensor(3.0000, dtype=torch.float64)
    """

    higher_is_better = True
    gram: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("gram")
        self.add_sum("count")

    def update(self, x: Tensor) -> None:
        """Add the rows of `x`, ``[N, d]``."""
        check_rows(x, "x")
        x = x.detach().double()
        self.gram = self.gram + x.T @ x
        self.count = self.count + len(x)

    def compute(self) -> Tensor:
        self._check_updated(self.count)
        eigenvalues = torch.linalg.eigvalsh(self.gram)
        # Below the roundoff of the sum an eigenvalue is noise, whose square root would count.
        floor = eigenvalues[-1] * len(eigenvalues) * torch.finfo(torch.float64).eps
        return effective_rank_of_values(torch.where(eigenvalues > floor, eigenvalues, 0).sqrt())
