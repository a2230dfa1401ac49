"""How far features spread around their mean on the sphere: what tells a collapse."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_rows


class Spread(NamedTuple):
    """What `spread` finds; the numbers are zero-dimensional tensors.

    Attributes:
        std: The mean over dimensions of the deviation, in units of :math:`1/\\sqrt d`: 1 spread, 0 one point.
        alive: The share of dimensions whose deviation exceeds the threshold.
        participation: The participation ratio of the covariance, a number of dimensions; 0 for one point.
        centred: The normalised rows minus their mean, ``[N, d]``.
    """

    std: Tensor
    alive: Tensor
    participation: Tensor
    centred: Tensor


def spread(x: Tensor, alive: float = 0.01) -> Spread:
    r"""The deviations of l2-normalised features, and over how many dimensions their variance is shared.

    .. math::
        \mathrm{std}_j = \sqrt{d\, \mathrm{Var}(\hat x_j)}, \qquad
        \mathrm{participation} = (\mathrm{tr}\, C)^2 / \mathrm{tr}\, C^2, \quad C = \mathrm{Cov}(\hat x)

    The participation ratio is a lower bound of the effective rank of the centred features, without their
    eigenvalues. Rows of zeros have no direction and stay zero.

    Args:
        x: Features, ``[N, d]``.
        alive: The deviation, in units of :math:`1/\sqrt d`, above which a dimension counts as alive.

    Example:
        >>> found = spread(torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))
        >>> [round(float(value), 3) for value in found[:3]]
        [0.707, 0.5, 1.0]
    """
    check_rows(x, "x")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    tiny = torch.finfo(x.dtype).tiny
    norms = x.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, x / norms.clamp_min(tiny), 0)
    centred = unit - unit.mean(dim=0)
    n, dim = centred.shape
    std = (centred.square().mean(dim=0) * dim).sqrt()
    gram = centred @ centred.T if n < dim else centred.T @ centred  # the smaller one has the same norm
    participation = centred.square().sum().square() / gram.square().sum().clamp_min(tiny)
    return Spread(std.mean(), (std > alive).to(x.dtype).mean(), participation, centred)


class Shape(NamedTuple):
    """What `variance_shape` finds; zero-dimensional tensors.

    Attributes:
        rank: The exponential of the entropy of the variance over the principal directions.
        alive: How many principal directions hold any variance to speak of.
    """

    rank: Tensor
    alive: Tensor


def variance_shape(x: Tensor, level: float = 1e-4) -> Shape:
    r"""Over how many principal directions the variance is shared, and how many have any.

    .. math::
        \mathrm{rank} = \exp\Big(-\sum_j q_j \log q_j\Big), \quad q_j = \lambda_j / \textstyle\sum_i \lambda_i;
        \qquad \mathrm{alive} = \#\{j : \lambda_j > \mathrm{level} \cdot \mathrm{tr}\, C / d\}

    with the eigenvalues of the covariance C of the rows. Shares of variance, not of deviation: a hundred directions
    with a hundredth of the deviation hold a hundredth of the variance, and hardly count.

    Args:
        x: Rows, ``[N, d]``; normalise them first where their lengths do not matter.
        level: The variance, relative to the mean over dimensions, below which a direction is dead.

    Example:
        >>> found = variance_shape(torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -1.0, 0.0]]))
        >>> round(float(found.rank), 3), int(found.alive)
        (2.0, 2)
    """
    check_rows(x, "x")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = x - x.mean(dim=0)
    n, dim = centred.shape
    values = torch.linalg.eigvalsh(centred @ centred.T if n < dim else centred.T @ centred).clamp_min(0)
    return variance_shape_of(values, dim, level)


def variance_shape_of(values: Tensor, dim: int, level: float = 1e-4) -> Shape:
    total = values.sum()
    share = values / total.clamp_min(torch.finfo(values.dtype).tiny)
    rank = torch.exp(-torch.special.xlogy(share, share).sum())
    return Shape(torch.where(total > 0, rank, 0.0), (share > level / dim).sum())


def unbiased_participation(x: Tensor) -> Tensor:
    r"""The participation ratio :math:`(\mathrm{tr}\, \Sigma)^2 / \mathrm{tr}\, \Sigma^2` that few rows do not bound.

    From N rows the sample covariance S overestimates :math:`\mathrm{tr}\, \Sigma^2` by :math:`(\mathrm{tr}\, S)^2 / n`
    with n = N - 1: with as many rows as dimensions the plain ratio of isotropic features is half of what it should be.
    Here it is :math:`\frac{n^2}{(n - 1)(n + 2)} (\mathrm{tr}\, S^2 - (\mathrm{tr}\, S)^2 / n)`, unbiased for
    Gaussian rows; at most d.

    Args:
        x: Rows, ``[N, d]`` with N >= 3.

    Example:
        >>> x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        >>> 200 < float(unbiased_participation(x)) <= 256
        True
    """
    check_rows(x, "x", min_rows=3)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = x - x.mean(dim=0)
    rows, dim = centred.shape
    n = rows - 1
    gram = centred @ centred.T if rows < dim else centred.T @ centred
    trace, square = centred.square().sum() / n, gram.square().sum() / n**2
    corrected = n * n / ((n - 1) * (n + 2)) * (square - trace.square() / n)
    return trace.square() / torch.maximum(corrected, trace.square() / dim).clamp_min(torch.finfo(x.dtype).tiny)
