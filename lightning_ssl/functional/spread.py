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
