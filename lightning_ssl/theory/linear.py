r"""Learning dynamics of linear BYOL and SimSiam (DirectPred Secs. 2-3, Appendices B and D), integrated and solved.

Notation: W online, W_p predictor, W_a target; X the correlation of augmentation-averaged data, X' the mean covariance
of an augmentation; alpha_p and beta the rates of predictor and target relative to W, eta the weight decay. In training
with step alpha the predictor's step is alpha * alpha_p, the EMA rate alpha * beta and the decay alpha * eta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from lightning_ssl.functional.modes import ModeDynamics, check_rates, integrate

__all__ = [
    "CorrelationDynamics",
    "LinearDynamics",
    "ModeDynamics",
    "additive_scrambling",
    "alignment_matrix",
    "balance",
    "critical_weight_decay",
    "fixed_points",
    "integrate",
    "multiplicative_scrambling",
    "predictor_fixed_point",
    "separatrix",
    "stationary_encoders",
    "top_modes",
]


class Weights(NamedTuple):
    """A trajectory of the three matrices, each with a leading axis of times."""

    W: Tensor
    W_p: Tensor
    W_a: Tensor


@dataclass
class LinearDynamics:
    r"""The matrix dynamics (Eqs. 2-4).

    .. math::
        \dot W_p &= \alpha_p (-W_p W (X + X') + W_a X) W^T - \eta_p W_p \\
        \dot W &= W_p^T (-W_p W (X + X') + W_a X) - \eta W \\
        \dot W_a &= \beta (W - W_a)

    Args:
        X: Correlation of augmentation-averaged data, [n1, n1].
        X_aug: Mean augmentation covariance X', [n1, n1].
        alpha_p: Relative rate of the predictor.
        beta: Relative rate of the EMA; None is SimSiam, W_a = W.
        eta: Weight decay of W, and of W_p unless ``eta_p`` is given.
        eta_p: Weight decay of W_p.
        stop_gradient: False lets the target branch learn too (Theorem 2; only without EMA).
        symmetric: Symmetrise the predictor's flow (Assumption 3); start from a symmetric W_p.
        train_predictor: False keeps W_p as it starts.
    """

    X: Tensor
    X_aug: Tensor
    alpha_p: float = 1.0
    beta: float | None = None
    eta: float = 0.0
    eta_p: float | None = None
    stop_gradient: bool = True
    symmetric: bool = False
    train_predictor: bool = True

    def __post_init__(self) -> None:
        self.X, self.X_aug = self.X.double(), self.X_aug.double()
        for name, matrix in (("X", self.X), ("X_aug", self.X_aug)):
            if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape != self.X.shape:
                raise ValueError(f"`X` and `X_aug` must be square and of one size, got {name} {tuple(matrix.shape)}")
        check_rates(alpha_p=self.alpha_p, beta=self.beta, eta=self.eta, eta_p=self.eta_p)
        if not self.stop_gradient and self.beta is not None:
            raise ValueError(
                "`beta` must be None with stop_gradient=False: the theorem is for a target equal to the online network"
            )

    def field(self, W: Tensor, W_p: Tensor, W_a: Tensor) -> Weights:
        """The time derivatives."""
        error = -W_p @ W @ (self.X + self.X_aug) + W_a @ self.X
        dW = W_p.T @ error - self.eta * W
        if not self.stop_gradient:  # the target's own gradient, Eq. 46
            dW = dW + W_p @ W @ self.X - W @ (self.X + self.X_aug)
        dW_p = self.alpha_p * error @ W.T
        if self.symmetric:
            dW_p = (dW_p + dW_p.T) / 2
        dW_p = dW_p - (self.eta if self.eta_p is None else self.eta_p) * W_p
        if not self.train_predictor:
            dW_p = torch.zeros_like(W_p)
        return Weights(dW, dW_p, dW if self.beta is None else self.beta * (W - W_a))

    def solve(
        self,
        W: Tensor,
        W_p: Tensor,
        times: Sequence[float] | Tensor,
        W_a: Tensor | None = None,
        rtol: float = 1e-9,
        atol: float = 1e-12,
    ) -> Weights:
        """The trajectory from W, W_p and W_a (default: W), at the given times."""
        if W_p.dim() != 2 or W_p.shape[0] != W_p.shape[1]:
            raise ValueError(f"`W_p` must be square, it maps the features to themselves; got {tuple(W_p.shape)}")
        if W.shape != (W_p.shape[0], self.X.shape[0]):
            raise ValueError(f"`W` must be {(W_p.shape[0], self.X.shape[0])} for this W_p and X, got {tuple(W.shape)}")
        if self.symmetric and not torch.allclose(W_p, W_p.T):
            raise ValueError("`W_p` must be symmetric with symmetric=True; pass (W_p + W_p.T) / 2")
        if self.beta is None and W_a is not None and not torch.equal(W_a, W):
            raise ValueError("`W_a` must equal W with beta=None (SimSiam); set beta, or leave W_a out")
        target = W if W_a is None else W_a
        return Weights(*integrate(lambda s: self.field(*s), (W, W_p, target), times, rtol, atol))


def balance(W: Tensor, W_p: Tensor, alpha_p: float = 1.0) -> Tensor:
    r"""C(t) = W W^T - W_p^T W_p / alpha_p, which decays exactly as :math:`e^{-2 \eta t}` (Theorem 1, Eq. 5)."""
    return W @ W.mT - W_p.mT @ W_p / alpha_p


def alignment_matrix(
    F: Tensor, W_p: Tensor, sigma2: float, alpha_p: float = 1.0, eta: float = 0.0, tau: float = 1.0
) -> Tensor:
    r"""K of the commutator's law :math:`\frac{d}{dt}[F, W_p] = -\{[F, W_p], K\}` (Theorem 3, Eq. 9).

    While its smallest eigenvalue stays above :math:`\lambda_0 > 0`, the commutator shrinks as
    :math:`e^{-2 \lambda_0 t}`: the eigenspaces align.
    """
    eye = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    return (1 + sigma2) * (alpha_p / 2 * F + W_p @ W_p) - tau * W_p + 1.5 * eta * eye


@dataclass
class CorrelationDynamics:
    r"""The coupled dynamics of F = W W^T and W_p for isotropic data (Eqs. 7, 55-56).

    Args:
        sigma2: Variance of the augmentation, X = I and X' = sigma2 I.
        alpha_p: Relative rate of the predictor.
        eta: Weight decay.
        beta: Relative EMA rate; None keeps tau as it starts.
        symmetric: Symmetrise the predictor's flow (Eq. 7).
        tied: Hold F to W_p^T W_p / alpha_p, the invariant of Theorem 1 with C = 0 (as in Fig. 8).
    """

    sigma2: float
    alpha_p: float = 1.0
    eta: float = 0.0
    beta: float | None = None
    symmetric: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        check_rates(alpha_p=self.alpha_p, beta=self.beta, eta=self.eta)
        if self.sigma2 < 0:
            raise ValueError(f"`sigma2` must not be negative, it is a variance; got {self.sigma2}")

    def field(self, F: Tensor, W_p: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The time derivatives."""
        if self.tied:
            F = W_p.mT @ W_p / self.alpha_p
        d = 1 + self.sigma2
        if self.symmetric:
            dW_p = -self.alpha_p / 2 * d * (W_p @ F + F @ W_p) + self.alpha_p * tau * F - self.eta * W_p
        else:
            dW_p = -self.alpha_p * d * W_p @ F + self.alpha_p * tau * F - self.eta * W_p
        square = W_p.mT @ W_p
        dF = -d * (square @ F + F @ square) + tau * (W_p.mT @ F + F @ W_p) - 2 * self.eta * F
        if self.tied:
            dF = (dW_p.mT @ W_p + W_p.mT @ dW_p) / self.alpha_p
        if self.beta is None:
            return dF, dW_p, torch.zeros_like(tau)
        # One tau for all modes: W_a = tau W, weighted by the modes' strength.
        return dF, dW_p, self.beta * (1 - tau) - tau / 2 * dF.trace() / F.trace()

    def solve(self, F: Tensor, W_p: Tensor, times: Sequence[float] | Tensor, tau: float = 1.0) -> tuple[Tensor, ...]:
        """Trajectories of F, W_p and tau."""
        if W_p.dim() != 2 or W_p.shape[0] != W_p.shape[1] or F.shape != W_p.shape:
            raise ValueError(
                f"`F` and `W_p` must be square and of one size, got {tuple(F.shape)} and {tuple(W_p.shape)}"
            )
        return integrate(lambda s: self.field(*s), (F, W_p, torch.tensor(tau, dtype=torch.float64)), times)


class FixedPoint(NamedTuple):
    """A fixed point of Eqs. 11-12 at constant tau, with the eigenvalues of the flow's Jacobian there."""

    p: float
    s: float
    eigenvalues: tuple[float, float]
    stable: bool


def critical_weight_decay(tau: float = 1.0, sigma2: float = 0.0) -> float:
    r""":math:`\eta = \tau^2 / (4 (1 + \sigma^2))`: above it only the collapsed point is left (Sec. 3.2)."""
    return tau**2 / (4 * (1 + sigma2))


def fixed_points(eta: float, tau: float = 1.0, sigma2: float = 0.0, alpha_p: float = 1.0) -> list[FixedPoint]:
    r"""Fixed points with weight decay: 0 and, below the critical decay, two more.

    .. math:: p_\pm = \frac{\tau \pm \sqrt{\tau^2 - 4 \eta (1 + \sigma^2)}}{2 (1 + \sigma^2)}

    Each lies on the invariant parabola s = p^2 / alpha_p. Returned in increasing p. Mode j collapses from below the
    saddle p_-, whose stable manifold (:func:`separatrix`) bounds the basin. Without weight decay fixed points are
    not isolated (s = 0 with any p; p = tau / (1 + sigma2) with any s), so eta must be positive.
    """
    check_rates(alpha_p=alpha_p, eta=eta)
    if eta == 0:
        raise ValueError(
            f"`eta` must be positive, got {eta}: there are no isolated fixed points, s=0 with any p and "
            f"p={tau / (1 + sigma2):.4g} with any s are fixed"
        )
    d = 1 + sigma2
    values = [0.0]
    discriminant = tau**2 - 4 * eta * d
    if discriminant >= 0 and tau > 0:
        root = discriminant**0.5
        values += sorted({(tau - root) / (2 * d), (tau + root) / (2 * d)})
    points = []
    for p in values:
        s = p**2 / alpha_p
        jacobian = _mode_jacobian(p, s, eta, tau, d, alpha_p)
        eigenvalues = np.sort(np.linalg.eigvals(jacobian).real)
        points.append(
            FixedPoint(p, s, (float(eigenvalues[0]), float(eigenvalues[1])), bool(eigenvalues.max() < -1e-12))
        )
    return points


def _mode_jacobian(p: float, s: float, eta: float, tau: float, d: float, alpha_p: float) -> np.ndarray:
    """d(p', s') / d(p, s) of Eqs. 11-12."""
    return np.array(
        [
            [-alpha_p * s * d - eta, alpha_p * (tau - d * p)],
            [2 * s * (tau - 2 * d * p), 2 * p * (tau - d * p) - 2 * eta],
        ]
    )


def separatrix(
    eta: float, tau: float = 1.0, sigma2: float = 0.0, alpha_p: float = 1.0, span: float = 40.0, points: int = 400
) -> Tensor:
    """The boundary of the collapse basin in the (p, s) plane, ``[points, 2]``: the saddle's stable manifold.

    Integrated backwards in time from the saddle both ways, and cut where it leaves s >= 0 or blows up.
    """
    saddle = [f for f in fixed_points(eta, tau, sigma2, alpha_p) if not f.stable and f.p > 0]
    if not saddle:
        raise ValueError(
            f"`eta` must be below {critical_weight_decay(tau, sigma2):.4g}, got {eta}: there, every start collapses"
        )
    p, s = saddle[0].p, saddle[0].s
    values, vectors = np.linalg.eig(_mode_jacobian(p, s, eta, tau, 1 + sigma2, alpha_p))
    direction = vectors[:, np.argmin(values.real)].real
    mode = ModeDynamics.isotropic(sigma2, alpha_p, None, eta)

    def backwards(_: float, y: np.ndarray) -> np.ndarray:
        dp, ds = mode.field(torch.tensor(y[0]), torch.tensor(y[1]), tau)
        return -np.array([float(dp), float(ds)])

    def leaves(_: float, y: np.ndarray) -> float:
        return min(y[1] + 1e-9, 10 * max(1.0, tau) - abs(y[0]) - y[1])

    leaves.terminal = True  # type: ignore[attr-defined]
    branches = []
    for sign in (-1.0, 1.0):
        start = np.array([p, s]) + sign * 1e-5 * direction
        if start[1] < 0:
            continue
        solution = solve_ivp(backwards, (0, span), start, "DOP853", events=leaves, rtol=1e-9, atol=1e-12, max_step=0.05)
        branches.append(torch.from_numpy(solution.y.T.copy()))
    if len(branches) == 2:
        branches[0] = branches[0].flip(0)
    curve = torch.cat(branches)
    return curve[torch.linspace(0, len(curve) - 1, min(points, len(curve))).round().long()]


def predictor_fixed_point(
    F: Tensor, tau: float = 1.0, sigma2: float = 0.0, alpha_p: float = 1.0, eta: float = 0.0
) -> Tensor:
    r"""Where the predictor comes to rest for a fixed F (SM Eqs. 57-59).

    .. math:: W_p = \tau F \big((1 + \sigma^2) F + \tfrac{\eta}{\alpha_p} I\big)^{-1}

    Symmetric, and a function of F: with weight decay a predictor that is not symmetric becomes so. Without it, where F
    vanishes W_p may be anything; this is the solution that vanishes too.

    Args:
        F: Second moment of the predictor's inputs, symmetric positive semi-definite.
        tau: The target's ratio.
        sigma2: Variance of the augmentation.
        alpha_p: Relative rate of the predictor.
        eta: Weight decay.
    """
    check_rates(alpha_p=alpha_p, eta=eta)
    values, vectors = torch.linalg.eigh(F.double())
    values = values.clamp_min(0)
    divisor = (1 + sigma2) * values + eta / alpha_p
    scale = torch.where(divisor > 0, tau * values / torch.where(divisor > 0, divisor, 1), 0)
    return (vectors * scale) @ vectors.mT


def stationary_encoders(predictor: Tensor, A: Tensor, B: Tensor, tol: float = 1e-9) -> Tensor:
    r"""Encoders theta at which linear BYOL rests for a given invertible predictor W: a basis, ``[k, m, n]``.

    With target and online network equal, both gradients vanish where :math:`W \theta = \theta B A^{-1}`,
    :math:`A = E[x_1 x_1^T]`, :math:`B = E[x_2 x_1^T]` (RAFT App. H, Eqs. 65-68): a Sylvester equation. It has solutions
    other than 0, the collapse, exactly where W and B A^{-1} share eigenvalues, one for each shared pair; a W drawn at
    random shares none, so that a non-trivial solution needs the predictor to learn, too. W = I shares the eigenvalue
    1 along directions that no augmentation touches.

    Args:
        predictor: W, ``[m, m]``.
        A: Second moment of a view, ``[n, n]``, invertible.
        B: Cross moment of two views, ``[n, n]``.
        tol: Singular values below this, relative to the largest, count as 0.
    """
    target = (B.double() @ torch.linalg.inv(A.double())).mT.contiguous()
    m, n = len(predictor), len(A)
    system = torch.kron(torch.eye(n, dtype=torch.float64), predictor.double().contiguous()) - torch.kron(
        target, torch.eye(m, dtype=torch.float64)
    )
    _, singular, rows = torch.linalg.svd(system)
    null = rows[singular <= tol * max(float(singular[0]), 1.0)]
    return null.view(-1, n, m).mT  # vec stacks columns


def multiplicative_scrambling(covariance: Tensor, U: Tensor) -> tuple[Tensor, Tensor]:
    """(Sigma_d, Sigma_s) when an augmentation multiplies the span of U's orthonormal columns by a Gaussian matrix.

    Sigma_s = P S P + tr(U^T S U) U U^T with P = I - U U^T, so that Sigma_d Sigma_s^{-1} is P whatever the data (D.2;
    the paper's Sigma_s = S leaves out the scrambled part's isotropy).
    """
    covariance, U = covariance.double(), U.double()
    if not torch.allclose(U.T @ U, torch.eye(U.shape[1], dtype=torch.float64), atol=1e-6):
        raise ValueError("`U` must have orthonormal columns; take torch.linalg.qr(U).Q")
    P = torch.eye(len(covariance), dtype=torch.float64) - U @ U.T
    kept = P @ covariance @ P
    return kept, kept + torch.trace(U.T @ covariance @ U) * U @ U.T


def additive_scrambling(covariance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(Sigma_d, Sigma_s) when an augmentation adds noise of the given covariance (D.2)."""
    return covariance.double(), (covariance + noise).double()


def top_modes(sigma_d: Tensor, sigma_s: Tensor, k: int, choose: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues of Sigma_d Sigma_s^{-1} and their left eigenvectors as rows, ``[k]`` and ``[k, n1]``.

    W with these rows (or S W with any invertible S), W_a = W and W_p = diag(eigenvalues) (or S diag S^{-1}) is the
    stable family of fixed points without weight decay (D.1): W_p W = W Sigma_d Sigma_s^{-1}. With `choose`, k modes of
    these ranks (0 is the largest) instead: fixed points too, but unstable where a larger mode is left out.
    """
    if not 1 <= k <= len(sigma_s) or (choose is not None and len(choose) != k):
        raise ValueError(f"`k` must lie between 1 and the number of inputs, {len(sigma_s)}, got {k}")
    # v^T Sd = lambda v^T Ss: symmetric in the whitened coordinates u = L^T v.
    L = torch.linalg.cholesky(sigma_s.double())
    inner = torch.linalg.solve_triangular(
        L, torch.linalg.solve_triangular(L, sigma_d.double(), upper=False).mT, upper=False
    )
    values, u = torch.linalg.eigh((inner + inner.mT) / 2)
    rows = torch.linalg.solve_triangular(L.mT, u, upper=True).mT
    order = values.argsort(descending=True)
    order = order[:k] if choose is None else order[list(choose)]
    return values[order], torch.nn.functional.normalize(rows[order], dim=1)
