"""From the rows of a layer to its operators' norms: exactly through their Gram matrix, or through sketched sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssl.functional.sketch import REPLICAS


class CovarianceOperatorNorms(NamedTuple):
    """Sizes of one layer's covariance operators; scalars.

    Attributes:
        inter_norm: Frobenius norm of VE.
        inter_trace: Trace of VE.
        inter_top: Leading eigenvalue of VE.
        intra_norm: Frobenius norm of EV.
        intra_trace: Trace of EV.
        relative_error: Estimated relative standard error of `inter_norm`, at most 1; 0 where it is exact.
    """

    inter_norm: Tensor
    inter_trace: Tensor
    inter_top: Tensor
    intra_norm: Tensor
    intra_trace: Tensor
    relative_error: Tensor


def laplacian(n: int, weight: Tensor | None, unbiased: bool, like: Tensor) -> Tensor:
    r"""L with :math:`\frac12 E_{x,x'}[\xi (a - a')(a - a')^T] = \sum_{ij} L_{ij} a_i a_j^T`, ``[n, n]``.

    Over all ordered pairs, or, `unbiased`, over those of different samples.
    """
    w = like.new_ones(n, n) if weight is None else weight.to(like)
    return (torch.diag(w.sum(1)) - w) / (n * (n - 1 if unbiased else n))


def quadratic_forms(lap: Tensor, views: int, unbiased: bool) -> tuple[Tensor, Tensor]:
    r"""VE and EV as quadratic forms in the samples' and views' rows, both ``[N, V, N, V]``.

    VE is L between the view means. With sampled views their mean still holds 1/V of the variance over views, which
    is taken off: what remains are the products of different views.
    """
    n = len(lap)
    centre = torch.eye(views).to(lap) - 1 / views
    inside = torch.eye(n).to(lap)[:, None, :, None] * centre[None, :, None, :] / (views - 1 if unbiased else views)
    inter = (lap / views**2)[:, None, :, None].expand(n, views, n, views)
    if unbiased:
        inter = inter - lap.diag()[:, None, None, None] * inside / views
    return inter, inside / n


def exact_norms(rows: Tensor, lap: Tensor, unbiased: bool) -> CovarianceOperatorNorms:
    """From all rows of a layer, ``[V, n_L, N, P]``, in memory of (V N n_L)^2."""
    views, n_out, n, _ = rows.shape
    rows = rows.permute(1, 2, 0, 3).flatten(1, 2)  # [n_L, N V, P]
    rows = (rows - rows.mean(1, keepdim=True)).flatten(0, 1)  # both forms vanish on constants
    gram = (rows @ rows.T).double().view(n_out, n * views, -1)
    results = []
    for form in quadratic_forms(lap.double(), views, unbiased):
        h = (form.reshape(n * views, -1) @ gram).flatten(0, 1)  # similar to the operator, up to zeros
        results.append(((h * h.T).sum().clamp_min(0).sqrt(), h.trace(), h))
    (inter_norm, inter_trace, h), (intra_norm, intra_trace, _) = results
    return CovarianceOperatorNorms(
        inter_norm, inter_trace, _leading(h), intra_norm, intra_trace, torch.zeros_like(inter_norm)
    )


def _leading(h: Tensor, block: int = 8, steps: int = 60) -> Tensor:
    """The largest eigenvalue of a matrix whose eigenvalues are real, by subspace iteration if it is large."""
    if len(h) <= 512:
        return torch.linalg.eigvals(h).real.max()
    x = torch.randn(len(h), min(block, len(h)), generator=torch.Generator().manual_seed(0), dtype=h.dtype).to(h.device)
    for _ in range(steps):
        x = torch.linalg.qr(h @ x)[0]
    return torch.linalg.eigvals(x.T @ h @ x).real.max()


class Sums(NamedTuple):
    """Sums over samples, linear in the data: those of two ranks add up. m directions, s numbers a row, g groups.

    The principal directions are one group, each random direction is one.
    """

    samples: Tensor  # [1]
    mean: Tensor  # [m, 2, s]: view means of both sketches
    between: Tensor  # [g, s, s]: products of the view means
    within: Tensor  # [g, s, s]: covariance over views
    between_trace: Tensor  # [m, 2]
    within_trace: Tensor  # [m, 2]

    @classmethod
    def shapes(cls, directions: int, principal: int, width: int) -> list[tuple[int, ...]]:
        m, g, s = directions, 1 + directions - principal, width
        return [(1,), (m, 2, s), (g, s, s), (g, s, s), (m, 2), (m, 2)]

    @classmethod
    def zeros(cls, directions: int, principal: int, width: int, device: torch.device | None = None) -> Sums:
        shapes = cls.shapes(directions, principal, width)
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, direction: int, rows: Tensor) -> None:
        """Add sketched rows ``[2, V, N, s]`` along one direction."""
        rows = rows.double()
        mean = rows.mean(1)
        deviation = (rows - mean.unsqueeze(1)).flatten(1, 2)
        free = rows.shape[1] - 1
        group = max(0, direction - (len(self.mean) - len(self.between)))
        if direction == 0:
            self.samples.add_(rows.shape[2])
        self.mean[direction] += mean.sum(1)
        self.between[group] += mean[0].T @ mean[1]
        self.within[group] += deviation[0].T @ deviation[1] / free
        self.between_trace[direction] += mean.square().sum((1, 2))
        self.within_trace[direction] += deviation.square().sum((1, 2)) / free

    def operators(self, views: int, unbiased: bool) -> Operators:
        n = self.samples
        divisor = n - 1 if unbiased else n
        first = len(self.mean) - len(self.between) + 1
        left, right = self.mean.unbind(1)  # [m, s]
        single = left[first:].unsqueeze(2) * right[first:].unsqueeze(1)
        centre = torch.cat([(left[:first].T @ right[:first]).unsqueeze(0), single]) / n
        inter = (self.between - centre) / divisor
        inter_trace = (self.between_trace - self.mean.square().sum(2) / n) / divisor
        intra, intra_trace = self.within / n, self.within_trace / n
        if unbiased:
            return Operators(inter - intra / views, intra, inter_trace - intra_trace / views, intra_trace)
        keep = (views - 1) / views
        return Operators(inter, intra * keep, inter_trace, intra_trace * keep)


class Operators(NamedTuple):
    """Sketched operators by group of directions, S_1 C S_2^T ``[g, s, s]``, and traces by direction and sketch."""

    inter: Tensor
    intra: Tensor
    inter_trace: Tensor  # [m, 2]
    intra_trace: Tensor  # [m, 2]

    @classmethod
    def zeros(cls, directions: int, principal: int, width: int, device: torch.device | None = None) -> Operators:
        sums = Sums.zeros(directions, principal, width, device)
        return cls(sums.between, sums.within, sums.between_trace, sums.within_trace)

    def add(self, direction: int, rows: Tensor, forms: tuple[Tensor, Tensor]) -> None:
        """Add all samples' rows ``[2, V, N, s]`` along one direction, with quadratic forms ``[N, V, N, V]``."""
        group = max(0, direction - (len(self.inter_trace) - len(self.inter)))
        flat = rows.double().transpose(1, 2).flatten(1, 2)  # [2, N V, s]
        flat = flat - flat.mean(1, keepdim=True)
        for form, matrix, trace in zip(forms, self[:2], self[2:], strict=True):
            product = form.reshape(flat.shape[1], -1) @ flat
            matrix[group] += flat[0].T @ product[1]
            trace[direction] += (flat * product).sum((1, 2))


