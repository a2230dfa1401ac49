"""What features are worth, from rows that stay on their ranks: for the metrics and the probes alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_ssl.distributed import Together
from lightning_ssl.functional.probes import knn_scores
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

    def part(self, mask: Tensor, together: Together) -> Shard:
        """Collective: the rows of a mask, with their places among all that are kept."""
        kept = self.positions[mask]
        everyone = torch.cat(together.gather(lambda: kept)).to(kept.device).sort().values
        return Shard(self.rows[mask], self.labels[mask], torch.searchsorted(everyone, kept), len(everyone))


class LinearOutcome(NamedTuple):
    """What a linear model of a split came to."""

    values: dict[str, float]
    fitted: LinearProbeResult
    l2: float


def place(
    together: Together, make: Callable[[], Mapping[Any, tuple[Tensor, Tensor, Tensor]]]
) -> dict[tuple[Any, ...], Shard]:
    """Collective: the ranks' rows as shards, each sample of the dataset once, on the first rank that has it."""
    found: Mapping[Any, tuple[Tensor, Tensor, Tensor]] = {}

    def mine() -> dict[str, Any]:
        nonlocal found
        found = make()
        _, labels, index = next(iter(found.values()))
        return {
            "index": index.flatten().long(),
            "shapes": [list(part[0].shape[1:]) for part in found.values()],
            "labels": str(labels.dtype),
            "width": list(labels.shape[1:]),
        }

    answers = together.gather(mine)
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
    shards, arranged = {}, set()

    def arrange() -> None:
        for (key, (rows, labels, _)), shape in zip(found.items(), filled["shapes"], strict=True):
            if not len(rows):
                rows, labels = rows.new_zeros(0, *shape), _empty(filled, together.device)
            if id(labels) not in arranged:
                arranged.add(id(labels))
                _arrange(labels, kept)
            _arrange(rows, kept)
            shards[key] = Shard(rows[: len(kept)], labels[: len(kept)], own[kept], int(first.sum()))

    together.run(arrange)
    return shards


def _empty(filled: Mapping[str, Any], device: torch.device) -> Tensor:
    dtype = getattr(torch, str(filled["labels"]).removeprefix("torch."))
    return torch.zeros(0, *filled["width"], dtype=dtype, device=device)


def _arrange(rows: Tensor, order: Tensor) -> None:
    """Put rows into an order, in place and some columns at a time: a copy of all would double the memory."""
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        return
    columns = rows[:, None] if rows.ndim == 1 else rows
    order = order.to(rows.device)
    for start in range(0, columns.shape[1], 32):
        part = columns[:, start : start + 32]
        part[: len(order)] = part[order]


def shuffled(positions: Tensor, seed: int = 0) -> Tensor:
    """A number in [0, 1) for each place, which looks drawn at random and is the same on any rank."""
    x = positions.to(torch.float64) + 1 + 1000.0 * seed
    return (x * 0.6180339887498949) % 1.0  # evenly spread (the golden ratio), whatever the order of classes


