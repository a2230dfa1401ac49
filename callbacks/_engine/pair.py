"""Pair: from the calls of a place to views of the same samples.

What the calls make certain is not questioned: calls of as many rows as the batch has samples are views, so that a
collapsed run is still measured. A call of several times as many rows holds several views, one block after another or
sample by sample; which, is seen where what entered equals tensors of the batch, or else tested: views of one sample
are closer than those of two. It is settled at the first observation, by all ranks' evidence together, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_ssl.callbacks._engine.record import leading_sizes, tensors_in

Kind = Literal["calls", "blocked", "interleaved"]
Pairing = Kind | Callable[[list[Tensor]], Sequence[Tensor]]

MOST_VIEWS = 16  # of one call that nobody declared
SURE = 3.3  # standard deviations by which views of one sample must be closer than those of two; needs 4 samples
APART = 2.0  # and by which one reading must beat the other
SAMPLES = 256  # of a call that are compared
WHOLE = ("whole", 0)  # what entered is a tensor of the batch as it is
TARGET = ("target", 2)  # the score of an online network's rows with a target's


class Declared(NamedTuple):
    """What a user says of the views: their number, and how they lie."""

    views: int | None = None
    pairing: Pairing | None = None

    def check(self) -> None:
        if self.views is not None and (not isinstance(self.views, int) or self.views < 1):
            raise ValueError(f"`views` must be a positive integer or None, got {self.views!r}")
        known = ("calls", "blocked", "interleaved")
        if self.pairing is not None and self.pairing not in known and not callable(self.pairing):
            raise ValueError(f"`pairing` must be one of {', '.join(known)}, a function or None, got {self.pairing!r}")


class Reading(NamedTuple):
    """How views lie in the calls: so many in each call, blocked or interleaved."""

    kind: str
    parts: tuple[int, ...]


class Evidence(NamedTuple):
    """What one rank saw that tells how views lie; made without collectives, judged together.

    Attributes:
        rows: Rows of each call.
        sizes: Numbers of rows of the batch's tensors.
        certain: How views lie, where what entered equals tensors of the batch: kind and number a call.
        scores: By (kind, number a call): for each view but the first, how much closer the pairs are than chance and
            how many there are.
    """

    rows: list[int]
    sizes: list[int]
    certain: tuple[str, int] | None
    scores: dict[tuple[str, int], list[tuple[float, int]]]


def gather_evidence(
    entered: Sequence[Tensor | None], rows: list[int], batch: Any, declared: Declared, online: int | None = None
) -> Evidence:
    """Look at one rank's calls: what entered them, and how many rows they have.

    Calls from number `online` on are a target network's, whose rows some steps shuffle: those are tested, too.
    """
    sizes = sorted(leading_sizes(batch))
    if online is not None and online < len(rows) and declared.pairing is None:
        first, *others = entered
        closer = [_closer(first, x) for x in others if first is not None and x is not None and x.shape == first.shape]
        return Evidence(rows, sizes, None, {TARGET: closer or [(0.0, 0)]})
    largest = rows.index(max(rows)) if rows else 0
    x = entered[largest] if len(entered) == len(rows) > 0 else None
    if x is None or declared.pairing is not None or x.ndim == 0 or len(x) != rows[largest]:
        return Evidence(rows, sizes, None, {})
    possible = sorted({parts for parts in _numbers(rows, sizes, declared.views) if parts > 1})
    certain = _equal_to_batch(x, batch) if possible else None
    scores: dict[tuple[str, int], list[tuple[float, int]]] = {}
    if certain is None or certain[1] not in possible:
        certain = None
        if any(t.shape == x.shape and torch.equal(t, x) for t in tensors_in(batch, floating=False)):
            scores[WHOLE] = [(1.0, 1)]
        for parts in possible:
            for kind in ("blocked", "interleaved"):
                scores[kind, parts] = _closeness(x, kind, parts)
    return Evidence(rows, sizes, certain, scores)


def settle(found: Sequence[Evidence], declared: Declared) -> Reading | None:
    """How the views lie, from all ranks' evidence; None where no rank has rows; a ValueError in doubt."""
    found = [evidence for evidence in found if any(evidence.rows)]
    if not found:
        return None
    calls = {len(evidence.rows) for evidence in found}
    if len(calls) > 1:
        raise ValueError(f"ranks called it {sorted(calls)} times; views of the same samples need equally many calls")
    rows, sizes = found[0].rows, found[0].sizes
    views, pairing = declared
    if callable(pairing):
        return Reading("function", ())
    if TARGET in found[0].scores:
        if _score(found, TARGET) < SURE:
            raise ValueError(
                "what entered the target network is no closer to what entered the online one, row by row, than to "
                'other samples: the step may shuffle its rows; pass `pairing="calls"` if it does not, or a function '
                "that takes the views from the list of calls"
            )
        return Reading("calls", (1,) * len(rows))
    if pairing == "calls" or (pairing is None and views == len(rows) > 1):
        if len(set(rows)) > 1 or views not in (None, len(rows)):
            raise ValueError(
                f"{_calls(rows)} are not {views or len(rows)} views; pass the right `views=` or `pairing=`"
            )
        return Reading("calls", (1,) * len(rows))
    if views is not None and (len(rows) > views or views % len(rows)):
        raise ValueError(
            f"`views={views}`, but there were {_calls(rows)}; pass `pairing=`, a function that takes the views from "
            "the list of calls"
        )
    if len(set(rows)) > 1:
        parts = _parts_of_unequal(rows, sizes)
    else:
        numbers = _numbers(rows, sizes, views)
        if len(rows) == 1 and not numbers:
            raise ValueError(
                f"a call of {rows[0]} rows cannot be samples of a batch whose tensors have {sizes} rows; pass "
                "`views=` and `pairing=`, or `layout=` if samples are on another axis"
            )
        kind, number = _choose(found, numbers or {1}, pairing, views)
        return Reading(kind if number > 1 else "calls", (number,) * len(rows))
    if max(parts) == 1:
        return Reading("calls", parts)
    kind, _ = _choose(found, {max(parts)}, pairing, max(parts))
    return Reading(kind, parts)


