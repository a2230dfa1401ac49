"""Small datasets written in the original file formats."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image


def write_cifar(root: Path, hundred: bool = False) -> dict[str, np.ndarray]:
    """CIFAR-10 in five files of 4 images, or CIFAR-100 in one of 20, and 10 for testing; pixels are [N, 3, 32, 32]."""
    rng = np.random.default_rng(0)
    folder = root / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    key = "fine_labels" if hundred else "labels"
    names = ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]
    pixels: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for name in [*names, "test" if hundred else "test_batch"]:
        part = "test" if name.startswith("test") else "train"
        count = 10 if part == "test" else 20 // len(names)
        data = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        pixels[part].append(data.reshape(-1, 3, 32, 32))
        entry = {"data": data, key: [i % 10 for i in range(count)]}
        (folder / name).write_bytes(pickle.dumps(entry))
    if hundred:
        (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class{i}" for i in range(100)]}))
    else:
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class{i}" for i in range(10)]}))
    return {name: np.concatenate(parts) for name, parts in pixels.items()}


def write_stl10(root: Path) -> dict[str, np.ndarray]:
    """STL-10 with 12 train, 10 test and 20 unlabelled images, stored column by column."""
    rng = np.random.default_rng(0)
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    pixels = {}
    for name, count in (("train", 12), ("test", 10), ("unlabeled", 20)):
        pixels[name] = rng.integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)
        (folder / f"{name}_X.bin").write_bytes(pixels[name].transpose(0, 1, 3, 2).tobytes())
        if name != "unlabeled":
            (folder / f"{name}_y.bin").write_bytes(bytes(i % 10 + 1 for i in range(count)))
    (folder / "class_names.txt").write_text("\n".join(f"class{i}" for i in range(10)))
    (folder / "fold_indices.txt").write_text("")
    return pixels


def write_fashion_mnist(root: Path, compress: bool = False) -> dict[str, np.ndarray]:
    """Fashion-MNIST with 30 train and 10 test images in idx files."""
    rng = np.random.default_rng(0)
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    pixels = {}
    for name, prefix, count in (("train", "train", 30), ("test", "t10k", 10)):
        pixels[name] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        images = struct.pack(">IIII", 0x803, count, 28, 28) + pixels[name].tobytes()
        labels = struct.pack(">II", 0x801, count) + bytes(i % 10 for i in range(count))
        for suffix, content in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{prefix}-{suffix}-ubyte{'.gz' if compress else ''}"
            path.write_bytes(gzip.compress(content) if compress else content)
    return pixels


def write_folder(root: Path, classes: int = 2, train: int = 6, test: int = 3) -> None:
    """An ImageFolder of small PNG and JPEG files of different sizes; each class has its own brightness."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for c in range(classes):
            folder = root / part / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(count):
                height, width = rng.integers(20, 60, 2)
                pixels = rng.integers(100 * c, 100 * c + 56, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.{'png' if i % 2 else 'jpg'}")
