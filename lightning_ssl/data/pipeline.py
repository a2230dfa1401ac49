"""From a split to batches: the datasets draw what shall happen, the device makes it happen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_ssl.data import augment, digits, sources, transforms
from lightning_ssl.data.augment import Augmentation, Plan
from lightning_ssl.data.batch import ProbeBatch, RawBatch, ViewBatch
from lightning_ssl.data.cached import large
from lightning_ssl.data.digits import Nuisance
from lightning_ssl.data.loader import EpochDataset, as_rows
from lightning_ssl.data.packed import Plans
from lightning_ssl.data.sources import Split
from lightning_ssl.rng import CLEAN, uniforms


@dataclass(frozen=True)
class Pipeline:
    """How views and clean images are made; everything random in them is drawn from `seed`.

    Attributes:
        recipes: The augmentation of each view; None where views resample the nuisance instead.
        num_views: Number of views.
        size: Side of the views.
        mean: Channel means.
        std: Channel standard deviations.
        digits: Whether the images are 8 x 8 digits, to be drawn.
        nuisance: Range of the digits' nuisance; None draws them plainly.
        clean_image: Whether view batches hold the clean image, too.
        seed: The seed.
    """

    recipes: tuple[Augmentation, ...] | None
    num_views: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digits: bool = False
    nuisance: Nuisance | None = None
    clean_image: bool = False
    seed: int = 0

    def draw_plans(self, index: Tensor, epoch: int, split: int, height: Tensor, width: Tensor) -> tuple[Plan, ...]:
        """The augmentation of each view of samples whose images have these heights and widths [B]."""
        if self.recipes is None:
            return ()
        plans = []
        for view in range(self.num_views):
            u = uniforms(index, augment.NUM_UNIFORMS, self.seed, split, epoch, view)
            plans.append(augment.draw_plan(self.recipes[view], u, height, width))
        return tuple(plans)

    def plans(self, views: tuple[Plan, ...]) -> Plans:
        """These plans, as they move to a device."""
        return Plans(views, self.recipes or (), self.size, self.mean, self.std)

    def draw_nuisance(self, index: Tensor, epoch: int, split: int, num_views: int) -> Tensor | None:
        """Uniforms of the nuisance of each resampled view and of the clean image."""
        if self.nuisance is None:
            return None
        keys = [(epoch, view) for view in range(num_views if self.recipes is None else 0)] + [(CLEAN, CLEAN)]
        return torch.stack([uniforms(index, digits.NUM_UNIFORMS, self.seed, split, *key) for key in keys])

    def make_batch(self, raw: RawBatch) -> ViewBatch:
        """Make the views, and the clean image if asked for, on whatever device the bytes are."""
        raw = raw.from_bits()
        if raw.num_views == 0:
            clean = self.clean(raw)
            return ViewBatch((clean,), raw.label, raw.index, clean)
        return ViewBatch(tuple(self._views(raw)), raw.label, raw.index, self.clean(raw) if self.clean_image else None)

    def clean(self, raw: RawBatch) -> Tensor:
        """The clean, normalised images, [B, 3, size, size]."""
        assert raw.image is not None
        if self.digits:
            return self._normalize(self._draw_digits(raw, -1))
        height, width = raw.image.shape[2:]
        if (height, width) == (self.size, self.size):
            x = transforms.to_planes(raw.image) / 255
        else:
            rows = torch.arange(len(raw.image), device=raw.image.device)
            box = constant((0.0, 0.0, height, width, 0.0), rows.device)[:, None].expand(5, len(rows))
            x = transforms.resized_crop(raw.image, rows, box[0], box[1], box[2], box[3], box[4], self.size)
        return self._normalize(x.transpose(0, 1))

    def _views(self, raw: RawBatch) -> list[Tensor]:
        if self.recipes is None:
            return [self._normalize(self._draw_digits(raw, view)) for view in range(raw.num_views)]
        if raw.crops is not None:
            image = raw.crops
        elif self.digits:
            image = (self._draw_digits(raw, -1) * 255).round().to(torch.uint8)
        else:
            assert raw.image is not None
            image = raw.image
        assert raw.plans is not None
        return augment.make_views(raw.plans, image)

    def _draw_digits(self, raw: RawBatch, view: int) -> Tensor:
        assert raw.image is not None
        return digits.render(raw.image, self.size, self.nuisance, None if raw.nuisance is None else raw.nuisance[view])

    def _normalize(self, x: Tensor) -> Tensor:
        mean, std = (constant(tuple(values), x.device)[:, None, None] for values in (self.mean, self.std))
        return (x - mean) / std


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on a device, copied there once."""
    with torch.inference_mode(False):  # it may be made in a validation, and used in training
        return torch.tensor(values, dtype=torch.float32, device=device)


