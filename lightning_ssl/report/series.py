"""Values over steps that stay small and keep their extremes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 1000  # of one series in memory and in checkpoints


class Series:
    """Values over steps. Of a long one the past is thinned out; first, last, least and greatest values stay exact.

    Args:
        points: (step, value) pairs, in the order of the steps.
        most: The number of points at which the past is thinned to half as many.

    Example:
        >>> series = Series((step, float(step == 777)) for step in range(5000))
        >>> len(series) <= 1000, max(value for _, value in series)
        (True, 1.0)
    """

    def __init__(self, points: Iterable[tuple[int, float]] = (), most: int = MOST_POINTS) -> None:
        self.steps, self.values, self.most = array("q"), array("d"), most
        for step, value in points:
            self.add(step, value)

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.steps.append(int(step))
        self.values.append(value)
        if len(self.steps) > self.most:
            kept = thin(np.asarray(self.values), self.most // 2)
            self.steps = array("q", np.asarray(self.steps)[kept].tolist())
            self.values = array("d", np.asarray(self.values)[kept].tolist())

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.steps[index], self.values[index]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def extreme(self, largest: bool) -> tuple[int, float]:
        """The first point with the largest, or smallest, finite value; the last point where there is none."""
        values = np.asarray(self.values)
        finite = np.flatnonzero(np.isfinite(values))
        if not len(finite):
            return self[-1]
        return self[int(finite[np.argmax(values[finite] if largest else -values[finite])])]


def thin(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Positions of at most `most` values: the first, the last, and the least and greatest of each of equal parts.

    Example:
        >>> thin(np.array([0.0, 1, 9, 1, 2, -5, 2, 1, 0, 0]), 6).tolist()
        [0, 1, 2, 5, 6, 9]
    """
    count = len(values)
    if count <= max(most, 4):
        return np.arange(count)
    parts = max(1, (most - 2) // 2)
    edges = np.linspace(1, count - 1, parts + 1).astype(np.int64)[:-1]
    inner = values[: count - 1]
    low, high = np.where(np.isnan(inner), np.inf, inner), np.where(np.isnan(inner), -np.inf, inner)
    part = np.searchsorted(edges, np.arange(count - 1), side="right") - 1
    first_low = _first(low == np.minimum.reduceat(low, edges)[part], part)
    first_high = _first(high == np.maximum.reduceat(high, edges)[part], part)
    return np.unique(np.concatenate([[0, count - 1], first_low, first_high]))


def _first(marked: NDArray[np.bool_], part: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first marked position of each part; the position before the parts, of part -1, is left out."""
    places = np.flatnonzero(marked & (part >= 0))
    return places[np.unique(part[places], return_index=True)[1]]


def on_grid(
    series: Mapping[str, Sequence[tuple[int, float]] | Series], most: int
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Several series over the same steps, None where one has no value there.

    Where all their steps together are more than `most`, steps are put together in equal stretches, and each series
    shows its least and greatest value of a stretch, in their order, at its two ends.

    Example:
        >>> on_grid({"a": [(0, 1.0), (5, 2.0)], "b": [(5, 3.0)]}, 100)
        ([0, 5], {'a': [1.0, 2.0], 'b': [None, 3.0]})
    """
    arrays = {key: _array(points) for key, points in series.items()}
    steps = np.unique(np.concatenate([points[:, 0] for points in arrays.values()])) if arrays else np.zeros(0)
    if len(steps) <= most:
        grid, found = steps, {key: _placed(steps, points) for key, points in arrays.items()}
    else:
        width = (steps[-1] - steps[0] + 1) / max(1, most // 2)
        starts = np.unique(np.floor((steps - steps[0]) / width))
        left = steps[np.searchsorted(np.floor((steps - steps[0]) / width), starts)]
        right = steps[np.searchsorted(np.floor((steps - steps[0]) / width), starts, side="right") - 1]
        grid = np.unique(np.concatenate([left, right]))
        found = {}
        for key, points in arrays.items():
            part = np.searchsorted(starts, np.floor((points[:, 0] - steps[0]) / width))
            found[key] = _placed(grid, _ends(points, part, left, right))
    return [int(step) for step in grid], {
        key: [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.tolist()]
        for key, values in found.items()
    }


def _array(points: Sequence[tuple[int, float]] | Series) -> NDArray[np.float64]:
    if isinstance(points, Series):
        return np.stack([np.asarray(points.steps, dtype=np.float64), np.asarray(points.values)], axis=1)
    return np.array(list(points), dtype=np.float64).reshape(-1, 2)


def _placed(grid: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.full(len(grid), np.nan)
    values[np.searchsorted(grid, points[:, 0])] = points[:, 1]
    return values


def _ends(
    points: NDArray[np.float64], part: NDArray[np.int64], left: NDArray[np.float64], right: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Each stretch's least and greatest value, in their order, at its two ends; its only value at the nearer one."""
    finite = np.isfinite(points[:, 1])
    points, part = points[finite], part[finite]
    if not len(points):
        return points
    _, starts, own = np.unique(part, return_index=True, return_inverse=True)
    values = points[:, 1]
    low = _first(values == np.minimum.reduceat(values, starts)[own], own)
    high = _first(values == np.maximum.reduceat(values, starts)[own], own)
    one, two = np.minimum(low, high), np.maximum(low, high)
    here = part[one]
    near = points[one, 0] - left[here] <= right[here] - points[one, 0]
    begin = np.where((one != two) | near, left[here], right[here])
    both = (one != two) & (left[here] != right[here])
    return np.concatenate(
        [np.stack([begin, values[one]], axis=1), np.stack([right[here][both], values[two][both]], axis=1)]
    )
