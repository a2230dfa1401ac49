"""Anybody's batch: its tensors, its rows, the views in it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]


def rebuilt(batch: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The batch with each leaf changed; leaves are what is no list, tuple, mapping or dataclass."""
    if isinstance(batch, Mapping):
        items = {key: rebuilt(value, change, (*path, key)) for key, value in batch.items()}
        if type(batch) is dict:
            return items
        new = copy.copy(batch)
        for key, value in items.items():
            new[key] = value  # type: ignore[index]
        return new
    if isinstance(batch, (list, tuple)):
        if batch and _plain(batch):
            return change(path, batch)
        parts = [rebuilt(value, change, (*path, i)) for i, value in enumerate(batch)]
        if hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        twin: Any = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(twin, field.name, rebuilt(getattr(batch, field.name), change, (*path, field.name)))
        return twin
    return change(path, batch)


def _plain(values: Any) -> bool:
    """Whether these are names or numbers, one a row."""
    return all(isinstance(value, (str, int, float)) for value in values)


def leaves(batch: Any) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    rebuilt(batch, lambda path, leaf: found.append((path, leaf)))
    return found


def tensors(batch: Any) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, Tensor)]


def count_rows(batch: Any) -> int | None:
    """How many samples a batch holds: the commonest first size of its tensors."""
    sizes = Counter(len(x) for _, x in tensors(batch) if x.ndim)
    return sizes.most_common(1)[0][0] if sizes else None


def take(batch: Any, rows: Tensor) -> Any:
    """These samples of a batch; whatever has another number of rows is left as it is."""
    n = count_rows(batch)

    def change(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[rows.to(leaf.device)] if leaf.ndim and len(leaf) == n else leaf
        if isinstance(leaf, (list, tuple)) and len(leaf) == n:
            return type(leaf)(leaf[i] for i in rows.tolist())
        return leaf

    return rebuilt(batch, change)


def divisible(batch: Any) -> str:
    """Why a batch cannot be divided by rows; empty if it can."""
    n = count_rows(batch)
    if n is None:
        return f"no tensor with rows was found in the batch ({type(batch).__name__})"
    odd = {tuple(x.shape) for _, x in tensors(batch) if x.ndim > 1 and len(x) != n and x.is_floating_point()}
    if odd:
        return f"the batch has {n} rows, but also tensors of shape {sorted(odd)[0]}, which cannot be divided by rows"
    return ""


def trimmed(batch: Any, most: int) -> Any:
    """The first rows of a batch, an even number of them."""
    n = count_rows(batch)
    if n is None or divisible(batch) or n < 2:
        return batch
    return take(batch, torch.arange(min(n - n % 2, most)))


def parts(batch: Any, ranks: int) -> list[Any] | None:
    """Equal shares of a batch, in order; None if there are fewer than two rows for each."""
    n = count_rows(batch)
    if n is None or n // ranks < 2:
        return None
    share = n // ranks
    return [take(batch, torch.arange(r * share, (r + 1) * share)) for r in range(ranks)]


@dataclass(frozen=True)
class Views:
    """Where the views of a batch are: tensors of one shape beside each other, or one tensor [N, V, ...]."""

    paths: tuple[Path, ...]
    stacked: bool = False

    def of(self, batch: Any) -> list[Tensor]:
        found = [at(batch, path) for path in self.paths]
        return list(found[0].unbind(1)) if self.stacked else found

    def put(self, batch: Any, views: list[Tensor]) -> Any:
        """The batch with other views."""
        new = [torch.stack(views, dim=1)] if self.stacked else views
        by_path = dict(zip(self.paths, new, strict=True))
        return rebuilt(batch, lambda path, leaf: by_path.get(path, leaf))


def at(batch: Any, path: Path) -> Any:
    for key in path:
        named = is_dataclass(batch) and not isinstance(batch, Mapping)
        batch = getattr(batch, key) if named else batch[key]
    return batch


def find_views(batch: Any) -> Views | None:
    """The first group of two or more floating-point tensors of one shape that stand side by side, one row a sample."""
    n = count_rows(batch)
    groups: dict[tuple[Path, tuple[int, ...]], list[Path]] = {}
    stacked: list[Path] = []
    for path, x in tensors(batch):
        if not x.is_floating_point() or x.ndim < 2 or len(x) != n:
            continue
        groups.setdefault((path[:-1], tuple(x.shape)), []).append(path)
        if x.ndim == 5 and 2 <= x.shape[1] <= 8 and x.shape[2] <= 16:
            stacked.append(path)
    for paths in groups.values():
        if len(paths) > 1:
            return Views(tuple(paths))
    return Views((stacked[0],), stacked=True) if stacked else None
