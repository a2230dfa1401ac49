"""The same views, bit for bit, on a CPU: a few images at a time, which stay in its cache, and nothing times zero.

Images whose colours change in the same order are treated together. A filter's sums are over whole numbers, exact in
float32 in any order, so that the part of its matrix that is not zero gives what all of it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_ssl.data import transforms
from lightning_ssl.data.transforms import PIXEL, STEPS, WEIGHT

if TYPE_CHECKING:
    from lightning_ssl.data.augment import Augmentation, Plan

_BAND = 32  # columns of a filter's matrix that are multiplied together
_ROOM = 2**18  # numbers treated together
_SMALL = 64  # sides of views below which most is done to all at once
_ALONE = 128  # sides from which on they are cut out one by one
# Which of brightness, contrast and saturation comes at each of the three steps, in the order in which plans sort them.
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))


def carry_out(
    plan: Plan, recipe: Augmentation, image: Tensor, size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Make one view of a batch, as :func:`lightning_ssl.data.augment.carry_out` says."""
    crop = Crop(plan, image, size)
    hue = Hue(plan.hue) if recipe.hue > 0 else None
    if size < _SMALL:
        return _small(plan, recipe, crop(0, len(plan.rows)), hue, mean, std)
    rows = plan.rows.tolist()
    grayscale, solarize = set(plan.grayscale.tolist()), set(plan.solarize.tolist())
    weights = transforms.blur_weights(plan.sigma, recipe.kernel_size(size)).tolist() if len(plan.blur) else []
    blur = dict(zip(plan.blur.tolist(), weights, strict=True))
    means, stds = (torch.tensor(values)[:, None, None] for values in (mean, std))
    out = torch.empty(len(rows), 3, size, size)
    for order, start, end in _chunks(plan.ends, len(rows), size):
        x = crop(start, end)
        if order < len(plan.ends):
            x = _jitter(x, order, plan.steps[:, :, start:end], hue, start)
        for place in range(start, end):
            one = x[:, place - start]
            if place in grayscale:
                one = transforms.gray(one)[None]
            if place in blur:
                one = _blur(one, blur[place])
            if place in solarize:
                transforms.solarize_(one, recipe.solarize_threshold)
            torch.div(one - means if len(one) == 1 else one.sub_(means), stds, out=out[rows[place]])
    return out


