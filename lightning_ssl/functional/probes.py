"""What the features are worth to a classifier: nearest neighbours and logistic regression."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ssl.functional._checks import check_labels, check_positive, check_rows
from lightning_ssl.functional.geometry import _unit_rows

# Similarities held at a time: 2^25 floats are 128 MB.
_SIMILARITIES = 2**25


@torch.no_grad()
def knn_predict(
    queries: Tensor, bank: Tensor, labels: Tensor, num_classes: int, k: int = 200, temperature: float = 0.1
) -> Tensor:
    r"""Classify by weighted nearest neighbours under the cosine, each with weight :math:`e^{\cos / T}`.

    Memory is bounded for any number of rows: queries are taken in chunks.

    Args:
        queries: features to classify, ``[Q, d]``.
        bank: features with known labels, ``[N, d]``.
        labels: the bank's labels, integers in [0, num_classes), ``[N]``.
        num_classes: the number of classes C.
        k: how many neighbours vote; at most N do.
        temperature: T.

    Returns:
        The classes of each query by falling score, ``[Q, C]``: the first column is the prediction.

    Example:
        >>> bank = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> knn_predict(torch.tensor([[3.0, 1.0]]), bank, torch.tensor([4, 2]), num_classes=5, k=1)[:, 0]
        tensor([4])
    """
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}")
    check_positive(temperature, "temperature")
    bank = _unit_rows(bank, "bank")
    queries = _unit_rows(queries, "queries").to(bank.dtype)
    if queries.shape[1] != bank.shape[1]:
        raise ValueError(f"`queries` and `bank` must agree in dimension, got {queries.shape[1]} and {bank.shape[1]}")
    check_labels(labels, num_classes, len(bank))
    labels = labels.to(bank.device, torch.long)
    k = min(k, len(bank))
    ranked = []
    for chunk in queries.split(max(1, _SIMILARITIES // len(bank))):
        cosines, neighbours = (chunk @ bank.T).topk(k, dim=1, sorted=False)
        # Relative to the largest possible cosine, so that a small temperature does not overflow.
        votes = torch.exp((cosines - 1) / temperature)
        scores = votes.new_zeros(len(chunk), num_classes).scatter_add_(1, labels[neighbours], votes)
        ranked.append(scores.argsort(dim=1, descending=True, stable=True))
    return torch.cat(ranked)


class LinearProbeResult(NamedTuple):
    """A fitted classifier: ``logits = features @ weight.T + bias``."""

    weight: Tensor  # [C, d]
    bias: Tensor  # [C]


@torch.no_grad()
def fit_linear_probe(
    features: Tensor, labels: Tensor, num_classes: int, l2: float = 1e-4, max_iter: int = 500, tolerance: float = 1e-5
) -> LinearProbeResult:
    r"""Fit multinomial logistic regression to convergence by L-BFGS.

    Minimises the mean cross-entropy plus :math:`\frac{\lambda}{2} \|W\|_F^2` over W and an unpenalised bias, on
    features standardised to mean 0 and variance 1. In scikit-learn's terms :math:`\lambda = 1 / (C N)`.

    The search runs in coordinates in which the Hessian at W = 0 is the identity: an order of magnitude fewer steps
    than on raw features, to the same optimum.

    Args:
        features: ``[N, d]``.
        labels: integers in [0, num_classes), at least two different ones, ``[N]``.
        num_classes: the number of classes C.
        l2: :math:`\lambda`, positive.
        max_iter: a limit on the steps; reached only in degenerate cases.
        tolerance: stop when no entry of the gradient is larger.

    Returns:
        Weight ``[C, d]`` and bias ``[C]`` in the units of the raw features.

    Example:
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> weight, bias = fit_linear_probe(x, torch.tensor([0, 0, 1, 1]), num_classes=2)
        >>> (x @ weight.T + bias).argmax(dim=1)
        tensor([0, 0, 1, 1])
    """
    check_rows(features, "features", min_rows=2)
    check_labels(labels, num_classes, len(features))
    check_positive(l2, "l2")
    if bool((labels == labels[0]).all()):
        raise ValueError("`labels` hold one class only; a probe needs at least two: check the split")
    with torch.inference_mode(False):  # a caller's inference mode would forbid the optimizer's in-place updates
        x = features.to(torch.promote_types(features.dtype, torch.float32), copy=True)
        labels = labels.to(x.device, torch.long).clone()
        n, dim = x.shape
        variance, mean = torch.var_mean(x, dim=0, correction=0)
        # A constant feature carries nothing: its roundoff must not be blown up to variance 1.
        constant = variance <= (torch.finfo(x.dtype).eps * mean.abs()) ** 2 * 16
        scale = torch.where(constant, 0, variance.rsqrt())
        x = (x - mean).mul_(scale)

        # Whitened coordinates: with R^T R = x^T x / (N C) + l2 I, the logits are (x R^-1) (R W^T).
        gram = x.T @ x / (n * num_classes)
        gram.diagonal().add_(l2)
        root = torch.linalg.cholesky(gram, upper=True)
        x = torch.linalg.solve_triangular(root, x, upper=True, left=False)
        inverse = torch.linalg.solve_triangular(root, torch.eye(dim, dtype=x.dtype, device=x.device), upper=True)
        penalty = l2 * inverse.T @ inverse  # l2 |W|^2 = tr(V^T penalty V) for V = R W^T
        targets = F.one_hot(labels, num_classes).to(x.dtype)

        theta = x.new_zeros(num_classes, dim + 1)  # V^T and the bias
        optimizer = torch.optim.LBFGS(
            [theta],
            max_iter=max_iter,
            max_eval=4 * max_iter,
            history_size=20,
            tolerance_grad=tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def objective() -> Tensor:
            weight, bias = theta[:, :dim], theta[:, dim]
            log_probs = torch.addmm(bias, x, weight.T).log_softmax(dim=1)
            loss = -(log_probs * targets).sum() / n
            residual = log_probs.exp_().sub_(targets).div_(n)
            decayed = weight @ penalty
            theta.grad = torch.cat([residual.T @ x + decayed, residual.sum(dim=0)[:, None]], dim=1)
            return loss + 0.5 * (decayed * weight).sum()

        optimizer.step(objective)
    weight = theta[:, :dim] @ inverse.T * scale
    return LinearProbeResult(weight, theta[:, dim] - weight @ mean)
