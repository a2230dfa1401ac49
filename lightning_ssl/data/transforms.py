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
LUMA = (0.2989, 0.587, 0.114)


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
    planes = torch.arange(3, device=rows.device)
    return cut(image, rows, planes, spans(torch.stack((top, left, height, width, flip)), size), size).transpose(0, 1)


def spans(box: Tensor, size: int) -> Tensor:
    """The part of its lines that each box covers, first downwards, then across.

    Args:
        box: Top, left, height, width and flip, [5, N].
        size: Side of the result.

    Returns:
        First and last pixel, pixels of the source for one of the result, where counting begins and in which direction
        it goes, [5, 2 N].
    """
    start, length = box[:2].flatten(), box[2:4].flatten()
    flip = torch.cat((torch.zeros_like(box[4]), box[4]))
    return torch.stack((start, start + length - 1, length / size, flip * size, 1 - 2 * flip))


def cut(image: Tensor, rows: Tensor, planes: Tensor, span: Tensor, size: int) -> Tensor:
    """As :func:`resized_crop` says: `span` is that of the boxes, `planes` are 0, 1, 2; the result is [N, 3, S, S]."""
    channels, height, width = image.shape[1:]
    if size < max(height, width):
        down, across = _reduce(max(height, width), span, size).chunk(2)
        pixels = image.index_select(0, rows).to(torch.float32)
        x = filtered(pixels, down[:, :height].transpose(1, 2), across[:, :width], 255.0)
    else:
        down, across = places(span, size).chunk(2)
        first = rows * (channels * height) + (planes[:channels] * height)[:, None]  # lines, [C, N]
        lines = _enlarge_lines(image.reshape(-1, width), first, down)
        columns = enlarge(width, across)
        x = lines.new_empty(channels, len(rows), size, size)
        for plane, result in zip(lines, x, strict=True):
            torch.bmm(plane, columns, out=result)
        x = x.mul_(1 / (255 * STEPS * STEPS)).transpose(0, 1)
    return x if channels == 3 else x.expand(-1, 3, -1, -1).contiguous()


def _centers(span: Tensor, size: int) -> Tensor:
    """Where the centres of `size` pixels lie in the part of a line that they cover, [N, size]."""
    start, _, scale, origin, direction = span[:, :, None]
    pixel = torch.arange(0.5, size, device=span.device, dtype=torch.float32)
    return torch.addcmul(origin, direction, pixel).mul_(scale).add_(start)  # whole and half numbers until it is scaled


def places(span: Tensor, size: int) -> Tensor:
    """Those centres, as multiples of 1/256 of a source pixel from the first one's centre, kept inside the part.

    Interpolation weights are then multiples of 1/256: two passes over bytes need 24 bits.
    """
    return _centers(span, size).sub_(0.5).clamp_(span[0, :, None], span[1, :, None]).mul_(STEPS).round_()


def _enlarge_lines(lines: Tensor, first: Tensor, places: Tensor) -> Tensor:
    """Interpolate between `lines` [L, W] of bytes at `places` [N, S] behind `first` [C, N]; times 256, [C, N, S, W]."""
    upper = (places / STEPS).floor_()
    weight = (places - upper * STEPS)[:, :, None]
    line = upper.long() + first[:, :, None]  # [C, N, S]
    following = line + (weight[..., 0] > 0)  # the next one may lie outside
    before, after = (lines.index_select(0, i.flatten()).to(torch.float32).view(*i.shape, -1) for i in (line, following))
    return before.mul_(STEPS - weight).add_(after.mul_(weight))


def enlarge(source: int, places: Tensor) -> Tensor:
    """Weights, times 256, of the `source` pixels of a line for the pixels at `places` [..., S]; [..., source, S]."""
    pixel = torch.arange(0, source * STEPS, STEPS, device=places.device, dtype=torch.float32)[:, None]
    return (pixel - places[..., None, :]).abs_().neg_().add_(STEPS).clamp_(min=0)


def _reduce(source: int, span: Tensor, size: int) -> Tensor:
    """Weights, times 2048, of the `source` pixels of a line for `size` pixels of its part, [N, source, size]."""
    first, last, scale = span[:3, :, None, None]
    center = _centers(span, size)[:, None, :]
    pixel = torch.arange(0.5, source, device=span.device, dtype=torch.float32)[:, None]
    weight = (1 - ((pixel - center) / scale.clamp(min=1.0)).abs()).clamp_(min=0)
    weight *= (pixel > first) & (pixel < last + 1)
    weight = weight.mul_(WEIGHT).round_()  # before they are summed
    weight = weight.mul_(WEIGHT / weight.sum(1, keepdim=True)).round_()
    nearest = center.clamp(first, last).long()
    return weight.scatter_add_(1, nearest, WEIGHT - weight.sum(1, keepdim=True))


def filtered(x: Tensor, rows: Tensor, columns: Tensor, in_scale: float) -> Tensor:
    """Multiply planes of [N, C, H, W] by `rows` [N, S, H] from the left and `columns` [N, W, S] from the right."""
    y = torch.bmm(x.flatten(1, 2), columns).mul_(PIXEL / (in_scale * WEIGHT)).round_().unflatten(1, x.shape[1:3])
    out = x.new_empty(*x.shape[:2], rows.shape[1], columns.shape[2])
    for plane, result in zip(y.unbind(1), out.unbind(1), strict=True):
        torch.bmm(rows, plane, out=result)
    return out.mul_(1 / (PIXEL * WEIGHT))