class RawImages(EpochDataset):
    """A split as `RawBatch`es.

    Args:
        split: The images.
        pipeline: What is to be drawn for each sample.
        key: Number of the split; equal indices of different splits get different randomness.
        augmented: Whether to draw views; otherwise batches are clean.
        on_corrupt: For files: "error", or "skip", which puts the next readable file of the split in the place of a
            corrupt one (so that all ranks keep equal batches), or leaves it out of clean batches.
    """

    def __init__(self, split: Split, pipeline: Pipeline, key: int, augmented: bool, on_corrupt: str = "error") -> None:
        super().__init__()
        self.split, self.pipeline, self.key, self.augmented = split, pipeline, key, augmented
        self.on_corrupt = on_corrupt

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, rows: list[int]) -> RawBatch:
        return (self._from_memory(rows) if self.split.pixels is not None else self._from_files(rows)).as_bits()

    def _from_memory(self, rows: list[int]) -> RawBatch:
        assert self.split.pixels is not None
        index = as_rows(rows)
        image, label = self.split.pixels.index_select(0, index), self.split.labels[index]
        num_views = self.pipeline.num_views if self.augmented else 0
        nuisance = self.pipeline.draw_nuisance(index, self.epoch, self.key, num_views)
        plans: tuple[Plan, ...] = ()
        if self.augmented:
            height, width = (self.pipeline.size,) * 2 if self.pipeline.digits else image.shape[2:]
            sides = (torch.full((len(rows),), side) for side in (height, width))
            plans = self.pipeline.draw_plans(index, self.epoch, self.key, *sides)
        return RawBatch(image, label, index, self.pipeline.plans(plans), None, nuisance, num_views)

    def _from_files(self, rows: list[int]) -> RawBatch:
        size = self.pipeline.size
        images, read, labels = [], [], []
        for row in rows:
            found, image, label_of = self._read(row)
            if image is not None:
                images.append(image)
                read.append(found)
                labels.append(label_of)
        index, label = as_rows(read), as_rows(labels)
        if not self.augmented:
            return RawBatch(_stack([sources.center_crop(image, size) for image in images], size), label, index)
        height, width = (torch.tensor([image.shape[axis] for image in images]) for axis in (1, 2))
        plans = self.pipeline.draw_plans(index, self.epoch, self.key, height, width)
        crops = large(len(plans), len(images), 3, size, size, dtype=torch.uint8)
        for plan, out in zip(plans, crops, strict=True):
            _cut(images, plan, size, out)
        drawn = self.pipeline.plans(tuple(plan._replace(box=None) for plan in plans))
        clean = None
        if self.pipeline.clean_image:
            clean = _stack([sources.center_crop(image, size) for image in images], size)
        return RawBatch(clean, label, index, drawn, crops, None, self.pipeline.num_views)

    def _read(self, row: int) -> tuple[int, Tensor | None, int]:
        """Row, image and class; if it is corrupt and to be skipped, no image, or the next readable one for training."""
        for step in range(len(self.split) if self.augmented else 1):
            found = (row + step) % len(self.split)
            image, label = self.split.read(found, self.on_corrupt)
            if image is not None:
                return found, image, label
        if self.augmented:
            raise sources.CorruptImageError("None of the files can be decoded.")
        return row, None, -1


class ProbeImages(EpochDataset):
    """The clean, normalised images of a split as `ProbeBatch`es, made on the CPU."""

    def __init__(self, raw: RawImages) -> None:
        super().__init__()
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw)

    def __getitems__(self, rows: list[int]) -> ProbeBatch:
        batch = self.raw.__getitems__(rows).from_bits()
        return ProbeBatch(self.raw.pipeline.clean(batch), batch.label, batch.index)


def _cut(images: list[Tensor], plan: Plan, size: int, out: Tensor) -> None:
    """Crop and mirror images of any size as a plan says, into `out`, [B, 3, size, size]."""
    assert plan.box is not None
    boxes = torch.empty_like(plan.box)
    boxes[:, plan.rows] = plan.box
    for image, (top, left, height, width, flip), result in zip(images, boxes.T.long().tolist(), out, strict=True):
        crop = sources.resized_crop(image, top, left, height, width, size)
        result.copy_(crop.flip(-1) if flip else crop)


def _stack(images: list[Tensor], size: int) -> Tensor:
    return torch.stack(images) if images else torch.empty(0, 3, size, size, dtype=torch.uint8)
