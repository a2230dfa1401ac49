"""scikit-learn's handwritten digits as the generative model x(z0, z') of the papers.

The digit is z0; where, how large, how turned and in which colours it is drawn is the nuisance z'. Resampling z' is
exactly the papers' augmentation: two views share z0 and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import grid_sample

from lightning_ssl.rng import permutation

TEST_SIZE = 360
_SPLIT_SEED = 1797
NUM_UNIFORMS = 10


@dataclass(frozen=True)
class Nuisance:
    """The range of z'.

    Attributes:
        translate: Largest shift along each axis, as a fraction of the image's side.
        scale: Smallest and largest side of the digit, as a fraction of the image's side.
        rotate: Largest turn either way, in degrees.
        foreground: Range of the digit's colour, in each channel.
        background: Range of the colour behind it, in each channel.

    Example:
        >>> Nuisance(rotate=0.0).scale
        (0.7, 1.0)
    """

    translate: float = 0.15
    scale: tuple[float, float] = (0.7, 1.0)
    rotate: float = 15.0
    foreground: tuple[float, float] = (0.5, 1.0)
    background: tuple[float, float] = (0.0, 0.4)

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"`scale` must be two positive numbers, the smaller first, got {self.scale}")


def load(train: bool) -> tuple[Tensor, Tensor]:
    """The digits of one split: images [N, 1, 8, 8] as bytes, classes [N]; 1,437 for training and 360 for testing."""
    data = load_digits()
    images = torch.from_numpy(data.images * (255 / 16)).round().to(torch.uint8)[:, None]
    order = permutation(len(images), _SPLIT_SEED)
    rows = order[TEST_SIZE:] if train else order[:TEST_SIZE]
    return images[rows], torch.from_numpy(data.target)[rows].long()


def render(digits: Tensor, size: int, nuisance: Nuisance | None = None, uniforms: Tensor | None = None) -> Tensor:
    """Draw digits as RGB images in [0, 1].

    Args:
        digits: Bytes, [B, 1, 8, 8].
        size: Side of the result.
        nuisance: Range of z'; None draws the plain digit, white on black and filling the image.
        uniforms: Where in that range, [B, 10], each in [0, 1).

    Returns:
        Images, [B, 3, size, size].
    """
    batch = len(digits)
    ink = digits.to(torch.float32) / 255
    pixel = (torch.arange(size, device=digits.device, dtype=torch.float32) + 0.5) * (2 / size) - 1
    if nuisance is None or uniforms is None:
        grid = torch.stack((pixel.expand(size, size), pixel[:, None].expand(size, size)), dim=-1)
        plain = grid_sample(ink, grid.expand(batch, -1, -1, -1), padding_mode="zeros", align_corners=False)
        return plain.expand(-1, 3, -1, -1)

    shift = (uniforms[:, 0:2] - 0.5) * (4 * nuisance.translate)  # in the grid's units, where a side is 2
    low, high = nuisance.scale
    scale = low + uniforms[:, 2] * (high - low)
    # Vectorised and scalar cosines differ in the last bit, and which one a row meets depends on the batch: rounding
    # from double hides that, so that the picture does not depend on the batch it is drawn in.
    angle = _wide((uniforms[:, 3] - 0.5) * (2 * math.radians(nuisance.rotate)))
    cos, sin = angle.cos().to(torch.float32) / scale, angle.sin().to(torch.float32) / scale
    x = (pixel[None, None, :] - shift[:, 0, None, None]).expand(-1, size, -1)
    y = (pixel[None, :, None] - shift[:, 1, None, None]).expand(-1, -1, size)
    cos, sin = cos[:, None, None], sin[:, None, None]
    grid = torch.stack((x * cos + y * sin, y * cos - x * sin), dim=-1)
    ink = grid_sample(ink, grid, padding_mode="zeros", align_corners=False)

    low, high = nuisance.background
    background = low + uniforms[:, 4:7, None, None] * (high - low)
    low, high = nuisance.foreground
    foreground = low + uniforms[:, 7:10, None, None] * (high - low)
    return background + ink * (foreground - background)


def _wide(x: Tensor) -> Tensor:
    return x if x.device.type == "mps" else x.double()  # Apple's devices have no doubles
