"""The label-free quantities of features and of prototypes, seen batch by batch, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_positive
from lightning_ssl.functional.quality import feature_sums, prototype_sums, prototype_use_of, quality_of_sums, slices
from lightning_ssl.metrics._base import ReducedMetric


class FeatureQuality(ReducedMetric):
    """RankMe, LiDAR, alpha-ReQ, and what else features tell without labels, from one pass over sums.

    `compute` gives a dict: ``rankme``, ``alpha_req``, ``spectrum_area``, ``stable_rank``, ``wasserstein_uniformity``,
    ``sliced_gaussianity``, and ``lidar`` where views were given; see the functions of these names in
    :mod:`lightning_ssl.functional` (``spectrum_area`` is `cumulative_spectrum_area`). ``modes`` are the eigenvalues of
    the second moment F, falling.

    Args:
        directions: Random directions of the sliced Gaussianity.
        delta: LiDAR's regularisation of the covariance within a sample.
        seed: Of the directions.

    Example:
        >>> metric = FeatureQuality(directions=8)
        >>> metric.update(torch.eye(4)[:2])
        >>> metric.update(torch.eye(4)[2:])
        >>> round(metric.compute()["rankme"].item(), 3)
        4.0
    """

    higher_is_better = None

    def __init__(self, directions: int = 256, delta: float = 1e-4, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(directions, "directions")
        check_positive(delta, "delta")
        self.directions, self.delta, self.seed = directions, delta, seed
        for name in ("count", "total", "moment", "unit_total", "unit_moment", "waves", "samples", "between"):
            self.add_sum(name)

    def update(self, x: Tensor) -> None:
        """Add rows ``[N, d]``, or views grouped by sample ``[N, V, d]``, always as many of each."""
        with torch.no_grad():
            dim = x.shape[-1]
            for name, value in feature_sums(x.detach(), slices(dim, self.directions, self.seed, x.device)).items():
                setattr(self, name, getattr(self, name) + value)

    def compute(self) -> dict[str, Tensor]:
        self._check_updated(self.count)  # type: ignore[arg-type]
        return quality_of_sums({name: getattr(self, name) for name in self._reductions}, self.delta)


class PrototypeUse(ReducedMetric):
    """How a softmax over K prototypes is used, see :func:`lightning_ssl.functional.prototype_use`.

    `compute` gives a dict of its four fields.

    Args:
        temperature: What the student's scores are divided by.
        teacher_temperature: What the teacher's are.

    Example:
        >>> metric = PrototypeUse()
        >>> metric.update(10 * torch.eye(4))
        >>> metric.compute()["used"].item()
        1.0
    """

    higher_is_better = None
    sums: Tensor

    def __init__(self, temperature: float = 0.1, teacher_temperature: float = 0.04, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(temperature, "temperature")
        check_positive(teacher_temperature, "teacher_temperature")
        self.temperature, self.teacher_temperature = temperature, teacher_temperature
        self.add_sum("sums")

    def update(self, logits: Tensor, teacher: Tensor | None = None) -> None:
        """Add the scores ``[N, K]`` of some rows, and a teacher's of the same."""
        teacher = None if teacher is None else teacher.detach()
        self.sums = self.sums + prototype_sums(logits.detach(), self.temperature, teacher, self.teacher_temperature)

    def compute(self) -> dict[str, Tensor]:
        self._check_updated(self.sums[-1] if self.sums.ndim else 0)
        return prototype_use_of(self.sums)._asdict()
