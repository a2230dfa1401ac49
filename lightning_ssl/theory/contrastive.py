"""The contrastive gradient by connections, with and without output normalisation, and what Theorem 4 leaves out.

As in :mod:`lightning_ssl.theory.batchnorm` a population is enumerated by its connections K_l(x') = f_{l-1}(x') (x)
J_l(x')^T, ``[samples, views, P, outputs]``, samples and views equally likely. Networks are homogeneous (ReLU, no
biases), so that a view's output is K^T vec(W). Equations are DDN-v2's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_ssl.functional.losses import pair_weight, squared_distance

__all__ = [
    "expected_pair_gradient",
    "negative_slope",
    "pair_gradient",
    "preserved_operator",
    "residue",
    "residue_bound",
    "sample_gradient",
    "simple_operator",
    "weighted_operator",
]

Loss = Literal["simple", "triplet", "nce"]


def pair_gradient(K1: Tensor, K2: Tensor, w: Tensor, normalize: bool = False) -> Tensor:
    r"""d r / d vec(W) of the first branch, :math:`K_1 (K_1 - K_2)^T w` (Eq. 40), r = 1/2 |f(x_1) - f(x_2)|^2.

    With `normalize`, of l2-normalised outputs: :math:`K^n_1 P^\perp_{f_1} (K^n_1 - K^n_2)^T w` with
    :math:`K^n = K / |f|` and :math:`P^\perp_f = I - \hat f \hat f^T` (Eq. 41).

    Args:
        K1: Connection of the branch that learns, ``[P, outputs]``.
        K2: Connection of the other.
        w: Vec(W), ``[P]``.
        normalize: Whether outputs are l2-normalised.
    """
    left, right1 = _sides(K1, w, normalize)
    _, right2 = _sides(K2, w, normalize)
    return left @ ((right1 - right2).mT @ w)


def sample_gradient(
    K1: Tensor, K_pos: Tensor, K_neg: Tensor, slopes: Tensor, w: Tensor, normalize: bool = False
) -> Tensor:
    r"""The first branch's gradient for one positive and H negatives (Lemma 2: Eq. 46, normalised Eq. 51).

    :math:`K(x_1) \sum_k \frac{\partial L}{\partial r_{k-}} (K(x_+) - K(x_{k-}))^T w`, for any loss whose derivatives
    with respect to all distances sum to 0.

    Args:
        K1: Connection of the anchor, ``[P, outputs]``.
        K_pos: Of the positive.
        K_neg: Of the negatives, ``[H, P, outputs]``.
        slopes: DL/dr_k-, ``[H]``, see :func:`negative_slope`.
        w: vec(W).
        normalize: Whether outputs are l2-normalised.
    """
    left, _ = _sides(K1, w, normalize)
    _, positive = _sides(K_pos, w, normalize)
    _, negative = _sides(K_neg, w, normalize)
    return left @ torch.einsum("h,hpa,p->a", slopes, positive - negative, w)


def negative_slope(r_pos: Tensor, r_neg: Tensor, loss: Loss, tau: float = 0.5, margin: float = 0.0) -> Tensor:
    """-dL/dr_- of the losses with one negative (Eqs. 44, 70): 1, or a logistic function of r_+ - r_-."""
    if loss == "simple":
        return torch.ones_like(r_pos + r_neg)
    if loss == "triplet":
        return torch.sigmoid((r_pos - r_neg + margin) / tau)
    return torch.sigmoid((r_pos - r_neg) / tau) / tau


def simple_operator(K: Tensor, w: Tensor | None = None) -> Tensor:
    r"""OP of L_simp in the large-batch limit, :math:`V_x[\bar K]` (Theorem 3), so that the update is OP w.

    With `w`, for l2-normalised outputs: :math:`Cov_x[\overline{K^n P^\perp}, \bar K^n]` (Eq. 56), no longer symmetric.
    """
    left, right = (K, K) if w is None else _sides(K, w, True)
    left, right = left.mean(1), right.mean(1)
    return torch.einsum("xpa,xqa->pq", left - left.mean(0), right - right.mean(0)) / len(K)


def expected_pair_gradient(mean: Tensor, mean_other: Tensor, weight: Tensor | float, w: Tensor) -> Tensor:
    r"""The mean gradient for a pair of samples over augmentations, :math:`-\xi \bar K (\bar K - \bar K')^T w` (Eq. 65).

    Args:
        mean: Mean connection of the anchor's sample, ``[P, outputs]``.
        mean_other: Of the negative's.
        weight: Xi of the pair.
        w: vec(W).
    """
    return -weight * mean @ ((mean - mean_other).mT @ w)


def weighted_operator(K: Tensor, clean: Tensor, loss: Loss, tau: float = 0.5, margin: float = 0.0) -> Tensor:
    r"""Theorem 4 without residue: :math:`\frac12 E_{x,x'}[\xi(r) (\bar K - \bar K') (\bar K - \bar K')^T]` (Eq. 57).

    Args:
        K: Connections of the augmented views.
        clean: Outputs of the un-augmented samples, ``[samples, outputs]``.
        loss: Whose xi (Eq. 58).
        tau: Temperature.
        margin: The triplet loss's r_0.
    """
    mean = K.mean(1)
    xi = pair_weight(squared_distance(clean[:, None], clean[None]), loss, tau, margin)
    gaps = mean[:, None] - mean[None]  # [x, x', P, outputs]
    return torch.einsum("xy,xypa,xyqa->pq", xi, gaps, gaps) / (2 * len(K) ** 2)


def residue(K: Tensor, w: Tensor, clean: Tensor, loss: Loss, tau: float = 0.5, margin: float = 0.0) -> Tensor:
    r"""Theorem 4's theta, exactly: what the weights' dependence on the augmentations adds to the operator (Eq. 79).

    :math:`E[F K(x_1) (K(x_+) - K(x_-))^T]` with :math:`F = -\partial L / \partial r_-` at the augmented distances, over
    all views of all pairs of samples, less :func:`weighted_operator`.
    """
    f = torch.einsum("xvpa,p->xva", K, w)
    samples, views = K.shape[:2]
    total = torch.zeros(K.shape[2], K.shape[2], dtype=K.dtype)
    for x in range(samples):
        r_pos = squared_distance(f[x][:, None], f[x][None])  # [x1, x+]
        r_neg = squared_distance(f[x][:, None, None], f[None])  # [x1, x', x-]
        F = negative_slope(r_pos[:, :, None, None], r_neg[:, None], loss, tau, margin)  # [x1, x+, x', x-]
        positive = torch.einsum("ipa,ij,jqa->pq", K[x], F.mean((2, 3)), K[x]) / views**2
        negative = torch.einsum("ipa,iyk,ykqa->pq", K[x], F.mean(1), K) / (samples * views**2)
        total += (positive - negative) / samples
    return total - weighted_operator(K, clean, loss, tau, margin)


def residue_bound(
    K: Tensor, w: Tensor, clean: Tensor, loss: Literal["triplet", "nce"], tau: float = 0.5, as_printed: bool = False
) -> Tensor:
    r"""Eq. 79: the residue's spectral norm is at most this.

    .. math:: \frac{2 M_K^2}{\tau^2} \Big\{ 2 E_{x,x'}\big[|f(x) - f(x')| (\sqrt{tr V_{aug}[f|x]} + c_0(x))\big]
        + 3 E_x[tr V_{aug}[f|x]] + 2 E_x[c_0^2(x)] \Big\}

    with :math:`c_0(x) = |f(x) - E_{aug}[f]|` and :math:`M_K = \max |K|`; 1/tau in place of 1/tau^2 for the triplet
    loss. The last term is missing in the paper (`as_printed`): it takes :math:`tr V` for
    :math:`E_{aug}|f(x_1) - f(x)|^2 = tr V + c_0^2`, and an augmentation that moves two equal samples apart without any
    variance refutes that.
    """
    f = torch.einsum("xvpa,p->xva", K, w)
    mean = f.mean(1)
    variance = (f - mean[:, None]).square().sum(-1).mean(1)
    offset = (clean - mean).norm(dim=-1)
    distance = (clean[:, None] - clean[None]).norm(dim=-1)
    M = torch.linalg.matrix_norm(K, ord=2).max()
    bracket = 2 * (distance * (variance.sqrt() + offset)[:, None]).mean() + 3 * variance.mean()
    if not as_printed:
        bracket = bracket + 2 * offset.square().mean()
    return 2 * M.square() / (tau**2 if loss == "nce" else tau) * bracket


def preserved_operator(covariance: Tensor, projector: Tensor) -> Tensor:
    """OP of one linear neuron whose augmentation scrambles all but a subspace, Q V[x] Q (DDN-v1 Sec. 4.1).

    The neuron's weight grows fastest along the data's leading principal direction within the preserved subspace.

    Args:
        covariance: Of the data, ``[n, n]``.
        projector: Q, the orthogonal projector onto the subspace that augmentations leave alone.
    """
    return projector @ covariance @ projector.mT


def _sides(K: Tensor, w: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """What stands left and right of the difference: K and K, or K^n P and K^n; any leading axes."""
    if not normalize:
        return K, K
    f = torch.einsum("...pa,p->...a", K, w)
    norm = f.norm(dim=-1)[..., None, None]
    unit = f / f.norm(dim=-1, keepdim=True)
    scaled = K / norm
    return scaled - torch.einsum("...pa,...a,...b->...pb", scaled, unit, unit), scaled
