"""The curvature of linear models' losses: the Hessian's blocks, one an output, in the features' own directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ssl.functional.products import times_transposed

# Numbers that the Hessian's blocks may hold: 2^24 floats are 64 MB, and their inverses as much again.
_BLOCKS = 2**24
# Rows that count themselves in a block, for each of its dimensions: at least, and at most where they cost little.
_ROWS = 4, 14
# How far the variance of few rows may be above that of all.
_EXCESS = 1.5
# Weights of rows are told apart by that many steps an octave, so many steps down.
_FINE, _STEPS = 4, 160


class Basis:
    """The principal directions of the standardised features, ascending, and the place of the bias after them.

    Args:
        design: The rows; see :class:`lightning_ssl.functional.regression.Design`.
    """

    rows: Tensor  # of this rank, those that the directions are found from

    def __init__(self, design: Any) -> None:
        self._design, together, dim = design, design.together, design.dim
        share = 8 * (dim + 1) / design.total  # a few rows for each dimension; of few rows all

        def second_moment() -> list[Tensor]:
            self.rows = design.scattered(share if share < 0.5 else 1.0)
            gram = torch.zeros(dim + 1, dim + 1, dtype=together.wide, device=design.features.device)
            for rows, _ in design.chunks(self.rows):  # directions of equal spread turn with the last digit
                rows = rows.to(gram)
                gram.addmm_(rows.T, rows)
            return [gram[:dim, :dim], torch.tensor(float(len(self.rows)))]

        gram, self.count = together.sum(second_moment, [(dim, dim), ()])

        def turn() -> list[Tensor]:  # on one rank: another's processor may round otherwise
            if together.rank:
                return [gram.new_zeros(dim), torch.zeros_like(gram)]
            moment = gram / self.count * design.scale * design.scale[:, None]
            # All rows' variance is 1: where it is far more of these few, one of them stands for too many.
            excess = (moment.diagonal() / _EXCESS).clamp_min(1).rsqrt()
            return list(torch.linalg.eigh(moment * excess * excess[:, None]))

        values, self._directions = together.sum(turn, [(dim,), (dim, dim)])
        self.values: Tensor = torch.cat([values.clamp_min(0), values.new_ones(1)])

    # Both are made when they are first asked for, in the work before an exchange, so that all ranks know what fails.

    @cached_property
    def vectors(self) -> Tensor:
        """The directions as columns, ``[d + 1, d + 1]``."""
        every = torch.eye(len(self.values), dtype=self.values.dtype, device=self.values.device)
        every[:-1, :-1] = self._directions
        return every

    @cached_property
    def turn(self) -> Tensor:
        """From weights along the directions to those of rows that are centred but not scaled."""
        scale = torch.cat([self._design.scale, self._design.scale.new_ones(1)])
        return (self.vectors * scale[:, None]).to(self._design.dtype)

    def raw(self, weight: Tensor) -> Tensor:
        """Weights along the directions, for rows that are centred but not scaled, as the loss takes them."""
        return times_transposed(weight.to(self.turn), self.turn)

    def along(self, gradient: Tensor) -> Tensor:
        """A gradient in such weights, along the directions."""
        return times_transposed(gradient.to(self.turn), self.turn.T).to(gradient)


class Curvature:
    """About the inverse of the loss's Hessian at a point, for any penalty.

    The Hessian is the mean over rows of B_n ⊗ x_n x_n^T, with B_n that of the loss in the outputs. Its blocks on the
    diagonal, one an output, are means of x x^T with weights q = p (1 - p), which single out other directions for each
    output. They are taken as they are along the leading principal directions of the features, as many as `_BLOCKS`
    allows, and beyond these as a mean weight times the features' second moment. Of the rows the heaviest count
    themselves in their output's block, the others by their mean. Heavy is what is uncertain or far out: q times the
    row's norm. What couples outputs is left to the search's memory.

    Args:
        loss: What is minimised; see :class:`lightning_ssl.functional.regression.Classes`.
        basis: Of the same rows.
        weight: Where the curvature is taken, along the directions, ``[C, d + 1]``; by default at zero, where all rows
            have the same q.
    """

    def __init__(self, loss: Any, basis: Basis, weight: Tensor | None = None) -> None:
        design = loss.design
        self._basis = basis
        self._room = int(_BLOCKS * design.portion)
        # As many directions as there is memory for, and no more than pay: the blocks cost a look or two at all rows.
        room = self._room // loss.outputs
        most = design.dim if design.dim**2 <= min(room, design.total) else math.isqrt(min(room, design.total // 3))
        self._leading = 0 if weight is None else max(1, min(design.dim, most))
        self._inverse: tuple[float, Tensor] | None = None
        self._loss = loss
        if weight is None:
            return
        raw = cache(lambda: basis.raw(weight))
        scale = (design.scale / (design.scale > 0).sum().clamp_min(1).sqrt()).to(design.dtype)

        def weigh(rows: Tensor) -> tuple[Tensor, Tensor]:
            p = loss.probabilities(times_transposed(rows, raw()))
            q = torch.addcmul(p, p, p, value=-1)
            # In place: memory for a copy might be new each time, and the system takes longer to give it.
            return q, q * rows[:, :-1].mul_(scale).norm(dim=1, keepdim=True)

        # As much work as two looks at all rows, and as little memory as an output's block in sixteen.
        cheap = min(4 * design.total * design.dim // self._leading**3, room // 16 // self._leading)
        least = _threshold(loss, basis, weigh, self._leading * min(max(_ROWS[0], cheap), _ROWS[1]))
        self._weights, light, found = _heaviest(loss, weigh, least)
        self._blocks = self._moments(found, light)

    @cached_property
    def _weights(self) -> Tensor:
        """The mean weight of each output's rows."""
        even = self._loss.probabilities(self._loss.design.mean.new_zeros(1, self._loss.outputs))
        return (even - even.square())[0].to(self._basis.values)

    @cached_property
    def _floor(self) -> float:
        return 1e-6 * float(self._weights.mean() * self._basis.values[:-1].mean())

    def _moments(self, found: list[tuple[Tensor, Tensor, Tensor]], light: Tensor) -> Tensor:
        """Collective: the blocks, a few outputs at a time, of the rows that were found and the light ones."""
        loss, design, together = self._loss, self._loss.design, self._loss.design.together
        size = self._leading + 1
        width = max(1, self._room // 64 // size**2)  # outputs at a time
        own = cache(partial(self._own_moments, found))  # made before the first exchange
        for first in range(0, loss.outputs, width):
            some = slice(first, min(first + width, loss.outputs))
            shapes = [(some.stop - first, size, size)]
            moment = together.sum(lambda some=some: [own()[some]], shapes, design.dtype)[0]
            torch.div(moment, design.total, out=own()[some])
        blocks = own()
        # And a little that keeps rows which are all certain regular.
        diagonal = blocks.diagonal(dim1=1, dim2=2)
        diagonal[:, :-1] += light[1][:, None] * self._basis.values[-size:-1]
        diagonal[:, -1] += light[0]
        diagonal += 1e-6 * self._weights.mean()
        return blocks

    def _own_moments(self, found: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """The sums over this rank's rows that were found, each of which is read and turned once, whoever weighs it."""
        loss, design = self._loss, self._loss.design
        turn = self._basis.turn[:, -self._leading - 1 :].T.contiguous()
        size, none = len(turn), turn.new_zeros(0)
        moments = turn.new_zeros(loss.outputs, size, size)
        row, output, q = (torch.cat(part) for part in zip((none.long(), none.long(), none), *found, strict=True))
        rows, which = row.unique_consecutive(return_inverse=True)
        stretch = max(64, self._room // 4 // size // 64 * 64)  # rows that are held, turned
        bounds = torch.arange(0, len(rows) + stretch, stretch, device=rows.device)
        ends = torch.searchsorted(which, bounds).tolist()
        for first, start, end in zip(range(0, len(rows), stretch), ends, ends[1:], strict=False):
            several = rows[first : first + stretch]
            turned = turn.new_empty(len(several) + -len(several) % 64, size)
            for (part, _), place in zip(design.chunks(_padded(several)), turned.split(design.chunk), strict=True):
                place.copy_(times_transposed(part, turn))
            order = output[start:end].argsort(stable=True)
            counts = torch.bincount(output[start:end], minlength=loss.outputs).tolist()
            places, shares = ((x[start:end] - off)[order].split(counts) for x, off in ((which, first), (q, 0)))
            for moment, place, share in zip(moments, places, shares, strict=True):
                if len(place):
                    y = turned.index_select(0, _padded(place))
                    moment += times_transposed((y * _padded(share)[:, None]).T, y.T)
        return moments

    def solve(self, gradients: Tensor, penalty: Tensor) -> Tensor:
        """The inverse times gradients ``[..., C, d + 1]`` along the directions, for a penalty of each of them."""
        size = self._leading + 1 if self._leading else 0
        cut = gradients.shape[-1] - size
        plain = self._weights.to(gradients)[:, None] * self._basis.values[:cut].to(gradients)
        solved = torch.empty_like(gradients)
        torch.div(gradients[..., :cut], plain.clamp_min_(self._floor).add_(penalty[:cut]), out=solved[..., :cut])
        if size:  # all at once: the blocks are more to read than to multiply
            rows = gradients[..., cut:].reshape(-1, *solved[..., cut:].shape[-2:]).transpose(0, 1)
            solved[..., cut:] = torch.bmm(rows, self._inverted(penalty)).transpose(0, 1).view_as(solved[..., cut:])
        return solved

    def _inverted(self, penalty: Tensor) -> Tensor:
        if self._inverse is None or self._inverse[0] != float(penalty[0]):
            whole = torch.empty_like(self._blocks) if self._inverse is None else self._inverse[1]
            self._inverse = None
            factor = whole.mT  # as LAPACK has matrices; it is one and the same place for all of them
            failed = torch.empty(len(whole), dtype=torch.int32, device=whole.device)
            diagonal = whole.diagonal(dim1=1, dim2=2)
            for larger in (1, 100, 10_000):  # rounding may leave a block short of regular
                whole.copy_(self._blocks)
                diagonal += penalty[-whole.shape[1] :]
                shift = 4 * torch.finfo(whole.dtype).eps * whole.shape[1] * diagonal.amax(dim=1, keepdim=True)
                diagonal += larger * shift
                torch.linalg.cholesky_ex(factor, out=(factor, failed))
                if not bool(failed.any()):
                    break
            self._inverse = float(penalty[0]), torch.cholesky_inverse(factor, out=factor).mT
        return self._inverse[1]


def _threshold(loss: Any, basis: Basis, weigh: Any, wanted: int) -> Callable[[], Tensor]:
    """Collective: the weight above which each output has about `wanted` rows, found from those of the basis.

    It is made when it is asked for, in the work before the next exchange.
    """
    design, together, outputs = loss.design, loss.design.together, loss.outputs

    def look() -> list[Tensor]:
        counts = torch.zeros(outputs * _STEPS, dtype=torch.long, device=design.features.device)
        shelves = _STEPS * torch.arange(outputs, device=counts.device)
        for rows, _ in design.chunks(basis.rows, _few(loss)):
            down = weigh(rows)[1].clamp_min_(1e-30).log2_().mul_(-_FINE).long().clamp_(0, _STEPS - 1)
            counts += torch.bincount((down + shelves).flatten(), minlength=len(counts))
        return [counts.view(outputs, _STEPS)]

    counts = together.sum(look, [(outputs, _STEPS)])[0]

    @cache
    def least() -> Tensor:
        steps = (counts.cumsum(dim=1) * (design.total / basis.count) <= wanted).sum(dim=1)
        return torch.exp2(-steps / _FINE).to(design.dtype)

    return least


def _few(loss: Any) -> int:
    """Rows whose outputs take no more room than a chunk of rows."""
    return max(16, loss.design.chunk * loss.design.dim // (2 * loss.outputs))


def _heaviest(
    loss: Any, weigh: Any, least: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """Collective: each output's mean weight; what of the mean q and weight light rows have; this rank's heavier ones.

    Of these, which they are, for which output, and their q.
    """
    design, together, outputs = loss.design, loss.design.together, loss.outputs
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def look() -> list[Tensor]:
        total, at = torch.zeros(3, outputs, dtype=together.wide, device=design.features.device), 0
        for rows, _ in design.chunks(None, _few(loss)):
            q, weights = weigh(rows)
            total[0] += weights.sum(dim=0)
            row, output = (weights > least()).nonzero(as_tuple=True)
            found.append((row + at, output, q[row, output]))
            for mean, part in zip(total[1:], (q, weights), strict=True):
                part[row, output] = 0
                mean += part.sum(dim=0)
            at += len(rows)
        return [total]

    total = together.sum(look, [(3, outputs)])[0] / design.total
    return total[0], total[1:], found


def _padded(x: Tensor) -> Tensor:
    """With zeros up to a multiple of 64: few shapes, see :func:`times_transposed`."""
    return F.pad(x, (0, -len(x) % 64))
