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
        x: Features, ``[N, d]``.

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
    :math:`(d^2 - \|\Lambda\|_F^2) / N` in the mean; `unbiased` takes that away. Costs min(N, d) N d.

    Args:
        x: Features, ``[N, d]``; rows are rescaled.
        unbiased: Correct for the size of the batch (N >= 2).

    Example:
        >>> correlation_loss(torch.eye(4))
        tensor(0.)
    """
    x = unit_rows(x, "x", min_rows=2 if unbiased else 1) * math.sqrt(x.shape[1])
    rows, dim = x.shape
    if rows >= dim:
        return correlation_loss_of_moment(second_moment(x), rows if unbiased else None)
    # Lambda has the Gram matrix's eigenvalues and d - N zeros, each of which is 1 away from the identity's.
    gram = x @ x.T / rows
    loss = (gram - torch.eye(rows, dtype=x.dtype, device=x.device)).square().sum() + (dim - rows)
    # What `correlation_loss_of_moment` does, by |Lambda|^2 = L_cor + 2 tr Lambda - d and tr Lambda = d.
    return loss - (dim**2 - loss - dim) / (rows - 1) if unbiased else loss


def correlation_matrix(x: Tensor, most: int | None = None) -> Tensor:
    r"""Lambda, the second moment of rows scaled to norm :math:`\sqrt d`, of all features or the first `most`.

    Args:
        x: Features, ``[N, d]``; rows are rescaled.
        most: How many features to show.

    Example:
        >>> correlation_matrix(torch.eye(2)).round()
        tensor([[1., 0.],
                [0., 1.]])
    """
    return second_moment((unit_rows(x, "x") * math.sqrt(x.shape[1]))[:, :most])


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
        l_cor: The value of :func:`correlation_loss`.
        dim: The features' dimension d.
        num_classes: The number of latent classes K.

    Example:
        >>> generalization_bound(torch.tensor(0.0), dim=20, num_classes=10)
        tensor(-0.0250)
    """
    check_counts(dim=dim, num_classes=num_classes)
    return (2 * l_cor + num_classes - dim) / dim**2


def error_rate_bound(l_cor: Tensor, dim: int, class_probs: Tensor | Sequence[float], eps: float) -> Tensor:
    r"""A bound on the nearest-class-mean error rate: Bound Theorem 3 with its last step mended.

    .. math:: \frac{\frac{2}{d^2} L_{cor} + 2\varepsilon^4 + \frac{K - d}{d^2}}
        {p_{min} (1 - 4\varepsilon + \varepsilon^2)^2}

    A class can only lose samples to a class whose mean has a product of at least
    :math:`d (1 - 4\varepsilon + \varepsilon^2)` with its own (Theorem 1). Theorem 2 with Markov's inequality bounds the
    probability :math:`\sum_{i \ne j} p_i p_j` of such *pairs*; a class that has such a partner adds :math:`p_i` to the
    error rate and at least :math:`p_i p_{min}` to that sum. For K equiprobable classes this is K - 1 times what the
    paper prints, :func:`error_rate_bound_as_printed`, whose last step takes the pairs' probability for the samples'.

    Args:
        l_cor: The value of :func:`correlation_loss`.
        dim: The features' dimension d.
        class_probs: The class probabilities p_i, ``[K]``, at least two positive ones, summing to 1; classes without
            samples do not count.
        eps: The largest distance of two views of one class in feature space, relative to the features' norm;
            below :math:`2 - \sqrt 3`, where the bound's denominator vanishes.

    Example:
        >>> error_rate_bound(torch.tensor(50.0), dim=20, class_probs=[0.5, 0.5], eps=0.0)
        tensor(0.4100)
    """
    probs = _check_classes(l_cor, dim, class_probs, eps)
    probs = probs[probs > 0]
    numerator = generalization_bound(l_cor, dim, len(probs)) + 2 * eps**4
    return numerator / (probs.min() * (1 - 4 * eps + eps**2) ** 2)


def error_rate_bound_as_printed(l_cor: Tensor, dim: int, class_probs: Tensor | Sequence[float], eps: float) -> Tensor:
    r"""Bound Theorem 3 as printed, which is not a bound: an indicator, for comparison with the paper.

    .. math:: \frac{\frac{2}{d^2} L_{cor} + 2\varepsilon^4 + \frac{K - d}{d^2}}
        {(1 - \sum_i p_i^2) (1 - 4\varepsilon + \varepsilon^2)^2}

    With K = d classes of which two share a direction the error rate is about 1/K, and this of the order of 1/K^2.
    :func:`error_rate_bound` holds.

    Args:
        l_cor: The value of :func:`correlation_loss`.
        dim: The features' dimension d.
        class_probs: The class probabilities p_i, ``[K]``, at least two positive ones, summing to 1.
        eps: As in :func:`error_rate_bound`.

    Example:
        >>> error_rate_bound_as_printed(torch.tensor(50.0), dim=20, class_probs=[0.25] * 4, eps=0.0)
        tensor(0.2800)
    """
    probs = _check_classes(l_cor, dim, class_probs, eps)
    numerator = generalization_bound(l_cor, dim, len(probs)) + 2 * eps**4
    return numerator / ((1 - probs.square().sum()) * (1 - 4 * eps + eps**2) ** 2)


def _check_classes(l_cor: Tensor, dim: int, class_probs: Tensor | Sequence[float], eps: float) -> Tensor:
    check_counts(dim=dim)
    probs = torch.as_tensor(class_probs, dtype=l_cor.dtype, device=l_cor.device)
    if probs.ndim != 1 or bool((probs < 0).any()) or abs(float(probs.sum()) - 1) > 1e-4 or float(probs.max()) >= 1:
        raise ValueError(f"`class_probs` must be at least two probabilities that sum to 1, got {class_probs}")
    if not 0 <= eps < 2 - math.sqrt(3):
        raise ValueError(f"`eps` must lie in [0, 2 - sqrt(3)) for the bound to hold, got {eps}")
    return probs


def check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
