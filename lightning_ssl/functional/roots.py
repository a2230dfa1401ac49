"""A matrix square root from products alone: nothing for the host to wait for, which every eigensolver makes it do."""

from __future__ import annotations

import torch
from torch import Tensor

SQUARINGS = 30  # 2^30: eigenvalues that differ from the largest by 1e-8 of it no longer count
ITERATIONS = 36  # of Newton and Schulz: roots are right to 1e-6 of the largest; many more would let roundoff grow


def relative_root(F: Tensor) -> Tensor:
    r"""The root :math:`(F / s_{max})^{1/2}` of positive semi-definite matrices, with :math:`s_{max}` the largest
    eigenvalue of each.

    The largest eigenvalue is the Rayleigh quotient of what repeated squaring leaves; the root comes from the coupled
    Newton-Schulz iteration (Higham, Functions of Matrices, Sec. 6.3), which needs no inverse and is stable. Roots of
    any size are right to 1e-6 of the largest in double precision.

    Args:
        F: Symmetric positive semi-definite matrices, ``[..., d, d]``; a zero matrix gives NaN.

    Example:
        >>> relative_root(torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64))).diagonal()
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    F = (F + F.mT) / 2
    y = F / largest_eigenvalue(F)[..., None, None]
    identity = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    z = identity.expand_as(y)
    for _ in range(ITERATIONS):
        step = 1.5 * identity - 0.5 * (z @ y)
        y, z = y @ step, step @ z
    return (y + y.mT) / 2


def largest_eigenvalue(F: Tensor) -> Tensor:
    """The largest eigenvalue of positive semi-definite matrices ``[..., d, d]``, ``[...]``."""
    power = F
    for _ in range(SQUARINGS):
        power = power / power.norm(dim=(-2, -1), keepdim=True)
        power = power @ power
    # Its largest column, which cannot be orthogonal to the leading eigenvectors.
    column = power.norm(dim=-2).argmax(dim=-1)
    vector = power.gather(-1, column[..., None, None].expand(*F.shape[:-1], 1))
    return (vector.mT @ (F @ vector))[..., 0, 0] / vector.square().sum(dim=(-2, -1))
