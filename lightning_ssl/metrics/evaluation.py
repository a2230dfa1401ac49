"""What features are worth, from rows that stay on their ranks: for the metrics and the probes alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ssl.distributed import Together
from lightning_ssl.functional.probes import vote
from lightning_ssl.functional.regression import BUDGET, LinearProbeResult, fit_linear_path, fit_ridge

Targets = Literal["class", "multilabel", "continuous"]


class Shard(NamedTuple):
    """This rank's part of a split.

    Attributes:
        rows: Features ``[n, d]`` of any floating type; n may be 0.
        labels: Classes ``[n]``, attributes ``[n, C]`` or targets ``[n, T]``.
        positions: The rising places of these rows in the whole split, 0 to `total` - 1, each on one rank.
        total: How many rows all ranks have.
    """

    rows: Tensor
    labels: Tensor
    positions: Tensor
    total: int

    def some(self, mask: Tensor | Callable[[], Tensor], together: Together) -> Some:
        """Collective: the rows of a mask, which stay where they are; what makes it may fail on one rank alone."""

        def mine() -> dict[str, Tensor]:
            which = (mask() if callable(mask) else mask).nonzero().flatten()
            return {"which": which, "at": self.positions[which]}

        parts = together.gather(mine)

        def among_all() -> Some:
            everyone = torch.cat([part["at"].to(self.positions.device) for part in parts]).sort().values
            which, at = (parts[together.rank][name].to(self.positions.device) for name in ("which", "at"))
            return Some(which, self.labels[which], torch.searchsorted(everyone, at), len(everyone))

        return together.run(among_all)  # type: ignore[no-any-return]

    def part(self, mask: Tensor | Callable[[], Tensor], together: Together) -> Shard:
        """Collective: a copy of the rows of a mask, with their places among all that are kept."""
        some = self.some(mask, together)
        return Shard(together.run(lambda: self.rows[some.which]), some.labels, some.positions, some.total)


class Some(NamedTuple):
    """Some rows of a shard: which they are, their labels and their places among all ranks' of them."""

    which: Tensor
    labels: Tensor
    positions: Tensor
    total: int


class LinearOutcome(NamedTuple):
    """What a linear model of a split came to."""

    values: dict[str, float]
    fitted: LinearProbeResult
    l2: float


def place(
    together: Together, make: Callable[[], Mapping[Any, tuple[Tensor, Tensor, Tensor]]], keep: bool = False
) -> dict[tuple[Any, ...], Shard]:
    """Collective: the ranks' rows as shards, each sample of the dataset once, on the first rank that has it.

    Args:
        together: The ranks.
        make: This rank's rows, labels and dataset indices, under any names.
        keep: Leave these as they are; otherwise they are put into order where they stand.
    """
    found: Mapping[Any, tuple[Tensor, Tensor, Tensor]] = {}

    def mine() -> dict[str, Any]:
        nonlocal found
        found = make()
        _, labels, index = next(iter(found.values()))
        return {
            "index": index.flatten().long(),
            "shapes": [list(part[0].shape[1:]) for part in found.values()],
            "rows": [str(part[0].dtype) for part in found.values()],
            "labels": str(labels.dtype),
            "width": list(labels.shape[1:]),
        }

    answers = together.gather(mine)
    shards: dict[tuple[Any, ...], Shard] = {}

    def arrange() -> None:
        filled = next((answer for answer in answers if len(answer["index"])), answers[0])
        everyone = torch.cat([answer["index"].to(together.device) for answer in answers])
        order = everyone.argsort(stable=True)  # of equal indices the first rank's
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = everyone[order][1:] != everyone[order][:-1]  # a sampler's padding repeats samples
        positions = torch.full_like(everyone, -1)
        positions[order[first]] = torch.arange(int(first.sum()), device=order.device)
        at = sum(len(answer["index"]) for answer in answers[: together.rank])
        own = positions[at : at + len(answers[together.rank]["index"])]
        kept = (own >= 0).nonzero().flatten()
        kept = kept[own[kept].argsort()]
        arranged: dict[int, Tensor] = {}
        kinds = zip(filled["shapes"], filled["rows"], strict=True)
        for (key, (rows, labels, _)), (shape, kind) in zip(found.items(), kinds, strict=True):
            if not len(rows):  # as those of the others
                rows = _empty(shape, kind, together.device)
                labels = _empty(filled["width"], filled["labels"], together.device)
            if id(labels) not in arranged:
                arranged[id(labels)] = _arrange(labels, kept, keep)
            rows = _arrange(rows, kept, keep)
            shards[key] = Shard(rows, arranged[id(labels)], own[kept], int(first.sum()))

    together.run(arrange)
    return shards


def _empty(shape: Sequence[int], kind: str, device: torch.device) -> Tensor:
    return torch.zeros(0, *shape, dtype=getattr(torch, kind.removeprefix("torch.")), device=device)


