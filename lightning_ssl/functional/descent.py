"""L-BFGS for penalised linear models, preconditioned by what the Hessian is made of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.functional.products import times_transposed

# Pairs of steps and changes of the gradient that are kept.
_HISTORY = 20
# Numbers that the Hessian's blocks may hold: 2^24 floats are 64 MB, and their inverses as much again.
_BLOCKS = 2**24
# Rows that count themselves in a block, for each of its dimensions.
_ROWS = 4
# Weights of rows are told apart by that many steps an octave, so many steps down.
_FINE, _STEPS = 4, 160


class Basis:
    """The principal directions of the standardised features, ascending, and the place of the bias after them.

    Args:
        design: The rows; see :class:`lightning_ssl.functional.regression.Design`.
    """

    def __init__(self, design: Any) -> None:
        together, dim = design.together, design.dim

        def few() -> Tensor:  # every so-manieth block of rows, a few rows for each dimension
            every = max(1, design.total // (8 * (dim + 1)))
            block = 64 if design.total >= 64 * every else 1
            return ((design.positions // block) % every == 0).nonzero().flatten()

        self.rows: Tensor = together.run(few)

        def second_moment() -> list[Tensor]:
            gram = torch.zeros(dim + 1, dim + 1, dtype=together.wide, device=design.features.device)
            for rows, _ in design.chunks(self.rows):
                gram += times_transposed(rows.T, rows.T)
            return [gram[:dim, :dim], torch.tensor(float(len(self.rows)))]

        gram, self.count = together.sum(second_moment, [(dim, dim), ()])

        def turn() -> tuple[Tensor, Tensor]:
            values, vectors = torch.linalg.eigh(gram / self.count * design.scale * design.scale[:, None])
            whole = torch.eye(dim + 1, dtype=together.wide, device=gram.device)
            whole[:dim, :dim] = vectors
            return torch.cat([values.clamp_min(0), values.new_ones(1)]), whole

        self.values, self.vectors = together.run(turn)


class Curvature:
    """About the inverse of the loss's Hessian at a point, for any penalty.

    The Hessian is the mean over rows of B_n ⊗ x_n x_n^T, with B_n that of the loss in the outputs. Its blocks on the
    diagonal, one an output, are means of x x^T with weights q = p (1 - p), which single out other directions for each
    output. They are taken as they are along the leading principal directions of the features, as many as `_BLOCKS`
    allows, and beyond these as the mean of q times the features' second moment. Of the rows the heaviest count
    themselves in their output's block, the others by their mean. What couples outputs is left to the search's memory.

    Args:
        loss: What is minimised; see :class:`lightning_ssl.functional.regression.Classes`.
        basis: Of the same rows.
        weight: Where the curvature is taken, ``[C, d + 1]``; by default at zero, where there is nothing but q's mean.
    """

    def __init__(self, loss: Any, basis: Basis, weight: Tensor | None = None) -> None:
        design = loss.design
        self._basis, self._dtype = basis, design.dtype
        # As many directions as there is memory for, and no more than pay: the blocks cost a few looks at all rows.
        most = math.isqrt(min(_BLOCKS // loss.outputs, design.total))
        self._leading = 0 if weight is None else max(1, min(design.dim, most))
        self._inverse: tuple[float, Tensor] | None = None
        if weight is None:
            even = design.together.run(lambda: loss.probabilities(design.mean.new_zeros(1, loss.outputs)))
            self._weights = (even - even.square())[0].to(basis.values)
            return
        raw = design.together.run(lambda: _scaled(design, weight))

        def heaviness(rows: Tensor) -> Tensor:
            p = loss.probabilities(times_transposed(rows, raw))
            return torch.addcmul(p, p, p, value=-1)

        least = _threshold(loss, basis, heaviness, _ROWS * self._leading)
        self._weights, which, shares, counts = _heaviest(loss, heaviness, least)
        self._blocks = self._moments(loss, which, shares, counts)

    def _moments(self, loss: Any, which: Tensor, shares: Tensor, counts: list[int]) -> Tensor:
        """Collective: the blocks, a few outputs at a time."""
        design, together = loss.design, loss.design.together
        size = self._leading + 1
        width = max(1, _BLOCKS // 8 // size**2)  # outputs at a time
        rest, at = self._weights.clone(), 0

        def prepare() -> tuple[Tensor, Tensor]:
            scale = torch.cat([design.scale, design.scale.new_ones(1)])[:, None]
            turn = (self._basis.vectors[:, -size:] * scale).to(design.dtype).T.contiguous()
            return turn, turn.new_empty(loss.outputs, size, size)

        turn, blocks = together.run(prepare)
        for first in range(0, loss.outputs, width):
            some = counts[first : first + width]

            def moments(some: list[int] = some, at: int = at) -> list[Tensor]:
                found = torch.zeros(len(some), size, size, dtype=design.dtype, device=design.features.device)
                heavy = found.new_zeros(len(some))
                for i, count in enumerate(some):
                    for rows, _ in design.chunks(which[at : at + count]):
                        share = shares[at : at + len(rows)]
                        y = times_transposed(rows, turn)
                        found[i] += times_transposed((y * share[:, None]).T, y.T)
                        heavy[i] += share.sum()
                        at += len(rows)
                return [found, heavy]

            found, heavy = together.sum(moments, [(len(some), size, size), (len(some),)])
            blocks[first : first + len(some)] = found / design.total
            rest[first : first + len(some)] -= heavy / design.total
            at += sum(some)
        # What the other rows weigh, and a little that keeps rows which are all certain regular.
        rest = rest.clamp_min(0)[:, None] * self._basis.values[-size:] + 1e-6 * self._weights.mean()
        blocks.diagonal(dim1=1, dim2=2).add_(rest)
        return blocks

    def solve(self, gradient: Tensor, penalty: Tensor) -> Tensor:
        """The inverse times a gradient, for a penalty of each column."""
        size = self._leading + 1 if self._leading else 0
        turned = gradient @ self._basis.vectors
        cut = turned.shape[1] - size
        plain = self._weights[:, None] * self._basis.values[:cut]
        solved = torch.empty_like(turned)
        solved[:, :cut] = turned[:, :cut] / (plain.clamp_min(1e-6 * float(plain.mean())) + penalty[:cut])
        if size:
            inverse = self._inverted(penalty)
            solved[:, cut:] = torch.bmm(turned[:, None, cut:].to(self._dtype), inverse)[:, 0]
        return solved @ self._basis.vectors.T

    def _inverted(self, penalty: Tensor) -> Tensor:
        if self._inverse is None or self._inverse[0] != float(penalty[0]):
            self._inverse = None  # the last one's memory is free first
            whole = self._blocks.clone()
            diagonal = whole.diagonal(dim1=1, dim2=2)
            diagonal += penalty[-whole.shape[1] :]
            shift = 4 * torch.finfo(whole.dtype).eps * whole.shape[1] * diagonal.amax(dim=1, keepdim=True)
            for larger in (1, 99, 9900):  # rounding may leave a block short of regular
                diagonal += larger * shift
                factor, failed = torch.linalg.cholesky_ex(whole)
                if not bool(failed.any()):
                    break
            del whole, diagonal
            self._inverse = float(penalty[0]), torch.cholesky_inverse(factor)
        return self._inverse[1]


def _threshold(loss: Any, basis: Basis, heaviness: Any, wanted: int) -> Tensor:
    """Collective: the weight above which each output has about `wanted` rows."""
    design, together, outputs = loss.design, loss.design.together, loss.outputs

    def look() -> list[Tensor]:
        counts = torch.zeros(outputs * _STEPS, dtype=torch.long, device=design.features.device)
        shelves = _STEPS * torch.arange(outputs, device=counts.device)
        for rows, _ in design.chunks(basis.rows, _few(loss)):
            down = heaviness(rows).clamp_min_(1e-30).log2_().mul_(-_FINE).long().clamp_(0, _STEPS - 1)
            counts += torch.bincount((down + shelves).flatten(), minlength=len(counts))
        return [counts.view(outputs, _STEPS)]

    counts = together.sum(look, [(outputs, _STEPS)])[0]
    steps = (counts.cumsum(dim=1) * (design.total / basis.count) <= wanted).sum(dim=1)
    return torch.exp2(-steps / _FINE).to(design.dtype)


def _few(loss: Any) -> int:
    """Rows whose outputs take no more room than a chunk of rows."""
    return max(16, loss.design.chunk * loss.design.dim // (2 * loss.outputs))


def _heaviest(loss: Any, heaviness: Any, least: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Collective: each output's mean weight; this rank's rows above the least, by output, their weights and numbers."""
    design, together, outputs = loss.design, loss.design.together, loss.outputs
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def look() -> list[Tensor]:
        total, at = torch.zeros(outputs, dtype=together.wide, device=design.features.device), 0
        for rows, _ in design.chunks(None, _few(loss)):
            q = heaviness(rows)
            total += q.sum(dim=0)
            row, output = (q > least).nonzero(as_tuple=True)
            found.append((row + at, output, q[row, output]))
            at += len(rows)
        return [total]

    weights = together.sum(look, [(outputs,)])[0] / design.total

    def by_output() -> tuple[Tensor, Tensor, list[int]]:
        none = design.mean.new_zeros(0)
        row, output, q = (torch.cat(part) for part in zip((none.long(), none.long(), none), *found, strict=True))
        order = output.argsort(stable=True)
        return row[order], q[order], torch.bincount(output, minlength=outputs).tolist()

    which, shares, counts = together.run(by_output)
    return weights, which, shares, counts