def first_of_each_class(shard: Shard, shots: int, num_classes: int, together: Together, seed: int = 0) -> Shard:
    """Collective: `shots` samples of each class, the same at any number of ranks."""
    dice = torch.Generator().manual_seed(seed)
    rank = torch.randperm(shard.total, generator=dice).to(shard.positions.device)[shard.positions]
    every = together.gather(lambda: {"rank": rank, "labels": shard.labels})
    ranks, labels = (torch.cat([part[name].to(rank.device) for part in every]) for name in ("rank", "labels"))
    last = torch.full((num_classes,), -1, dtype=torch.long, device=rank.device)
    for number in labels.unique().tolist():
        own = ranks[labels == number].sort().values
        last[number] = own[min(shots, len(own)) - 1]
    return shard.part(rank <= last[shard.labels.long()], together)


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
    labels = train.labels if targets == "class" else train.labels.to(together.wide)
    ranks = dict(sharded=together, positions=train.positions, budget=budget)
    scores = knn_scores(test.rows, train.rows, labels, num_classes, k, temperature, **ranks)  # type: ignore[arg-type]
    return score(lambda _: scores, test, together, targets)


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

    def fit(part: Shard, penalties: Sequence[float], begin: LinearProbeResult | None) -> list[LinearProbeResult]:
        ranks: dict[str, Any] = dict(sharded=together, positions=part.positions, budget=budget)
        if targets == "continuous":
            return fit_ridge(part.rows, part.labels, penalties, **ranks)
        return fit_linear_path(part.rows, part.labels, num_classes, penalties, start=begin, **ranks)

    best = l2[0]
    if len(l2) > 1:
        chosen = shuffled(train.positions) < held_out
        path = fit(train.part(~chosen, together), l2, start)
        decide = train.part(chosen, together)
        found = [judge(model, decide, together, targets) for model in path]
        # The better score, then the lower loss, then the stronger penalty.
        at = max(range(len(l2)), key=lambda i: (found[i][0], -found[i][1], l2[i]))
        best, start = l2[at], path[at]
    model = fit(train, [best], start)[0]
    return LinearOutcome(score(logits_of(model), test, together, targets), model, best)


def logits_of(model: LinearProbeResult) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows.to(model.weight.dtype) @ model.weight.T + model.bias


def judge(model: LinearProbeResult, shard: Shard, together: Together, targets: Targets) -> tuple[float, float]:
    """Collective: the score that decides between models, and their mean loss."""

    def make() -> list[Tensor]:
        total, logits_at = torch.zeros((), dtype=together.wide, device=shard.rows.device), logits_of(model)
        for start in range(0, len(shard.rows), 4096):
            logits, truth = logits_at(shard.rows[start : start + 4096]), shard.labels[start : start + 4096]
            if targets == "class":
                total += torch.nn.functional.cross_entropy(logits, truth.long(), reduction="sum")
            elif targets == "multilabel":
                total += torch.nn.functional.binary_cross_entropy_with_logits(
                    logits, truth.to(logits.dtype), reduction="sum"
                )
            else:
                total += (logits - truth).square().sum()
        return [total]

    loss = float(together.sum(make, [()])[0]) / max(1, shard.total)
    if targets == "continuous":
        return -loss, loss
    values = score(logits_of(model), shard, together, targets)
    return values["top1" if targets == "class" else "map"], loss


def score(predict: Callable[[Tensor], Tensor], test: Shard, together: Together, targets: Targets) -> dict[str, float]:
    """Collective: how good predictions ``[n, C]`` of all ranks' test rows are."""
    if targets == "class":

        def hits() -> list[Tensor]:
            if not len(test.rows):
                return [torch.zeros(2)]
            ranked = predict(test.rows).argsort(dim=1, descending=True, stable=True)[:, :5]
            correct = ranked == test.labels[:, None]
            return [torch.stack([correct[:, 0].sum(), correct.any(dim=1).sum()])]

        top1, top5 = (together.sum(hits, [(2,)])[0] / max(1, test.total)).tolist()
        return {"top1": top1, "top5": top5}
    if targets == "multilabel":
        parts = together.gather(lambda: {"scores": predict(test.rows), "truth": test.labels.to(torch.uint8)})
        filled = [part for part in parts if len(part["truth"])]
        scores, truth = (torch.cat([part[name] for part in filled]) for name in ("scores", "truth"))
        return {"map": together.run(lambda: average_precision(scores, truth))}

    def squares() -> list[Tensor]:
        truth = test.labels.to(together.wide)
        off = predict(test.rows).to(truth) - truth if len(truth) else truth
        return [off.square().sum(dim=0), truth.sum(dim=0), truth.square().sum(dim=0)]

    width = (test.labels.shape[1],)
    off, first, second = together.sum(squares, [width, width, width])
    variance = second - first.square() / test.total
    r2 = (1 - off / variance.clamp_min(torch.finfo(variance.dtype).tiny)).mean()
    return {"r2": float(r2), "mse": float(off.mean() / test.total)}


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
