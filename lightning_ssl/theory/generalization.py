r"""Bound's theorems one by one: which classes can be confused, what L_cor says about them, and SimSiam's dynamics.

Features have norm :math:`r = \sqrt d`; two views of one class are never further apart than :math:`r \varepsilon`.
Theorem 3 is :func:`lightning_ssl.functional.error_rate_bound`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CosineGradients",
    "ModeDrift",
    "barlow_lower_bound",
    "confusable",
    "correlation_drift",
    "cosine_gradients",
    "mean_product",
    "mean_product_bound",
    "simsiam_modes",
]


def confusable(means: Tensor, eps: float) -> Tensor:
    r"""Which pairs of classes nearest-class-mean might confuse, ``[K, K]`` bool (Theorem 1).

    Where :math:`\mu_i^T \mu_j < d (1 - 4\varepsilon + \varepsilon^2)`, no view of class i is taken for class j.

    Args:
        means: Class means of features of norm sqrt(d), ``[K, d]``.
        eps: Largest distance of two views of a class, relative to sqrt(d).
    """
    products = means @ means.mT
    possible = products >= means.shape[1] * (1 - 4 * eps + eps**2)
    return possible & ~torch.eye(len(means), dtype=torch.bool)


def mean_product(means: Tensor, probs: Tensor) -> Tensor:
    r"""The mean of :math:`(\mu_i^T \mu_j)^2` over pairs of views of different classes (Theorem 2, left)."""
    weights = probs[:, None] * probs
    weights = weights - torch.diag(weights.diagonal())
    return (weights * (means @ means.mT).square()).sum() / (1 - probs.square().sum())


def mean_product_bound(l_cor: Tensor, dim: int, probs: Tensor, eps: float) -> Tensor:
    r"""What it is at most: :math:`(2 L_{cor} + 2 d^2 \varepsilon^4 + K - d) / (1 - \sum_i p_i^2)` (Theorem 2, Eq. 27).

    The theorem as printed puts its factor 2 before all of the numerator, which the proof does not give.
    """
    return (2 * l_cor + 2 * dim**2 * eps**4 + len(probs) - dim) / (1 - probs.square().sum())


def barlow_lower_bound(l_cor: Tensor, dim: int, eps: float) -> Tensor:
    r"""What :math:`\|C - I\|^2`, Barlow Twins' loss with lambda 1, is at least: :math:`L_{cor}/2 - d^2 \varepsilon^2`.

    Eq. 13 prints :math:`\varepsilon^2`; the proof's last step bounds :math:`\|E[f_1 (f_2 - f_1)^T]\|` by
    :math:`r \cdot r \varepsilon`.
    """
    return l_cor / 2 - dim**2 * eps**2


class CosineGradients(NamedTuple):
    """Derivatives of sim(W_p z_1, z_2), means over pairs: with respect to W_p ``[d, d]`` and to each z_1 ``[N, d]``."""

    predictor: Tensor
    features: Tensor


def cosine_gradients(z1: Tensor, z2: Tensor, predictor: Tensor) -> CosineGradients:
    r"""Ascent directions of SimSiam's similarity (Eqs. 33-35; the paper swaps the last two labels).

    :math:`\partial g / \partial W_p = \frac{|z_1|}{|p_1|} \Delta \hat z_1^T` and :math:`\partial g / \partial z_1 =
    \frac{1}{|p_1|} W_p^T \Delta` with :math:`\Delta = \hat z_2 - (\hat z_2^T \hat p_1) \hat p_1`.
    """
    p = z1 @ predictor.mT
    norm = p.norm(dim=1, keepdim=True)
    target, unit = torch.nn.functional.normalize(z2, dim=1), p / norm
    delta = target - (target * unit).sum(1, keepdim=True) * unit
    return CosineGradients((delta / norm).mT @ z1 / len(z1), delta / norm @ predictor)


def correlation_drift(z1: Tensor, z2: Tensor, predictor: Tensor, eta: float = 0.0) -> Tensor:
    r"""d/dt of :math:`\Lambda = E[\hat z_1 \hat z_1^T]` as the features climb, with weight decay on them (Theorem 4).

    :math:`M + M^T` with :math:`M = E[\frac{1}{|z_1| |p_1|} W_p^T \Delta \hat z_1^T]` (Eq. 45). Weight decay only
    shortens the features and leaves their directions: `eta` has no effect (Eq. 52). Eqs. 49, 55 and 57 subtract
    :math:`2 \eta \Lambda` all the same, under which the trace of Lambda, which is 1, would fall.
    """
    step = cosine_gradients(z1, z2, predictor).features - eta * z1
    unit, norm = torch.nn.functional.normalize(z1, dim=1), z1.norm(dim=1, keepdim=True)
    turn = (step - (step * unit).sum(1, keepdim=True) * unit) / norm
    half = turn.mT @ unit / len(z1)
    return half + half.mT


class ModeDrift(NamedTuple):
    """Derivatives of a mode's lambda_p and lambda."""

    predictor: Tensor
    correlation: Tensor


def simsiam_modes(
    lambda_p: Tensor,
    lam: Tensor,
    c: float = 1.0,
    epsilon: Tensor | float = 0.0,
    eta: float = 0.0,
    z_norm: float = 1.0,
    p_norm: float = 1.0,
    as_printed: bool = False,
) -> ModeDrift:
    r"""The dynamics mode by mode, when W_p and Lambda share their eigenvectors (Eqs. 18-19, with weight decay E.2).

    .. math:: \dot\lambda_p = \frac{|z|}{|p|} [(1 - c \tilde\lambda_p) \lambda + \epsilon] - \eta \lambda_p, \qquad
        \dot\lambda = \frac{2 \lambda_p}{|z| |p|} [(1 - c \tilde\lambda_p) \lambda + \epsilon]

    with :math:`\tilde\lambda_p = \lambda_p |z| / |p|`. Without decay and epsilon: lambda falls for
    :math:`\tilde\lambda_p` below 0 or above 1/c and rises in between, lambda_p always moves towards 1/c.

    Args:
        lambda_p: The predictor's eigenvalue.
        lam: The eigenvalue of Lambda.
        c: The similarity of target and prediction.
        epsilon: The mode's part of E[(z_2 - z_1) z_1^T].
        eta: Weight decay.
        z_norm: Norm of the features.
        p_norm: Norm of the predictions.
        as_printed: Subtract :math:`2 \eta \lambda` as Eq. 49 does, see :func:`correlation_drift`.
    """
    force = (1 - c * lambda_p * z_norm / p_norm) * lam + epsilon
    drift = 2 * lambda_p / (z_norm * p_norm) * force
    return ModeDrift(z_norm / p_norm * force - eta * lambda_p, drift - 2 * eta * lam if as_printed else drift)
