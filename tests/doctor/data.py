"""Small data whose views are drawn anew each time, and the mistakes that can be made in that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

SIZE, BATCH = 48, 12
MEAN, STD = 0.45, 0.25


def images(n: int = SIZE) -> Tensor:
    """[n, 3, 8, 8] in [0, 1], each sample unlike the others."""
    generator = torch.Generator().manual_seed(3)
    return torch.sigmoid(torch.randn(n, 3, 8, 8, generator=generator)) * 0.9 + 0.05


class Pairs(Dataset):
    """([view, view], label), normalised; augmented by noise from torch's generator."""

    def __init__(self, bug: str = "") -> None:
        self.bug, self.images = bug, images()
        self.own = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.images)

    def noise(self) -> Tensor:
        if self.bug == "own_generator":
            return torch.from_numpy(self.own.standard_normal((3, 8, 8)).astype("float32"))
        return torch.randn(3, 8, 8)

    def view(self, i: int) -> Tensor:
        x = (self.images[i] + 0.05 * self.noise()).clamp(0, 1)
        if self.bug == "bytes":
            return 255 * x
        x = (x - MEAN) / STD
        return (x - MEAN) / STD if self.bug == "twice" else x

    def __getitem__(self, i: int) -> Any:
        if self.bug == "seeded_by_index":
            torch.manual_seed(i)
        first = self.view(i)
        if self.bug == "identical":
            return [first, first.clone()], i % 4
        other = int(torch.randint(SIZE, ())) if self.bug == "other_sample" else i
        second = self.view(other)
        if self.bug == "not_a_number" and i == 1:
            second = second * torch.nan
        return [first, second], i % 4


def shuffled_collate(items: list[Any]) -> Any:
    """Sorts the second view by something else."""
    (x1, x2), y = torch.utils.data.default_collate(items)
    return [[x1, x2.roll(3, 0)], y]


class Stream(IterableDataset):
    """All samples in order; not divided by rank or worker."""

    def __init__(self) -> None:
        self.pairs = Pairs()

    def __iter__(self) -> Iterator[Any]:
        torch.manual_seed(0)
        for i in range(SIZE):
            yield self.pairs[i]


def loader(bug: str = "", **kwargs: Any) -> DataLoader:
    if bug == "shuffled_view":
        kwargs["collate_fn"] = shuffled_collate
    return DataLoader(Pairs(bug), batch_size=BATCH, drop_last=True, **kwargs)


def stream(**kwargs: Any) -> DataLoader:
    return DataLoader(Stream(), batch_size=BATCH, **kwargs)


class PairsModule(L.LightningDataModule):
    """For configs."""

    def train_dataloader(self) -> DataLoader:
        return loader()
