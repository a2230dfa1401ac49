"""Where the features lie: alignment and uniformity on the sphere, and how many dimensions they use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ssl.functional.checks import check_positive, check_rows, check_same_shape, trusted

# The side of a block of similarities: small enough for a CPU's cache, large enough to be fast.
_BLOCK = 512
# exp of anything up to this, and sums of many, stay in single precision's range.
_SAFE_EXPONENT = 32.0


def alignment(x: Tensor, y: Tensor, alpha: float = 2.0) -> Tensor:
    r"""How far apart the two views of a sample lie, :math:`E \|\hat x - \hat y\|^\alpha` (RAFT Def. 2.1).

    The definition sums over coordinates; the values printed in the RAFT paper are per coordinate, smaller by d.

    Args:
        x: Features of the first view, ``[N, d]``; rows are scaled to unit length.
        y: Features of the second view of the same samples, ``[N, d]``.
        alpha: The exponent.

    Example:
        >>> alignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]]))
        tensor(2.)
    """
    return pair_distances(x, y, alpha).mean()


def pair_distances(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    check_positive(alpha, "alpha")
    check_same_shape(x, y, ("x", "y"))
    squared = (unit_rows(x, "x") - unit_rows(y, "y")).square().sum(dim=1)
    return squared if alpha == 2 else squared ** (alpha / 2)


def uniformity(x: Tensor, t: float = 2.0) -> Tensor:
    r"""How evenly the features cover the sphere (RAFT Def. 2.2); 0 when collapsed, lower is more even.

    .. math:: \log \frac{2}{N(N-1)} \sum_{i<j} e^{-t \|\hat x_i - \hat x_j\|^2}

    Memory is bounded for any N, in the backward pass too: similarities are made block by block.

    Args:
        x: Features, ``[N, d]`` with N >= 2; rows are scaled to unit length.
        t: The kernel's inverse width.

    Example:
        >>> uniformity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
        tensor(-8.)
    """
    check_positive(t, "t")
    x = unit_rows(x, "x", min_rows=2)
    n = x.shape[0]
    return _LogKernelSum.apply(x, t) - math.log(n * (n - 1) / 2)


class _LogKernelSum(torch.autograd.Function):
    """The log of the sum over i < j of exp(-t |x_i - x_j|^2) for rows of unit length, block by block.

    With its own backward pass, which makes each block anew: autograd would keep them all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: float) -> Tensor:
        if t <= _SAFE_EXPONENT / 2:
            # A product, an exponential and a sum a block; the factor 2t of -t |a - b|^2 = 2t (cos - 1) is in the rows.
            wide = x.dtype if x.device.type == "mps" else torch.float64
            sums = x.new_zeros((), dtype=wide)
            for _, _, cosines in _blocks(x, x * (2 * t)):
                sums += cosines.exp_().sum()
            total = (sums.log() - 2 * t).to(x.dtype)
        else:  # relative to each block's largest, so that a narrow kernel does not underflow
            total = x.new_tensor(-math.inf)
            for _, _, cosines in _blocks(x, x):
                top = cosines.amax()
                block = cosines.sub_(top).mul_(2 * t).exp_().sum().log_() + 2 * t * (top - 1)
                total = torch.logaddexp(total, block)
        ctx.t = t
        ctx.save_for_backward(x, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        x, total = ctx.saved_tensors
        grad = torch.zeros_like(x)
        for rows, columns, cosines in _blocks(x, x):
            weights = cosines.sub_(1).mul_(2 * ctx.t).sub_(total).exp_()  # each pair's share of the sum
            grad[rows].addmm_(weights, x[columns])
            grad[columns].addmm_(weights.T, x[rows])
        return grad.mul_(2 * ctx.t * grad_output), None


def _blocks(x: Tensor, y: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """The products x_i y_j of all pairs i < j, block by block, each valid until the next; other entries are -inf."""
    side = min(_BLOCK, len(x))
    memory = x.new_empty(side * side)
    for start in range(0, len(x), _BLOCK):
        rows = slice(start, start + _BLOCK)
        for other in range(start, len(x), _BLOCK):
            columns = slice(other, other + _BLOCK)
            left, right = x[rows], y[columns]
            # Always the same memory: it stays in the cache.
            products = torch.mm(left, right.T, out=memory[: len(left) * len(right)].view(len(left), len(right)))
            if start == other:
                if len(products) == 1:
                    continue
                products.masked_fill_(torch.ones_like(products, dtype=torch.bool).tril_(), -math.inf)
            yield rows, columns, products


def effective_rank(x: Tensor) -> Tensor:
    r"""How many dimensions the features use: the exponential of the entropy of the normalised singular values.

    .. math:: \exp\Big(-\sum_i q_i \log q_i\Big), \qquad q_i = \sigma_i / \textstyle\sum_j \sigma_j

    Between 1 (all rows on one line through the origin) and min(N, d) (equal singular values).

    Args:
        x: Features, ``[N, d]``, not centred.

    Example:
        >>> effective_rank(torch.eye(3))
        tensor(3.)
    """
    check_rows(x, "x")
    return effective_rank_of_values(torch.linalg.svdvals(x.to(torch.promote_types(x.dtype, torch.float32))))


def effective_rank_of_values(singular_values: Tensor) -> Tensor:
    if not trusted() and not bool((singular_values > 0).any()):
        raise ValueError("`x` is all zero and has no effective rank; the features have collapsed to the origin")
    q = singular_values / singular_values.sum()
    return torch.exp(-torch.xlogy(q, q).sum())


def principal_plane(x: Tensor, centre: bool = False) -> tuple[Tensor, Tensor]:
    """The features on the plane of their two leading principal directions (RAFT Fig. 5).

    About the origin by default: features that have collapsed to one direction are then one point of the circle, and
    spread ones lie around it. Centred, what is left of a collapsed cloud is its noise, an even ring.

    The cost is that of the smaller of the two Gram matrices, min(N, d) squared.

    Args:
        x: Features, ``[N, d]`` with N, d >= 2; rows are scaled to unit length.
        centre: Subtract the mean of the scaled rows first (principal component analysis proper).

    Returns:
        Coordinates ``[N, 2]``, and the share that the plane holds of the rows' mean square (with `centre`, of their
        variance).

    Example:
        >>> plane, share = principal_plane(torch.tensor([[2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]))
        >>> plane.tolist(), float(share)
        ([[1.0, 0.0], [1.0, 0.0]], 1.0)
    """
    if x.ndim == 2 and x.shape[1] < 2:
        raise ValueError(f"`x` needs at least 2 dimensions to have a plane, got {x.shape[1]}")
    x = unit_rows(x, "x", min_rows=2)
    if centre:
        x = x - x.mean(dim=0)
    tiny = torch.finfo(x.dtype).tiny
    if x.shape[0] < x.shape[1]:
        values, vectors = torch.linalg.eigh(x @ x.T)
        directions = x.T @ vectors[:, -2:].flip(1)
        # No direction where there is no second one: its coordinate is 0.
        present = values[-2:].flip(0) > values[-1] * len(x) * torch.finfo(x.dtype).eps
        directions = F.normalize(directions, dim=0, eps=tiny) * present
    else:
        values, vectors = torch.linalg.eigh(x.T @ x)
        directions = vectors[:, -2:].flip(1)
    # An eigenvector's sign is arbitrary: fixed, so that the picture is the same on any machine.
    directions = directions * directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)).sign()
    return x @ directions, values[-2:].sum() / values.sum().clamp_min(tiny)


def unit_rows(x: Tensor, name: str, min_rows: int = 1) -> Tensor:
    check_rows(x, name, min_rows=min_rows, nonzero=True)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # Dividing by the largest entry first keeps the squares of very large or very small rows in range.
    return F.normalize(x / x.detach().abs().amax(dim=1, keepdim=True), dim=1)