def sample_rows(
    reading: Reading, rows: Sequence[int], declared: Declared, device: torch.device | None = None
) -> Tensor:
    """For each sample and view its row in the concatenation of the calls, ``[N, V]``, made where it is needed."""
    starts = [sum(rows[:k]) for k in range(len(rows))]
    where = None if reading.kind == "function" else device  # somebody's own function gets the host's numbers
    numbers = [torch.arange(start, start + n, device=where) for start, n in zip(starts, rows, strict=True)]
    if reading.kind == "function":
        assert callable(declared.pairing)
        views = [torch.as_tensor(view).flatten().long() for view in declared.pairing([n[:, None] for n in numbers])]
    else:
        if len(reading.parts) != len(rows):
            raise ValueError(f"there were {len(reading.parts)} calls at first and {len(rows)} now; pass `pairing=`")
        views = []
        for call, parts in zip(numbers, reading.parts, strict=True):
            if len(call) % parts:
                raise ValueError(f"a call of {len(call)} rows does not hold {parts} views; pass the right `views=`")
            table = call.view(parts, -1) if reading.kind != "interleaved" else call.view(-1, parts).T
            views += list(table)
    if len({len(view) for view in views}) != 1:
        raise ValueError(f"cannot tell the views apart in {_calls(rows)}; pass `pairing=`")
    return torch.stack(views, dim=1)


def _calls(rows: Sequence[int]) -> str:
    return f"{len(rows)} call{'s' if len(rows) > 1 else ''} of {', '.join(map(str, rows))} rows"


