"""Anybody's folder of images: what is in it, which part is held out, and which views suit it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError
from torchvision.datasets.folder import IMG_EXTENSIONS

from lightning_ssl.rng import permutation

TEST = ("test", "val", "valid", "validation")
SIDES = (32, 64, 96, 128, 160, 224)
LOOKED_AT = 64  # files whose sizes are read
_SPLIT_SEED = 5077
# What torchvision's own datasets leave in their root.
MARKS = {
    "cifar-10-batches-py": "cifar10",
    "cifar-100-python": "cifar100",
    "stl10_binary": "stl10",
    "FashionMNIST": "fashion_mnist",
    "meta.bin": "imagenet",
}


class Folder(NamedTuple):
    """The images of a folder.

    Attributes:
        train: Paths with their classes, -1 for none.
        test: Those that validation and the probes' tests are given.
        classes: The classes' names; none where the images have no classes.
        held_out: Whether the test images were drawn from the training ones, for want of a folder of their own.
    """

    train: list[tuple[str, int]]
    test: list[tuple[str, int]]
    classes: list[str]
    held_out: bool


def kind_of(root: str) -> str:
    """The name of the torchvision dataset that lies in a folder, "hf" or "wds" by its beginning, or "image_folder"."""
    if (begin := root.partition("/")[0]) in ("hf", "wds"):
        return begin
    return next((name for mark, name in MARKS.items() if Path(root, mark).exists()), "image_folder")


def read_folder(root: str) -> Folder:
    """Find the images of a folder, in any of the usual orders.

    ``train/<class>/<image>`` with ``test/``, ``val/``, ``valid/`` or ``validation/`` beside it, or without; class
    folders alone; or images without classes, at any depth. Without a test folder a fifth of the images, at most
    10,000, is held out by a draw that depends on their number alone.
    """
    base = Path(root)
    training = base / "train" if (base / "train").is_dir() else base
    train, classes = _images(training)
    aside = next((base / name for name in TEST if training != base and (base / name).is_dir()), None)
    if aside is not None:
        if next(_walk(aside), None) is None:
            raise FileNotFoundError(f"{aside.name}/ holds no image.")
        test, its = _images(aside)
        if its != classes:
            odd = sorted(set(classes) ^ set(its))
            raise FileNotFoundError(f"the class folders of train/ and {aside.name}/ differ: {odd} are in one only.")
        return Folder(train, test, classes, held_out=False)
    if len(train) < 2:
        raise FileNotFoundError(f"it holds {len(train)} image(s); at least two are needed.")
    rest, drawn = ([train[row] for row in rows] for rows in held_out_rows(len(train)))
    return Folder(rest, drawn, classes, held_out=True)


def held_out_rows(total: int) -> tuple[list[int], list[int]]:
    """The rows to train on and those held out, a fifth and at most 10,000, by a draw that depends on `total` alone."""
    count = max(1, min(total // 5, 10_000))
    order = permutation(total, _SPLIT_SEED).tolist()
    return sorted(order[count:]), sorted(order[:count])


def _images(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """All images of a folder with their classes: its subfolders' names, where it holds no other image."""
    with os.scandir(folder) as entries:
        inside = list(entries)
    loose = any(_is_image(entry.name) for entry in inside if entry.is_file())
    parts = sorted(entry.path for entry in inside if entry.is_dir())
    if loose or not parts:
        return [(path, -1) for path in sorted(_walk(folder))], []
    found = [(path, label) for label, part in enumerate(parts) for path in sorted(_walk(Path(part)))]
    empty = sorted(set(range(len(parts))) - {label for _, label in found})
    if empty:
        raise FileNotFoundError(f"class folders without an image: {[os.path.basename(parts[row]) for row in empty]}.")
    return found, [os.path.basename(part) for part in parts]


def _walk(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder, followlinks=True):
        yield from (os.path.join(place, name) for name in names if _is_image(name))


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)


def side_of(root: str, otherwise: int) -> int:
    """The side of views that suits the images of a folder: their median shorter side, or a little less."""
    sides = []
    for path in itertools.islice(_walk(Path(root)), LOOKED_AT):
        try:
            with Image.open(path) as image:
                sides.append(min(image.size))
        except (OSError, UnidentifiedImageError):
            continue  # it is judged when it is read
    return suitable_side(sides, otherwise)


def suitable_side(sides: list[int], otherwise: int) -> int:
    """The side of views for images whose shorter sides are these."""
    if not sides:
        return otherwise
    median = sorted(sides)[len(sides) // 2]
    return max([SIDES[0], *(side for side in SIDES if side <= 1.15 * median)])


def recipe_for(side: int) -> str:
    """The augmentation of images of a size: CIFAR's has no blur, STL-10's a small one."""
    return "cifar10" if side <= 40 else "stl10" if side <= 128 else "simclr"
