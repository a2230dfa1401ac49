"""L-BFGS for penalised linear models, preconditioned by what the Hessian is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Pairs of steps and changes of the gradient that are kept.
_HISTORY = 20


class Curvature:
    """About the inverse of the loss's Hessian, for any penalty.

    The Hessian is the mean over rows of B_n ⊗ x_n x_n^T, with B_n that of the loss in the outputs. In the eigenbases U
    of the mean of B and V of that of x x^T, weighted by the trace of B, its diagonal is taken as it is:
    ``H^-1 g = U [(U^T g V) / (h + l2)] V^T``. The rows in it are the least certain ones, a few for each dimension; the
    others enter by their mean. Before the first step all are alike, and every so-manieth is taken.

    Args:
        loss: What is minimised; see :class:`lightning_ssl.functional.regression.Classes`.
        weight: Where the curvature is taken, ``[C, d + 1]``; by default at zero.
    """

    def __init__(self, loss: Any, weight: Tensor | None = None) -> None:
        design, together = loss.design, loss.design.together
        dim, outputs, total, wide = design.dim, loss.outputs, design.total, together.wide
        wanted = 8 * (dim + 1)

        def prepare() -> tuple[Tensor, Tensor | None]:
            every = max(1, total // wanted)
            block = 64 if total >= 64 * every else 1
            strided = ((design.positions // block) % every == 0).nonzero().flatten()
            return strided, None if weight is None else _scaled(design, weight)

        strided, raw = together.run(prepare)

        def probabilities(rows: Tensor) -> Tensor:
            logits = rows.new_zeros(len(rows), outputs) if raw is None else rows @ raw.T
            return loss.probabilities(logits)  # type: ignore[no-any-return]

        def second_moment(some: Tensor) -> Tensor:
            gram = torch.zeros(dim, dim, dtype=wide, device=design.features.device)
            for rows, _ in design.chunks(some):
                gram += rows[:, :dim].T @ rows[:, :dim]
            return gram

        if raw is None:
            picked, rest = strided, 0.0
            count = float(together.sum(lambda: [torch.tensor(float(len(strided)))], [()])[0])
        else:
            picked, rest = _least_certain(loss, probabilities, wanted)
            count = float(total)

        def moments() -> list[Tensor]:
            spread = torch.zeros(outputs, outputs, dtype=wide, device=design.features.device)
            gram = torch.zeros(dim, dim, dtype=wide, device=design.features.device)
            for rows, _ in design.chunks(picked):
                p = probabilities(rows)
                spread += loss.spread(p)
                gram += (rows[:, :dim] * loss.uncertainty(p)[:, None]).T @ rows[:, :dim]
            plain = second_moment(strided) if rest else torch.zeros_like(gram)
            return [spread, gram, plain, torch.tensor(float(len(strided)))]

        shapes = [(outputs, outputs), (dim, dim), (dim, dim), ()]
        spread, gram, plain, strides = together.sum(moments, shapes)

        def bases() -> tuple[Tensor, ...]:
            scale = design.scale
            mixed = (gram / count + rest * plain / strides) * scale * scale[:, None]
            vectors = torch.eye(dim + 1, dtype=wide, device=gram.device)
            vectors[:dim, :dim] = torch.linalg.eigh(mixed)[1]
            directions = torch.linalg.eigh(spread)[1]
            scale = torch.cat([scale, scale.new_ones(1)])[:, None]
            return directions, vectors, directions.to(design.dtype), (vectors * scale).to(design.dtype)

        # The last one takes centred rows to standardised, turned ones.
        self._outputs, self._inputs, directions, turn = together.run(bases)

        def diagonal() -> list[Tensor]:
            found = torch.zeros(outputs, dim + 1, dtype=wide, device=design.features.device)
            others = torch.zeros(dim + 1, dtype=wide, device=design.features.device)
            for rows, _ in design.chunks(picked):
                found += loss.along(probabilities(rows), directions).T @ (rows @ turn).square()
            if rest:
                for rows, _ in design.chunks(strided):
                    others += (rows @ turn).square().sum(dim=0)
            return [found, others]

        found, others = together.sum(diagonal, [(outputs, dim + 1), (dim + 1,)])
        found = found / count + rest / outputs * others / strides
        self._diagonal = found.clamp_min(1e-6 * float(found.mean()))  # rows that are all certain leave it regular

    def whitened(self, gradient: Tensor, l2: Tensor) -> Tensor:
        """The gradient in coordinates in which the Hessian is about the identity."""
        return self._outputs.T @ gradient @ self._inputs * (self._diagonal + l2).rsqrt()

    def solve(self, gradient: Tensor, l2: Tensor) -> Tensor:
        turned = self._outputs.T @ gradient @ self._inputs / (self._diagonal + l2)
        return self._outputs @ turned @ self._inputs.T


def _least_certain(loss: Any, probabilities: Any, wanted: int) -> tuple[Tensor, float]:
    """Collective: which of this rank's rows are among the `wanted` least certain of all, and the others' mean share."""
    design, together = loss.design, loss.design.together

    def look() -> Tensor:
        parts = [loss.uncertainty(probabilities(rows)) for rows, _ in design.chunks()]
        uncertain.append(torch.cat(parts) if parts else design.mean.new_zeros(0))
        return uncertain[0].topk(min(wanted, len(uncertain[0]))).values

    def remaining() -> list[Tensor]:
        picked.append((uncertain[0] >= threshold).nonzero().flatten())
        return [uncertain[0].sum(dtype=together.wide) - uncertain[0][picked[0]].sum(dtype=together.wide)]

    uncertain: list[Tensor] = []
    picked: list[Tensor] = []
    top = torch.cat(together.gather(look))
    # A little lower, so that rows equally uncertain but for rounding are in it together, however rows are spread.
    threshold = top.topk(min(wanted, len(top))).values[-1] * (1 - 1e-3)
    rest = float(together.sum(remaining, [()])[0]) / design.total
    return picked[0], max(0.0, rest)


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
        norm = float(curvature.whitened(gradient, penalty).norm())
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
