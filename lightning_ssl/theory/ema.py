"""Growth of a weight driven by its own exponential moving average (DDN-v1 Theorem 9)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["growth_bound", "growth_rate", "simulate"]


def growth_rate(alpha: float, eta: float, lam: float) -> float:
    r""":math:`\kappa = \frac{1}{2}(\eta + \alpha)(\sqrt{1 + 4 \alpha \eta \lambda / (\eta + \alpha)^2} - 1)`.

    w(t) grows as (1 + kappa)^t under w(t+1) - w(t) = alpha (-w(t) + (1 + lam) w_ema(t)). The paper's Eq. 15 prints
    (1 - lam), with which its theorem would not hold.

    Args:
        alpha: Step size.
        eta: 1 - the EMA's momentum.
        lam: Excess weight of the EMA term.

    Example:
        >>> round(growth_rate(0.03, 0.004, 0.5), 8)
        0.00168154
    """
    _check(alpha, eta)
    if 4 * alpha * eta * lam < -((alpha + eta) ** 2):
        raise ValueError(
            f"`lam` must be at least {-((alpha + eta) ** 2) / (4 * alpha * eta):.3g}, got {lam}: below, w oscillates"
        )
    return (eta + alpha) / 2 * (math.sqrt(1 + 4 * alpha * eta * lam / (eta + alpha) ** 2) - 1)


def growth_bound(alpha: float, eta: float, lam: float) -> float:
    r"""The theorem's upper bound for lam >= 0, :math:`\lambda / (1/\alpha + 1/\eta)`."""
    _check(alpha, eta)
    return lam / (1 / alpha + 1 / eta)


def simulate(alpha: float, eta: float, lam: float, steps: int, w: float = 1.0, w_ema: float = 0.0) -> Tensor:
    """w(0) ... w(steps) of the recursion, ``[steps + 1]`` float64."""
    _check(alpha, eta)
    out = [w]
    for _ in range(steps):
        w, w_ema = w + alpha * (-w + (1 + lam) * w_ema), (1 - eta) * w_ema + eta * w
        out.append(w)
    return torch.tensor(out, dtype=torch.float64)


def _check(alpha: float, eta: float) -> None:
    if alpha <= 0 or not 0 < eta <= 1:
        raise ValueError(f"`alpha` must be positive and `eta`, 1 - momentum, lie in (0, 1], got {alpha} and {eta}")