def _numbers(rows: Sequence[int], sizes: Sequence[int], views: int | None) -> set[int]:
    """How many views the largest of the calls may hold."""
    if views is not None:
        return {views // len(rows)} if views >= len(rows) else set()
    largest = max(rows)
    ratios = {largest // size for size in sizes if size and largest % size == 0 and largest // size <= MOST_VIEWS}
    if not sizes or (len(set(rows)) == 1 < len(rows) and (1 in ratios or not ratios)):
        return {1}  # a call a view: not questioned
    return ratios


def _parts_of_unequal(rows: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Views in each of calls of different sizes: several crops, say."""
    for size in sorted(sizes, reverse=True):
        if size and all(n % size == 0 and n // size <= MOST_VIEWS for n in rows):
            return tuple(n // size for n in rows)
    raise ValueError(f"cannot tell the views apart in {_calls(rows)}; pass `pairing=`, a function of the list of calls")


def _choose(found: Sequence[Evidence], numbers: set[int], pairing: Any, views: int | None) -> tuple[str, int]:
    """Kind and number of views of a call."""
    if views == 1:
        return "calls", 1
    if pairing in ("blocked", "interleaved"):
        if len(numbers - {1}) != 1:
            raise ValueError(f"`pairing={pairing!r}` needs `views=`, the number of views of a sample")
        return pairing, next(iter(numbers - {1}))
    if numbers == {1}:
        return "calls", 1
    certain = {evidence.certain for evidence in found}
    if len(certain) == 1 and (sure := next(iter(certain))) is not None and sure[1] in numbers:
        return sure
    keys = {key for evidence in found for key in evidence.scores if key[1] in numbers}
    scores = {key: _score(found, key) for key in keys}
    ranked = sorted(scores, key=lambda key: (scores[key] >= SURE, key[1] if scores[key] >= SURE else 0, scores[key]))
    best = ranked[-1] if ranked else None
    sure_of_best = best is not None and scores[best] >= SURE + (APART if 1 in numbers else 0)
    if sure_of_best and best is not None:
        other = scores.get(("interleaved" if best[0] == "blocked" else "blocked", best[1]), 0.0)
        if scores[best] - other >= APART:
            return best
    elif 1 in numbers and (best is None or scores[best] < APART) and all(WHOLE in e.scores for e in found):
        return "calls", 1
    expected = views or min(n for n in numbers if n > 1)
    raise ValueError(
        f"a call of {found[0].rows[0]} rows may hold {expected} views of each sample, one block after another or "
        f'interleaved, and what entered does not tell; pass `views={expected}` and `pairing="blocked"` or '
        '`pairing="interleaved"` (`views=1` if each row is a sample)'
    )


def _score(found: Sequence[Evidence], key: tuple[str, int]) -> float:
    """By how many standard deviations the pairs of all ranks are closer than chance; of several views the least."""
    views = zip(*(evidence.scores[key] for evidence in found if key in evidence.scores), strict=True)
    sums = [[sum(column) for column in zip(*view, strict=True)] for view in views]
    return min((excess / math.sqrt(n / 12) for excess, n in sums if n), default=0.0)


def _equal_to_batch(x: Tensor, batch: Any) -> tuple[str, int] | None:
    """How the rows that entered lie in the batch's own tensors."""
    held = [t for t in tensors_in(batch, floating=False) if t.ndim and t.device == x.device and t.dtype == x.dtype]
    alike = [t for t in held if t.shape[1:] == x.shape[1:] and len(t) < len(x) and len(x) % len(t) == 0]
    for first in alike:
        parts = len(x) // len(first)
        group = [t for t in alike if t.shape == first.shape][:parts]
        if len(group) == parts:
            if torch.equal(torch.cat(group), x):
                return "blocked", parts
            if torch.equal(torch.stack(group, dim=1).flatten(0, 1), x):
                return "interleaved", parts
        if torch.equal(first.repeat(parts, *[1] * (x.ndim - 1)), x):
            return "blocked", parts
        if torch.equal(first.repeat_interleave(parts, dim=0), x):
            return "interleaved", parts
    others = {len(t) for t in tensors_in(batch, floating=False) if t.ndim == 1}
    for t in held:
        if t.ndim == x.ndim + 1 and t.shape[0] * t.shape[1] == len(x):
            samples_first = t.shape[0] in others or (t.shape[1] not in others and t.shape[0] > t.shape[1])
            parts = t.shape[1] if samples_first else t.shape[0]
            if torch.equal(t.flatten(0, 1), x):
                return ("interleaved" if samples_first else "blocked"), parts
            if torch.equal(t.transpose(0, 1).flatten(0, 1), x):
                return ("blocked" if samples_first else "interleaved"), parts
    return None


def _closeness(x: Tensor, kind: str, parts: int) -> list[tuple[float, int]]:
    """For each view but the first: by how much its pairs with the first are closer than chance, summed; how many."""
    if len(x) % parts:
        return [(0.0, 0)] * (parts - 1)
    x = x.flatten(1) if x.ndim > 1 else x[:, None]
    views = x.view(parts, -1, x.shape[1]) if kind == "blocked" else x.view(-1, parts, x.shape[1]).transpose(0, 1)
    return [_closer(views[0], other) for other in views[1:]]


def _closer(x: Tensor, y: Tensor) -> tuple[float, int]:
    """By how much the rows of x and y are closer to each other than to other rows, summed; how many there are."""
    x, y = x[:SAMPLES].flatten(1), y[:SAMPLES].flatten(1)
    n = len(x)
    if n < 2:
        return 0.0, 0
    if x.is_floating_point():
        distance = torch.cdist(x.float(), y.float())
    else:
        distance = (x[:, None] != y[None]).float().mean(dim=2)
    own = distance.diagonal()[:, None]
    closer = (own < distance).float() + 0.5 * (own == distance).float()
    wins = (closer.sum(dim=1) - 0.5) / (n - 1)  # without the pair itself
    return float((wins - 0.5).sum()), n
