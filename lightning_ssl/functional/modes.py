"""The decoupled modes of a linear network with a linear predictor, and their flow (DirectPred Eqs. 11-13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def integrate(
    field: Callable[[tuple[Tensor, ...]], Sequence[Tensor]],
    start: Sequence[Tensor],
    times: Sequence[float] | Tensor,
    rtol: float = 1e-9,
    atol: float = 1e-12,
) -> tuple[Tensor, ...]:
    """Integrate an autonomous system of tensors in float64 (Dormand-Prince 8(5,3), adaptive steps).

    Args:
        field: Time derivatives of the state's tensors, in the same shapes.
        start: Initial state, at ``times[0]``.
        times: Increasing times at which to return the state.
        rtol: Relative tolerance of a step.
        atol: Absolute tolerance of a step.

    Returns:
        Each tensor with a leading axis of times.
    """
    from scipy.integrate import solve_ivp  # here: it takes as long to import as the rest of the package

    grid = torch.as_tensor(times, dtype=torch.float64)
    if grid.dim() != 1 or len(grid) < 2 or not (grid.diff() > 0).all():
        raise ValueError("`times` must be an increasing sequence of at least two numbers")
    start = [torch.as_tensor(s, dtype=torch.float64) for s in start]
    shapes, sizes = [s.shape for s in start], [s.numel() for s in start]

    def unpack(flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))

    def derivative(_: float, y: np.ndarray) -> np.ndarray:
        return torch.cat([d.reshape(-1) for d in field(unpack(torch.from_numpy(np.ascontiguousarray(y))))]).numpy()

    y0 = torch.cat([s.reshape(-1) for s in start]).numpy()
    solution = solve_ivp(
        derivative, (grid[0].item(), grid[-1].item()), y0, "DOP853", grid.numpy(), rtol=rtol, atol=atol
    )
    if not solution.success or solution.y.shape[1] != len(grid):
        raise ValueError(f"the integration stopped at t={solution.t[-1]:.4g}: {solution.message} The state diverges.")
    out = torch.from_numpy(solution.y.T.copy())
    return tuple(part.reshape(len(grid), *shape) for part, shape in zip(out.split(sizes, 1), shapes, strict=True))


def check_rates(**rates: float | None) -> None:
    """Refuse rates that are negative, or a predictor's that is zero."""
    for name, value in rates.items():
        if value is None:
            continue
        if not value >= 0 or (name == "alpha_p" and value == 0):  # not NaN either
            raise ValueError(
                f"`{name}` must {'be positive' if name == 'alpha_p' else 'not be negative'}, it is a rate; got {value}"
            )


class Modes(NamedTuple):
    """Trajectories of the modes, each ``[times, modes]``: predictor p, feature strength s = w^2, tau = w_a / w."""

    p: Tensor
    s: Tensor
    tau: Tensor


@dataclass
class ModeDynamics:
    r"""The decoupled modes: the triplet (w, w_p, w_a) with s = w^2, p = w_p, tau = w_a / w (Eqs. 11-13, 98-100).

    .. math::
        \dot w_p = \alpha_p (w_a \lambda_d - w_p w \lambda_s) w - \eta_p w_p, \quad
        \dot w = w_p (w_a \lambda_d - w_p w \lambda_s) - \eta w, \quad
        \dot w_a = \beta (w - w_a)

    Args:
        lambda_s: Eigenvalues of the views' correlation X + X' (1 + sigma2 for isotropic data), one or one per mode.
        lambda_d: Eigenvalues of X (1 for isotropic data).
        alpha_p: Relative rate of the predictor.
        beta: Relative EMA rate; None is SimSiam.
        eta: Weight decay of w, and of w_p unless ``eta_p`` is given.
        eta_p: Weight decay of w_p.

    Example:
        >>> modes = ModeDynamics(eta=0.01).solve(p=torch.tensor([0.5]), s=torch.tensor([0.5]), times=[0.0, 500.0])
        >>> f"{modes.p[-1].item():.2f}"  # near 1, where the predictor undoes nothing
        '0.99'
    """

    lambda_s: float | Tensor = 1.0
    lambda_d: float | Tensor = 1.0
    alpha_p: float = 1.0
    beta: float | None = None
    eta: float = 0.0
    eta_p: float | None = None

    def __post_init__(self) -> None:
        check_rates(alpha_p=self.alpha_p, beta=self.beta, eta=self.eta, eta_p=self.eta_p)

    @classmethod
    def isotropic(
        cls, sigma2: float, alpha_p: float = 1.0, beta: float | None = None, eta: float = 0.0
    ) -> ModeDynamics:
        """X = I, X' = sigma2 I."""
        return cls(1 + sigma2, 1.0, alpha_p, beta, eta)

    def triplet_field(self, w: Tensor, w_p: Tensor, w_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eqs. 98-100 with weight decay."""
        error = w_a * self.lambda_d - w_p * w * self.lambda_s
        dw = w_p * error - self.eta * w
        dw_p = self.alpha_p * error * w - (self.eta if self.eta_p is None else self.eta_p) * w_p
        return dw, dw_p, dw if self.beta is None else self.beta * (w - w_a)

    def field(self, p: Tensor, s: Tensor, tau: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Eqs. 11-12 at a given tau."""
        error = tau * self.lambda_d - self.lambda_s * p
        eta_p = self.eta if self.eta_p is None else self.eta_p
        return self.alpha_p * s * error - eta_p * p, 2 * p * s * error - 2 * self.eta * s

    def solve(
        self, p: Tensor, s: Tensor, times: Sequence[float] | Tensor, tau: Tensor | float = 1.0, freeze_tau: bool = False
    ) -> Modes:
        """Trajectories from p, s and tau; ``freeze_tau`` holds tau where it starts."""
        p, s = torch.as_tensor(p, dtype=torch.float64), torch.as_tensor(s, dtype=torch.float64)
        if (s < 0).any():
            raise ValueError(f"`s` must not be negative, an eigenvalue of F = W W^T; got {s.min():.3g}")
        tau = torch.as_tensor(tau, dtype=torch.float64).expand_as(s).clone()
        if freeze_tau:
            P, S = integrate(lambda y: self.field(y[0], y[1], tau), (p, s), times)
            return Modes(P, S, tau.expand_as(P).clone())
        if self.beta is None and not torch.all(tau == 1):
            raise ValueError(
                "`tau` must be 1 with beta=None (SimSiam); set beta, or freeze_tau=True for a constant tau"
            )
        w = s.sqrt()
        w, w_p, w_a = integrate(lambda y: self.triplet_field(*y), (w, p, tau * w), times)
        return Modes(w_p, w.square(), torch.where(w != 0, w_a / torch.where(w != 0, w, 1.0), torch.ones_like(w)))
