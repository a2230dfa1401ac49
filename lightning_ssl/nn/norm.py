"""Batch normalisation taken apart (DDN-v1 Table 4)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Part = Literal["keep", "detach", "omit"]


class BatchNormParts(nn.Module):
    r"""Batch normalisation whose mean and standard deviation are each kept, detached or omitted.

    :math:`(x - \mu) / \sqrt{\sigma^2 + \epsilon}` over the batch, where a detached part acts in the forward pass but
    passes no gradient (PyTorch: ``x - x.mean(0).detach()``). The variance is always about the batch mean. No affine
    part and no running statistics: evaluation uses the batch at hand too. Under DDP each rank uses its own batch.

    Args:
        mean: What becomes of the subtraction of the mean.
        std: What becomes of the division by the standard deviation.
        eps: Added to the variance.

    Example:
        >>> norm = BatchNormParts(mean="keep", std="omit")
        >>> norm(torch.tensor([[1.0], [3.0]])).squeeze(1)
        tensor([-1.,  1.])
    """

    def __init__(self, mean: Part = "keep", std: Part = "keep", eps: float = 1e-5) -> None:
        super().__init__()
        for name, part in (("mean", mean), ("std", std)):
            if part not in ("keep", "detach", "omit"):
                raise ValueError(f"`{name}` must be keep, detach or omit, got {part!r}")
        self.mean, self.std, self.eps = mean, std, eps

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=0, correction=0)
        return self.normalise(x, mean, variance)

    def normalise(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalise by given statistics; the callbacks that run a step again hold those of the step constant."""
        if self.mean != "omit":
            x = x - (mean.detach() if self.mean == "detach" else mean)
        if self.std != "omit":
            variance = variance.detach() if self.std == "detach" else variance
            x = x * torch.rsqrt(variance + self.eps)
        return x

    def extra_repr(self) -> str:
        return f"mean={self.mean}, std={self.std}, eps={self.eps}"


Affine = bool | Literal["scale"]


def build_norm(spec: str, dim: int, affine: Affine = True) -> nn.Module:
    """A normalisation layer for [N, dim] from its name.

    Args:
        spec: "batch", PyTorch's BatchNorm1d; "none"; or the parts of batch normalisation to have, separated by a
            comma: "mean" or "detached_mean", "std" or "detached_std" (so "mean,detached_std" is Table 4's best
            variant with a detached part).
        dim: Number of features.
        affine: Whether "batch" has its affine part; "scale" has the scale alone, its shift stays 0.
    """
    if affine not in (True, False, "scale"):
        raise ValueError(f'`affine` must be true, false or "scale", got {affine!r}')
    if spec == "batch":
        norm = nn.BatchNorm1d(dim, affine=bool(affine))
        if affine == "scale":
            norm.bias.requires_grad_(False)
        return norm
    if spec == "none":
        return nn.Identity()
    parts = {"mean": "omit", "std": "omit"}
    for word in spec.split(","):
        detached = word.strip().startswith("detached_")
        name = word.strip().removeprefix("detached_")
        if parts.get(name) != "omit":
            raise ValueError(
                f'a norm must be "batch", "none", or one or both of [detached_]mean and [detached_]std separated by a '
                f'comma, such as "mean,detached_std"; got {spec!r}'
            )
        parts[name] = "detach" if detached else "keep"
    return BatchNormParts(parts["mean"], parts["std"])  # type: ignore[arg-type]
