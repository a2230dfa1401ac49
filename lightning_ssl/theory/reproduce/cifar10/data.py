"""The real images, packed once, and the parts of them that pretraining, probe and test see."""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lightning_ssl.data import ImageDataModule
from lightning_ssl.data.sources import Source, Split, into_memory, load

ORDER = 20_000  # seed of the one order in which training images are taken, the same for every setting and seed


class CIFAR10(ImageDataModule):
    """Some of CIFAR-10's training images to pretrain on and to fit the probe on, and images to test it with.

    Args:
        root: A folder with torchvision's ``cifar-10-batches-py``, or with ``train/<class>`` and ``test/<class>``.
        images: How many training images are used.
        held_out: Test on so many other training images, for the choice of settings; the test images are not read.
        test_images: How many test images are used; None is all.
        options: Those of `ImageDataModule`.
    """

    def __init__(
        self, root: str, images: int, held_out: int = 0, test_images: int | None = None, **options: Any
    ) -> None:
        super().__init__("cifar10", root, **options)
        self.images, self.held_out, self.test_images = images, held_out, test_images

    @property
    def source(self) -> Source:
        return _parts(self.root, self.images, self.held_out, self.test_images)


@lru_cache(maxsize=1)
def _parts(root: str, images: int, held_out: int, test_images: int | None) -> Source:
    train, classes = packed(root, "train")
    if images + held_out > len(train):
        raise ValueError(
            f"`images` must be at most {len(train) - held_out} of the {len(train)} training images in {root!r}, got "
            f"{images}; lower it"
        )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(ORDER))
    chosen = _take(train, order[:images])
    if held_out:
        return Source(chosen, chosen, _take(train, order[images : images + held_out]), classes)
    test, _ = packed(root, "test")
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(ORDER))
    return Source(chosen, chosen, _take(test, order[: test_images or len(test)]), classes)


def _take(split: Split, rows: torch.Tensor) -> Split:
    assert split.pixels is not None
    return Split(split.labels[rows], split.pixels[rows])


def packed(root: str, part: str) -> tuple[Split, list[str]]:
    """The images of "train" or "test" as one tensor of bytes; files are decoded once and kept beside the folder."""
    folder = Path(root)
    if (folder / "cifar-10-batches-py").is_dir():
        source = load("cifar10", root)
        return (source.train if part == "train" else source.test), source.classes
    if not (folder / part).is_dir():
        raise ValueError(
            f"`root` must hold cifar-10-batches-py/ or {part}/<class>/ with CIFAR-10's images, got {root!r}; give the "
            "folder with --root"
        )
    cache = folder / f"{part}.pt"
    if cache.exists():
        kept = torch.load(cache, weights_only=True)
        return Split(kept["labels"], kept["pixels"]), list(kept["classes"])
    # Of this part alone: the other one's files are not opened.
    classes = sorted(path.name for path in (folder / part).iterdir() if path.is_dir())
    found = [(str(path), row) for row, name in enumerate(classes) for path in sorted((folder / part / name).iterdir())]
    files = Split(torch.tensor([label for _, label in found]), paths=[path for path, _ in found])
    split = into_memory(files, 32, "error")
    with contextlib.suppress(OSError):  # a folder that cannot be written to is decoded each time
        partial = cache.with_suffix(f".{os.getpid()}.tmp")
        torch.save({"pixels": split.pixels, "labels": split.labels, "classes": classes}, partial)
        partial.replace(cache)
    return split, classes
