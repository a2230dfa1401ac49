"""A linear predictor that depends on the features: one map for each side of random hyperplanes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_ssl.distributed import all_reduce_sum


class PartitionedLinear(nn.Module):
    r"""For each of n hyperplanes the map of the side that a row lies on, averaged over the hyperplanes.

    :math:`y = \frac1n \sum_h W_{h, s_h(x)} x + b` with :math:`s_h(x) = [a_h^T x \ge t_h]`: the feature-dependent
    predictor of DirectPred's random partitions (Sec. 6). The normals a_h are Gaussian; the thresholds t_h are the mean
    projection of the batch, of all ranks (:meth:`thresholds_of`), so that each hyperplane cuts through the cloud.

    Calling it without `sides` uses the thresholds last seen in training, and no other row of the batch.

    Args:
        linear: A square linear layer; all maps start as its weight, and its bias is taken over.
        partitions: Number n of hyperplanes.
        seed: Seed of the normals.

    Example:
        >>> layer = nn.Linear(4, 4)
        >>> predictor = PartitionedLinear(layer, partitions=3)
        >>> x = torch.randn(8, 4)
        >>> torch.allclose(predictor(x), layer(x), atol=1e-6)  # until its maps are set apart
        True
    """

    normals: Tensor
    thresholds: Tensor

    def __init__(self, linear: nn.Linear, partitions: int, seed: int = 0) -> None:
        super().__init__()
        dim = linear.in_features
        if partitions < 1 or linear.out_features != dim:
            raise ValueError(
                f"`partitions` must be at least 1 and `linear` square, got {partitions} and "
                f"{linear.in_features} to {linear.out_features} features"
            )
        self.partitions = partitions
        self.weight = nn.Parameter(linear.weight.detach().repeat(partitions, 2, 1, 1))  # n x side x d x d
        self.bias = linear.bias
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("normals", torch.randn(partitions, dim, generator=generator))
        self.register_buffer("thresholds", torch.zeros(partitions))

    @torch.no_grad()
    def thresholds_of(self, x: Tensor) -> Tensor:
        """The mean projections of a batch of all ranks, [n]; kept for calls without `sides`. A collective."""
        total = torch.cat([self._project(x).sum(dim=0), x.new_full((1,), len(x), dtype=self._precise(x))])
        total = all_reduce_sum(total)
        mean = total[:-1] / total[-1].clamp_min(1)
        self.thresholds.copy_(mean)
        return mean

    @torch.no_grad()
    def sides(self, x: Tensor, thresholds: Tensor | None = None) -> Tensor:
        """On which side of each hyperplane each row lies, [n, N] bool."""
        limits = self.thresholds if thresholds is None else thresholds
        projections = self._project(x)
        return (projections >= limits.to(projections)).T

    def forward(self, x: Tensor, sides: Tensor | None = None) -> Tensor:
        sides = self.sides(x) if sides is None else sides
        total: Tensor | float = 0.0
        for (below, above), side in zip(self.weight, sides, strict=True):
            total = total + torch.where(side[:, None], x @ above.T, x @ below.T)
        y = total / self.partitions
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.weight.shape[-1]}, partitions={self.partitions}, bias={self.bias is not None}"

    def _project(self, x: Tensor) -> Tensor:
        dtype = self._precise(x)
        return x.detach().to(dtype) @ self.normals.T.to(dtype)

    @staticmethod
    def _precise(x: Tensor) -> torch.dtype:
        """Rows near a hyperplane keep their side on any number of ranks."""
        return torch.float32 if x.device.type == "mps" else torch.float64
