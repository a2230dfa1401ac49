"""What the loaders yield."""

from __future__ import annotations

from typing import NamedTuple

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_ssl.data.packed import Plans


class ViewBatch(NamedTuple):
    """The batch a method trains on.

    Attributes:
        views: Augmented, normalised images, each [B, 3, H, W]; the clean image alone in test and predict batches.
        label: Classes, [B]; -1 where a sample has none (the unlabelled part of STL-10).
        index: Positions in the dataset, [B].
        image: The clean, normalised image, [B, 3, H, W], or None unless asked for.

    Example:
        >>> x = torch.rand(4, 3, 8, 8)
        >>> batch = ViewBatch((x, x.flip(-1)), torch.arange(4), torch.arange(4))
        >>> len(batch.views)
        2
    """

    views: tuple[Tensor, ...]
    label: Tensor
    index: Tensor  # type: ignore[assignment]
    image: Tensor | None = None


class ProbeBatch(NamedTuple):
    """Clean, normalised images [B, 3, H, W] with their classes [B] and positions in the split [B].

    Example:
        >>> batch = ProbeBatch(torch.rand(4, 3, 8, 8), torch.arange(4), torch.arange(4))
        >>> image, label, index = batch
    """

    image: Tensor
    label: Tensor
    index: Tensor  # type: ignore[assignment]


class RawBatch(NamedTuple):
    """What crosses to the device, where the views are made from it: bytes, and what to do with them.

    Attributes:
        image: Bytes, [B, C, H, W]; None where workers have cropped and nobody asked for the clean image.
        label: Classes, [B].
        index: Positions in the dataset, [B].
        plans: The augmentation of the views.
        crops: Bytes of each view, [V, B, 3, S, S], when the workers have cropped.
        nuisance: Uniforms behind the nuisance of each resampled view and, last, of the clean image, [V + 1, B, 10].
        num_views: Views to make; 0 makes the clean image the only view.
    """

    image: Tensor | None
    label: Tensor
    index: Tensor  # type: ignore[assignment]
    plans: Plans | None = None
    crops: Tensor | None = None
    nuisance: Tensor | None = None
    num_views: int = 0

    def as_bits(self) -> RawBatch:
        """The same batch with its floats as bits: a Trainer converts a batch's floats to its own precision.

        The views must not depend on that; :meth:`from_bits` undoes it.
        """
        return apply_to_collection(self, Tensor, lambda x: x.view(torch.int32) if x.dtype == torch.float32 else x)

    def from_bits(self) -> RawBatch:
        """The batch that :meth:`as_bits` was made of."""
        return apply_to_collection(self, Tensor, lambda x: x.view(torch.float32) if x.dtype == torch.int32 else x)
