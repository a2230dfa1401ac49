"""L-BFGS for penalised linear models, preconditioned by what the Hessian is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.functional.curvature import Basis, Curvature

# Pairs of steps and changes of the gradient that are kept.
_HISTORY = 20


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())


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
        # Steps, and changes of the loss's gradient, in the precision of the rows: they only say where to go.
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._value: Tensor | None = None
        self._gradient: Tensor | None = None
        self._ahead: tuple[float, Tensor, float, Tensor]  # what :meth:`_direction` found last
        self.evaluations = 0.0  # in passes over all rows
        self.left = 0.0  # about how far the objective has still to fall, where the steps were not enough

    def begin(self, weight: Tensor) -> None:
        """Go on from here, unless zero is better."""
        at_zero, _ = self._at(self.weight)
        value, gradient = self._at(weight)
        if bool(value < at_zero):
            self.weight, self._value, self._gradient = weight, value, gradient

    def _evaluate(self, point: Callable[[], Tensor | None], some: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Collective: the mean loss and its gradient at a point that each rank finds for itself, or none.

        To find it and to add up are one exchange: what goes wrong in either is known to all ranks after it.
        """
        design = self._loss.design

        def make() -> list[Tensor]:
            weight = point()
            if weight is None:
                return [self.weight.new_zeros(()), torch.zeros_like(self.weight), self.weight.new_tensor(math.nan)]
            loss, gradient = self._loss.loss(self._basis.raw(weight), some)
            count = len(design.features) if some is None else len(some)
            return [loss, self._basis.along(gradient), torch.tensor(float(count))]

        loss, gradient, rows = self._together.sum(make, [(), self._shape, ()])
        count = float(rows)
        if math.isnan(count):
            return None
        self.evaluations += count / design.total
        return loss / count, self._loss.settle(gradient / count)

    def _at(self, weight: Tensor, some: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = self._evaluate(lambda: weight, some)
        assert found is not None  # there is a point
        return found

    def minimise(
        self, l2: float, curvature: Curvature, tolerance: float, max_iter: int, some: Tensor | None = None
    ) -> Tensor:
        """Collective: go down until the norm of the whitened gradient is at most `tolerance`.

        With `some`, only of those rows; what was learnt of them is then forgotten but for the weights.
        """
        penalty = l2 * self._penalised
        if self._value is None or self._gradient is None or some is not None:
            self._value, self._gradient = self._at(self.weight, some)
        value, gradient = self._value, self._gradient
        self.left = 0.0
        last: Tensor | None = None  # the gradient before the newest pair, by the same curvature

        def ahead() -> Tensor | None:
            self._ahead = self._direction(gradient + penalty * self.weight, last, curvature, penalty)
            norm, direction, slope, _ = self._ahead
            return None if norm <= tolerance or not slope < 0 else self.weight + direction

        for _ in range(max_iter):
            new = self._evaluate(ahead, some)
            norm, direction, slope, solved = self._ahead
            before, step = float(value + 0.5 * (penalty * self.weight.square()).sum()), 1.0
            while new is not None:
                weight = self.weight + step * direction
                after = float(new[0] + 0.5 * (penalty * weight.square()).sum())
                rise = after - before
                if rise <= 1e-4 * step * slope or step < 1e-6:
                    break
                guess = -slope * step**2 / (2 * (rise - slope * step)) if rise == rise else 0.0
                step = min(max(guess, 0.1 * step), 0.5 * step)
                new = self._at(self.weight + step * direction, some)
            if new is None or not after < before:  # there, or rounding is all that is left
                break
            last = solved if self._remember(step * direction, new[1] - gradient) else None
            self.weight, (value, gradient) = weight, new
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
        value, gradient = self._at(weight)
        here = self._value + 0.5 * (penalty * self.weight.square()).sum()
        if bool(value + 0.5 * (penalty * weight.square()).sum() < here):
            self._remember(weight - self.weight, gradient - self._gradient)
            self.weight, self._value, self._gradient = weight, value, gradient

    def _remember(self, step: Tensor, change: Tensor) -> bool:
        rises = bool(_dot(step, change) > 0)
        if rises:
            self._pairs = [*self._pairs[1 - _HISTORY :], (step.to(self._dtype), change.to(self._dtype))]
        return rises

    def _direction(
        self, gradient: Tensor, last: Tensor | None, curvature: Curvature, penalty: Tensor
    ) -> tuple[float, Tensor, float, Tensor]:
        """The norm of the gradient, whitened by all that is known of the curvature; where to go; the slope there.

        And what the curvature makes of the gradient, which is the `last` of the next call.
        """
        penalty = penalty.to(self._dtype)
        q = solved = curvature.solve(gradient.to(self._dtype), penalty)
        if self._pairs:
            q, turns = gradient.to(self._dtype, copy=True), []
            for s, change in reversed(self._pairs):
                y = torch.addcmul(change, penalty, s)  # the penalty's own part exactly, whatever it was at that step
                along = 1 / _dot(s, y)
                turns.append((along, along * _dot(s, q)))
                q.addcmul_(turns[-1][1], y, value=-1)
            s, change = self._pairs[-1]
            y = torch.addcmul(change, penalty, s)
            newest = curvature.solve(y, penalty) if last is None else solved - last
            q = curvature.solve(q, penalty).div_(turns[0][0] * _dot(y, newest))
            for (s, change), (along, part) in zip(self._pairs, reversed(turns), strict=True):
                q.addcmul_(part - along * _dot(torch.addcmul(change, penalty, s), q), s)
        q = self._loss.settle(q.to(gradient))
        slope = -float(_dot(q, gradient))
        return max(0.0, float(_dot(gradient, solved.to(gradient))), -slope) ** 0.5, -q, slope, solved
