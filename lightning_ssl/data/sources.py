"""Where the images come from: torchvision's datasets, the digits, and folders of files."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import warnings
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F

from lightning_ssl.data import digits
from lightning_ssl.data.folders import read_folder

_IMAGENET_STATS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Facts:
    """What is fixed about a dataset.

    Attributes:
        image_size: Side of its images unless another one is asked for.
        mean: Channel means its images are normalised by.
        std: Channel standard deviations, likewise.
        augmentation: Preset used unless another one is asked for.
        layout: What `root` must contain.
        downloads: Whether torchvision can fetch it.
        files: Whether it is kept as files that workers decode.
    """

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augmentation: str
    layout: str
    downloads: bool = True
    files: bool = False


FACTS: dict[str, Facts] = {
    "digits": Facts(32, (0.32,) * 3, (0.2,) * 3, "digits", "nothing", downloads=False),
    "cifar10": Facts(32, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), "cifar10", "cifar-10-batches-py/"),
    "cifar100": Facts(32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "cifar10", "cifar-100-python/"),
    "stl10": Facts(96, (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713), "stl10", "stl10_binary/"),
    "fashion_mnist": Facts(32, (0.286,) * 3, (0.353,) * 3, "cifar10", "FashionMNIST/raw/*-ubyte or *-ubyte.gz"),
    "imagenet": Facts(
        224, *_IMAGENET_STATS, "simclr", "train/, val/ and meta.bin, or the original archives", False, files=True
    ),
    "hf": Facts(224, *_IMAGENET_STATS, "simclr", "a dataset of Hugging Face", False, files=True),
    "wds": Facts(224, *_IMAGENET_STATS, "simclr", "tar files of WebDataset", False, files=True),
    "image_folder": Facts(
        224,
        *_IMAGENET_STATS,
        "simclr",
        "images, in class folders or without classes, with train/ and test/ (or val/) or without",
        False,
        files=True,
    ),
}


@dataclass
class Split:
    """One part of a dataset: bytes [N, C, H, W] in memory, or paths; and classes [N], -1 for none."""

    labels: Tensor
    pixels: Tensor | None = None
    paths: list[str] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, row: int, on_corrupt: str) -> tuple[Tensor | None, int]:
        """The bytes [C, H, W] and the class of a file; None for a corrupt one that is to be skipped."""
        assert self.paths is not None
        return decode_or_none(self.paths[row], on_corrupt), int(self.labels[row])


class DatasetSplit(Split):
    """Anybody's dataset as a split: each item is an image, or begins with an image and its class.

    Args:
        dataset: Yields PIL images or bytes [C, H, W]. Its classes are taken from `targets` or `labels`, as torchvision
            names them, or else read with the images.
        name: The argument it was given as, for messages.
    """

    def __init__(self, dataset: Dataset[Any], name: str) -> None:
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"`{name}` must be a dataset with a length and items, got {type(dataset).__name__}")
        self.dataset, self.name = dataset, name
        self.pixels = self.paths = None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @cached_property
    def labels(self) -> Tensor:  # type: ignore[override]
        """All classes, [N]; one pass over the items where the dataset does not list them."""
        for name in ("targets", "labels"):
            listed = getattr(self.dataset, name, None)
            if listed is not None and len(listed) == len(self):
                return torch.as_tensor(np.asarray(listed)).long().reshape(len(self), -1)[:, 0]
        return torch.tensor([self.read(row, "error")[1] for row in range(len(self))])

    @property
    def classes(self) -> list[str]:
        names = getattr(self.dataset, "classes", None)
        return [str(name) for name in names or range(max(0, int(self.labels.max())) + 1)]

    def read(self, row: int, on_corrupt: str) -> tuple[Tensor | None, int]:
        item = self.dataset[row]
        image, label = (item[0], item[1]) if isinstance(item, (tuple, list)) and len(item) > 1 else (item, -1)
        if isinstance(image, (tuple, list)):
            (image,) = image
        if isinstance(image, Image.Image):
            image = _bytes(image)
        if not isinstance(image, Tensor) or image.dtype != torch.uint8 or image.ndim != 3 or len(image) not in (1, 3):
            got = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise TypeError(
                f"`{self.name}` must yield PIL images or bytes of shape [3, H, W] or [1, H, W], got {got} in item "
                f"{row}; leave out transforms such as ToTensor and Normalize"
            )
        return image.expand(3, -1, -1), int(label)


@dataclass
class Source:
    """A dataset: what to pretrain on, and labelled splits for the probes (`probe_train` may be `train` itself)."""

    train: Split
    probe_train: Split
    test: Split
    classes: list[str]
    held_out: bool = False  # whether the test split was drawn from the training one


def load(name: str, root: str, download: bool = False) -> Source:
    """Load a dataset of `FACTS` by name."""
    if name == "digits":
        train, test = (Split(labels, pixels) for pixels, labels in (digits.load(True), digits.load(False)))
        return Source(train, train, test, [str(digit) for digit in range(10)])
    if not download and not os.path.isdir(root):
        raise FileNotFoundError(f"root={root!r} does not exist. {_remedy(name, root)}")
    try:
        return _LOADERS[name](root, download)
    except (RuntimeError, FileNotFoundError, OSError) as error:
        # torchvision says what is wrong but not, in our words, what to do.
        raise FileNotFoundError(
            f"dataset={name!r} cannot be read from root={root!r}: {error} {_remedy(name, root)}"
        ) from error


def wrap(train: Dataset[Any], test: Dataset[Any] | None) -> Source:
    """Anybody's datasets as a source; without a test set that split is empty."""
    split = DatasetSplit(train, "dataset")
    held_out = (
        Split(torch.empty(0, dtype=torch.int64), paths=[]) if test is None else DatasetSplit(test, "test_dataset")
    )
    return Source(split, split, held_out, split.classes if test is not None else [])


