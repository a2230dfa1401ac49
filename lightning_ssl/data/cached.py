"""The same views, bit for bit, on a CPU: a few images at a time, which stay in its cache, and nothing times zero.

Images whose colours change in the same order are treated together. A filter's sums are over whole numbers, exact in
float32 in any order, so that the few weights of a pixel that are not zero give what a matrix does: to add up rows of a
table, each times its weight, is what `embedding_bag` is made for. Columns become rows by a transposition.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from lightning_ssl.data import transforms
from lightning_ssl.data.transforms import PIXEL, STEPS, WEIGHT

if TYPE_CHECKING:
    from lightning_ssl.data.augment import Augmentation, Plan

_ROOM = 2**18  # numbers treated together; twice as many of small views, where calls are what costs
_SMALL = 64  # sides of views below which a call costs more than the work it saves
_LARGE = 2**22  # bytes from which on a view's memory is kept for another
_KEEP = 4  # of them
_LOCK = threading.Lock()  # between finding memory idle and lending it
if hasattr(os, "register_at_fork"):  # a process forked meanwhile must find it open
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
# Which of brightness, contrast and saturation comes at each of the three steps, in the order in which plans sort them.
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))


class _Kept(NamedTuple):
    """Memory, and the loan that lives as long as a tensor, a view, an array or a graph has a part of it."""

    memory: mmap.mmap
    loan: weakref.ref[memoryview]

    @property
    def idle(self) -> bool:
        return self.loan() is None


_KEPT: list[_Kept] = []


def carry_out(
    plan: Plan, recipe: Augmentation, image: Tensor, size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Make one view of a batch, as :func:`lightning_ssl.data.augment.carry_out` says."""
    ends = plan.ends if size >= _SMALL else ()
    chunks = list(_chunks(ends, len(plan.rows), size))
    crop, jitter, blur = Crop(plan, image, size, chunks), Jitter(plan, recipe), Blur(plan, recipe, size)
    grayscale, solarize, rows = Marked(plan.grayscale), Marked(plan.solarize), plan.rows.tolist()
    means, stds = (torch.tensor(values)[:, None, None] for values in (mean, std))
    out = large(len(rows), 3, size, size)
    for order, start, end in chunks:
        x = crop(start, end)  # n x 3 x S x S
        if size < _SMALL:
            jitter.mixed_(x.transpose(0, 1), start, end)
        elif order < len(ends):
            x = jitter(x.transpose(0, 1), order, start, end).transpose(0, 1)
        x = grayscale.change(x, start, end, lambda y, _: transforms.gray(y.transpose(0, 1))[:, None])
        x = blur.chosen.change(x, start, end, blur)
        x = solarize.change(x, start, end, lambda y, _: transforms.solarize_(y, recipe.solarize_threshold))
        x = x.sub_(means) if x.shape[1] == 3 else x - means
        if size < _SMALL:
            _put(out, plan.rows[start:end], x.div_(stds))
        else:
            for one, row in zip(x.unbind(), rows[start:end], strict=True):
                torch.div(one, stds, out=out[row])
    return out


def _put(out: Tensor, rows: Tensor, x: Tensor) -> None:
    """Write these rows, contiguous ones, sixteen bytes at a time where they divide into such."""
    out, x = out.flatten(1), x.flatten(1)
    if x.shape[1] % 4 == 0:
        out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.index_copy_(0, rows, x)


