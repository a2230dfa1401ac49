"""Image transforms on a whole batch at once, every image with its own parameters.

Each equals torchvision's v2 functional counterpart. Images are held plane by plane, [3, B, H, W] in [0, 1], so that
each colour operation runs over contiguous memory.

A picture's bits must not depend on the batch it is made in, on the number of threads or on the BLAS: sums are therefore
taken over integers small enough to be exact in float32, in any order, and everything else is one rounded operation at
a time (no fused multiply-add, whose use differs between the vectorised body and the tail of a loop).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

WEIGHT = 2048.0  # filter weights are multiples of 1/2048: with 12-bit pixels a filter's sum stays below 2^24
PIXEL = 4080.0  # pixels between two filters are multiples of 1/4080, a sixteenth of a grey level
STEPS = 256.0  # places between two pixels, when enlarging
_GRAY = (0.2989, 0.587, 0.114)


def to_planes(image: Tensor, rows: Tensor | None = None) -> Tensor:
    """Bytes [B, C, H, W], C being 1 or 3, to whole numbers in float32, [3, B, H, W]; optionally only some rows."""
    image = image if rows is None else image.index_select(0, rows)
    return image.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format).expand(3, -1, -1, -1)


def resized_crop(
    image: Tensor, rows: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor, size: int
) -> Tensor:
    """Cut a box from each image, mirror it where `flip` is 1, and resize it to `size` (bilinear, antialiased).

    Args:
        image: Bytes, [B, C, H, W], C being 1 or 3.
        rows: Which images to take, in which order, [N].
        top: First row of the box, [N]; `left`, `height` and `width` likewise.
        flip: 0 or 1, [N].
        size: Side of the result.

    Returns:
        Images in [0, 1], [3, N, size, size].
    """
    across, down = (left, width, flip), (top, height, torch.zeros_like(flip))
    if size < max(image.shape[2:]):
        x = to_planes(image, rows)
        return _filter(x, _reduce(x.shape[2], *down, size).transpose(1, 2), _reduce(x.shape[3], *across, size), 255.0)
    lines = _enlarge_lines(image, rows, places(*down, size))
    columns = enlarge(image.shape[3], places(*across, size))
    out = lines.new_empty(3, len(rows), size, size)
    for plane, result in zip(lines, out, strict=True):
        torch.bmm(plane, columns, out=result)
    return out.mul_(1 / (255 * STEPS * STEPS))


def _centers(start: Tensor, length: Tensor, flip: Tensor, size: int) -> Tensor:
    """Where the centres of `size` pixels lie in the part of a line that they cover, [N, size]."""
    out = torch.arange(size, device=start.device, dtype=torch.float32) + 0.5
    out = torch.where(flip[:, None] > 0, size - out, out)
    return start[:, None] + out * (length / size)[:, None]


def places(start: Tensor, length: Tensor, flip: Tensor, size: int) -> Tensor:
    """Those centres, as multiples of 1/256 of a source pixel from the first one's centre, kept inside the part.

    Interpolation weights are then multiples of 1/256: two passes over bytes need 24 bits.
    """
    center = _centers(start, length, flip, size) - 0.5
    return (center.clamp(start[:, None], (start + length - 1)[:, None]) * STEPS).round_()


def _enlarge_lines(image: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Interpolate between the lines of bytes [B, C, H, W] at `places` [N, S]; times 256, [3, N, S, W]."""
    channels, height, width = image.shape[1:]
    upper = (places / STEPS).floor_()
    weight = (places - upper * STEPS)[None, :, :, None]
    first = torch.arange(3, device=rows.device)[:, None] % channels + rows * channels  # planes, [3, N]
    upper = upper.long() + first[:, :, None] * height  # lines, [3, N, S]
    lower = torch.where(weight[..., 0] > 0, upper + 1, upper)  # the next one may lie outside
    lines = image.reshape(-1, width)
    upper, lower = (
        lines.index_select(0, line.flatten()).to(torch.float32).view(*line.shape, width) for line in (upper, lower)
    )
    return upper.mul_(STEPS - weight).add_(lower.mul_(weight))


def enlarge(source: int, places: Tensor) -> Tensor:
    """Weights, times 256, of the `source` pixels of a line for the pixels at `places` [..., S]; [..., source, S]."""
    pixel = torch.arange(source, device=places.device, dtype=torch.float32)[:, None] * STEPS
    return (pixel - places[..., None, :]).abs_().neg_().add_(STEPS).clamp_(min=0)


def _reduce(source: int, start: Tensor, length: Tensor, flip: Tensor, size: int) -> Tensor:
    """Weights, times 2048, of the `source` pixels of a line for `size` pixels of its part, [N, source, size]."""
    center = _centers(start, length, flip, size)[:, None, :]
    support = (length / size).clamp(min=1.0)[:, None, None]
    pixel = (torch.arange(source, device=start.device, dtype=torch.float32) + 0.5)[:, None]
    first, last = start[:, None, None], (start + length)[:, None, None]
    weight = (1 - ((pixel - center) / support).abs()).clamp_(min=0) * ((pixel > first) & (pixel < last))
    weight = (weight * WEIGHT).round_()  # before they are summed
    weight = (weight * (WEIGHT / weight.sum(1, keepdim=True))).round_()
    nearest = center.clamp(first, last - 1).floor().long()
    return weight.scatter_add_(1, nearest, WEIGHT - weight.sum(1, keepdim=True))


