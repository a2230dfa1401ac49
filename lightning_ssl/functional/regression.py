"""Linear models of features that may be spread over ranks: logistic regression, paths of penalties, ridge regression.

Rows stay where they are and as they are: they are centred a few at a time, in the cache of the processor, and only sums
over rows cross between ranks. So memory beyond the features is bounded, and every rank gets the same weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ssl.distributed import Together
from lightning_ssl.functional.checks import check_labels, check_positive, check_rows, trusting
from lightning_ssl.functional.curvature import Basis, Curvature
from lightning_ssl.functional.descent import Descent
from lightning_ssl.functional.products import times_transposed
from lightning_ssl.precision import undisturbed

# Numbers that a few rows and what is made of them may hold at a time on a device: 2^25 floats are 128 MB.
BUDGET = 2**25
_TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Rows times dimensions times outputs up to which double precision costs nothing, and a thousandth of the tolerance
# little: of a few rows one is soon on the other side.
_SMALL, _EXACT = 2**20, 1e-3
# The whitened gradient's norm at which the curvature is worth a second look.
_ROUGH = 0.1
# The curvature is looked at anew after that many penalties of a path; the first of them is reached by stages.
_EVERY = 4
_STAGES = (100.0, 10.0)
# 2^32 by the golden ratio: its multiples come near no fraction.
_GOLDEN = 2654435769
# Stages are left that much earlier than what was asked for.
_LOOSE = 20.0


class LinearProbeResult(NamedTuple):
    """A fitted linear model: ``logits = features @ weight.T + bias``."""

    weight: Tensor  # [C, d]
    bias: Tensor  # [C]


class Design:
    """The rows of a regression: this rank's, standardised over all ranks' as they are used.

    Args:
        features: This rank's rows ``[n, d]``, of any floating type.
        together: How the ranks add up.
        positions: The place of each row among all ranks' rows, ``[n]``; by default rows stand in the order of ranks.
        budget: How many numbers may be held at a time.
        outputs: How many numbers are predicted of a row.
        only: Which of this rank's rows count, by default all; `positions` are of these.
    """

    def __init__(
        self,
        features: Tensor,
        together: Together,
        positions: Tensor | None,
        budget: int,
        outputs: int = 1,
        only: Tensor | None = None,
    ) -> None:
        self.features, self.together, self._only = features, together, only
        self.budget, self.portion = budget, min(1.0, budget / BUDGET)  # the latter of what else needs room
        self.dim, self.count = features.shape[1], _count(features, only)
        most = int(2048 * self.portion) if features.device.type == "cpu" else 2**30
        self.chunk = max(16, min(most, budget // (2 * self.dim)))
        self.total, self.positions, dtype = place_rows(features, together, positions, self.count)
        self.given = torch.promote_types(dtype, torch.float32)
        self.small = self.total * self.dim * outputs <= _SMALL and together.wide == torch.float64
        self.dtype = torch.float64 if self.small else self.given
        few = min(self.chunk, self.count + -self.count % 64)  # the curvature takes rows by 64

        def make() -> list[Tensor]:
            self._buffer = features.new_ones(few, self.dim + 1, dtype=self.dtype)
            return self._spread()

        counts, means, squares = together.each(make, [(), (self.dim,), (self.dim,)])
        counts = counts[:, None]
        mean = (counts * means).sum(dim=0) / self.total
        variance = (squares + counts * (means - mean).square()).sum(dim=0) / self.total
        self.mean = mean.to(self.dtype)
        # A constant feature carries nothing: its roundoff must not be blown up to variance 1.
        constant = variance <= (torch.finfo(self.given).eps * mean.abs()) ** 2 * 16
        self.scale = torch.where(constant, 0, variance.rsqrt())

    def _spread(self) -> list[Tensor]:
        """How many rows this rank has, their mean and the sum of squares about it: in one pass, a few at a time."""
        count, wide = 0, self.together.wide
        mean, squares = self.features.new_zeros(2, self.dim, dtype=wide)
        few = min(256 if self.features.device.type == "cpu" else self.chunk, self.chunk)
        place = self.features.new_empty(min(few, self.count), self.dim, dtype=wide)
        for start in range(0, self.count, few):
            part = self._take(slice(start, start + few))
            rows = place[: len(part)].copy_(part)
            here = rows.mean(dim=0)
            off, share = here - mean, len(part) / (count + len(part))
            squares += rows.sub_(here).square_().sum(dim=0) + off.square() * (count * share)
            mean += off * share
            count += len(part)
        if not bool(squares.isfinite().all()):
            check_rows(self.features, "features", min_rows=0)
        return [torch.tensor(float(count)), mean, squares]

    def _take(self, which: Tensor | slice) -> Tensor:
        which = which if self._only is None else self._only[which]
        return self.features[which] if isinstance(which, slice) else self.features.index_select(0, which)

    def chunks(self, some: Tensor | None = None, chunk: int | None = None) -> Iterator[tuple[Tensor, Tensor | slice]]:
        """Centred rows with a last column of ones, a few at a time and always in one place, and which they are."""
        chunk = min(chunk or self.chunk, self.chunk)
        count = self.count if some is None else len(some)
        for start in range(0, count, chunk):
            which = slice(start, start + chunk) if some is None else some[start : start + chunk]
            part = self._take(which)
            rows = self._buffer[: len(part)]
            torch.sub(part, self.mean, out=rows[:, : self.dim])  # in the buffer's precision
            yield rows, which

    def scattered(self, share: float) -> Tensor:
        """About that share of this rank's rows, spread evenly over all ranks' whatever order or period they have."""
        return (self.positions * _GOLDEN % 2**32 < share * 2**32).nonzero().flatten()

    def result(self, found: Tensor) -> LinearProbeResult:
        """A model from its weights with a last column of biases, in the units of the features."""
        weight, bias = found[:, : self.dim], found[:, self.dim]
        return LinearProbeResult(*(torch.empty_like(x, dtype=self.given).copy_(x) for x in (weight, bias)))

    def raw(self, weight: Tensor) -> LinearProbeResult:
        """Weights ``[C, d + 1]`` of standardised rows in the units of the features."""
        scaled = weight[:, : self.dim] * self.scale
        bias = weight[:, self.dim] - scaled @ self.mean.to(scaled)
        return LinearProbeResult(scaled.to(self.given), bias.to(self.given))

    def standard(self, fitted: LinearProbeResult) -> Tensor:
        """The inverse of :meth:`raw`."""
        weight, bias = (part.to(self.scale) for part in fitted)
        deviation = torch.where(self.scale > 0, 1 / self.scale, 0)
        return torch.cat([weight * deviation, (bias + weight @ self.mean.to(weight))[:, None]], dim=1)


def place_rows(
    rows: Tensor, together: Together, positions: Tensor | None = None, count: int | None = None
) -> tuple[int, Tensor, torch.dtype]:
    """Collective: how many rows all ranks have, the places of this rank's among them, and their type.

    Args:
        rows: This rank's.
        together: The ranks.
        positions: The places, if they are known.
        count: How many of the rows count; by default all.
    """
    count = len(rows) if count is None else count
    own = positions

    def look() -> list[Tensor]:
        nonlocal own
        own = torch.arange(count, device=rows.device) if positions is None else positions.to(rows.device, torch.long)
        return [torch.tensor((count, rows.shape[1], _TYPES.index(rows.dtype)))]

    counts, widths, types = together.each(look, [(3,)])[0].long().T.tolist()
    if len(set(widths)) > 1:
        raise ValueError(f"all ranks' rows must have as many dimensions, got {widths} by rank; embed with one encoder")
    found = [number for number, n in zip(types, counts, strict=True) if n] or types
    if len(set(found)) > 1:
        names = [str(_TYPES[number]) for number in types]
        raise ValueError(f"all ranks' rows must be of one type, got {names} by rank; convert them")
    assert own is not None
    places = own.add_(sum(counts[: together.rank])) if positions is None else own
    return sum(counts), places, _TYPES[found[0]]


def _count(features: Tensor, only: Tensor | None) -> int:
    return len(features if only is None else only)


class Classes:
    """Softmax and cross-entropy of one class a row."""

    def __init__(self, design: Design, labels: Tensor, num_classes: int) -> None:
        self.design, self.labels, self.outputs = design, labels, num_classes

    def loss(self, weight: Tensor, some: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sums over this rank's rows of the cross-entropy of logits x W^T, and of its gradient, in one pass."""
        loss = torch.zeros((), dtype=self.design.together.wide, device=weight.device)
        grad = torch.zeros_like(weight, dtype=loss.dtype)
        for rows, which in self.design.chunks(some, max(16, self.design.budget // (2 * len(weight)))):
            z, truth = times_transposed(weight, rows), self.labels[which][None]  # C x n
            z -= z.gather(0, truth)  # relative to the true class
            top = z.amax(dim=0, keepdim=True)
            total = z.sub_(top).exp_().sum(dim=0, keepdim=True)
            loss += (total.log() + top).sum()
            z.div_(total).scatter_add_(0, truth, torch.full_like(top, -1.0))
            grad += times_transposed(z, rows.T)
        return loss, grad

    def settle(self, gradient: Tensor) -> Tensor:
        """Adding one vector to all classes changes nothing: take out what rounding adds in that direction."""
        return gradient - gradient.mean(dim=0)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)


class Attributes(Classes):
    """A sigmoid and binary cross-entropy for each of several attributes of a row; `labels` are 0 or 1, ``[n, C]``."""

    def loss(self, weight: Tensor, some: Tensor | None) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=self.design.together.wide, device=weight.device)
        grad = torch.zeros_like(weight, dtype=loss.dtype)
        for rows, which in self.design.chunks(some, max(16, self.design.budget // (4 * len(weight)))):
            logits, truth = times_transposed(rows, weight), self.labels[which].to(rows.dtype)
            loss += F.binary_cross_entropy_with_logits(logits, truth, reduction="sum")
            grad += times_transposed((logits.sigmoid_() - truth).T, rows.T)
        return loss, grad

    def settle(self, gradient: Tensor) -> Tensor:
        return gradient

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


def fit_linear_probe(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    l2: float = 1e-4,
    max_iter: int = 500,
    tolerance: float = 1e-3,
    start: LinearProbeResult | None = None,
    sharded: bool | Together = False,
    positions: Tensor | None = None,
    budget: int = BUDGET,
) -> LinearProbeResult:
    r"""Fit multinomial logistic regression to convergence by L-BFGS.

    Minimises the mean cross-entropy plus :math:`\frac{\lambda}{2} \|W\|_F^2` over W and an unpenalised bias, on
    features standardised to mean 0 and variance 1. In scikit-learn's terms :math:`\lambda = 1 / (C N)`. With `labels`
    of several attributes a row, each has its own sigmoid and binary cross-entropy, and the loss is their sum.

    The search is preconditioned by the Hessian's blocks, one a class, along the features' leading directions: an order
    of magnitude fewer steps than on raw features, to the same optimum. Memory beyond the features is bounded.

    Args:
        features: ``[N, d]``.
        labels: integers in [0, num_classes), at least two different ones, ``[N]``; or zeros and ones ``[N, C]``.
        num_classes: the number of classes C.
        l2: :math:`\lambda`, positive.
        max_iter: a limit on the steps; where it is reached, a warning says so.
        tolerance: stop when the norm of the whitened gradient is at most that, of little data a thousandth of that:
            half its square is about what the objective has still to fall.
        start: weights to begin with, of an earlier fit of similar features.
        sharded: each rank passes its own rows (also none), all call together and get the same weights; the ranks may be
            named, :class:`lightning_ssl.distributed.Together`.
        positions: the place of each of this rank's rows among all ranks' rows, ``[N]``: with it the result does not
            depend on which rank has which row; by default rows stand in the order of ranks.
        budget: how many numbers a chunk may hold.

    Returns:
        Weight ``[C, d]`` and bias ``[C]`` in the units of the raw features.

    Example:
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> weight, bias = fit_linear_probe(x, torch.tensor([0, 0, 1, 1]), num_classes=2)
        >>> (x @ weight.T + bias).argmax(dim=1)
        tensor([0, 0, 1, 1])
    """
    return fit_linear_path(features, labels, num_classes, [l2], max_iter, tolerance, start, sharded, positions, budget)[
        0
    ]


def fit_linear_path(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    l2: Sequence[float],
    max_iter: int = 500,
    tolerance: float = 1e-3,
    start: LinearProbeResult | None = None,
    sharded: bool | Together = False,
    positions: Tensor | None = None,
    budget: int = BUDGET,
    only: Tensor | None = None,
) -> list[LinearProbeResult]:
    """Fit :func:`fit_linear_probe` for several penalties, each from where the stronger one before it ended.

    The steps' curvature is kept along the path, the penalty's own part of it corrected exactly: ten values cost little
    more than one or two.

    Args:
        features: See :func:`fit_linear_probe`, as for all but `l2`.
        labels: The classes or attributes.
        num_classes: How many there are.
        l2: The penalties, in any order.
        max_iter: A limit on the steps of each.
        tolerance: Of each.
        start: Weights to begin with.
        sharded: Whether each rank passes its own rows.
        positions: The places of rows among all ranks'.
        budget: How many numbers a chunk may hold.
        only: Which of the rows are fitted, by default all; `labels` and `positions` are of these. So a part of the
            rows need not be copied.

    Returns:
        The models, in the order of `l2`.

    Example:
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> strong, weak = fit_linear_path(x, torch.tensor([0, 0, 1, 1]), 2, [1.0, 1e-3])
        >>> bool(strong.weight.norm() < weak.weight.norm())
        True
    """
    if not len(l2):
        raise ValueError("`l2` must hold at least one penalty, got none")
    for value in l2:
        check_positive(value, "l2")
    if max_iter < 1:
        raise ValueError(f"`max_iter` must be at least 1, got {max_iter}")
    if start is not None and tuple(start.weight.shape) != (num_classes, *features.shape[1:]):
        wanted = [num_classes, *features.shape[1:]]
        raise ValueError(f"`start` must have weights {wanted}, a row a class, got {list(start.weight.shape)}")
    together = sharded if isinstance(sharded, Together) else Together(features.device, sharded)
    with undisturbed(features.device):
        labels = _check(features, labels, num_classes, together, only)
        design = Design(features, together, positions, budget, num_classes, only)
        loss = (Attributes if labels.ndim == 2 else Classes)(design, labels, num_classes)
        basis = Basis(design)
        descent = Descent(loss, basis)
        tolerance *= _EXACT if design.small else 1.0
        if start is not None:
            descent.begin(lambda: design.standard(start) @ basis.vectors)
        stages = [] if start is not None else [max(l2) * factor for factor in _STAGES if max(l2) * factor < 0.1]
        wanted = sorted(((value, i) for i, value in enumerate(l2)), reverse=True)
        fitted: dict[int, LinearProbeResult] = {}
        trail: list[tuple[float, Tensor]] = []  # the optimum moves about evenly with the logarithm of the penalty
        for number, (value, i) in enumerate([*((value, None) for value in stages), *wanted]):
            if not number and start is None and tolerance < _ROUGH:
                # A quarter of the rows, where they are many, is enough to come near.
                share = 1 / 4 if design.total >= 64 * design.dim else 1.0
                descent.minimise(value, Curvature(loss, basis), _ROUGH, max_iter, share)
            if len(trail) == 2 and trail[0][0] > trail[1][0] > value:
                descent.leap(value, *trail)
            if not number or (i is not None and (number - len(stages)) % _EVERY == 0):
                curvature = Curvature(loss, basis, descent.weight)

            if i is None:
                descent.minimise(value, curvature, _LOOSE * tolerance, max_iter)
            else:
                told = partial(_told, design, basis, descent, max_iter, value)
                found = descent.minimise(value, curvature, tolerance, max_iter, told=told)
                assert found is not None
                fitted[i] = design.result(found)
            trail = [*trail[-1:], (value, descent.weight)]
    return [fitted[i] for i in range(len(l2))]


def _told(design: Design, basis: Basis, descent: Descent, max_iter: int, l2: float) -> Tensor:
    """What a search has come to, and a warning where it has not come to its end."""
    if descent.left:
        warnings.warn(
            f"`max_iter={max_iter}` steps were not enough for l2={l2:g}: the objective may still fall by about "
            f"{descent.left:.1e}; raise `max_iter` or `l2`",
            stacklevel=1,
        )
    weight, bias = design.raw(descent.weight @ basis.vectors.T)
    return torch.cat([weight, bias[:, None]], dim=1)


def _check_shape(features: Tensor, together: Together) -> None:
    with trusting():  # whether numbers are finite is seen from their sums
        check_rows(features, "features", min_rows=2 if together.ranks == 1 else 0)


def _check(
    features: Tensor, labels: Tensor, num_classes: int, together: Together, only: Tensor | None = None
) -> Tensor:
    """Collective: the labels of the rows, on their device; what any rank cannot use is refused on all."""
    count, own = _count(features, only), labels

    def look() -> list[Tensor]:
        nonlocal own
        _check_shape(features, together)
        if labels.ndim == 2:
            if labels.shape != (count, num_classes) or bool(((labels != 0) & (labels != 1)).any()):
                raise ValueError(
                    f"`labels` must be zeros and ones of shape {(count, num_classes)}, one column a class, got "
                    f"{tuple(labels.shape)} of {labels.dtype}"
                )
            own = labels.to(features.device).clone()
            return [torch.stack([column.ne(0).any() for column in labels.T])]
        check_labels(labels, num_classes, count)
        own = labels.to(features.device, torch.long, copy=True)
        return [F.one_hot(own.unique(), num_classes).sum(dim=0)]

    present = together.sum(look, [(num_classes,)])[0]
    if labels.ndim == 1 and int((present > 0).sum()) < 2:
        raise ValueError("`labels` hold one class only; a probe needs at least two: check the split")
    return own


def fit_ridge(
    features: Tensor,
    targets: Tensor,
    l2: Sequence[float],
    sharded: bool | Together = False,
    positions: Tensor | None = None,
    budget: int = BUDGET,
    only: Tensor | None = None,
) -> list[LinearProbeResult]:
    r"""Ridge regression of continuous targets in closed form, for several penalties at once.

    Minimises :math:`\frac{1}{2N} \sum \|y - W x - b\|^2 + \frac{\lambda}{2} \|W\|^2` on standardised features, by one
    eigendecomposition of their second moment, which is summed over ranks.

    Args:
        features: ``[N, d]``; see :func:`fit_linear_probe`, as for `sharded`, `positions` and `budget`.
        targets: floating point, ``[N, T]``.
        l2: the penalties.
        sharded: whether each rank passes its own rows.
        positions: the places of rows among all ranks'.
        budget: how many numbers a chunk may hold.
        only: which of the rows are fitted, by default all; `targets` and `positions` are of these.

    Returns:
        The models in the units of the features and the targets, in the order of `l2`.

    Example:
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]])
        >>> weight, bias = fit_ridge(x, 3 * x + 2, [1e-9])[0]
        >>> weight.round(decimals=4), bias.round(decimals=4)
        (tensor([[3.]]), tensor([2.]))
    """
    for value in l2:
        check_positive(value, "l2")
    together = sharded if isinstance(sharded, Together) else Together(features.device, sharded)
    count = _count(features, only)

    def look() -> list[Tensor]:
        _check_shape(features, together)
        if targets.ndim != 2 or len(targets) != count or not targets.is_floating_point():
            raise ValueError(
                f"`targets` must be floating point [{count}, T], got {tuple(targets.shape)} of {targets.dtype}"
            )
        check_rows(targets, "targets", min_rows=0)
        return [torch.tensor(targets.shape[1])]

    with undisturbed(features.device):
        widths = together.each(look, [()])[0].long().tolist()
        if len(set(widths)) > 1:
            raise ValueError(f"all ranks' `targets` must have as many columns, got {widths} by rank")
        design = Design(features, together, positions, budget, only=only)
        dim, outputs, wide = design.dim, widths[0], together.wide
        centre = together.sum(lambda: [targets.sum(dim=0, dtype=wide)], [(outputs,)])[0] / design.total

        def moments() -> list[Tensor]:
            gram = torch.zeros(dim, dim, dtype=wide, device=features.device)
            cross = torch.zeros(outputs, dim, dtype=wide, device=features.device)
            for rows, which in design.chunks():
                x = rows[:, :dim].to(wide)  # where features depend on each other, the last digits decide
                gram.addmm_(x.T, x)
                cross.addmm_((targets[which].to(wide) - centre).T, x)
            return [gram, cross]

        gram, cross = together.sum(moments, [(dim, dim), (outputs, dim)])
        scale = design.scale

        def solve() -> list[Tensor]:  # on one rank: another's processor may round otherwise
            if together.rank:
                return [torch.zeros(len(l2), outputs, dim + 1)]
            values, vectors = torch.linalg.eigh(gram * scale * scale[:, None] / design.total)
            turned = cross * scale @ vectors / design.total
            weights = [turned / (values.clamp_min(0) + penalty) @ vectors.T for penalty in l2]
            models = [design.raw(torch.cat([weight, centre[:, None]], dim=1)) for weight in weights]
            return [torch.stack([torch.cat([weight, bias[:, None]], dim=1) for weight, bias in models])]

        return [design.result(found) for found in together.sum(solve, [(len(l2), outputs, dim + 1)])[0]]
