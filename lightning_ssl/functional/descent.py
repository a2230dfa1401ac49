"""L-BFGS for penalised linear models, preconditioned by what the Hessian is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ssl.functional.curvature import Basis, Curvature

# Pairs of steps and changes of the gradient that are kept.
_HISTORY = 16

# A point to look at the rows from, and numbers of which the first rank's are to come back.
Question: TypeAlias = tuple[Tensor, tuple[float, ...]]
# The mean loss at that point, its gradient along the directions, and those numbers.
Answer: TypeAlias = tuple[Tensor, Tensor, list[float]]
Search: TypeAlias = Generator[Question, Any, None]
# How many numbers there may be.
_NUMBERS = 3


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())


def _penal(weight: Tensor, penalty: Tensor) -> float:
    return float(0.5 * (penalty * weight.square()).sum())


class Descent:
    """A search that can go on with another penalty: the loss's own part of everything is kept apart.

    Weights are along the directions of the basis, where the curvature is known, ``[C, d + 1]``.

    Args:
        loss: What is minimised; see :class:`lightning_ssl.functional.regression.Classes`.
        basis: Of the loss's rows.
    """

    def __init__(self, loss: Any, basis: Basis) -> None:
        design = loss.design
        self._loss, self._basis, self._together = loss, basis, design.together
        self._shape, self._dtype = (loss.outputs, design.dim + 1), design.dtype
        self.weight = torch.zeros(self._shape, dtype=self._together.wide, device=design.features.device)
        self._penalised = torch.ones(self._shape[1], dtype=self.weight.dtype, device=self.weight.device)
        self._penalised[-1] = 0
        # Steps, changes of the gradient, one over their product; in the rows' precision: they only say where to go.
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self._penalty = torch.zeros(self._shape[1], dtype=self._dtype, device=self.weight.device)  # what is in changes
        self._learnt = 0  # pairs so far
        self._value: Tensor | None = None
        self._gradient: Tensor | None = None
        self.evaluations = 0.0  # in passes over all rows
        self.left = 0.0  # about how far the objective has still to fall, where the steps were not enough

    def begin(self, start: Callable[[], Tensor]) -> None:
        """Collective: go on from where `start` says, unless zero is better."""

        def search() -> Search:
            weight = self._loss.settle(start())  # no step leads to another mean over classes
            at_zero, *_ = yield self.weight, ()
            value, gradient, _ = yield weight, ()
            if bool(value < at_zero):
                self.weight, self._value, self._gradient = weight, value, gradient

        self._drive(search())

    def minimise(
        self,
        l2: float,
        curvature: Curvature,
        tolerance: float,
        max_iter: int,
        share: float = 1.0,
        told: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """Collective: go down until the norm of the whitened gradient is at most `tolerance`.

        With a share of the rows, only of these; what was learnt of them is then forgotten but for the weights.

        Returns:
            What the first rank tells of the end, of the weights' shape, the same on all ranks.
        """
        self.left = 0.0
        if share < 1:
            self._value = self._gradient = None
        found = self._drive(self._descend(l2 * self._penalised, curvature, tolerance, max_iter), share, told)
        if share < 1:
            self._pairs, self._value, self._gradient = [], None, None
        return found

    def leap(self, l2: float, before: tuple[float, Tensor], last: tuple[float, Tensor]) -> None:
        """Collective: go on where two optima of stronger penalties point to, if the objective is lower there."""
        penalty = l2 * self._penalised

        def search() -> Search:
            if self._value is None or self._gradient is None:
                return
            ahead = math.log(l2 / last[0]) / math.log(last[0] / before[0])
            weight = last[1] + (last[1] - before[1]) * ahead
            value, gradient, (there, here, _) = yield weight, (_penal(weight, penalty), _penal(self.weight, penalty))
            if float(value) + there < float(self._value) + here:
                self._remember(weight - self.weight, gradient - self._gradient)
                self.weight, self._value, self._gradient = weight, value, gradient

        self._drive(search())

    def _drive(self, search: Search, share: float = 1.0, told: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Collective: answer what a search asks of the rows until it asks for no more; what the first rank tells then.

        What it does in between, every rank does alike, and in one exchange with the look at the rows that follows:
        whatever goes wrong on any rank is known to all of them after it. Where processors round otherwise a search
        might decide otherwise: it does so by the first rank's numbers, and is over where any rank's is.
        """
        design, together, sums = self._loss.design, self._together, None
        shapes: list[tuple[int, ...]] = [(), self._shape, (4 + _NUMBERS,)]
        leads, some = together.rank == 0, cache(lambda: None if share == 1 else design.scattered(share))

        def make() -> list[Tensor]:
            try:
                weight, numbers = search.send(None if sums is None else self._answer(*sums))
            except StopIteration:
                return [self.weight.new_ones(shape) for shape in shapes]
            rows = some()
            loss, gradient = self._loss.loss(self._basis.raw(weight), rows)
            count, known = design.count if rows is None else len(rows), self._learnt
            own = [*numbers, *[0.0] * (_NUMBERS - len(numbers))] if leads else [0.0] * _NUMBERS
            return [loss, gradient, loss.new_tensor([0.0, count, known, known**2, *own])]

        while True:
            sums = together.sum(make, shapes)
            over, rows, known, square = sums[2][:4].tolist()
            if over:
                break
            if known**2 != square * together.ranks:
                raise ValueError("the ranks' processors round too differently for one search; use equal ones")
            self.evaluations += rows / design.total
        if told is None:
            return None
        return together.sum(lambda: [told() if leads else torch.zeros(self._shape)], [self._shape])[0]

    def _answer(self, loss: Tensor, gradient: Tensor, told: Tensor) -> Answer:
        # Turned after the sum over ranks: theirs are large where the sum is nearly zero.
        rows, numbers = told[1], told[4:].tolist()
        return loss / rows, self._loss.settle(self._basis.along(gradient.div_(rows))), numbers

    def _descend(self, penalty: Tensor, curvature: Curvature, tolerance: float, max_iter: int) -> Search:
        if self._value is None or self._gradient is None:
            self._value, self._gradient, _ = yield self.weight, ()
        last: Tensor | None = None  # the gradient before the newest pair, by the same curvature
        for _ in range(max_iter):
            norm, direction, slope, solved = self._direction(
                self._gradient + penalty * self.weight, last, curvature, penalty
            )
            if norm <= tolerance or not slope < 0:
                return
            own, step = (_penal(self.weight, penalty), slope), 1.0
            while True:
                weight = self.weight + step * direction
                value, gradient, (there, here, slope) = yield weight, (_penal(weight, penalty), *own)
                before, after = float(self._value) + here, float(value) + there
                rise = after - before
                if rise <= 1e-4 * step * slope or step < 1e-6:
                    break
                guess = -slope * step**2 / (2 * (rise - slope * step)) if rise == rise else 0.0
                step = min(max(guess, 0.1 * step), 0.5 * step)
            if not after < before:  # rounding is all that is left
                return
            last = solved if self._remember(step * direction, gradient - self._gradient) else None
            self.weight, self._value, self._gradient = weight, value, gradient
        self.left = norm**2 / 2

    def _remember(self, step: Tensor, change: Tensor) -> bool:
        rises = bool(_dot(step, change) > 0)
        if rises:
            self._learnt += 1
            step, change = step.to(self._dtype), change.to(self._dtype)
            self._pairs = [*self._pairs[1 - _HISTORY :], self._pair(step, change.addcmul(self._penalty, step))]
        return rises

    def _pair(self, step: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return step, change, 1 / _dot(step, change)

    def _penalise(self, penalty: Tensor) -> None:
        """Give the changes another penalty's own part, whatever it was at their steps."""
        if not torch.equal(penalty, self._penalty):
            more, self._penalty = penalty - self._penalty, penalty
            self._pairs = [self._pair(s, y.addcmul_(more, s)) for s, y, _ in self._pairs]

    def _direction(
        self, gradient: Tensor, last: Tensor | None, curvature: Curvature, penalty: Tensor
    ) -> tuple[float, Tensor, float, Tensor]:
        """The norm of the gradient, whitened by all that is known of the curvature; where to go; the slope there.

        And what the curvature makes of the gradient, which is the `last` of the next call.
        """
        penalty, given = penalty.to(self._dtype), gradient.to(self._dtype)
        self._penalise(penalty)
        if not self._pairs:
            q = solved = curvature.solve(given, penalty)
        else:
            q, parts = given.clone(), []
            for s, y, along in reversed(self._pairs):
                parts.append(along * _dot(s, q))
                q.addcmul_(parts[-1], y, value=-1)
            _, y, along = self._pairs[-1]
            solved, q, *newest = curvature.solve(torch.stack([given, q, *([y] if last is None else [])]), penalty)
            q = q.div_(along * _dot(y, newest[0] if newest else solved - last))
            for (s, y, along), part in zip(self._pairs, reversed(parts), strict=True):
                q.addcmul_(part - along * _dot(y, q), s)
        q = self._loss.settle(q.to(gradient))
        slope = -float(_dot(q, gradient))
        return max(0.0, float(_dot(gradient, solved.to(gradient))), -slope) ** 0.5, -q, slope, solved