def _filter(x: Tensor, rows: Tensor, columns: Tensor, in_scale: float) -> Tensor:
    """Multiply each plane [H, W] by `rows` [B, S, H] from the left and by `columns` [B, W, S] from the right."""
    out = x.new_empty(3, x.shape[1], rows.shape[1], columns.shape[2])
    for plane, result in zip(x, out, strict=True):
        y = torch.bmm(plane, columns).mul_(PIXEL / (in_scale * WEIGHT)).round_()
        torch.bmm(rows, y, out=result)
    return out.mul_(1 / (PIXEL * WEIGHT))


def gray(x: Tensor) -> Tensor:
    """Luma, [B, H, W], of images [3, B, H, W]."""
    return (x[0] * _GRAY[0]).add_(x[1] * _GRAY[1]).add_(x[2] * _GRAY[2])


def average_gray(g: Tensor) -> Tensor:
    """The mean luma, [B], of [B, H, W]."""
    lines = g.mul(PIXEL).round_().sum(2)
    return lines.sum(1, dtype=_exact(g)).to(torch.float32) / (PIXEL * g[0].numel())


def blend_(x: Tensor, pixel: Tensor, luma: Tensor, mean: Tensor) -> Tensor:
    """One step of colour jitter, in place: x <- clip(pixel x + luma gray(x) + mean E[gray(x)]), factors [B].

    Brightness f is (f, 0, 0), saturation f is (f, 1 - f, 0), contrast f is (f, 0, 1 - f).
    """
    g = gray(x)
    average = average_gray(g)
    g.mul_(_each(luma)).add_(_each(mean * average))
    return x.mul_(_each(pixel)).add_(g).clamp_(0, 1)


def adjust_hue_(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` in [-0.5, 0.5] of the colour circle, [B], in place.

    With value V = max, chroma C = max - min and hue h in [0, 6), the channels of a colour are V - C w(h), where w clips
    2 - |h - 3| (red), |h - 2| - 1 (green), |h - 4| - 1 (blue) to [0, 1].
    """
    red, green, blue = x[0], x[1], x[2]
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # Products with 0 and 1 choose, exactly, and faster than `where`.
    not_red, not_green = (value - red).sign_(), (value - green).sign_()
    hue = (blue - red).mul_(1 - not_green).addcmul_(red - green, not_green).mul_(not_red)
    hue.addcmul_(green - blue, 1 - not_red).div_(chroma.clamp(min=1e-12))  # where it is 0 all differences are, too
    hue.add_(not_green.add_(1).mul_(2).mul_(not_red)).add_(_each(shift * 6))
    hue.sub_(hue.div(6).floor_().mul_(6))
    torch.sub(value, torch.rsub((hue - 3).abs_(), 2).clamp_(0, 1).mul_(chroma), out=red)
    torch.sub(value, (hue - 2).abs_().sub_(1).clamp_(0, 1).mul_(chroma), out=green)
    torch.sub(value, (hue - 4).abs_().sub_(1).clamp_(0, 1).mul_(chroma), out=blue)
    return x


def gaussian_blur(x: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Blur images [3, B, H, W] in [0, 1] with standard deviations `sigma` [B]; borders are reflected."""
    weight = blur_weights(sigma, kernel_size)
    rows, columns = (_blur_matrix(weight, side) for side in x.shape[2:])
    return _filter(x.mul(PIXEL).round_(), rows.transpose(1, 2), columns, in_scale=PIXEL)


def blur_weights(sigma: Tensor, kernel_size: int) -> Tensor:
    """The weights, times 2048, of a pixel and its neighbours in a line, [B, kernel_size]."""
    radius = kernel_size // 2
    offset = torch.arange(-radius, radius + 1, device=sigma.device, dtype=_exact(sigma))
    weight = torch.softmax(-0.5 * (offset / sigma[:, None].to(offset.dtype)).square(), dim=1)
    weight = (weight * WEIGHT).round().to(torch.float32)
    weight[:, radius] += WEIGHT - weight.sum(1)
    return weight


def _blur_matrix(weight: Tensor, side: int) -> Tensor:
    """The matrices [B, side, side] by which a line is multiplied from the right to be blurred."""
    radius = weight.shape[1] // 2
    line = torch.arange(side, device=weight.device, dtype=torch.float32)
    source = pad(line[None], (radius, radius), mode="reflect")[0].long().unfold(0, 2 * radius + 1, 1)  # [side, k]
    matrix = weight.new_zeros(len(weight), side, side)  # [B, to, from]
    matrix.scatter_add_(2, source.expand(len(weight), -1, -1), weight[:, None].expand(-1, side, -1))
    return matrix.transpose(1, 2)


def solarize_(x: Tensor, threshold: float) -> Tensor:
    """Invert what is at or above the threshold, in place."""
    return torch.where(x >= threshold, 1 - x, x, out=x)


def normalize_(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x - mean) / std, plane by plane, in place."""
    for plane, m, s in zip(x, mean, std, strict=True):
        plane.sub_(m).div_(s)
    return x


def _each(factor: Tensor) -> Tensor:
    return factor[:, None, None]


def _exact(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64  # Apple's devices have no doubles
