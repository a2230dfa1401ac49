"""What the features are worth to a classifier: nearest neighbours and logistic regression."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ssl.functional.checks import check_labels, check_positive, check_rows
from lightning_ssl.functional.geometry import unit_rows

# Similarities held at a time: 2^25 floats are 128 MB.
_SIMILARITIES = 2**25
# The linear probe's gradient at which its Hessian is worth a second look, and the most its blocks may hold.
_ROUGH = 1e-3
_BLOCKS = 2**26


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
    bank = unit_rows(bank, "bank")
    queries = unit_rows(queries, "queries").to(bank.dtype)
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
    features: Tensor, labels: Tensor, num_classes: int, l2: float = 1e-4, max_iter: int = 500, tolerance: float = 1e-4
) -> LinearProbeResult:
    r"""Fit multinomial logistic regression to convergence by L-BFGS.

    Minimises the mean cross-entropy plus :math:`\frac{\lambda}{2} \|W\|_F^2` over W and an unpenalised bias, on
    features standardised to mean 0 and variance 1. In scikit-learn's terms :math:`\lambda = 1 / (C N)`.

    The search runs in coordinates in which the Hessian at W = 0, and then near the optimum its block of each class, is
    about the identity: an order of magnitude fewer steps than on raw features, to the same optimum.

    Args:
        features: ``[N, d]``.
        labels: integers in [0, num_classes), at least two different ones, ``[N]``.
        num_classes: the number of classes C.
        l2: :math:`\lambda`, positive.
        max_iter: a limit on the steps; reached only in degenerate cases.
        tolerance: stop when no entry of the gradient, in those coordinates, is larger: half its square is about what
            the objective has still to fall.

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
        raw = features.to(torch.promote_types(features.dtype, torch.float32))
        labels = labels.to(raw.device, torch.long).clone()
        n, dim = raw.shape
        mean = raw.mean(dim=0)
        x = raw.new_ones(n, dim + 1)  # the last feature is the bias
        torch.sub(raw, mean, out=x[:, :dim])
        squares = (rows.square().sum(dim=0) for rows in x[:, :dim].split(1024))  # many times as fast as var_mean
        variance = torch.stack(list(squares)).sum(dim=0) / n
        # A constant feature carries nothing: its roundoff must not be blown up to variance 1.
        constant = variance <= (torch.finfo(raw.dtype).eps * mean.abs()) ** 2 * 16
        scale = torch.where(constant, 0, variance.rsqrt())
        x[:, :dim] *= scale
        ridge = x.new_full((dim + 1,), l2)
        ridge[-1] = 0
        weight = x.new_zeros(num_classes, dim + 1)
        if tolerance < _ROUGH:  # a quarter of the rows, where they are many, is enough to come near
            some = slice(None, None, 4 if n >= 64 * dim else 1)
            start = _preconditioner(x, weight, ridge)
            weight = _minimise(x[some].contiguous(), labels[some], weight, ridge, start, _ROUGH, max_iter)
        weight = _minimise(x, labels, weight, ridge, _preconditioner(x, weight, ridge), tolerance, max_iter)
    weight, bias = weight[:, :dim] * scale, weight[:, dim]
    return LinearProbeResult(weight, bias - weight @ mean)


def _preconditioner(x: Tensor, weight: Tensor, ridge: Tensor) -> Tensor:
    """M with M M^T about the inverse of the Hessian's block of each class, ``[C or 1, d + 1, d + 1]``.

    The block of class k is the mean of p_k (1 - p_k) x x^T and the penalty. At W = 0, or where blocks would take too
    much memory, one stands for all. It need not be exact: its rows are those of the largest p_k (1 - p_k), the others
    enter by their mean.
    """
    classes, width = weight.shape
    some = x[:: max(1, len(x) // (8 * width))]
    gram = some.T @ some / len(some)
    if bool(weight.any()) and classes * width**2 <= _BLOCKS:
        rows = x[:: -(-len(x) * classes // _SIMILARITIES)]
        p = (rows @ weight.T).softmax(dim=1)
        curvature, index = (p - p.square()).T.topk(min(2 * width, len(rows)), dim=1)
        rest = (p - p.square()).mean(dim=0) - curvature.sum(dim=1) / len(rows)
        picked = ((rows[i] * c[:, None]).T @ rows[i] / len(rows) for c, i in zip(curvature, index, strict=True))
        # A floor, so that rows that are all certain leave it regular.
        blocks = torch.stack(list(picked)) + rest.clamp_min(1e-3 / classes)[:, None, None] * gram
    else:
        p = (some @ weight.T).softmax(dim=1)
        share = (p - p.square()).mean(dim=1).clamp_min_(1e-3 / classes)
        blocks = ((some * share[:, None]).T @ some / len(some))[None]
    blocks.diagonal(dim1=1, dim2=2).add_(ridge)
    root = torch.linalg.cholesky(blocks, upper=True)
    return torch.linalg.solve_triangular(root, torch.eye(width, dtype=x.dtype, device=x.device), upper=True)


def _minimise(
    x: Tensor, labels: Tensor, start: Tensor, ridge: Tensor, preconditioner: Tensor, tolerance: float, max_iter: int
) -> Tensor:
    """L-BFGS for rows W_k = start_k + M_k theta_k, until no entry of theta's gradient is larger than `tolerance`."""
    theta = torch.zeros_like(start)
    optimizer = torch.optim.LBFGS(
        [theta],
        max_iter=max_iter,
        max_eval=4 * max_iter,
        history_size=20,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def times(v: Tensor, matrices: Tensor) -> Tensor:
        return v @ matrices[0] if len(matrices) == 1 else torch.bmm(v[:, None], matrices)[:, 0]

    def objective() -> Tensor:
        weight = start + times(theta, preconditioner.mT)
        loss, grad = _cross_entropy(x, labels, weight)
        decayed = ridge * weight
        theta.grad = times(grad + decayed, preconditioner)
        return loss + 0.5 * (decayed * weight).sum()

    optimizer.step(objective)
    return start + times(theta, preconditioner.mT)


def _cross_entropy(x: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of logits x W^T and its gradient, in one pass over the rows.

    On a processor a few rows at a time, so that both products find them in its cache, and with rows of zeros up to a
    multiple of 16 classes: matrix products of other heights take several times as long.
    """
    n, classes = len(x), len(weight)
    chunk = n if x.is_cuda else 1024
    weight = F.pad(weight, (0, 0, 0, -classes % 16))
    loss, grad = x.new_zeros(()), torch.zeros_like(weight)
    for rows, truth in zip(x.split(chunk), labels.split(chunk), strict=True):
        logits = weight @ rows.T  # C x n
        z, truth = logits[:classes], truth[None]
        z -= z.gather(0, truth)  # relative to the true class
        top = z.amax(dim=0, keepdim=True)
        total = z.sub_(top).exp_().sum(dim=0, keepdim=True)
        loss += (total.log() + top).sum()
        z.div_(total).scatter_add_(0, truth, torch.full_like(top, -1.0))
        logits[classes:] = 0
        grad.addmm_(logits, rows)
    return loss / n, grad[:classes].div_(n)
