"""Hugging Face's datasets and WebDataset's shards, read by sample index as all other data is."""

from __future__ import annotations

import glob
import re
import tarfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ssl.data.folders import TEST, held_out_rows, suitable_side
from lightning_ssl.data.sources import CorruptImageError, Source, Split, decode_bytes

KINDS = {"hf": "datasets", "wds": "webdataset"}  # and the packages that read them
IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
LOOKED_AT = 64  # images whose sizes are read


def name_of(root: str, kind: str) -> str:
    """What stands behind `hf/` or `wds/`, where `root` has it."""
    return root.removeprefix(f"{kind}/")


def load(kind: str, root: str) -> Source:
    """The splits of a dataset.

    Args:
        kind: "hf" or "wds".
        root: For "hf" a folder that `save_to_disk` wrote or that holds parquet or arrow files, or a name on the hub;
            for "wds" a pattern of tar files, with braces or wildcards. Either may begin with its kind and a slash.
    """
    package, name = KINDS[kind], name_of(root, kind)
    if find_spec(package) is None:
        raise ValueError(f"root={root!r} needs the package {package}, which is not installed: pip install {package}")
    train, test, classes = _hugging_face(name) if kind == "hf" else _shards(name)
    alone = test is None
    if test is None:
        if len(train) < 2:
            raise FileNotFoundError(f"root={root!r} holds {len(train)} sample(s); at least two are needed.")
        train, test = (train.part(rows) for rows in held_out_rows(len(train)))
    return Source(train, train, test, classes, held_out=alone)


def side_of(source: Source, otherwise: int) -> int:
    """The side of views that suits the first images of a dataset."""
    read = (source.train.read(row, "skip")[0] for row in range(min(LOOKED_AT, len(source.train))))
    return suitable_side([min(image.shape[1:]) for image in read if image is not None], otherwise)