def _remedy(name: str, root: str) -> str:
    facts = FACTS[name]
    flag = ", or set download=True" if facts.downloads else ""
    return f"Put {facts.layout} into {root!r}{flag}."


def _cifar(dataset: type[datasets.CIFAR10]) -> Callable[[str, bool], Source]:
    def read(root: str, download: bool) -> Source:
        parts = [dataset(root, train=train, download=download) for train in (True, False)]
        train, test = (
            Split(torch.tensor(part.targets), torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous())
            for part in parts
        )
        return Source(train, train, test, list(parts[0].classes))

    return read


def _stl10(root: str, download: bool) -> Source:
    parts = [datasets.STL10(root, split=split, download=download) for split in ("train", "test", "unlabeled")]
    train, test, unlabeled = (
        Split(torch.from_numpy(np.asarray(part.labels)).long(), torch.from_numpy(part.data)) for part in parts
    )
    assert train.pixels is not None and unlabeled.pixels is not None
    pretrain = Split(torch.cat((train.labels, unlabeled.labels)), torch.cat((train.pixels, unlabeled.pixels)))
    return Source(pretrain, train, test, list(parts[0].classes))


def _fashion_mnist(root: str, download: bool) -> Source:
    for archive in Path(root, "FashionMNIST", "raw").glob("*-ubyte.gz"):  # as Debian ships them
        target = archive.with_suffix("")
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}")  # other ranks may be at it, too
            partial.write_bytes(gzip.decompress(archive.read_bytes()))
            partial.replace(target)
    parts = [datasets.FashionMNIST(root, train=train, download=download) for train in (True, False)]
    train, test = (Split(part.targets.long(), part.data[:, None]) for part in parts)
    return Source(train, train, test, list(parts[0].classes))


def _imagenet(root: str, download: bool) -> Source:
    parts = [datasets.ImageNet(root, split=split) for split in ("train", "val")]
    train, test = (_file_split(part) for part in parts)
    return Source(train, train, test, [names[0] for names in parts[0].classes])


def _image_folder(root: str, download: bool) -> Source:
    found = read_folder(root)
    train, test = (
        Split(torch.tensor([label for _, label in part]), paths=[path for path, _ in part])
        for part in (found.train, found.test)
    )
    return Source(train, train, test, found.classes)