def _arrange(rows: Tensor, order: Tensor, keep: bool = False) -> Tensor:
    """Rows in an order; where they need not be kept in place, some columns at a time: a copy is twice the memory."""
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        return rows[: len(order)]
    order = order.to(rows.device)
    if keep:
        return rows[order]
    columns = rows[:, None] if rows.ndim == 1 else rows
    for start in range(0, columns.shape[1], 32):
        part = columns[:, start : start + 32]
        part[: len(order)] = part[order]
    return rows[: len(order)]


def shuffled(positions: Tensor, seed: int = 0) -> Tensor:
    """A number in [0, 1) for each place, which looks drawn at random and is the same on any rank."""
    x = positions.to(torch.float64) + 1 + 1000.0 * seed
    return (x * 0.6180339887498949) % 1.0  # evenly spread (the golden ratio), whatever the order of classes


def first_of_each_class(shard: Shard, shots: int, num_classes: int, together: Together, seed: int = 0) -> Shard:
    """Collective: `shots` samples of each class, the same at any number of ranks."""

    def mine() -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(seed)
        rank = torch.randperm(shard.total, generator=dice).to(shard.positions.device)[shard.positions]
        return {"rank": rank, "labels": shard.labels}

    every = together.gather(mine)

    def among_the_first() -> Tensor:
        own = every[together.rank]["rank"].to(shard.positions.device)
        ranks, labels = (torch.cat([part[name].to(own.device) for part in every]) for name in ("rank", "labels"))
        last = torch.full((num_classes,), -1, dtype=torch.long, device=own.device)
        for number in labels.unique().tolist():
            of_class = ranks[labels == number].sort().values
            last[number] = of_class[min(shots, len(of_class)) - 1]
        return own <= last[shard.labels.long()]

    return shard.part(among_the_first, together)


def knn_evaluation(
    train: Shard,
    test: Shard,
    num_classes: int,
    k: int,
    temperature: float,
    together: Together,
    targets: Targets = "class",
    budget: int | None = None,
) -> dict[str, float]:
    """Collective: `top1` and `top5`; `map` of attributes; `r2` and `mse` of continuous targets."""
    tally, ranks = Tally(test, targets, together), dict(sharded=together, positions=train.positions, budget=budget)
    vote(tally.take, test.rows, train.rows, train.labels, num_classes, k, temperature, **ranks)  # type: ignore[arg-type]
    return tally.values()


def linear_evaluation(
    train: Shard,
    test: Shard,
    num_classes: int,
    l2: Sequence[float],
    together: Together,
    targets: Targets = "class",
    held_out: float = 0.1,
    start: LinearProbeResult | None = None,
    budget: int = BUDGET,
) -> LinearOutcome:
    """Collective: fit a linear model to `train`, for the penalty that does best on a part of it, and try it on `test`.

    Args:
        train: What is fitted.
        test: What it is tried on; it has no part in the choice.
        num_classes: How many classes, attributes or targets there are.
        l2: Penalties; with more than one, `held_out` of `train` decides, and the fit is then repeated on all of it.
        together: The ranks.
        targets: What labels are.
        held_out: The share of `train` that decides.
        start: Weights of an earlier fit of similar features.
        budget: How many numbers a chunk may hold.
    """

    def fit(part: Shard | Some, penalties: Sequence[float], begin: LinearProbeResult | None) -> list[LinearProbeResult]:
        ranks: dict[str, Any] = dict(sharded=together, positions=part.positions, budget=budget)
        ranks["only"] = part.which if isinstance(part, Some) else None
        if targets == "continuous":
            return fit_ridge(train.rows, part.labels, penalties, **ranks)
        return fit_linear_path(train.rows, part.labels, num_classes, penalties, start=begin, **ranks)

    best = l2[0]
    if len(l2) > 1:
        path = fit(train.some(lambda: shuffled(train.positions) >= held_out, together), l2, start)
        decide = train.part(lambda: shuffled(train.positions) < held_out, together)
        found = [judge(model, decide, together, targets, budget) for model in path]
        # The better score, then the lower loss, then the stronger penalty.
        at = max(range(len(l2)), key=lambda i: (found[i][0], -found[i][1], l2[i]))
        best, start = l2[at], path[at]
        del decide
    model = fit(train, [best], start)[0]
    tally = Tally(test, targets, together)
    return LinearOutcome(tally.values(lambda: predict(model, test.rows, tally.take, budget)), model, best)


