"""The papers' losses: contrastive ones of distances, cross-model and redundancy-reduction ones of features."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ssl.functional.checks import check_positive, check_same_shape

ContrastiveLoss = Literal["simple", "triplet", "nce"]


def squared_distance(x: Tensor, y: Tensor) -> Tensor:
    r"""Half the squared distance of each pair of rows, :math:`r = \frac12 \|x - y\|^2` (DDN-v2 Sec. 3).

    Args:
        x: Rows, ``[..., d]``.
        y: Rows, ``[..., d]``; leading dimensions broadcast.

    Returns:
        r, ``[...]``.

    Example:
        >>> squared_distance(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
        tensor([12.5000])
    """
    if x.shape[-1:] != y.shape[-1:]:
        raise ValueError(f"`x` and `y` must agree in the last dimension, got {tuple(x.shape)} and {tuple(y.shape)}")
    return 0.5 * (x - y).square().sum(dim=-1)


def simple_contrastive_loss(r_pos: Tensor, r_neg: Tensor, beta: float = 0.0) -> Tensor:
    r"""The simple contrastive loss :math:`(1 + \beta) r_+ - r_-` (DDN-v2 Sec. 4, Corollary 1), mean over the batch.

    Args:
        r_pos: Distances of the positive pairs, ``[N]``.
        r_neg: Distances of the negative pairs, ``[N]`` or ``[N, H]`` (mean over H).
        beta: The weight of the intra-augmentation operator; the derivatives sum to `beta`.

    Example:
        >>> simple_contrastive_loss(torch.tensor([1.0]), torch.tensor([[2.0, 4.0]]), beta=0.5)
        tensor(-1.5000)
    """
    r_neg = _negatives(r_pos, r_neg)
    return ((1 + beta) * r_pos - r_neg.mean(dim=1)).mean()


def soft_triplet_loss(r_pos: Tensor, r_neg: Tensor, margin: float, tau: float) -> Tensor:
    r"""The soft triplet loss :math:`\tau \log(1 + e^{(r_+ - r_- + r_0)/\tau})` (DDN-v2 Sec. 4), mean over all pairs.

    Args:
        r_pos: Distances of the positive pairs, ``[N]``.
        r_neg: Distances of the negative pairs, ``[N]`` or ``[N, H]`` (mean over H).
        margin: :math:`r_0 \ge 0`.
        tau: Temperature; towards 0 this is the hinge :math:`\max(r_+ - r_- + r_0, 0)`.

    Example:
        >>> soft_triplet_loss(torch.tensor([1.0]), torch.tensor([1.0]), margin=0.0, tau=1.0)
        tensor(0.6931)
    """
    check_positive(tau, "tau")
    r_neg = _negatives(r_pos, r_neg)
    return tau * F.softplus((r_pos[:, None] - r_neg + margin) / tau).mean()


def info_nce_loss(
    r_pos: Tensor, r_neg: Tensor, tau: float, beta: float = 0.0, beta_form: Literal["text", "table"] = "text"
) -> Tensor:
    r"""InfoNCE of distances (DDN-v2 Eq. 2), mean over the batch; with `beta` the extended form.

    .. math:: L = -\log \frac{e^{-r_+/\tau}}{e^{-r_+/\tau} + \sum_k e^{-r_{k-}/\tau}}

    extended to :math:`L + \beta r_+` in the text (Sec. 4.2), and to :math:`(L + \beta r_+ / \tau) / (1 + \beta)` in the
    experiments of Table 3.

    On rows of unit length this is the cosine NT-Xent loss of SimCLR.

    Args:
        r_pos: Distances of the positive pairs, ``[N]``.
        r_neg: Distances of the negative pairs, ``[N]`` or ``[N, H]``.
        tau: Temperature.
        beta: What the derivatives with respect to all distances sum to (Sec. 4.2), in the form "text".
        beta_form: "text" or "table".

    Example:
        >>> info_nce_loss(torch.tensor([1.0]), torch.tensor([[1.0, 1.0, 1.0]]), tau=0.5)
        tensor(1.3863)
    """
    check_positive(tau, "tau")
    r_neg = _negatives(r_pos, r_neg)
    logits = torch.cat([r_pos[:, None], r_neg], dim=1) / -tau
    loss = torch.logsumexp(logits, dim=1) - logits[:, 0]
    if beta_form == "text":
        return (loss + beta * r_pos).mean()
    if beta_form != "table":
        raise ValueError(f'`beta_form` must be "text" or "table", got {beta_form!r}')
    return (loss + beta / tau * r_pos).mean() / (1 + beta)


def pair_weight(r: Tensor, loss: ContrastiveLoss, tau: float = 0.5, margin: float = 0.0, joint: bool = False) -> Tensor:
    r"""The weight :math:`\xi(r)` of a pair of samples in the covariance operator (DDN-v2 Eq. 6).

    1 for the simple loss, :math:`\sigma((r_0 - r)/\tau)` for the triplet loss, :math:`\sigma(-r/\tau)/\tau` for
    InfoNCE. With `joint`, InfoNCE's weights share one partition function over the last dimension,
    :math:`\xi_k = \frac1\tau e^{-r_k/\tau} / (1 + \sum_j e^{-r_j/\tau})` (Eq. 80 with its missing factor).

    Args:
        r: Distances of un-augmented samples, any shape; ``[N, H]`` with `joint`.
        loss: "simple", "triplet" or "nce".
        tau: Temperature.
        margin: The triplet loss's :math:`r_0`.
        joint: Normalise over all negatives of a sample ("nce" only).

    Example:
        >>> pair_weight(torch.tensor([0.0, 1.0]), "nce", tau=0.5)
        tensor([1.0000, 0.2384])
    """
    if loss not in get_args(ContrastiveLoss):
        raise ValueError(f"`loss` must be one of {get_args(ContrastiveLoss)}, got {loss!r}")
    if joint and loss != "nce":
        raise ValueError(f'`joint` is for loss="nce" only, got loss={loss!r}')
    check_positive(tau, "tau")
    if loss == "simple":
        return torch.ones_like(r)
    if loss == "triplet":
        return torch.sigmoid((margin - r) / tau)
    if joint:
        # The positive pair of un-augmented samples has r = 0: the 1 in the partition function.
        return torch.softmax(F.pad(r / -tau, (1, 0)), dim=-1)[..., 1:] / tau
    return torch.sigmoid(r / -tau) / tau


def exact_contrastive_loss(
    r_pos: Tensor,
    r_neg: Tensor,
    r_clean: Tensor,
    loss: ContrastiveLoss,
    tau: float = 0.5,
    margin: float = 0.0,
    joint: bool = False,
) -> Tensor:
    r"""The loss whose gradient is the weighted covariance operator without a residue (DDN-v2 Eq. 7).

    .. math:: \sum_k \mathrm{sg}(\xi(r_k)) (r_+ - r_{k-})

    Args:
        r_pos: Distances of the positive pairs, ``[N]``.
        r_neg: Distances of the negative pairs, ``[N]`` or ``[N, H]``.
        r_clean: Distances of the same negative pairs before augmentation, shaped as `r_neg`; no gradient flows here.
        loss: Whose :math:`\xi`: "simple", "triplet" or "nce".
        tau: Temperature.
        margin: The triplet loss's :math:`r_0`.
        joint: Normalise "nce" weights over all negatives of a sample, see :func:`pair_weight`.

    Returns:
        The mean over the batch, a scalar.

    Example:
        >>> r = torch.tensor([1.0])
        >>> exact_contrastive_loss(r, 2 * r, 0 * r, "nce", tau=0.5)
        tensor(-1.)
    """
    check_same_shape(r_neg, r_clean, ("r_neg", "r_clean"))
    r_neg = _negatives(r_pos, r_neg)
    weight = pair_weight(r_clean.detach().reshape(r_neg.shape), loss, tau, margin, joint)
    return (weight * (r_pos[:, None] - r_neg)).sum(dim=1).mean()


def cross_model_loss(p: Tensor, z: Tensor) -> Tensor:
    r"""The mean of :math:`\|\hat p - \hat z\|^2 = 2 - 2 \cos(p, z)` over pairs of rows (RAFT Sec. 2).

    Args:
        p: Outputs of one branch, ``[N, d]``.
        z: Outputs of the other, ``[N, d]``; detach it where the method stops the gradient.

    Example:
        >>> cross_model_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
        tensor(2.)
    """
    check_same_shape(p, z, ("p", "z"))
    return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


def byol_loss(p: Tensor, z: Tensor) -> Tensor:
    """BYOL's loss for one order of the views: :func:`cross_model_loss` of a prediction and a fixed target.

    Args:
        p: Predictions of the online network, ``[N, d]``.
        z: Projections of the target network, ``[N, d]``; no gradient flows here.

    Example:
        >>> byol_loss(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 2.0]])).abs() < 1e-6
        tensor(True)
    """
    return cross_model_loss(p, z.detach())


def barlow_twins_loss(z1: Tensor, z2: Tensor, lambd: float = 5e-3) -> Tensor:
    r"""Redundancy reduction, :math:`\sum_i (1 - C_{ii})^2 + \lambda \sum_{i \ne j} C_{ij}^2` (Bound Eq. 2).

    C is the cross-correlation matrix of the two views' features, each standardised over the batch (biased variance,
    as in batch normalisation, with its epsilon of 1e-5).

    Args:
        z1: Features of the first view, ``[N, d]`` with N > 1.
        z2: Features of the second view, ``[N, d]``.
        lambd: The weight of the off-diagonal terms.

    Example:
        >>> z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> barlow_twins_loss(z, z) < 1e-9
        tensor(True)
    """
    check_same_shape(z1, z2, ("z1", "z2"))
    if z1.ndim != 2 or z1.shape[0] < 2:
        raise ValueError(f"`z1` must be [N, d] with at least 2 rows to standardise over, got {tuple(z1.shape)}")
    return redundancy(_standardize(z1).T @ _standardize(z2) / z1.shape[0], lambd)


def redundancy(correlation: Tensor, lambd: float) -> Tensor:
    """Barlow Twins' loss of a cross-correlation matrix ``[d, d]``."""
    diagonal = correlation.diagonal()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + lambd * off_diagonal


def _standardize(z: Tensor, eps: float = 1e-5) -> Tensor:
    variance, mean = torch.var_mean(z, dim=0, correction=0)
    return (z - mean) * torch.rsqrt(variance + eps)


def _negatives(r_pos: Tensor, r_neg: Tensor) -> Tensor:
    """Give the negatives' distances as [N, H], or refuse them."""
    if r_pos.ndim != 1 or r_pos.shape[0] == 0:
        raise ValueError(f"`r_pos` must have shape [N] with N >= 1, got {tuple(r_pos.shape)}")
    if r_neg.ndim == 1:
        r_neg = r_neg[:, None]
    if r_neg.ndim != 2 or r_neg.shape[0] != r_pos.shape[0] or r_neg.shape[1] == 0:
        raise ValueError(
            f"`r_neg` must have shape [N] or [N, H] with N = {r_pos.shape[0]} and H >= 1, got {tuple(r_neg.shape)}"
        )
    return r_neg