def leading_pair(matrix: Tensor) -> tuple[Tensor, Tensor]:
    r"""The singular vectors u, v of the largest singular value, u^T A v > 0.

    On a device without an eigensolver, for which the host would wait: powers of :math:`A^T A`, by squaring, become
    the projection on v. :math:`2^{24}` of them part singular values that differ by a millionth; the vectors of closer
    ones are of little meaning.
    """
    if matrix.device.type == "cpu":
        left, _, right = torch.linalg.svd(matrix)
        return left[:, 0], right[0]
    tiny = torch.finfo(matrix.dtype).tiny
    matrix = matrix / matrix.abs().max().clamp_min(tiny)  # no square overflows
    power = matrix.T @ matrix
    for _ in range(24):
        power = power / power.trace().clamp_min(tiny)
        power = power @ power
    longest = power.diagonal().argmax().view(1)
    right = power.index_select(1, longest).squeeze(1)
    right = right / right.norm().clamp_min(tiny)
    left = matrix @ right
    return left / left.norm().clamp_min(tiny), right


def estimated_norms(operators: Operators, n_out: int, principal: int, exact_rows: bool) -> CovarianceOperatorNorms:
    """Extrapolate from the sampled output directions to all of them.

    The k random directions of the R = n_L - q in the complement stand for R / k each, their pairs for
    R (R - 1) / (k (k - 1)) each.
    """
    sampled = len(operators.inter) - 1
    rest = n_out - principal
    share = rest / sampled if sampled else 0.0
    inter_trace, intra_trace = operators.inter_trace.T, operators.intra_trace.T  # [2, m]

    def square(products: Tensor) -> Tensor:
        """Squared norm from the groups' inner products ``[..., g, g]``."""
        own = products[..., 1:, 1:].diagonal(dim1=-2, dim2=-1).sum(-1)
        pairs = products[..., 1:, 1:].sum((-2, -1)) - own
        both = products[..., 0, 1:].sum(-1) + products[..., 1:, 0].sum(-1)
        pair_share = share * (rest - 1) / (sampled - 1) if sampled > 1 else 0.0
        return products[..., 0, 0] + share * both + share * own + pair_share * pairs

    def norm(products: Tensor) -> Tensor:
        """No smaller than the principal directions' share, which nothing can cancel."""
        return torch.maximum(square(products), products[0, 0]).clamp_min(0).sqrt()

    def trace(traces: Tensor) -> Tensor:
        return traces[..., :principal].sum(-1) + share * traces[..., principal:].sum(-1)

    inter = operators.inter.flatten(1)
    products = inter @ inter.T
    whole = operators.inter[0] + share * operators.inter[1:].sum(0)
    # The leading eigenvector from the principal directions: the few random ones, inflated, would make one up.
    left, right = leading_pair(operators.inter[0] if principal else whole)
    top = left @ whole @ right
    intra = operators.intra.flatten(1)
    variance = torch.zeros_like(top)
    if sampled > 1:
        # How much the squared norm would change with each random direction.
        size = inter_trace[:, principal:].mean(0)
        size = torch.nan_to_num(size / size.mean())
        pairs = products[1:, 1:].sum() - products.diagonal()[1:].sum()
        effect = rest * (2 * products[0, 1:] + products.diagonal()[1:])
        effect = effect + 2 * rest * (rest - 1) * pairs / (sampled * (sampled - 1)) * size
        variance = variance + effect.var() / sampled * (1 - sampled / rest)
    if not exact_rows:
        # How much it differs between the replicas of either sketch.
        for sides in (operators.inter, operators.inter.mT):
            parts = sides.unflatten(1, (REPLICAS, -1)).flatten(2).transpose(0, 1)
            variance = variance + square(parts @ parts.mT * REPLICAS).var() / REPLICAS
    inter_norm = norm(products)
    # Of the norm, half that of its square; beyond 1 it would say no more.
    relative_error = torch.nan_to_num(variance.sqrt() / (2 * inter_norm.square())).clamp_max(1)
    return CovarianceOperatorNorms(
        inter_norm, trace(inter_trace).mean(), top, norm(intra @ intra.T), trace(intra_trace).mean(), relative_error
    )
