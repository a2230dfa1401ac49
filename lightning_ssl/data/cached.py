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
# Which of brightness, contrast and saturation comes at each of the three steps, in the order in which plans sort them.
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))


def carry_out(
    plan: Plan, recipe: Augmentation, image: Tensor, size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Make one view of a batch, as :func:`lightning_ssl.data.augment.carry_out` says."""
    rows = plan.rows.tolist()
    crop = Crop(plan, image, size)
    grayscale, solarize = set(plan.grayscale.tolist()), set(plan.solarize.tolist())
    weights = transforms.blur_weights(plan.sigma, recipe.kernel_size(size)).tolist() if len(plan.blur) else []
    blur = dict(zip(plan.blur.tolist(), weights, strict=True))
    out = torch.empty(len(rows), 3, size, size)
    for order, start, end in _chunks(plan.ends, len(rows), size):
        x = crop(start, end)
        if order < len(plan.ends):
            _jitter_(x, order, plan.steps[:, :, start:end], plan.hue[start:end], recipe.hue > 0)
        for place in range(start, end):
            one = x[:, place - start]
            if place in grayscale:
                one.copy_(transforms.gray(one).expand_as(one))
            if place in blur:
                _blur_(one, blur[place])
            if place in solarize:
                transforms.solarize_(one, recipe.solarize_threshold)
        transforms.normalize_(x, mean, std)
        for place in range(start, end):
            out[rows[place]].copy_(x[:, place - start])
    return out


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
        self.alone = plan.box is not None and size >= max(128, *image.shape[2:])
        if plan.box is None or not self.alone:
            return
        top, left, height, width, flip = plan.box
        self.rows, self.boxes = plan.rows.tolist(), plan.box.T.long().tolist()
        across = transforms.places(left, width, flip, size) - left[:, None] * STEPS
        down = transforms.places(top, height, torch.zeros_like(flip), size) - top[:, None] * STEPS
        upper = (down / STEPS).floor_()
        self.weight = (down - upper * STEPS)[:, :, None]
        self.upper = upper.long()
        # Where there is no next line its weight is 0.
        self.lower = torch.minimum(self.upper + 1, height.long()[:, None] - 1)
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
        """Images in [0, 1], [3, n, size, size]."""
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
        wide = wide.view(-1, height, self.size)
        upper, lower = (wide.index_select(1, line) for line in (self.upper[place], self.lower[place]))
        upper.mul_(STEPS - self.weight[place]).add_(lower.mul_(self.weight[place]))
        out.copy_(upper.mul_(1 / (255 * STEPS * STEPS)).expand_as(out))


def _jitter_(x: Tensor, order: int, steps: Tensor, hue: Tensor, turn: bool) -> None:
    """Change the colours of images [3, n, H, W] in one order, in place."""
    before, others = divmod(order, len(ORDERS))
    for step in range(4):
        if step == before and turn:
            transforms.adjust_hue_(x, hue)
        if step == 3:
            return
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
        x.clamp_(0, 1)


def _blur_(x: Tensor, weight: list[float]) -> None:
    """Blur one image [3, H, W] in place; `weight` is a line of `transforms.blur_weights`."""
    middle = len(weight) // 2
    radius = max(r for r in range(middle + 1) if weight[middle + r] or r == 0)
    side = x.shape[2]
    y = pad(x.mul(PIXEL).round_(), (radius, radius, 0, 0), mode="reflect") if radius else x.mul(PIXEL).round_()
    y = _taps(y, weight, radius, 1)[:, :, :side].mul_(1 / WEIGHT).round_()
    y = pad(y, (0, 0, radius, radius), mode="reflect") if radius else y
    torch.mul(_taps(y, weight, radius, side)[:, : x.shape[1]], 1 / (PIXEL * WEIGHT), out=x)


def _taps(x: Tensor, weight: list[float], radius: int, stride: int) -> Tensor:
    """The weighted sum of `x` moved by up to `radius` strides either way; what moves in from elsewhere is padding."""
    flat, middle = x.reshape(-1), len(weight) // 2
    length = len(flat) - 2 * radius * stride
    out = torch.empty_like(flat)
    total = torch.mul(flat[radius * stride :][:length], weight[middle], out=out[:length])
    for r in range(1, radius + 1):
        pair = flat[(radius - r) * stride :][:length] + flat[(radius + r) * stride :][:length]
        total.add_(pair, alpha=weight[middle + r])
    return out.view(x.shape)
