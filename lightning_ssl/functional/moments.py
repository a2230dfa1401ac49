"""Second moments of the features, and the generalisation bound that rests on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_rows
from lightning_ssl.functional.geometry import unit_rows


def second_moment(x: Tensor) -> Tensor:
    r"""The uncentred second moment :math:`E[x x^T]`: F of DirectPred (Eq. 19), Lambda of Bound.

    Args:
        x: features, ``[N, d]``.

    Returns:
        A symmetric matrix, ``[d, d]``.

    Example:
        >>> second_moment(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[0.5000, 0.0000],
                [0.0000, 2.0000]])
    """
    check_rows(x, "x")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.T @ x / x.shape[0]


def correlation_loss(x: Tensor, unbiased: bool = False) -> Tensor:
    r"""How far the features are from decorrelated, :math:`L_{cor} = \|\Lambda - I\|_F^2` (Bound Sec. 4).

    :math:`\Lambda = E[x x^T]` of rows scaled to norm :math:`\sqrt d`. A batch of N rows overestimates it by
    :math:`(d^2 - \|\Lambda\|_F^2) / N` in the mean; `unbiased` takes that away.

    Args:
        x: features, ``[N, d]``; rows are rescaled.
        unbiased: correct for the size of the batch (N >= 2).

    Example:
        >>> correlation_loss(torch.eye(4))
        tensor(0.)
    """
    x = unit_rows(x, "x", min_rows=2 if unbiased else 1) * math.sqrt(x.shape[1])
    return correlation_loss_of_moment(second_moment(x), x.shape[0] if unbiased else None)


def correlation_loss_of_moment(moment: Tensor, unbiased_rows: Tensor | int | None = None) -> Tensor:
    """L_cor from Lambda (trace d), with the bias of `unbiased_rows` rows removed."""
    dim = moment.shape[0]
    if unbiased_rows is None:
        return (moment - torch.eye(dim, dtype=moment.dtype, device=moment.device)).square().sum()
    # E|Lambda_N|^2 = |Lambda|^2 + (d^2 - |Lambda|^2) / N, since every row has |x|^4 = d^2.
    squared_norm = (unbiased_rows * moment.square().sum() - dim**2) / (unbiased_rows - 1)
    return squared_norm - 2 * moment.trace() + dim


def generalization_bound(l_cor: Tensor, dim: int, num_classes: int) -> Tensor:
    r"""The label-free part of the error bound, :math:`\frac{2}{d^2} L_{cor} + \frac{K - d}{d^2}` (Bound Eq. 11).

    An indicator: its correlation with kNN accuracy is the claim, not a guarantee.

    Args:
        l_cor: the value of :func:`correlation_loss`.
        dim: the features' dimension d.
        num_classes: the number of latent classes K.

    Example:
        >>> generalization_bound(torch.tensor(0.0), dim=20, num_classes=10)
        tensor(-0.0250)
    """
    check_counts(dim=dim, num_classes=num_classes)
    return (2 * l_cor + num_classes - dim) / dim**2


def error_rate_bound(l_cor: Tensor, dim: int, class_probs: Tensor | Sequence[float], eps: float) -> Tensor:
    r"""The bound on the nearest-class-mean error rate (Bound Theorem 3).

    .. math:: \frac{\frac{2}{d^2} L_{cor} + 2\varepsilon^4 + \frac{K - d}{d^2}}
        {(1 - \sum_i p_i^2) (1 - 4\varepsilon + \varepsilon^2)^2}

    Args:
        l_cor: the value of :func:`correlation_loss`.
        dim: the features' dimension d.
        class_probs: the class probabilities p_i, ``[K]``, at least two positive ones, summing to 1.
        eps: the radius of a sample's augmentations in feature space, relative to the features' norm;
            below :math:`2 - \sqrt 3`, where the bound's denominator vanishes.

    Example:
        >>> error_rate_bound(torch.tensor(50.0), dim=20, class_probs=[0.5, 0.5], eps=0.0)
        tensor(0.4100)
    """
    check_counts(dim=dim)
    probs = torch.as_tensor(class_probs, dtype=l_cor.dtype, device=l_cor.device)
    if probs.ndim != 1 or bool((probs < 0).any()) or abs(float(probs.sum()) - 1) > 1e-4 or float(probs.max()) >= 1:
        raise ValueError(f"`class_probs` must be at least two probabilities that sum to 1, got {class_probs}")
    if not 0 <= eps < 2 - math.sqrt(3):
        raise ValueError(f"`eps` must lie in [0, 2 - sqrt(3)) for the bound to hold, got {eps}")
    numerator = generalization_bound(l_cor, dim, len(probs)) + 2 * eps**4
    return numerator / ((1 - probs.square().sum()) * (1 - 4 * eps + eps**2) ** 2)


def check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