def gray(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Luma, [B, H, W], of images [3, B, H, W]; with `weights`, LUMA on their device, in fewer calls and more memory."""
    if weights is None:
        return (x[0] * LUMA[0]).add_(x[1] * LUMA[1]).add_(x[2] * LUMA[2])
    red, green, blue = x * weights[:, None, None, None]
    return red.add_(green).add_(blue)


def average_gray(g: Tensor, at_once: bool = False) -> Tensor:
    """The mean luma, [B], of [B, H, W]; the sums are exact, and `at_once` is a call less."""
    whole = g.mul(PIXEL).round_()
    total = (whole if at_once else whole.sum(2, keepdim=True)).sum((1, 2), dtype=_exact(g))
    return torch.div(total, PIXEL * g[0].numel(), out=g.new_empty(len(g)))


def blend_(x: Tensor, pixel: Tensor, luma: Tensor, mean: Tensor, weights: Tensor | None = None) -> Tensor:
    """One step of colour jitter, in place: x <- clip(pixel x + luma gray(x) + mean E[gray(x)]), factors [B].

    Brightness f is (f, 0, 0), saturation f is (f, 1 - f, 0), contrast f is (f, 0, 1 - f). `weights` as for `gray`.
    """
    g = gray(x, weights)
    average = average_gray(g, at_once=weights is not None)
    g.mul_(_each(luma)).add_(_each(mean * average))
    return x.mul_(_each(pixel)).add_(g).clamp_(0, 1)


def adjust_hue_(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` in [-0.5, 0.5] of the colour circle, [B], in place."""
    part, *roles = hue_roles(shift)
    return turn_hue_(x, part, *roles)


def hue_roles(shift: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What :func:`turn_hue_` does for turns of `shift` of the circle, [B].

    A turn by a third of the circle is a change of places; what is left is a turn by up to a sixth either way.

    Returns:
        The part of a sixth that is left, [B], and for each channel of the result the channel it comes from, the one
        that moves, and the one that it moves to, [3, B] each.
    """
    sixths = shift * 6
    thirds = (sixths / 2).round()
    left = sixths - 2 * thirds
    first = torch.arange(3, device=shift.device)[:, None] - thirds.long()
    back = (left < 0).long()
    return left.abs(), first % 3, (first + 1 + back) % 3, (first + 2 - back) % 3


def turn_hue_(x: Tensor, part: Tensor, start: Tensor, moves: Tensor, to: Tensor) -> Tensor:
    """Turn hues by a part of a sixth of the circle, in place; see :func:`hue_roles`.

    Let C = max - min. On each sixth of the circle one channel is the maximum, one the minimum, and the third moves from
    one to the other. A turn by part p changes channel a as much as the next, b, changes if it moves towards the one
    after it, c, though not below max - pC when it falls nor above min + pC when it rises; a stays in [min, max].
    """
    high, low = x.amax(0), x.amin(0)
    step = (high - low).mul_(_each(part))
    start, moves, to = (x.gather(0, role[:, :, None, None].expand_as(x)) for role in (start, moves, to))
    torch.clamp(to, torch.minimum(moves, high - step), torch.maximum(moves, step.add_(low)), out=to)
    return torch.clamp(to.sub_(moves).add_(start), low, high, out=x)


def gaussian_blur(x: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Blur images [3, B, H, W] in [0, 1] with standard deviations `sigma` [B]; borders are reflected."""
    down, across = (reflected(side, kernel_size).to(x.device) for side in x.shape[2:])
    return blurred(x.transpose(0, 1), blur_weights(sigma, kernel_size), down, across).transpose(0, 1)


def blurred(x: Tensor, weight: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Blur images [B, C, H, W] by :func:`blur_weights`; `down` and `across` are their neighbours in a line."""
    columns = _blur_matrix(weight, across)
    rows = columns if down is across else _blur_matrix(weight, down)
    return filtered(x.mul(PIXEL).round_(), rows.transpose(1, 2), columns, in_scale=PIXEL)


def blur_weights(sigma: Tensor, kernel_size: int) -> Tensor:
    """The weights, times 2048, of a pixel and its neighbours in a line, [B, kernel_size]."""
    radius = kernel_size // 2
    offset = torch.arange(-radius, radius + 1, device=sigma.device, dtype=_exact(sigma))
    weight = torch.softmax(-0.5 * (offset / sigma[:, None].to(offset.dtype)).square(), dim=1)
    weight = (weight * WEIGHT).round().to(torch.float32)
    weight[:, radius] += WEIGHT - weight.sum(1)
    return weight


def reflected(side: int, kernel_size: int) -> Tensor:
    """Which pixels of a line lie under a kernel at each of its places, [side, kernel_size], borders reflected."""
    radius = kernel_size // 2
    line = torch.arange(side, dtype=torch.float32)
    return pad(line[None], (radius, radius), mode="reflect")[0].long().unfold(0, kernel_size, 1)


def _blur_matrix(weight: Tensor, source: Tensor) -> Tensor:
    """The matrices [B, side, side] by which a line is multiplied from the right to be blurred."""
    batch, side = len(weight), len(source)
    matrix = weight.new_zeros(batch, side, side)  # [B, to, from]
    matrix.scatter_add_(2, source.expand(batch, -1, -1), weight[:, None].expand(-1, side, -1))
    return matrix.transpose(1, 2)


def solarize_(x: Tensor, threshold: float | Tensor) -> Tensor:
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