def _small(
    plan: Plan, recipe: Augmentation, x: Tensor, hue: Hue | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """The view of small images [3, B, H, W], cut out: what is the same for all is done to all of them at once."""
    jittered, start = plan.ends[-1], 0
    for step, end in enumerate(plan.hue_ends if jittered else ()):
        if hue is not None:
            hue.turn_(x, start, end)
        if step < 3:
            transforms.blend_(x[:, :jittered], *plan.steps[step, :, :jittered])
        start = end
    if len(plan.grayscale):
        x.index_copy_(1, plan.grayscale, transforms.gray(x.index_select(1, plan.grayscale)).expand(3, -1, -1, -1))
    if len(plan.blur):
        chosen = x.index_select(1, plan.blur)
        x.index_copy_(1, plan.blur, transforms.gaussian_blur(chosen, plan.sigma, recipe.kernel_size(x.shape[3])))
    if len(plan.solarize):
        chosen = x.index_select(1, plan.solarize)
        x.index_copy_(1, plan.solarize, transforms.solarize_(chosen, recipe.solarize_threshold))
    transforms.normalize_(x, mean, std)
    return x.transpose(0, 1).contiguous().index_select(0, plan.places)


def _chunks(ends: tuple[int, ...], batch: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Slices of the images in treated order: the number of its order of steps, its start and its end."""
    most, start = max(1, _ROOM // (3 * size * size)), 0
    for order, end in enumerate((*ends, batch)):
        for first in range(start, end, most):
            yield order, first, min(first + most, end)
        start = end


class Crop:
    """Cuts, mirrors and resizes images in treated order, as `transforms.resized_crop` does."""

    def __init__(self, plan: Plan, image: Tensor, size: int) -> None:
        self.plan, self.image, self.size = plan, image, size
        self.alone = plan.box is not None and size >= max(_ALONE, *image.shape[2:])
        if plan.box is None or not self.alone:
            return
        top, left, height, _, _ = plan.box
        self.rows, self.boxes = plan.rows.tolist(), plan.box.T.long().tolist()
        down, across = transforms.places(transforms.spans(plan.box, size), size).chunk(2)
        down, across = down - top[:, None] * STEPS, across - left[:, None] * STEPS
        upper = (down / STEPS).floor_()
        self.weight = (down / STEPS - upper)[:, :, None]
        # The line before and the line after; where there is no next line its weight is 0.
        lower = torch.minimum(upper + 1, height[:, None] - 1)
        self.lines = torch.cat((upper, lower), dim=1).long()
        self.across = across
        bands = [across[:, start : start + _BAND] for start in range(0, size, _BAND)]
        self.spans = (
            torch.stack(
                [torch.stack(((b.amin(1) / STEPS).floor(), (b.amax(1) / STEPS).ceil() + 1)) for b in bands], dim=2
            )
            .long()
            .permute(1, 2, 0)
            .tolist()
        )  # first and one after the last pixel that counts, of each image and band

    def __call__(self, start: int, end: int) -> Tensor:
        """Images in [0, 1], [3, n, size, size], which may be written to."""
        rows = self.plan.rows[start:end]
        if self.plan.box is None:
            return transforms.to_planes(self.image, rows) / 255
        if not self.alone:
            top, left, height, width, flip = self.plan.box[:, start:end]
            return transforms.resized_crop(self.image, rows, top, left, height, width, flip, self.size)
        out = torch.empty(3, end - start, self.size, self.size)
        for place in range(start, end):
            self._one(place, out[:, place - start])
        return out

    def _one(self, place: int, out: Tensor) -> None:
        top, left, height, width, _ = self.boxes[place]
        pixels = self.image[self.rows[place], :, top : top + height, left : left + width].to(torch.float32)
        lines = pixels.reshape(-1, width)
        matrix = transforms.enlarge(width, self.across[place])
        wide = lines.new_empty(len(lines), self.size)
        for band, (low, high) in enumerate(self.spans[place]):
            columns = slice(band * _BAND, (band + 1) * _BAND)
            torch.mm(lines[:, low : min(high, width)], matrix[low:high, columns], out=wide[:, columns])
        upper, lower = wide.view(-1, height, self.size).index_select(1, self.lines[place]).chunk(2, dim=1)
        out.copy_(torch.lerp(upper, lower, self.weight[place]).mul_(1 / (255 * STEPS)).expand_as(out))


class Hue:
    """Turns the hues of images in treated order, as `transforms.turn_hue_` does."""

    def __init__(self, shift: Tensor) -> None:
        self.part, *roles = transforms.hue_roles(shift)
        self.roles = torch.stack(roles).permute(2, 1, 0)  # of each image and channel
        self.kind = roles[0][0] * 3 + roles[1][0]  # the same number where they are the same

    def __call__(self, x: Tensor, first: int) -> Tensor:
        """The images from `first` on, [3, n, H, W]: neighbours whose channels play the same roles together."""
        out, start = torch.empty_like(x), 0
        kinds = self.kind[first : first + x.shape[1]].tolist()
        for end in range(1, len(kinds) + 1):
            if end == len(kinds) or kinds[end] != kinds[start]:
                part = self.part[first + start : first + end]
                self._turn(x[:, start:end], out[:, start:end], part, self.roles[first + start].tolist())
                start = end
        return out

    def turn_(self, x: Tensor, start: int, end: int) -> None:
        """Turn the images from `start` to `end` of all [3, B, H, W] in place, whoever plays the same roles together."""
        kinds = self.kind[start:end]
        for kind in kinds.unique():
            rows = (kinds == kind).nonzero()[:, 0] + start
            chosen = x.index_select(1, rows)
            out = torch.empty_like(chosen)
            self._turn(chosen, out, self.part[rows], self.roles[rows[0]].tolist())
            x.index_copy_(1, rows, out)

    def _turn(self, x: Tensor, out: Tensor, part: Tensor, roles: list[list[int]]) -> None:
        planes = x.unbind(0)
        high = torch.maximum(planes[0], planes[1])
        torch.maximum(high, planes[2], out=high)
        low = torch.minimum(planes[0], planes[1])
        torch.minimum(low, planes[2], out=low)
        rise = (high - low).mul_(part[:, None, None])
        fall = high - rise
        rise.add_(low)
        most = torch.empty_like(high)
        for result, (source, other, goal) in zip(out.unbind(0), roles, strict=True):
            start, moves, to = planes[source], planes[other], planes[goal]
            torch.minimum(moves, fall, out=result)
            torch.maximum(moves, rise, out=most)
            torch.clamp(to, result, most, out=result)
            torch.clamp(result.sub_(moves).add_(start), low, high, out=result)


def _jitter(x: Tensor, order: int, steps: Tensor, hue: Hue | None, first: int) -> Tensor:
    """Change the colours of images [3, n, H, W], of which `first` is the first, in one order; in place if it can."""
    before, others = divmod(order, len(ORDERS))
    for step in range(4):
        if step == before and hue is not None:
            x = hue(x, first)
        if step == 3:
            break
        pixel, luma, mean = steps[step, :, :, None, None]
        kind = ORDERS[others][step]
        if kind == 0:
            x.mul_(pixel)
        elif kind == 1:
            grey = mean * transforms.average_gray(transforms.gray(x))[:, None, None]
            x.mul_(pixel).add_(grey)
        else:
            grey = transforms.gray(x).mul_(luma)
            x.mul_(pixel).add_(grey)
        if pixel.max() > 1:  # else nothing leaves [0, 1]
            x.clamp_(0, 1)
    return x


def _blur(x: Tensor, weight: list[float]) -> Tensor:
    """Blur one image [C, H, W]; `weight` is a line of `transforms.blur_weights`."""
    middle = len(weight) // 2
    radius = max(r for r in range(middle + 1) if weight[middle + r] or r == 0)
    _, height, width = x.shape
    y = pad(x.mul(PIXEL).round_(), (radius, radius, 0, 0), mode="reflect") if radius else x.mul(PIXEL).round_()
    y = _taps(y, weight, radius, 1)[:, :, :width].mul_(1 / WEIGHT).round_()
    y = pad(y, (0, 0, radius, radius), mode="reflect") if radius else y
    return _taps(y, weight, radius, width)[:, :height].mul_(1 / (PIXEL * WEIGHT))


def _taps(x: Tensor, weight: list[float], radius: int, stride: int) -> Tensor:
    """The weighted sum of `x` moved by up to `radius` strides either way; what moves in from elsewhere is padding."""
    flat, middle = x.reshape(-1), len(weight) // 2
    length = len(flat) - 2 * radius * stride
    out = torch.empty_like(flat)
    total = torch.mul(flat.narrow(0, radius * stride, length), weight[middle], out=out.narrow(0, 0, length))
    for r in range(1, radius + 1):
        for place in (radius - r, radius + r):
            total.add_(flat.narrow(0, place * stride, length), alpha=weight[middle + r])
    return out.view(x.shape)
