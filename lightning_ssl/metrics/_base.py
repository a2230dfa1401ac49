"""What the metrics share: states of two kinds, reduced over the ranks whatever each of them saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_ssl.distributed import all_reduce_sum, exchange


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

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] | None = None, process_group: Any | None = None) -> None:
        """Rows cross in one exchange, with the shapes of the sums; then each sum is reduced."""
        rows = {name: self._rows(name) for name, how in self._reductions.items() if how is dim_zero_cat}
        sums = {name: getattr(self, name) for name, how in self._reductions.items() if how is not dim_zero_cat}
        shapes = {name: tuple(value.shape) for name, value in sums.items()}
        group = process_group or self.process_group
        parts = exchange({"rows": rows, "shapes": shapes}, self.device, group=group)
        for name in rows:
            setattr(self, name, [self._joined([part["rows"][name] for part in parts], name)])
        for name, value in sums.items():
            found = {tuple(part["shapes"][name]) for part in parts} - {()}
            if len(found) > 1:
                raise ValueError(
                    f"`{type(self).__name__}.{name}` has different shapes on different ranks: {sorted(found)}; "
                    "feed the same features"
                )
            setattr(self, name, all_reduce_sum(value.expand(found.pop()) if found else value, group))

    def _joined(self, parts: list[Tensor], name: str) -> Tensor:
        filled = [part for part in parts if len(part)]
        if len({(part.shape[1:], part.dtype) for part in filled}) > 1:
            kinds = [(tuple(part.shape), part.dtype) for part in filled]
            raise ValueError(
                f"`{type(self).__name__}.{name}` has different row shapes or types on different ranks: {kinds}; feed "
                "the same data"
            )
        return torch.cat(filled) if filled else parts[0]