class HubSplit(Split):
    """A part of a dataset whose images are encoded bytes, found by their row."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__(labels)

    def part(self, rows: list[int]) -> HubSplit:
        """These rows alone."""
        raise NotImplementedError

    def encoded(self, row: int) -> tuple[bytes, str]:
        """The encoded image of a row, and what to call it."""
        raise NotImplementedError

    def read(self, row: int, on_corrupt: str) -> tuple[Tensor | None, int]:
        try:
            return decode_bytes(*self.encoded(row)), int(self.labels[row])
        except CorruptImageError as error:
            if on_corrupt == "error":
                raise
            warnings.warn(f"skipped: {error}", stacklevel=2)
            return None, int(self.labels[row])


# Hugging Face ---------------------------------------------------------------------------------------------------------


class RowsSplit(HubSplit):
    """A `datasets.Dataset` with a column of images."""

    def __init__(self, dataset: Any, column: str, labels: Tensor) -> None:
        super().__init__(labels)
        self.dataset, self.column = dataset, column

    def part(self, rows: list[int]) -> HubSplit:
        return RowsSplit(self.dataset.select(rows), self.column, self.labels[rows])

    def encoded(self, row: int) -> tuple[bytes, str]:
        value = self.dataset[row][self.column]
        name = f"row {row} of column {self.column!r}"
        if isinstance(value, dict):
            name = value.get("path") or name
            if value.get("bytes") is None:
                try:
                    value = {"bytes": Path(name).read_bytes()}
                except OSError as error:
                    raise CorruptImageError(f"{name} cannot be read: {error}") from error
            value = value["bytes"]
        if not isinstance(value, bytes):
            raise CorruptImageError(f"{name} holds no image, got {type(value).__name__}.")
        return value, name


def _hugging_face(name: str) -> tuple[HubSplit, HubSplit | None, list[str]]:
    import datasets

    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found: Any = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name)
    except Exception as error:  # what it raises has many names and no common base
        reason = (str(error).strip().splitlines() or [""])[0]
        raise FileNotFoundError(
            f"root='hf/{name}' cannot be read by datasets: {type(error).__name__}: {reason}; give a folder that "
            "save_to_disk wrote, a folder of parquet or arrow files, or the name of a dataset on the hub"
        ) from error
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    train = parts.get("train", next(iter(parts.values())))
    test = next((parts[key] for key in TEST if key in parts and parts[key] is not train), None)
    column = _image_column(name, train)
    labelled, classes = _label_column(train)
    splits = [None if part is None else _rows_split(part, column, labelled, classes) for part in (train, test)]
    assert splits[0] is not None
    return splits[0], splits[1], classes


def _image_column(name: str, dataset: Any) -> str:
    import datasets

    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature):
            return column
        if getattr(feature, "dtype", "") in ("binary", "large_binary"):
            return column
    raise ValueError(
        f"root='hf/{name}' must have a column of images (datasets.Image, or their encoded bytes), got "
        f"{', '.join(f'{column} ({feature})' for column, feature in dataset.features.items())}; cast one to it"
    )


def _label_column(dataset: Any) -> tuple[str | None, list[str]]:
    import datasets

    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.ClassLabel):
            return column, list(feature.names)
    column = next((column for column in LABELS if column in dataset.features), None)
    if column is None or not hasattr(dataset.features[column], "dtype"):
        return None, []
    values = {value for value in dataset.unique(column) if value is not None and value != -1}
    if all(isinstance(value, int) for value in values):
        return column, [str(value) for value in range(max(values, default=-1) + 1)]
    return column, sorted(map(str, values))


def _rows_split(dataset: Any, column: str, labelled: str | None, classes: list[str]) -> RowsSplit:
    import datasets

    labels = torch.full((len(dataset),), -1)
    if labelled is not None:
        number = {name: row for row, name in enumerate(classes)}
        listed = dataset.select_columns([labelled]).with_format(None)[:][labelled]
        labels = torch.tensor(
            [-1 if value is None else value if isinstance(value, int) else number[str(value)] for value in listed]
        )
    if isinstance(dataset.features[column], datasets.Image):
        dataset = dataset.cast_column(column, datasets.Image(decode=False))
    return RowsSplit(dataset.select_columns([column]), column, labels)


# WebDataset -----------------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """Where an image lies: the shard, its first byte and its size, and its key."""

    shard: str
    offset: int
    size: int
    key: str


class ShardSplit(HubSplit):
    """Samples of tar files, read in any order by where they lie."""

    def __init__(self, members: list[Member], labels: Tensor) -> None:
        super().__init__(labels)
        self.members = members

    def part(self, rows: list[int]) -> HubSplit:
        return ShardSplit([self.members[row] for row in rows], self.labels[rows])

    def encoded(self, row: int) -> tuple[bytes, str]:
        member = self.members[row]
        with open(member.shard, "rb") as file:
            file.seek(member.offset)
            return file.read(member.size), f"{member.key} in {member.shard}"


def _shards(pattern: str) -> tuple[HubSplit, HubSplit | None, list[str]]:
    train = _index(pattern, _expand(pattern))
    test = None
    folder, slash, file = pattern.rpartition("/")
    for word in TEST if "train" in file else ():
        if shards := _expand(f"{folder}{slash}{_counted_anew(file, word)}"):
            test = _index(pattern, shards)
            break
    top = int(max(split.labels.max() for split in (train, test) if split is not None and len(split)))
    return train, test, [str(label) for label in range(top + 1)]


def _counted_anew(file: str, word: str) -> str:
    """The pattern of another split, whose shards may be more or fewer."""
    return re.sub(r"\{\d+\.\.\d+\}", "*", file).replace("train", word)


def _expand(pattern: str) -> list[str]:
    """The files of a pattern, in order."""
    from webdataset.shardlists import expand_urls

    found: list[str] = []
    for url in expand_urls(pattern):
        if "://" in url or url.startswith("pipe:"):
            raise ValueError(
                f"root='wds/{pattern}' must name files, read sample by sample, got {url!r}; download the shards first"
            )
        found += sorted(glob.glob(url)) if any(sign in url for sign in "*?[") else [url]
    return found


def _index(pattern: str, shards: list[str]) -> ShardSplit:
    """Find every sample of some shards; one pass over their headers."""
    from webdataset.tariterators import base_plus_ext

    members: list[Member] = []
    labels: list[int] = []
    for shard in shards:
        images: dict[str, Member] = {}
        classes: dict[str, int] = {}
        try:
            with tarfile.open(shard, "r:") as archive:
                for entry in archive:
                    key, ending = base_plus_ext(entry.name)
                    kind = (ending or "").lower().rpartition(".")[2]
                    if not entry.isfile() or key is None:
                        continue
                    if kind in IMAGES and key not in images:
                        images[key] = Member(shard, entry.offset_data, entry.size, entry.name)
                    elif kind in ("cls", "id") and (content := archive.extractfile(entry)) is not None:
                        classes[key] = int(content.read())
        except (OSError, tarfile.TarError, ValueError) as error:
            raise FileNotFoundError(
                f"root='wds/{pattern}': {shard!r} cannot be read as a plain tar file of images and classes: {error}; "
                "give tar files, not compressed, whose .cls files hold a number"
            ) from error
        members += images.values()
        labels += [classes.get(key, -1) for key in images]
    if not members:
        raise FileNotFoundError(
            f"root='wds/{pattern}' holds no image, in {len(shards)} tar file(s); give a pattern of files such as "
            "wds/FOLDER/train-{000..099}.tar"
        )
    return ShardSplit(members, torch.tensor(labels))
