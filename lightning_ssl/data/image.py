"""One DataModule for images."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_ssl.data import digits
from lightning_ssl.data.batch import ProbeBatch, RawBatch, ViewBatch
from lightning_ssl.data.digits import Nuisance
from lightning_ssl.data.loader import EpochDataset, ShardLoader, ShardSampler, as_rows
from lightning_ssl.data.rng import CLEAN, uniforms

TRAIN, TEST = 0, 1


class ImageDataModule(L.LightningDataModule):
    """Images in, views out.

    Args:
        dataset: "digits".
        batch_size: Samples per process and step; a run on W ranks with `batch_size` G/W sees the same batches of G
            samples, and the same views, as one process with `batch_size` G.
        probe_batch_size: Samples per process and step of the probe, test and predict loaders.
        num_workers: Worker processes of each loader.
        views: "resample" draws a new nuisance for each view (digits only).
        num_views: Views per sample.
        nuisance: Draw the digits with a nuisance (True, or its range), or plain (False).
        clean_image: Make `ViewBatch.image` as well.
        image_size: Side of the images.
        seed: Seed of the order and of the views.
    """

    def __init__(
        self,
        dataset: Literal["digits"] = "digits",
        batch_size: int = 128,
        probe_batch_size: int = 512,
        num_workers: int = 0,
        views: Literal["resample"] = "resample",
        num_views: int = 2,
        nuisance: bool | Nuisance = True,
        clean_image: bool = False,
        image_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.batch_size = batch_size
        self.probe_batch_size = probe_batch_size
        self.num_workers = num_workers
        self.views = views
        self.num_views = num_views
        self.nuisance = Nuisance() if nuisance is True else nuisance or None
        self.clean_image = clean_image
        self.image_size = image_size
        self.seed = seed
        self.mean, self.std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
        self._splits: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_classes(self) -> int:
        return 10

    def setup(self, stage: str | None = None) -> None:
        if not self._splits:
            self._splits = {TRAIN: digits.load(train=True), TEST: digits.load(train=False)}

    def train_dataloader(self) -> ShardLoader:
        return self._view_loader(TRAIN, shuffle=True)

    def val_dataloader(self) -> ShardLoader:
        return self._view_loader(TEST, shuffle="once")

    def test_dataloader(self) -> ShardLoader:
        return self._clean_loader(TEST)

    def predict_dataloader(self) -> ShardLoader:
        return self._clean_loader(TEST)

    def probe_dataloaders(self) -> tuple[ShardLoader, ShardLoader]:
        """Clean train and test splits as `ProbeBatch`, each rank its own shard, every sample exactly once."""
        self.setup()
        return self._probe_loader(TRAIN), self._probe_loader(TEST)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not isinstance(batch, RawBatch):
            return batch
        clean = self._clean(batch) if self.clean_image or not batch.augment else None
        if not batch.augment:
            assert clean is not None
            return ViewBatch((clean,), batch.label, batch.index, clean)
        views = tuple(self._view(batch, view) for view in range(self.num_views))
        return ViewBatch(views, batch.label, batch.index, clean)

    def _view(self, batch: RawBatch, view: int) -> Tensor:
        u = uniforms(batch.index, digits.NUM_UNIFORMS, self.seed, batch.split, batch.epoch, view)
        return self._normalize(digits.render(batch.image, self.image_size, self.nuisance, u))

    def _clean(self, batch: RawBatch) -> Tensor:
        u = uniforms(batch.index, digits.NUM_UNIFORMS, self.seed, batch.split, CLEAN, CLEAN)
        return self._normalize(digits.render(batch.image, self.image_size, self.nuisance, u))

    def _normalize(self, image: Tensor) -> Tensor:
        mean, std = (torch.tensor(x, device=image.device)[:, None, None] for x in (self.mean, self.std))
        return (image - mean) / std

    def _view_loader(self, split: int, shuffle: bool | str) -> ShardLoader:
        rank, world_size = self._shard()
        images, labels = self._splits[split]
        dataset = _RawImages(images, labels, split)
        sampler = ShardSampler(dataset, rank, world_size, shuffle=shuffle, even=True, seed=self.seed)
        batch_size = self.batch_size if split == TRAIN else min(self.batch_size, len(sampler))
        return ShardLoader(
            dataset, sampler=sampler, batch_size=batch_size, drop_last=True, num_workers=self.num_workers
        )

    def _clean_loader(self, split: int) -> ShardLoader:
        rank, world_size = self._shard()
        images, labels = self._splits[split]
        dataset = _RawImages(images, labels, split, augment=False)
        sampler = ShardSampler(dataset, rank, world_size)
        return ShardLoader(dataset, sampler=sampler, batch_size=self.probe_batch_size, num_workers=self.num_workers)

    def _probe_loader(self, split: int) -> ShardLoader:
        rank, world_size = self._shard()
        images, labels = self._splits[split]
        dataset = _ProbeImages(_RawImages(images, labels, split, augment=False), self)
        return ShardLoader(dataset, sampler=ShardSampler(dataset, rank, world_size), batch_size=self.probe_batch_size)

    def _shard(self) -> tuple[int, int]:
        """This process' rank and the number of processes, from the Trainer if there is one."""
        if self.trainer is not None and (kwargs := self.trainer.distributed_sampler_kwargs) is not None:
            return kwargs["rank"], kwargs["num_replicas"]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1


class _RawImages(EpochDataset):
    """Images held in memory as one tensor of bytes."""

    def __init__(self, images: Tensor, labels: Tensor, split: int, augment: bool = True) -> None:
        super().__init__()
        self.images, self.labels, self.split, self.augment = images, labels, split, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: list[int]) -> RawBatch:
        index = as_rows(rows)
        return RawBatch(self.images[index], self.labels[index], index, self.epoch, self.split, None, self.augment)


class _ProbeImages(EpochDataset):
    """The clean, normalised images of a `_RawImages`."""

    def __init__(self, raw: _RawImages, module: ImageDataModule) -> None:
        super().__init__()
        self.raw, self.module = raw, module

    def __len__(self) -> int:
        return len(self.raw)

    def __getitems__(self, rows: list[int]) -> ProbeBatch:
        batch = self.raw.__getitems__(rows)
        return ProbeBatch(self.module._clean(batch), batch.label, batch.index)
