"""What the loaders yield."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ViewBatch(NamedTuple):
    """The batch a method trains on.

    Attributes:
        views: Augmented, normalised images, each [B, 3, H, W]; the clean image alone in test and predict batches.
        label: Classes, [B]; -1 where a sample has none (the unlabelled part of STL-10).
        index: Positions in the dataset, [B].
        image: The clean, normalised image, [B, 3, H, W], or None unless asked for.
    """

    views: tuple[Tensor, ...]
    label: Tensor
    index: Tensor
    image: Tensor | None = None


class ProbeBatch(NamedTuple):
    """Clean, normalised images [B, 3, H, W] with their classes [B] and positions in the split [B]."""

    image: Tensor
    label: Tensor
    index: Tensor


class RawBatch(NamedTuple):
    """What crosses to the device: bytes, and the epoch, from which the views are made there.

    Attributes:
        image: Bytes, [B, C, H, W], or None where only the crops are needed.
        label: Classes, [B].
        index: Positions in the dataset, [B].
        epoch: The epoch whose randomness the views take.
        split: Which part of the data this is; equal indices of different splits get different views.
        crops: One crop a view, [V, B, 3, S, S], when the workers have cropped already.
        augment: False makes the clean image the only view.
    """

    image: Tensor | None
    label: Tensor
    index: Tensor
    epoch: int
    split: int
    crops: Tensor | None = None
    augment: bool = True
