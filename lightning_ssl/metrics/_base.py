"""What the metrics share: states of two kinds, reduced over the ranks whatever each of them saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

_DTYPES = (torch.float32, torch.float64, torch.int64)


class ReducedMetric(Metric):
    """A metric whose states are sums in double precision, or rows.

    A sum begins as the scalar 0 and takes the shape of what is added to it, so that a metric need not know the
    features' dimension beforehand. torchmetrics' own synchronisation stalls when the ranks' shapes differ in rank or
    type, as they do when one of them saw no data; the one here agrees on the shapes first.
    """

    full_state_update = False
    is_differentiable = False

    def add_sum(self, name: str) -> None:
        self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def add_rows(self, name: str) -> None:
        self.add_state(name, [], dist_reduce_fx="cat")

    def _rows(self, name: str) -> Tensor:
        """All rows of a state, as one tensor; an empty one when there are none."""
        rows = getattr(self, name)
        return dim_zero_cat(rows) if len(rows) else torch.zeros(0, device=self.device)

    def _check_updated(self, count: Tensor | int) -> None:
        # After the reduction: all ranks agree, so that all of them raise.
        if not int(count):
            raise ValueError(f"{type(self).__name__} has seen no rows on any rank; call `update` before `compute`")

    def _sync_dist(self, dist_sync_fn: Callable | None = None, process_group: Any | None = None) -> None:
        group = process_group or self.process_group or dist.group.WORLD
        for name, reduction in self._reductions.items():
            if reduction is dim_zero_cat:
                setattr(self, name, [_gather_rows(self._rows(name), f"{type(self).__name__}.{name}", group)])
            else:
                setattr(self, name, _sum(getattr(self, name), f"{type(self).__name__}.{name}", group))


def _sum(value: Tensor, name: str, group: Any) -> Tensor:
    shapes = {shape for shape, _ in _headers(value, group) if shape}
    if len(shapes) > 1:
        raise ValueError(f"`{name}` has different shapes on different ranks: {sorted(shapes)}; feed the same features")
    total = value.expand(shapes.pop()).clone() if shapes else value.clone()
    dist.all_reduce(total, group=group)
    return total


def _gather_rows(rows: Tensor, name: str, group: Any) -> Tensor:
    headers = _headers(rows, group)
    filled = [(shape, dtype) for shape, dtype in headers if shape[0]]
    if not filled:
        return rows
    if len({(shape[1:], dtype) for shape, dtype in filled}) > 1:
        raise ValueError(f"`{name}` has different row shapes or types on different ranks: {filled}; feed the same data")
    longest = max(shape[0] for shape, _ in filled)
    (_, *trailing), dtype = filled[0]
    padded = torch.zeros(longest, *trailing, dtype=dtype, device=rows.device)
    if len(rows):
        padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in headers]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[: shape[0]] for part, (shape, _) in zip(gathered, headers, strict=True)])


def _headers(value: Tensor, group: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape and type of every rank's value."""
    header = [_DTYPES.index(value.dtype), value.ndim, *value.shape]
    local = torch.tensor(header + [0] * (8 - len(header)), device=value.device)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return [(tuple(sizes[:ndim]), _DTYPES[code]) for code, ndim, *sizes in (part.tolist() for part in parts)]
