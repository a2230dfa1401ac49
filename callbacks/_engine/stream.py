"""Probe data that can only be run through: shared by the ranks or split between them, in samples or in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_convert

from lightning_ssl.callbacks._engine.batch import collate, inputs_and_label, taken_apart
from lightning_ssl.callbacks._engine.record import first_tensor

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
        self.marks: list[int] = []  # of the samples that this rank took, in the last pass

    def own(self, batches: Iterator[Any], rank: int, ranks: int) -> Iterator[tuple[Any, Tensor]]:
        """This rank's batches, each with the places of its samples; -1 past the stated number."""
        self.marks, seen = [], 0
        most = self.samples if not self.split or self.samples is None else -(-self.samples // ranks)
        for number, batch in enumerate(batches):
            size = len(inputs_and_label(batch, "probe", None)[1])
            places = torch.arange(seen, seen + size)
            seen += size
            if self.split or number % ranks == rank:
                kept = torch.ones_like(places, dtype=torch.bool) if most is None else places < most
                self.marks += marks_of(batch)[: int(kept.sum())]
                yield batch, torch.where(kept, rank + ranks * places if self.split else places, -1)
            if most is not None and seen >= most:
                return


class Grouped:
    """Batches of what yields single samples; what yields batches passes through.

    Args:
        samples: Anything to iterate over again and again.
    """

    batch_size = 256

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        several: list[Any] = []
        for item in self.samples:
            if _is_batch(item):
                yield default_convert(item)
                continue
            several.append(item)
            if len(several) == self.batch_size:
                yield collate(several)
                several = []
        if several:
            yield collate(several)


def _is_batch(item: Any) -> bool:
    """Whether there is a label for each of several inputs; an image [channels, height, width] is one input."""
    inputs, label = taken_apart(default_convert(item))
    x = first_tensor(inputs, floating=False)
    if x is None or not isinstance(label, Tensor) or not label.ndim:
        return False
    return x.ndim >= 2 and x.ndim != 3 and len(x) == len(label)


def marks_of(batch: Any) -> list[int]:
    """A number for each sample of a batch, the same wherever and whenever it is read."""
    inputs, label = inputs_and_label(batch, "probe", None)
    x = first_tensor(inputs, floating=False)
    if x is None or len(x) != len(label) or not len(x):
        return []  # of these it is not known which is which
    some = x.detach().cpu().flatten(1) if x.ndim > 1 else x.detach().cpu()[:, None]
    some = some[:, :: max(1, some.shape[1] // _NUMBERS)].contiguous()
    digests = [hashlib.blake2b(row.view(torch.uint8).numpy().tobytes(), digest_size=7) for row in some]
    for digest, one in zip(digests, label.tolist(), strict=True):
        digest.update(repr(one).encode())
    return [int.from_bytes(digest.digest(), "big") for digest in digests]


def is_split(first: Sequence[Sequence[int] | None]) -> bool:
    """Whether ranks read samples of their own, by what each of them reads first.

    Raises:
        ValueError: Some read the same and some do not.
    """
    different = {tuple(marks or ()) for marks in first}
    if 1 < len(different) < len(first):
        raise ValueError(
            "some ranks read the same samples of a stream, and some others; give all of them the same stream, or each "
            "rank a part of its own"
        )
    return len(different) > 1
