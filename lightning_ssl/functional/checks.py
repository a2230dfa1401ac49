"""The input checks that the functions share; each error names the argument, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_trusted = False


@contextmanager
def trusting() -> Iterator[None]:
    """Inside, shapes are checked and numbers are not: each look at them would wait for the device.

    Non-finite input then gives non-finite results, by which the caller can tell that there is something to look at.
    """
    global _trusted
    before, _trusted = _trusted, True
    try:
        yield
    finally:
        _trusted = before


def trusted() -> bool:
    """Whether numbers are taken as they are."""
    return _trusted


def check_rows(x: Tensor, name: str, min_rows: int = 1, nonzero: bool = False) -> None:
    """Refuse anything but a finite floating-point matrix [N, d] with at least `min_rows` rows."""
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"`{name}` must be a matrix [rows, dimensions], got shape {tuple(x.shape)}; flatten or pool it"
        )
    if not x.is_floating_point():
        raise ValueError(f"`{name}` must be floating point, got {x.dtype}; convert it with .float()")
    if x.shape[0] < min_rows:
        raise ValueError(f"`{name}` needs at least {min_rows} rows, got {x.shape[0]}; pass a larger batch")
    if _trusted:
        return
    # One reduction on the device: a non-finite entry makes the row's sum of magnitudes non-finite.
    wide = torch.promote_types(x.dtype, torch.float32)
    few = max(1, 2**22 // x.shape[1])  # rows at a time: `abs` is a copy, always in the same place
    magnitude, copy = x.new_empty(len(x), dtype=wide), torch.empty_like(x.detach()[:few])
    for part, sums in zip(x.detach().split(few), magnitude.split(few), strict=True):
        torch.sum(torch.abs(part, out=copy[: len(part)]), dim=1, dtype=wide, out=sums)
    if not bool(magnitude.isfinite().all()):
        raise ValueError(f"`{name}` has {_rows(~magnitude.isfinite())}; drop them or find where they come from")
    if nonzero and bool((magnitude == 0).any()):
        raise ValueError(f"`{name}` has all-zero {_rows(magnitude == 0, '')}, which have no direction; drop them")


def _rows(mask: Tensor, what: str = "non-finite ") -> str:
    return f"{what}rows, the first at index {int(mask.nonzero()[0, 0])} ({int(mask.sum())} of {mask.numel()})"


def check_same_shape(x: Tensor, y: Tensor, names: tuple[str, str]) -> None:
    if x.shape != y.shape:
        raise ValueError(
            f"`{names[0]}` and `{names[1]}` must have the same shape, got {tuple(x.shape)} and {tuple(y.shape)}"
        )


def check_square(matrix: Tensor, name: str) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"`{name}` must be a square matrix, got shape {tuple(matrix.shape)}")
    if not _trusted and not bool(matrix.detach().isfinite().all()):
        raise ValueError(f"`{name}` has non-finite entries; find where they come from")


def check_positive(value: float, name: str) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be positive, got {value}")


def check_labels(labels: Tensor, num_classes: int, rows: int, name: str = "labels") -> None:
    """Refuse labels that are not `rows` integers in [0, num_classes)."""
    if num_classes < 1:
        raise ValueError(f"`num_classes` must be at least 1, got {num_classes}")
    if labels.shape != (rows,):
        raise ValueError(f"`{name}` must have shape ({rows},), one for each row, got {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"`{name}` must be integers, got {labels.dtype}; convert them with .long()")
    if rows and not _trusted and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        raise ValueError(
            f"`{name}` must lie in [0, {num_classes}), got {int(labels.min())} to {int(labels.max())}; "
            "drop unlabelled rows or raise `num_classes`"
        )
