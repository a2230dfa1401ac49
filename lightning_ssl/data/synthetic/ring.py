"""Two objects translated on a ring of pixels (DDN-v2 Sec. 5.1, Eq. 11)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ring_population"]


def ring_population(size: int, receptive_field: int | None = None) -> Tensor:
    """All views of the objects 11 and 101 at every position, ``[2, size, pixels]`` float64.

    Object z0 is the first axis, its position z', which an augmentation redraws, the second. Positions and objects are
    equally likely.

    Args:
        size: Number of pixels d of the ring.
        receptive_field: See only this many adjacent pixels; None sees the whole ring.

    Example:
        >>> ring_population(5)[1, 4]
        tensor([0., 1., 0., 0., 1.], dtype=torch.float64)
    """
    if size < 4:
        raise ValueError(f"`size` must be at least 4, or the two objects meet themselves on the ring, got {size}")
    if receptive_field is not None and not 1 <= receptive_field <= size:
        raise ValueError(f"`receptive_field` must lie between 1 and size={size}, got {receptive_field}")
    eye = torch.eye(size, dtype=torch.float64)
    x = torch.stack([eye + eye.roll(gap, dims=1) for gap in (1, 2)])
    return x[..., :receptive_field]