def large(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An empty tensor, in memory of an earlier one that nobody holds any more, if it is large.

    To get fresh pages from the system takes longer than to fill them; new memory is asked for in huge ones.
    """
    size = dtype.itemsize * math.prod(shape)
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    with _LOCK:
        place = next((i for i, kept in enumerate(_KEPT) if kept.idle and len(kept.memory) == size), None)
        if place is not None:
            memory = _KEPT.pop(place).memory
        else:
            _KEPT[:] = [kept for kept in _KEPT if not kept.idle]
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        loan = memoryview(memory)  # the tensor's memory holds it, and nobody else does
        if len(_KEPT) < _KEEP:
            _KEPT.append(_Kept(memory, weakref.ref(loan)))
        return torch.frombuffer(loan, dtype=dtype).view(shape)


def _chunks(ends: tuple[int, ...], batch: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Slices of the images in treated order: the number of its order of steps, its start and its end."""
    most, start = max(1, (_ROOM if size >= _SMALL else 2 * _ROOM) // (3 * size * size)), 0
    for order, end in enumerate((*ends, batch)):
        for first in range(start, end, most):
            yield order, first, min(first + most, end)
        start = end


class Marked:
    """Some of the images in treated order."""

    def __init__(self, positions: Tensor) -> None:
        self.positions, self._list = positions, positions.tolist()

    def change(self, x: Tensor, start: int, end: int, how: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """The images from `start` to `end`, [n, C, S, S], of which `how` has changed those that are marked."""
        which = slice(bisect_left(self._list, start), bisect_left(self._list, end))
        count = which.stop - which.start
        if count == 0:
            return x
        if count == len(x):
            return how(x, which)  # where one channel may stand for three
        rows = self.positions[which] - start
        return x.index_copy_(0, rows, how(x.index_select(0, rows), which).expand(-1, x.shape[1], -1, -1))


class Crop:
    """Cuts, mirrors and resizes images in treated order, as `transforms.resized_crop` does.

    Of the images of a chunk no more is touched than the window that holds all their boxes.
    """

    def __init__(self, plan: Plan, image: Tensor, size: int, chunks: list[tuple[int, int, int]]) -> None:
        self.plan, self.image, self.size = plan, image, size
        self.enlarges = plan.box is not None and size >= max(image.shape[2:])
        if plan.box is None or not self.enlarges:
            return
        self.windows: dict[int, tuple[slice, slice]] = {}
        ranges = torch.stack((plan.box[:2], plan.box[:2] + plan.box[2:4])).int().tolist()
        within = []  # of each image its place in the chunk, and where its window begins and how long it is either way
        for _, start, end in chunks:
            low, high = [[int(f(of[start:end])) for of in side] for side, f in zip(ranges, (min, max), strict=True)]
            self.windows[start] = slice(low[0], high[0]), slice(low[1], high[1])
            window = [low[0], high[0] - low[0], low[1], high[1] - low[1]]
            within += [[place, *window] for place in range(end - start)]
        place, top, height, left, width = torch.tensor(within, dtype=torch.int32).T
        plane = place[:, None] * image.shape[1] + torch.arange(image.shape[1], dtype=torch.int32)
        places = transforms.places(transforms.spans(plan.box, size), size)
        before = (places / STEPS).floor_()
        after = places - before * STEPS
        down, across = torch.stack((before, before + (after > 0)), dim=-1).int().chunk(2)  # N x S x 2
        down_weight, self.across_weight = torch.stack((STEPS - after, after), dim=-1).chunk(2)
        self.across = across + (place * width - left)[:, None, None]
        self.down = down[:, None] + (plane * height[:, None] - top[:, None])[:, :, None, None]  # N x C x S x 2
        self.down_weight = down_weight[:, None].expand(-1, image.shape[1], -1, -1).contiguous()

    def __call__(self, start: int, end: int) -> Tensor:
        """Images in [0, 1], [n, 3, size, size], which may be written to."""
        rows, size = self.plan.rows[start:end], self.size
        if self.plan.box is None:
            return self.image.index_select(0, rows) / 255
        if not self.enlarges:
            top, left, height, width, flip = self.plan.box[:, start:end]
            return transforms.resized_crop(self.image, rows, top, left, height, width, flip, size).transpose(0, 1)
        down, across = self.windows[start]
        one = int(rows[0])
        pixels = self.image.index_select(0, rows) if len(rows) > 1 else self.image[one : one + 1]
        pixels = pixels[:, :, down, across].permute(0, 3, 1, 2).contiguous().to(torch.float32)  # n x w x C x h
        x = _sums(pixels.view(-1, pixels[0, 0].numel()), self.across[start:end], self.across_weight[start:end])
        x = x.view(-1, size, *pixels.shape[2:]).permute(0, 2, 3, 1).contiguous()  # n x C x h x S
        x = _sums(x.view(-1, size), self.down[start:end], self.down_weight[start:end])
        x = x.mul_(1 / (255 * STEPS * STEPS)).view(len(rows), -1, size, size)
        return x if x.shape[1] == 3 else x.expand(-1, 3, -1, -1).contiguous()


def _sums(table: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Sums of rows of a table [R, L]: those named in the last dimension of `rows`, each times its weight."""
    taps = rows.shape[-1]
    return embedding_bag(rows.view(-1, taps), table, per_sample_weights=weight.view(-1, taps), mode="sum")


class Jitter:
    """Changes the colours of images in treated order, as `transforms.blend_` and `transforms.turn_hue_` do."""

    def __init__(self, plan: Plan, recipe: Augmentation) -> None:
        self.steps, self.most = plan.steps, plan.steps[:, 0].tolist()
        self.hue = recipe.hue > 0
        self.part, *roles = transforms.hue_roles(plan.hue)
        self.roles = torch.stack(roles)  # which channel plays each of them, for each channel of each image
        ends = (0, *plan.ends[5::6])
        pairs = list(itertools.pairwise(ends))
        self.alike = [pairs[first : first + 6] for first in range(0, 24, 6)]  # whose hues turn before each step
        self.jittered = plan.ends[-1]

    def mixed_(self, x: Tensor, start: int, end: int) -> None:
        """Change the colours of the images from `start` to `end`, [3, n, H, W], each in its order, in place."""
        end = min(end, self.jittered)
        if start >= end:
            return
        x = x[:, : end - start]
        for step in range(4):
            for low, high in self.alike[step] if self.hue else ():
                low, high = max(low, start), min(high, end)
                if low < high:
                    turned = x[:, low - start : high - start]
                    turned.copy_(self._turn(turned, low, high))
            if step < 3:
                transforms.blend_(x, *self.steps[step, :, start:end])

    def __call__(self, x: Tensor, order: int, start: int, end: int) -> Tensor:
        """Change the colours of the images from `start` to `end`, [3, n, H, W], all in one order; maybe in place."""
        before, others = divmod(order, 36)
        for step in range(4):
            if step == before and self.hue:
                x = self._turn(x, start, end)
            if step == 3:
                break
            pixel, luma, mean = self.steps[step, :, start:end, None, None]
            kind, grey = ORDERS[others % len(ORDERS)][step], None
            if kind == 1:
                grey = mean * transforms.average_gray(transforms.gray(x))[:, None, None]
            elif kind == 2:
                grey = transforms.gray(x).mul_(luma)
            x.mul_(pixel)
            if grey is not None:
                x.add_(grey)
            if max(self.most[step][start:end]) > 1:  # else nothing leaves [0, 1]
                x.clamp_(0, 1)
        return x

    def _turn(self, x: Tensor, start: int, end: int) -> Tensor:
        """Turn the hues; in all of these images the channels play the same roles."""
        out = torch.empty_like(x)
        _turn_hue(x, out, self.part[start:end, None, None], self.roles[:, :, start].T.tolist())
        return out


def _turn_hue(x: Tensor, out: Tensor, part: Tensor, roles: list[list[int]]) -> None:
    planes = x.unbind()
    high = torch.maximum(planes[0], planes[1])
    torch.maximum(high, planes[2], out=high)
    low = torch.minimum(planes[0], planes[1])
    torch.minimum(low, planes[2], out=low)
    rise = (high - low).mul_(part)
    fall = high - rise
    rise.add_(low)
    most = torch.empty_like(high)
    for result, (source, other, goal) in zip(out.unbind(), roles, strict=True):
        start, moves, to = planes[source], planes[other], planes[goal]
        torch.minimum(moves, fall, out=result)
        torch.maximum(moves, rise, out=most)
        torch.clamp(to, result, most, out=result)
        torch.clamp(result.sub_(moves).add_(start), low, high, out=result)


class Blur:
    """Blurs some of the images in treated order, as `transforms.gaussian_blur` does."""

    def __init__(self, plan: Plan, recipe: Augmentation, size: int) -> None:
        kernel = recipe.kernel_size(size)
        self.chosen, self.middle = Marked(plan.blur), kernel // 2
        if len(plan.blur):
            self.weight = transforms.blur_weights(plan.sigma, kernel)
            self.reflected = transforms.reflected(size, kernel).int()
            offset = torch.arange(-self.middle, self.middle + 1).abs()
            self.radius = ((self.weight > 0) * offset).amax(1).tolist()

    def __call__(self, x: Tensor, which: slice) -> Tensor:
        """Blur images [n, C, S, S], those of number `which` among the blurred ones; they may be written to."""
        radius = max(self.radius[which])
        taps = slice(self.middle - radius, self.middle + radius + 1)
        planes, size = x.shape[0] * x.shape[1], x.shape[3]
        first = torch.arange(0, planes * size, size, dtype=torch.int32)[:, None, None]
        lines = first + self.reflected[:, taps]
        weight = self.weight[which, taps][:, None].expand(-1, x.shape[1] * size, -1).contiguous()
        y = x.mul_(PIXEL).round_().transpose(2, 3).contiguous()
        y = _sums(y.view(-1, size), lines, weight).mul_(1 / WEIGHT).round_()
        y = y.view(planes, size, size).transpose(1, 2).contiguous()
        return _sums(y.view(-1, size), lines, weight).mul_(1 / (PIXEL * WEIGHT)).view(x.shape)