def _file_split(part: Any) -> Split:
    paths, labels = zip(*part.samples, strict=True)
    return Split(torch.tensor(labels), paths=list(paths))


_LOADERS: dict[str, Callable[[str, bool], Source]] = {
    "cifar10": _cifar(datasets.CIFAR10),
    "cifar100": _cifar(datasets.CIFAR100),
    "stl10": _stl10,
    "fashion_mnist": _fashion_mnist,
    "imagenet": _imagenet,
    "image_folder": _image_folder,
}


class CorruptImageError(RuntimeError):
    """A file that cannot be decoded."""


def decode(path: str) -> Tensor:
    """Read an image file of any kind as RGB bytes, [3, H, W].

    Transparency is dropped; 16-bit grey is scaled down to 8 bits (Pillow alone would clip it). JPEG files are decoded
    by torchvision, which is faster; whatever it refuses, Pillow judges.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise CorruptImageError(_undecoded(path, error)) from error
    return decode_bytes(data, path)


def decode_bytes(data: bytes, name: str) -> Tensor:
    """Like `decode`, of an encoded image in memory; `name` is what messages call it."""
    try:
        if _plain_jpeg(data):
            with contextlib.suppress(RuntimeError):
                return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        with Image.open(io.BytesIO(data)) as image:
            return _bytes(image)
    except Exception as error:  # Pillow's decoders raise anything, from SyntaxError to struct.error
        raise CorruptImageError(_undecoded(name, error)) from error


def _undecoded(name: str, error: Exception) -> str:
    return (
        f"{name} cannot be decoded ({type(error).__name__}: {error}). Repair or remove the file, or set "
        "on_corrupt='skip'."
    )


def _plain_jpeg(data: bytes) -> bool:
    """Whether these bytes are a JPEG file with 8 bits in one channel or three: not CMYK, whose conversion varies."""
    if data[:3] != b"\xff\xd8\xff":
        return False
    place = 2
    while place + 9 < len(data) and data[place] == 0xFF:
        kind, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the frame's header
            return data[place + 4] == 8 and data[place + 9] in (1, 3)
        place += 2 + length
    return False


def _bytes(image: Image.Image) -> Tensor:
    if image.mode.startswith("I"):
        gray = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(gray.round().clip(0, 255).astype(np.uint8))
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def decode_or_none(path: str, on_corrupt: str) -> Tensor | None:
    """Like `decode`, but with on_corrupt="skip" warn and return None for a corrupt file."""
    try:
        return decode(path)
    except CorruptImageError as error:
        if on_corrupt == "error":
            raise
        warnings.warn(f"skipped: {error}", stacklevel=2)
        return None


def resized_crop(image: Tensor, top: int, left: int, height: int, width: int, size: int) -> Tensor:
    """Cut a box from bytes [3, H, W] and resize it (bilinear, antialiased): torchvision's pixels, in half the time."""
    box = image[None, :, top : top + height, left : left + width].contiguous(memory_format=torch.channels_last)
    return interpolate(box, size=(size, size), mode="bilinear", antialias=True)[0]


def center_crop(image: Tensor, size: int) -> Tensor:
    """The usual evaluation crop, [3, size, size]: the central 7/8 of the shorter side."""
    height, width = image.shape[-2:]
    side = round(min(height, width) * 0.875)
    top, left = (height - side) // 2, (width - side) // 2
    return resized_crop(image, top, left, side, side, size)


def into_memory(split: Split, size: int, on_corrupt: str) -> Split:
    """Decode all files of a split, resized to one size, into one tensor; corrupt ones are left out if skipped."""
    pixels = torch.empty(len(split), 3, size, size, dtype=torch.uint8)
    labels: list[int] = []
    for row in range(len(split)):
        image, label = split.read(row, on_corrupt)
        if image is not None:
            pixels[len(labels)] = F.resize(image, [size, size], antialias=True)
            labels.append(label)
    return Split(torch.tensor(labels, dtype=torch.int64), pixels[: len(labels)])
