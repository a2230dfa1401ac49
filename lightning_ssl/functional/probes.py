"""What the features are worth to a classifier without weights: nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ssl.distributed import Together
from lightning_ssl.functional.checks import check_labels, check_positive, check_rows
from lightning_ssl.functional.regression import place_rows
from lightning_ssl.precision import undisturbed

# Similarities held at a time: 2^25 floats are 128 MB.
_SIMILARITIES = 2**25
# Queries that travel at a time, and the rows that are multiplied with them at a time.
_QUERIES = 1024
_BLOCK = 256, 1024


class Neighbours(NamedTuple):
    """The nearest rows of a bank to each query: cosines falling, of equal ones the earlier row first."""

    cosines: Tensor  # [Q, k]
    positions: Tensor  # [Q, k]
    labels: Tensor  # [Q, k] or [Q, k, C]


def knn_predict(
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    sharded: bool | Together = False,
    positions: Tensor | None = None,
    budget: int | None = None,
) -> Tensor:
    r"""Classify by weighted nearest neighbours under the cosine, each with weight :math:`e^{\cos / T}`.

    Memory is bounded for any number of rows: queries are taken in chunks. Of neighbours equally near at the k-th place
    the first in the bank count, so that the answer does not depend on chunks or ranks.

    Args:
        queries: features to classify, ``[Q, d]``.
        bank: features with known labels, ``[N, d]``.
        labels: the bank's labels, integers in [0, num_classes), ``[N]``.
        num_classes: the number of classes C.
        k: how many neighbours vote; at most N do.
        temperature: T.
        sharded: each rank passes its own queries and its own rows of the bank (also none), all call together; queries
            travel, rows stay.
        positions: the place of each of this rank's rows among all ranks' rows, ``[N]``, rising; by default rows stand
            in the order of ranks.
        budget: how many similarities may be held at a time.

    Returns:
        The classes of each query by falling score, ``[Q, C]``: the first column is the prediction.

    Example:
        >>> bank = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> knn_predict(torch.tensor([[3.0, 1.0]]), bank, torch.tensor([4, 2]), num_classes=5, k=1)[:, 0]
        tensor([4])
    """
    scores = knn_scores(queries, bank, labels, num_classes, k, temperature, sharded, positions, budget)
    return scores.argsort(dim=1, descending=True, stable=True)


def knn_scores(
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    sharded: bool | Together = False,
    positions: Tensor | None = None,
    budget: int | None = None,
) -> Tensor:
    """The share of each class in the votes of :func:`knn_predict`, ``[Q, C]``, in double precision.

    Args:
        queries: See :func:`knn_predict`, as for the others.
        bank: The rows with known labels.
        labels: Classes ``[N]``; or values of C attributes or targets, ``[N, C]``, whose weighted mean is returned.
        num_classes: C.
        k: How many neighbours vote.
        temperature: T.
        sharded: Whether each rank passes its own rows and queries.
        positions: The places of rows among all ranks'.
        budget: How many similarities may be held at a time.

    Example:
        >>> knn_scores(torch.eye(2), torch.eye(2), torch.tensor([1, 0]), num_classes=2, k=1)
        tensor([[0., 1.],
                [1., 0.]], dtype=torch.float64)
    """
    found: list[Tensor] = []

    def take(scores: Tensor, which: slice) -> None:
        if not found:
            found.append(scores.new_empty(len(queries), num_classes))
        found[0][which] = scores

    vote(take, queries, bank, labels, num_classes, k, temperature, sharded, positions, budget)
    together = sharded if isinstance(sharded, Together) else Together(bank.device, sharded)
    return found[0] if found else torch.zeros(0, num_classes, dtype=together.wide, device=bank.device)


def vote(
    take: Callable[[Tensor, slice], None],
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    sharded: bool | Together = False,
    positions: Tensor | None = None,
    budget: int | None = None,
) -> None:
    """Hand the scores of :func:`knn_scores` to `take`, those of a few of this rank's queries at a time.

    What goes wrong on one rank, in `take` too, is raised on all of them.

    Args:
        take: Gets scores ``[n, C]`` and which of the queries they are of.
        queries: See :func:`knn_predict`, as for the others.
        bank: The rows with known labels.
        labels: See :func:`knn_scores`.
        num_classes: C.
        k: How many neighbours vote.
        temperature: T.
        sharded: Whether each rank passes its own rows and queries.
        positions: The places of rows among all ranks'.
        budget: How many similarities may be held at a time.

    Example:
        >>> vote(lambda scores, which: print(which, scores), torch.eye(1), torch.eye(1), torch.tensor([0]), 2, k=1)
        slice(0, 1, None) tensor([[1., 0.]], dtype=torch.float64)
    """
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}")
    check_positive(temperature, "temperature")
    together = sharded if isinstance(sharded, Together) else Together(bank.device, sharded)
    with undisturbed(bank.device):
        _vote(take, queries, bank, labels, num_classes, k, temperature, together, positions, budget)


def _vote(
    take: Callable[[Tensor, slice], None],
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    num_classes: int,
    k: int,
    temperature: float,
    together: Together,
    positions: Tensor | None,
    budget: int | None,
) -> None:
    kinds = labels

    def look() -> int:
        nonlocal kinds
        least = 1 if together.ranks == 1 else 0
        check_rows(bank, "bank", min_rows=least, nonzero=True)
        check_rows(queries, "queries", min_rows=least, nonzero=True)
        if queries.shape[1] != bank.shape[1]:
            raise ValueError(
                f"`queries` and `bank` must agree in dimension, got {queries.shape[1]} and {bank.shape[1]}"
            )
        if labels.ndim == 2 and labels.shape != (len(bank), num_classes):
            raise ValueError(f"`labels` must have shape {(len(bank), num_classes)}, got {tuple(labels.shape)}")
        if labels.ndim == 1:
            check_labels(labels, num_classes, len(bank))
        kinds = labels.to(bank.device, torch.long if labels.ndim == 1 else together.wide)
        return len(queries)

    counts = [int(count) for count in together.gather(look)]
    total, places, kept = place_rows(bank, together, positions)
    if not total:
        raise ValueError("`bank` needs at least 1 row on some rank, got none; pass a larger bank")
    k = min(k, total)
    share = _QUERIES // together.ranks  # of each rank's queries at a time
    if labels.ndim == 2:
        share = min(share, (budget or _SIMILARITIES) // (k * num_classes))
    share = max(16, share)

    def ask(which: slice, settle: Callable[[], None]) -> Tensor:
        settle()  # the last ones, where what goes wrong is known to all
        return _unit(queries[which].to(bank.device), kept)

    def answer(asked: list[Tensor]) -> dict[str, Tensor]:
        everything = torch.cat([part.to(bank.device) for part in asked])
        return _nearest(everything, bank, kinds, places, k, budget)._asdict()

    def hand_over(found: list[Neighbours], own: slice, which: slice) -> None:
        if own.stop > own.start:
            take(_votes(_merge(found, own, k), num_classes, temperature), which)
        found.clear()

    settle: Callable[[], None] = lambda: None  # noqa: E731
    for start in range(0, max(counts), share):
        which = slice(start, min(start + share, len(queries)))
        asked = together.gather(partial(ask, which, settle))
        found = [Neighbours(**part) for part in together.gather(partial(answer, asked))]
        at = sum(len(part) for part in asked[: together.rank])
        settle = partial(hand_over, found, slice(at, at + len(asked[together.rank])), which)
    together.run(settle)


def _unit(rows: Tensor, dtype: torch.dtype) -> Tensor:
    rows = rows.to(torch.promote_types(rows.dtype, torch.promote_types(dtype, torch.float32)))
    wide = torch.float32 if rows.device.type == "mps" else torch.float64  # squares of single precision leave its range
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=wide).to(rows.dtype)


def _nearest(
    queries: Tensor, bank: Tensor, labels: Tensor, positions: Tensor, k: int, budget: int | None
) -> Neighbours:
    """The nearest k of this rank's rows to each unit query; fewer where it has fewer."""
    best = Neighbours(
        queries.new_zeros(len(queries), 0),
        positions.new_zeros(len(queries), 0),
        labels.new_zeros(len(queries), 0, *labels.shape[1:]),
    )
    stretch = max(_BLOCK[1], (budget or _SIMILARITIES) // max(_BLOCK[0], bank.shape[1]))
    for at in range(0, len(bank), stretch):  # a stretch of the bank is made unit once for all queries
        unit = _unit(bank[at : at + stretch], queries.dtype)
        chunk = max(1, min(_BLOCK[0], (budget or _SIMILARITIES) // max(1, len(unit))))
        parts = []
        for some in queries.split(chunk):
            cosines, columns = _top(_cosines(some, unit), min(k, len(unit)))
            parts.append(Neighbours(cosines, positions[at + columns], labels[at + columns]))
        found = Neighbours(*(torch.cat(part) for part in zip(*parts, strict=True)))
        best = found if not at else _merge([best, found], slice(None), k)
        del unit  # before there is another one
    return best


def _cosines(queries: Tensor, unit: Tensor) -> Tensor:
    """All products, in blocks of one shape and never of a few rows.

    So a product is the same to the last bit wherever its rows stand, in any chunk and on any rank: libraries sum in
    another order where one side is small.
    """
    rows, columns = len(queries), len(unit)
    queries = F.pad(queries, (0, 0, 0, -rows % 64))
    product = queries.new_empty(len(queries), columns + -columns % 64)
    for a in range(0, len(queries), _BLOCK[0]):
        for b in range(0, columns, _BLOCK[1]):
            part = unit[b : b + _BLOCK[1]]
            part = F.pad(part, (0, 0, 0, -len(part) % 64)) if len(part) % 64 else part
            torch.mm(queries[a : a + _BLOCK[0]], part.T, out=product[a : a + _BLOCK[0], b : b + len(part)])
    return product[:rows, :columns]


def _top(cosines: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, falling, and where they are; of equal ones those of the first columns."""
    if k == cosines.shape[1]:
        return cosines.sort(dim=1, descending=True, stable=True)
    values, columns = cosines.topk(k + 1, dim=1)
    level = (values[:, k - 1] == values[:, k]).nonzero().flatten()
    for rows in level.split(64):  # which of the equal ones `topk` takes is not said
        row, last = cosines[rows], values[rows, k - 1 : k]
        places = k - (row > last).sum(dim=1, keepdim=True)
        equal = row == last
        taken = (row > last) | (equal & (equal.cumsum(dim=1) <= places))
        columns[rows, :k] = taken.nonzero()[:, 1].view(len(rows), k)
    columns = columns[:, :k].sort(dim=1).values
    values, order = cosines.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _merge(parts: list[Neighbours], own: slice, k: int) -> Neighbours:
    """The nearest k of several answers to the same queries."""
    cosines, positions, labels = (torch.cat([part[i][own] for part in parts], dim=1) for i in range(3))
    if len(parts) > 1:
        order = positions.argsort(dim=1)
        order = order.gather(1, cosines.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, :k]
        cosines, positions = cosines.gather(1, order), positions.gather(1, order)
        labels = labels[torch.arange(len(labels), device=labels.device)[:, None], order]
    return Neighbours(cosines, positions, labels)


def _votes(nearest: Neighbours, num_classes: int, temperature: float) -> Tensor:
    wide = torch.float32 if nearest.cosines.device.type == "mps" else torch.float64
    cosines = nearest.cosines.to(wide)
    # Relative to the largest cosine, so that a small temperature does not overflow.
    votes = torch.exp((cosines - cosines[:, :1]) / temperature)
    votes = votes / votes.sum(dim=1, keepdim=True)
    if nearest.labels.ndim == 3:
        return (votes[:, None] @ nearest.labels.to(wide))[:, 0]
    return votes.new_zeros(len(votes), num_classes).scatter_add_(1, nearest.labels, votes)