def _scaled(design: Any, weight: Tensor) -> Tensor:
    """Weights for rows that are centred but not scaled, as the loss takes them."""
    scaled = weight.clone()
    scaled[:, : design.dim] *= design.scale
    return scaled.to(design.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())


class Descent:
    """A search that can go on with another penalty: the loss's own part of everything is kept apart.

    Args:
        loss: What is minimised; see :class:`lightning_ssl.functional.regression.Classes`.
    """

    def __init__(self, loss: Any) -> None:
        design = loss.design
        self._loss, self._together = loss, design.together
        self._shape = loss.outputs, design.dim + 1
        self.weight = torch.zeros(self._shape, dtype=self._together.wide, device=design.features.device)
        self._penalised = torch.ones(self._shape[1], dtype=self.weight.dtype, device=self.weight.device)
        self._penalised[-1] = 0
        self._pairs: list[tuple[Tensor, Tensor]] = []  # steps, and changes of the loss's gradient
        self._value: Tensor | None = None
        self._gradient: Tensor | None = None
        self._some: Tensor | None = None
        self.evaluations = 0.0  # in passes over all rows
        self.left = 0.0  # about how far the objective has still to fall, where the steps were not enough

    def begin(self, weight: Tensor) -> None:
        """Go on from here, unless zero is better."""
        at_zero, _ = self._evaluate(self.weight)
        value, gradient = self._evaluate(weight)
        if bool(value < at_zero):
            self.weight, self._value, self._gradient = weight, value, gradient

    def _evaluate(self, weight: Tensor, some: Tensor | None = None) -> tuple[Tensor, Tensor]:
        design = self._loss.design

        def make() -> list[Tensor]:
            loss, gradient = self._loss.loss(_scaled(design, weight), some)
            count = len(design.features) if some is None else len(some)
            return [loss, gradient, torch.tensor(float(count))]

        loss, gradient, count = self._together.sum(make, [(), self._shape, ()])
        gradient[:, : design.dim] *= design.scale
        self.evaluations += float(count) / design.total
        return loss / count, self._loss.settle(gradient / count)

    def minimise(
        self, l2: float, curvature: Curvature, tolerance: float, max_iter: int, some: Tensor | None = None
    ) -> Tensor:
        """Collective: go down until the norm of the whitened gradient is at most `tolerance`.

        With `some`, only of those rows; what was learnt of them is then forgotten but for the weights.
        """
        penalty = l2 * self._penalised
        if self._value is None or self._gradient is None or some is not None:
            self._value, self._gradient = self._evaluate(self.weight, some)
        value, gradient = self._value, self._gradient
        self.left = 0.0
        for _ in range(max_iter):
            norm, direction, slope = self._together.run(
                lambda g=gradient: self._direction(g + penalty * self.weight, curvature, penalty)
            )
            if norm <= tolerance or not slope < 0:
                break
            before, step = float(value + 0.5 * (penalty * self.weight.square()).sum()), 1.0
            while True:
                weight = self.weight + step * direction
                new_value, new_gradient = self._evaluate(weight, some)
                after = float(new_value + 0.5 * (penalty * weight.square()).sum())
                rise = after - before
                if rise <= 1e-4 * step * slope or step < 1e-6:
                    break
                guess = -slope * step**2 / (2 * (rise - slope * step)) if rise == rise else 0.0
                step = min(max(guess, 0.1 * step), 0.5 * step)
            if not after < before:  # rounding is all that is left
                break
            self._remember(step * direction, new_gradient - gradient)
            self.weight, value, gradient = weight, new_value, new_gradient
        else:
            self.left = norm**2 / 2
        if some is None:
            self._value, self._gradient = value, gradient
        else:
            self._pairs, self._value, self._gradient = [], None, None
        return self.weight

    def leap(self, l2: float, weight: Tensor) -> None:
        """Collective: go on from another point, if the objective is lower there."""
        if self._value is None or self._gradient is None:
            return
        penalty = l2 * self._penalised
        value, gradient = self._evaluate(weight)
        here = self._value + 0.5 * (penalty * self.weight.square()).sum()
        if bool(value + 0.5 * (penalty * weight.square()).sum() < here):
            self._remember(weight - self.weight, gradient - self._gradient)
            self.weight, self._value, self._gradient = weight, value, gradient

    def _remember(self, step: Tensor, change: Tensor) -> None:
        if bool((step * change).sum() > 0):
            self._pairs = [*self._pairs[1 - _HISTORY :], (step, change)]

    def _direction(self, gradient: Tensor, curvature: Curvature, penalty: Tensor) -> tuple[float, Tensor, float]:
        """The norm of the gradient, whitened by all that is known of the curvature; where to go; the slope there."""
        norm = max(0.0, float(_dot(gradient, curvature.solve(gradient, penalty)))) ** 0.5
        q = gradient.clone()
        turns = []
        for s, loss_change in reversed(self._pairs):
            y = torch.addcmul(loss_change, penalty, s)  # the penalty's own part, exactly, whatever it was at that step
            along = 1 / _dot(s, y)
            part = along * _dot(s, q)
            q.addcmul_(part, y, value=-1)
            turns.append((along, part))
        if self._pairs:
            s, loss_change = self._pairs[-1]
            y = torch.addcmul(loss_change, penalty, s)
            q = curvature.solve(q, penalty) * (_dot(s, y) / _dot(y, curvature.solve(y, penalty)))
        else:
            q = curvature.solve(q, penalty)
        for (s, loss_change), (along, part) in zip(self._pairs, reversed(turns), strict=True):
            q.addcmul_(part - along * _dot(torch.addcmul(loss_change, penalty, s), q), s)
        q = self._loss.settle(q)
        slope = -float((q * gradient).sum())
        return max(norm, max(0.0, -slope) ** 0.5), -q, slope