def predict(
    model: LinearProbeResult, rows: Tensor, take: Callable[[Tensor, slice], None], budget: int = BUDGET
) -> None:
    """Hand a linear model's outputs for rows to `take`, a few at a time."""
    size = max(16, budget // (4 * max(model.weight.shape)))
    for start in range(0, len(rows), size):
        which = slice(start, min(start + size, len(rows)))
        take(rows[which].to(model.weight.dtype) @ model.weight.T + model.bias, which)


def judge(
    model: LinearProbeResult, shard: Shard, together: Together, targets: Targets, budget: int = BUDGET
) -> tuple[float, float]:
    """Collective: the score that decides between models, and their mean loss."""
    tally = Tally(shard, targets, together)
    total = torch.zeros((), dtype=together.wide, device=shard.rows.device)

    def take(outputs: Tensor, which: slice) -> None:
        nonlocal total
        tally.take(outputs, which)
        truth = shard.labels[which]
        if targets == "class":
            total += F.cross_entropy(outputs, truth.long(), reduction="sum")
        elif targets == "multilabel":
            total += F.binary_cross_entropy_with_logits(outputs, truth.to(outputs.dtype), reduction="sum")
        else:
            total += (outputs - truth).square().sum()

    values = tally.values(lambda: predict(model, shard.rows, take, budget))
    loss = float(together.sum(lambda: [total], [()])[0]) / max(1, shard.total)
    return -loss if targets == "continuous" else values["top1" if targets == "class" else "map"], loss


class Tally:
    """How good predictions of all ranks' test rows are; this rank's come a few at a time.

    Args:
        test: This rank's part of the split.
        targets: What its labels are.
        together: The ranks.
    """

    def __init__(self, test: Shard, targets: Targets, together: Together) -> None:
        self._test, self._targets, self._together = test, targets, together
        self._shapes: list[tuple[int, ...]] = [(2,)] if targets == "class" else 3 * [tuple(test.labels.shape[1:])]
        self._sums: list[Tensor] = []
        self._scores: list[Tensor] = []

    def take(self, scores: Tensor, which: slice) -> None:
        """Predictions ``[n, C]`` of these of this rank's rows."""
        truth = self._test.labels[which].to(scores.device)
        if self._targets == "multilabel":
            self._scores.append(scores)
            return
        if self._targets == "class":
            place = places_of(scores, truth.long())
            sums = [torch.stack([(place < 1).sum(), (place < 5).sum()])]
        else:
            truth = truth.to(self._together.wide)
            sums = [part.sum(dim=0) for part in ((scores.to(truth) - truth).square(), truth, truth.square())]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums

    def values(self, feed: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Collective: `top1` and `top5`; `map` of attributes; `r2` and `mse` of continuous targets.

        Args:
            feed: Calls :meth:`take` for what has not come yet.
        """
        together, total = self._together, max(1, self._test.total)
        if self._targets == "multilabel":

            def own() -> dict[str, Tensor]:
                feed()
                truth = self._test.labels.to(torch.uint8)
                return {"scores": torch.cat(self._scores) if self._scores else truth.float(), "truth": truth}

            parts = together.gather(own)

            def whole() -> float:
                filled = [part for part in parts if len(part["truth"])]
                return average_precision(*(torch.cat([part[name] for part in filled]) for name in ("scores", "truth")))

            return {"map": together.run(whole)}

        def sums() -> list[Tensor]:
            feed()
            return self._sums or [torch.zeros(shape) for shape in self._shapes]

        found = together.sum(sums, self._shapes)
        if self._targets == "class":
            top1, top5 = (found[0] / total).tolist()
            return {"top1": top1, "top5": top5}
        off, first, second = found
        variance, rounding = second - first.square() / total, 100 * torch.finfo(second.dtype).eps * second
        # Of a constant target there is nothing to explain: 1 where it is met, as scikit-learn has it.
        share = torch.where(variance <= rounding, (off <= rounding).to(off), 1 - off / variance)
        return {"r2": float(share.mean()), "mse": float(off.mean() / total)}


def places_of(scores: Tensor, truth: Tensor) -> Tensor:
    """How many classes come before the true one by falling score, of equal ones the first class first.

    Example:
        >>> places_of(torch.tensor([[0.2, 0.5, 0.2]]).expand(3, 3), torch.tensor([0, 1, 2]))
        tensor([1, 0, 2])
    """
    own = scores.gather(1, truth[:, None])
    before = torch.arange(scores.shape[1], device=scores.device) < truth[:, None]
    return (~(scores <= own)).sum(dim=1) + ((scores == own) & before).sum(dim=1)  # what is no number comes first


def average_precision(scores: Tensor, truth: Tensor) -> float:
    """The mean over attributes, of which there is an example, of precision at each of its examples by falling score.

    Samples of equal score count as one step, as in scikit-learn.

    Example:
        >>> average_precision(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([[1], [0], [1]]))  # (1 + 2/3) / 2
        0.8333333333333333
    """
    found = []
    for column, right in zip(scores.T.double().cpu(), truth.T.double().cpu(), strict=True):
        if not bool(right.any()):
            continue
        values, order = column.sort(descending=True)
        hits = right[order].cumsum(dim=0)
        last = torch.cat([values[1:] != values[:-1], torch.ones(1, dtype=torch.bool)])
        at = last.nonzero().flatten()
        recall = torch.cat([torch.zeros(1, dtype=hits.dtype), hits[at] / hits[-1]])
        found.append(((hits[at] / (at + 1)) * recall.diff()).sum())
    return float(torch.stack(found).mean()) if found else 0.0
