"""The covariance operators' norms of a network, over batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl.distributed import gather_objects, rank
from lightning_ssl.functional.connection import as_found, check_views, watched_layers
from lightning_ssl.functional.covariance_operator import (
    check_directions,
    check_reached,
    norms_of,
    sketched_rows,
)
from lightning_ssl.functional.estimate import CovarianceOperatorNorms, Sums
from lightning_ssl.functional.sketch import PILOT, Basis, Pilot, make_basis, run_pilot
from lightning_ssl.metrics._base import ReducedMetric


class CovarianceOperator(ReducedMetric):
    r"""Norms of the inter- and intra-augmentation covariance operators of a network's layers (DDN-v2 Eqs. 9, 10).

    The streaming form of :func:`~lightning_ssl.functional.covariance_operator_norms`. Its state is one vector of
    sums over samples; ranks add theirs up, and centres, norms and eigenvalues are taken only then, so that the value
    is the one that a single process finds on the concatenated data. Weights must not change between updates, and
    must be the same on all ranks.

    The output directions and filters must be the same on all ranks and for all batches. They are chosen in the first
    `update` after a `reset`, on the first few samples of all ranks together. So with several ranks **that update is
    collective**: all ranks call it, those without data with an empty list of views. It exchanges two small messages
    (and the first samples, where the first rank has too few), `compute` one sum. An error on one rank in that update
    is raised on all.

    Args:
        layers: Dotted names of Linear or Conv layers; default: all that the model calls.
        directions: Output directions to follow, the cost of an update in backward passes.
        principal: How many of them are principal directions of the outputs.
        unbiased: Whether samples and views are draws; as in `functional.covariance_operator`.
        seed: Fixes every random choice.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> x = torch.randn(16, 4)
        >>> metric = CovarianceOperator(layers=["2"])
        >>> metric.update(model, [x, x + 0.1 * torch.randn(16, 4)])
        >>> list(metric.compute())
        ['2']
    """

    sums: Tensor

    def __init__(
        self,
        layers: Sequence[str] | None = None,
        directions: int = 16,
        principal: int | None = None,
        unbiased: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        principal = check_directions(directions, principal)
        self.layers = None if layers is None else list(layers)
        self.directions, self.principal, self.unbiased, self.seed = directions, principal, unbiased, seed
        self.basis: Basis | None = None
        self.num_views = 0
        self.add_sum("sums")

    def update(self, model: nn.Module, views: Sequence[Tensor]) -> None:
        """Add a batch.

        Args:
            model: Maps a batch to outputs ``[N, n_L]``; left as it was found.
            views: Two or more batches of the same samples; empty on a rank that has none.
        """
        if self.basis is None:
            self._choose_basis(model, views)
        if self.basis is None or not _size(views):
            return
        views = check_views(views, min_samples=1)
        if len(views) != self.num_views:
            raise ValueError(f"`views` must be {self.num_views}, as in the first update, got {len(views)}")
        sums = self._layers_sums(torch.zeros(self._length(), dtype=torch.float64, device=views[0].device))
        watched = {name: layer for name, layer in watched_layers(model, self.layers).items() if name in sums}
        with as_found(model, views[0].device, self.seed):
            for name, direction, rows in sketched_rows(model, watched, views, self.basis):
                sums[name].add(direction, rows)
        self.sums = self.sums + torch.cat([part.flatten() for layer in sums.values() for part in layer]).to(self.sums)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """The same as `update`: a batch's own value would need directions of its own."""
        self.update(*args, **kwargs)

    def compute(self) -> dict[str, CovarianceOperatorNorms]:
        """The norms of every watched layer, by name."""
        self._check_updated(int(self.basis is not None and self.sums.dim()))
        assert self.basis is not None
        norms = {}
        for name, sums in self._layers_sums(self.sums).items():
            if int(sums.samples) < 2:
                raise ValueError("CovarianceOperator has seen 1 sample; it takes at least 2 to have a variance")
            norms[name] = norms_of(sums.operators(self.num_views, self.unbiased), name, self.basis)
        return norms

    def reset(self) -> None:
        """Forget the samples, and the directions chosen for them."""
        super().reset()
        self.basis = None

    def _choose_basis(self, model: nn.Module, views: Sequence[Tensor]) -> None:
        problem: Exception | None = None
        try:
            if _size(views):
                check_views(views, min_samples=1)
            watched = watched_layers(model, self.layers)
        except ValueError as error:
            problem = error
        shards = self._gather((_size(views), len(views), problem))
        _raise_first([problem for *_, problem in shards])
        sizes = [size for size, *_ in shards]
        if not any(sizes):
            return
        this = rank(self.process_group) if len(shards) > 1 else 0
        owner = next(number for number, size in enumerate(sizes) if size)
        first = sum(sizes[:this])
        few = [view[: max(0, PILOT - first)] for view in views]
        if sizes[owner] < min(PILOT, sum(sizes)):
            # One rank must see them all: summed in another order, they would turn the directions by more than 1e-5.
            parts = [part for part in self._gather([view.cpu() for view in few]) if _size(part)]
            few = [torch.cat(view).to(self.device) for view in zip(*parts, strict=True)]
        pilot: Pilot | None = None
        try:
            if this == owner:
                with as_found(model, views[0].device, self.seed):
                    pilot = run_pilot(model, watched, few, self.seed)
                check_reached(watched, pilot.layers, self.layers)
        except ValueError as error:
            problem = error
        found = self._gather((pilot, problem))
        _raise_first([problem for _, problem in found])
        pilot = found[owner][0]
        assert pilot is not None
        self.num_views = shards[owner][1]
        self.basis = make_basis(pilot, watched, self.directions, self.principal, self.seed).to(self.device)

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self.process_group) if self.sync_on_compute else [value]

    def _layers_sums(self, flat: Tensor) -> dict[str, Sums]:
        """Views of the vector `flat`, by layer."""
        assert self.basis is not None
        layers, start = {}, 0
        for name, sketch in self.basis.sketches.items():
            parts = []
            for shape in Sums.shapes(*self.basis.strata(name), sketch.width):
                size = torch.Size(shape).numel()
                parts.append(flat[start : start + size].view(shape))
                start += size
            layers[name] = Sums(*parts)
        return layers

    def _length(self) -> int:
        assert self.basis is not None
        return sum(
            torch.Size(shape).numel()
            for name, sketch in self.basis.sketches.items()
            for shape in Sums.shapes(*self.basis.strata(name), sketch.width)
        )


def _size(views: Sequence[Tensor]) -> int:
    return len(views[0]) if len(views) else 0


def _raise_first(problems: Sequence[Exception | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise problem
