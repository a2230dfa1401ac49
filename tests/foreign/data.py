"""Small data of four classes whose samples differ clearly and whose views differ a little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BATCH = 12
STEPS = 3


class Items(Dataset):
    """A list of samples of any structure."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def samples(n: int, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Clean samples [n, *shape] and labels: a prototype of the class, and as much again of the sample's own."""
    labels = torch.arange(n) % 4
    classes = torch.randn(4, *shape, generator=torch.Generator().manual_seed(99))
    own = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))
    return classes[labels] + 0.8 * own, labels


def views_of(clean: Tensor, views: int, seed: int = 0, noise: float = 0.3) -> Tensor:
    """[n, views, ...]."""
    generator = torch.Generator().manual_seed(seed + 1000)
    return clean[:, None] + noise * torch.randn(len(clean), views, *clean.shape[1:], generator=generator)


def pairs(
    n: int = BATCH * STEPS, shape: tuple[int, ...] = (3, 16, 16), views: int = 2, seed: int = 0, noise: float = 0.3
) -> Items:
    """([view, view], label, file name), as lightly's datasets give them."""
    clean, labels = samples(n, shape, seed)
    augmented = views_of(clean, views, seed, noise)
    return Items([(list(augmented[i]), int(labels[i]), f"{i}.png") for i in range(n)])


def multi_crops(n: int = BATCH * STEPS, large: int = 16, small: int = 8, locals_: int = 3, seed: int = 0) -> Items:
    """Two large crops and some small ones of each image."""
    clean, labels = samples(n, (3, large, large), seed)
    augmented = views_of(clean, 2 + locals_, seed)
    items = []
    for i in range(n):
        crops = [*augmented[i, :2], *(crop[:, :small, :small] for crop in augmented[i, 2:])]
        items.append((crops, int(labels[i]), f"{i}.png"))
    return Items(items)


def stacked(n: int = BATCH * STEPS, shape: tuple[int, ...] = (3, 16, 16), seed: int = 0, noise: float = 0.3) -> Items:
    """Both views in one tensor [2, ...], for steps that flatten them together; a label."""
    clean, labels = samples(n, shape, seed)
    augmented = views_of(clean, 2, seed, noise)
    return Items([(augmented[i], int(labels[i])) for i in range(n)])


def labelled(n: int, shape: tuple[int, ...] = (3, 16, 16), seed: int = 0) -> Items:
    """(clean sample, label)."""
    clean, labels = samples(n, shape, seed)
    return Items([(clean[i], int(labels[i])) for i in range(n)])


def dicts(n: int = BATCH * STEPS, shape: tuple[int, ...] = (3, 16, 16), seed: int = 0) -> Items:
    """{"image", "label"}, as torchgeo's datasets give them."""
    clean, labels = samples(n, shape, seed)
    return Items([{"image": clean[i], "label": int(labels[i])} for i in range(n)])


def sentences(n: int = BATCH * STEPS, length: int = 10, vocabulary: int = 40, seed: int = 0) -> Items:
    """{"input_ids", "attention_mask", "label"}: sequences of uneven length, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for i in range(n):
        size = int(torch.randint(4, length + 1, (1,), generator=generator))
        ids = torch.zeros(length, dtype=torch.long)
        ids[:size] = torch.randint(1, vocabulary, (size,), generator=generator)
        ids[0] = 1 + i % 4
        mask = (torch.arange(length) < size).long()
        items.append({"input_ids": ids, "attention_mask": mask, "label": i % 4})
    return Items(items)


def loader(items: Dataset, batch_size: int = BATCH) -> DataLoader:
    return DataLoader(items, batch_size=batch_size)
