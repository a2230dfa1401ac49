"""Probe data that can only be run through: shared by the ranks or split between them, in samples or in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_convert

from lightning_ssl.callbacks._engine.batch import collate, inputs_and_label, taken_apart
from lightning_ssl.callbacks._engine.record import first_tensor
from lightning_ssl.metrics.evaluation import Targets

# A sample is known by so many of its numbers.
_NUMBERS = 1024


class Stream:
    """A loader that can only be run through.

    Args:
        loader: It yields batches.
        samples: How many samples all ranks together are to take; by default all that there are.
        split: Whether each rank's loader yields samples of its own; otherwise all yield the same, and the ranks take
            turns.
    """

    def __init__(self, loader: Any, samples: int | None, split: bool = False) -> None:
        self.loader, self.samples, self.split = loader, samples, split
        # Of the last pass: how many samples this rank took, and what they are known by, where that can be said.
        self.taken = 0
        self.marks: list[int] = []

    def own(self, batches: Iterator[Any], rank: int, ranks: int) -> Iterator[tuple[Any, Tensor]]:
        """This rank's batches, each with the places of its samples; -1 past the stated number."""
        self.taken, self.marks, seen = 0, [], 0
        most = self.samples if not self.split or self.samples is None else -(-self.samples // ranks)
        for number, batch in enumerate(batches):
            size = len(inputs_and_label(batch, "probe", None)[1])
            places = torch.arange(seen, seen + size)
            seen += size
            if self.split or number % ranks == rank:
                places = rank + ranks * places if self.split else places
                kept = int(size if self.samples is None else (places < self.samples).sum())
                places[kept:] = -1
                self.taken += kept
                self.marks += (marks_of(batch) or [])[:kept]
                yield batch, places
            if most is not None and seen >= most:
                return


class Grouped:
    """Batches of what yields single samples; what yields batches passes through.

    Args:
        samples: Anything to iterate over again and again.
        targets: What labels are, by which samples and batches are told apart.
    """

    batch_size = 256

    def __init__(self, samples: Any, targets: Targets = "class") -> None:
        self.samples, self.targets = samples, targets

    def __iter__(self) -> Iterator[Any]:
        several: list[Any] = []
        for item in self.samples:
            if _is_batch(item, self.targets):
                yield default_convert(item)
                continue
            several.append(item)
            if len(several) == self.batch_size:
                yield collate(several)
                several = []
        if several:
            yield collate(several)


def _is_batch(item: Any, targets: Targets) -> bool:
    """Whether there is a label for each of several inputs; numbers [N] may be one sample's, and are."""
    inputs, label = taken_apart(default_convert(item))
    x = first_tensor(inputs, floating=False)
    if x is None or not x.ndim or not isinstance(label, Tensor) or label.ndim != (1 if targets == "class" else 2):
        return False
    return len(x) == len(label) and not (x.ndim == 3 and len(label) == 1)


def marks_of(batch: Any) -> list[int] | None:
    """A number for each sample of a batch, the same wherever and whenever it is read; None where nothing tells them."""
    inputs, label = inputs_and_label(batch, "probe", None)
    parts = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    parts = [x.detach().cpu() for x in parts if isinstance(x, Tensor) and x.ndim and len(x) == len(label)]
    if not parts:
        return None
    digests = [hashlib.blake2b(repr(one).encode(), digest_size=7) for one in label.tolist()]
    for x in parts:
        some = x.flatten(1) if x.ndim > 1 else x[:, None]
        some = some[:, :: max(1, some.shape[1] // _NUMBERS)].contiguous()
        for digest, row in zip(digests, some, strict=True):
            digest.update(row.view(torch.uint8).numpy().tobytes())
    return [int.from_bytes(digest.digest(), "big") for digest in digests]


def is_split(first: Sequence[Sequence[int] | None]) -> bool:
    """Whether ranks read samples of their own, by what each of them reads first: nothing, or what is not known (None).

    Raises:
        ValueError: Some read the same and some do not.
    """
    if any(marks is None for marks in first):
        return False
    filled = [tuple(marks) for marks in first if marks]
    different = len(set(filled))
    if different <= 1 and len(filled) in (0, len(first)):
        return False
    if different < len(filled):
        raise ValueError(
            "some ranks read the same samples of a stream, and some others; give all of them the same stream, or each "
            "rank a part of its own"
        )
    return True


def read_by_several(marks: Sequence[Tensor]) -> int:
    """How many samples more than one rank has read, of data that has not as many twice on one rank."""
    once = [part.unique() for part in marks]
    apart = sum(len(part) for part in once)
    again = apart - len(torch.cat(once).unique())
    return again if again > sum(len(part) for part in marks) - apart else 0
