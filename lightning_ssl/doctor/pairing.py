"""Whether the loss sees which views belong together."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_ssl.doctor.batches import Views, count_rows, divisible, find_views, parts, take
from lightning_ssl.doctor.calls import Calls, losses_of
from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.target import learning
from lightning_ssl.doctor.trial import Fit, Patient, hold_norms, step_line
from lightning_ssl.doctor.twins import find_twins

SHUFFLES, DRAWS = 7, 8  # orders to compare with, draws of the weights
EACH, TOGETHER = 1.5, 3.0  # standard deviations: of every draw, and of their mean
REMEDY = "follow one sample's index from the loader to the loss: cat and chunk, view and flatten, gather and flip"


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    batch = patient.steps[0]
    views = find_views(batch)
    precision = "64-true"
    try:
        isolation.one(losses_of, patient, [batch], precision)
    except Ended:
        precision = "32-true"
    slack = 1e-9 if precision == "64-true" else 1e-6
    if views is None or divisible(batch):
        return _inside(patient, isolation, precision, slack)
    findings, seen = _in_batch(patient, isolation, views, precision, slack)
    if findings or not seen:
        return findings, "" if findings else "the views of the batch could not be told apart"
    began = time.monotonic()
    try:
        findings = isolation.one(_arranged, patient, views, precision)
    except Ended as ended:
        return [], f"the loss sees the pairing; whether it pairs the right rows was not finished: {ended}"
    if not findings:
        findings = [
            info("pairing_seen", f"shuffling the rows of a view changes the loss ({time.monotonic() - began:.1f} s)")
        ]
    return findings, ""


def _rolled(n: int) -> Tensor:
    return torch.arange(n).roll(1)


def _in_batch(
    patient: Patient, isolation: Isolation, views: Views, precision: str, slack: float
) -> tuple[list[Finding], bool]:
    batch = patient.steps[0]
    tensors = views.of(batch)
    n = len(tensors[0])
    if n < 4:
        return [], False
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(n, generator=generator), _rolled(n)]
    batches, kinds = [batch], []
    for k, view in enumerate(tensors[:4]):
        for order in orders:
            batches.append(views.put(batch, [*tensors[:k], view[order], *tensors[k + 1 :]]))
            kinds.append((k, "order"))
        other = view + view.std() * torch.randn(view.shape, generator=generator).to(view)
        batches.append(views.put(batch, [*tensors[:k], other, *tensors[k + 1 :]]))
        kinds.append((k, "content"))
    base, *losses = isolation.one(losses_of, patient, batches, precision)
    if not math.isfinite(base):
        return [], False

    def same(k: int, kind: str) -> bool:
        mine = [loss for loss, one in zip(losses, kinds, strict=True) if one == (k, kind)]
        return all(abs(loss - base) <= slack * max(1e-6, abs(base)) for loss in mine)

    count = min(len(tensors), 4)
    unused = [k for k in range(count) if same(k, "content")]
    unseen = [k for k in range(count) if k not in unused and same(k, "order")]
    where = step_line(patient.module)
    if len(unused) == count:
        return [], False
    if unused:
        texts = (
            f"view {unused[0]} of {len(tensors)} does not enter the loss: replaced by other numbers, it stays at "
            f"{base:.6g}",
            "each sample is compared with itself, or with nothing: perhaps both branches get the same view",
            "use it in the training step, or make one view fewer",
            where,
        )
        found = alarm("view_unused", *texts) if len(tensors) == 2 else info("view_unused", *texts)
        return [found], True
    if unseen and len(unseen) == count:
        return [_unseen(patient, isolation, precision, "the rows of a view", base)], True
    return [], True


def _unseen(patient: Patient, isolation: Isolation, precision: str, what: str, base: float) -> Finding:
    texts = (
        f"the loss does not see which views belong together: shuffling {what} leaves it at {base:.6g}",
        "nothing pulls the views of one sample together, so that there is nothing to learn from them",
        REMEDY,
        step_line(patient.module),
    )
    copies = [twin for twin in find_twins(patient.module, learning(patient, isolation)) if twin.copied]
    if not copies and isolation.one(_adds_up, patient, precision):
        return info("views_apart", texts[0], "each row has a loss of its own, as in reconstruction", where=texts[3])
    return alarm("pairing_unseen", *texts)


def _adds_up(patient: Patient, precision: str) -> bool:
    """Whether the loss of a batch is the mean of its halves' losses: each row has its own."""
    hold_norms(patient.module, patient.moments)
    halves = parts(patient.steps[0], 2)
    if halves is None:
        return False
    whole, *each = losses_of(patient, [patient.steps[0], *halves], precision)
    return abs(whole - sum(each) / 2) <= 1e-5 * max(1e-6, abs(whole))


def _inside(patient: Patient, isolation: Isolation, precision: str, slack: float) -> tuple[list[Finding], str]:
    """The views are made in the step: shuffle what enters the network instead."""
    n = count_rows(patient.steps[0]) or 0
    calls = isolation.one(_entries, patient)
    paths = [path for path, *_ in calls]
    again = [i for i, path in enumerate(paths) if path in paths[:i] and calls[i] == calls[paths.index(path)]]
    if again and calls[again[-1]][1][0] >= 4:
        at, rows = again[-1], slice(None)
    elif len(calls) == 1 and calls[0][1][0] == 2 * n and n >= 4:
        at, rows = 0, slice(n, None)
    else:
        return [], "the batch holds one view of each sample, and the step makes no second one that could be shuffled"
    losses = isolation.one(_shuffled_inside, patient, precision, at, rows)
    if all(abs(loss - losses[0]) <= slack * max(1e-6, abs(losses[0])) for loss in losses[1:]):
        what = f"the rows that enter {paths[at]} in its call number {at + 1}"
        return [_unseen(patient, isolation, precision, what, losses[0])], ""
    return [info("pairing_seen", f"shuffling the rows of one call of {paths[at]} changes the loss")], ""


def _entries(patient: Patient) -> list[tuple[str, tuple[int, ...]]]:
    calls = Calls(patient.module)
    Fit(patient, steps=1, feed=patient.steps[:1]).run()
    return [(c.path, tuple(c.entered.shape)) for c in calls.made if c.entry and c.entered is not None and c.grad]


def _shuffled_inside(patient: Patient, precision: str, at: int, rows: slice) -> list[float]:
    def change(number: int, call: int, x: Tensor) -> Tensor:
        if number == 0 or call != at:
            return x
        count = len(x[rows])
        order = torch.tensor(random.Random(number).sample(range(count), count))  # torch's draws are held steady here
        x = x.clone()
        x[rows] = x[rows][order]
        return x

    return losses_of(patient, [patient.steps[0]] * 4, precision, change=change)


def _arranged(patient: Patient, views: Views, precision: str) -> list[Finding]:
    """Give the loss one view twice, in the right order and in others: the right one must be the lowest, if any is.

    Before training a predictor may prefer any order by chance. So the same is done with other draws of the weights,
    and only what holds in all of them counts.
    """
    batch = take(patient.steps[0], torch.arange(min(16, count_rows(patient.steps[0]) or 0) // 4 * 4))
    tensors = views.of(batch)
    n = len(tensors[0])
    if n < 8 or len(tensors) != 2:
        return []
    one = tensors[0]
    halves = torch.arange(n).view(2, -1)
    known = {
        "reversed": torch.arange(n).flip(0),
        "shifted by one": torch.arange(n).roll(1),
        "shifted by one (backwards)": torch.arange(n).roll(-1),
        "shifted by half": torch.arange(n).roll(n // 2),
        "interleaved": halves.T.flatten(),
        "blocked": torch.arange(n).view(-1, 2).T.flatten(),
    }
    generator = torch.Generator().manual_seed(2)
    batches = [views.put(batch, [one, one])]
    batches += [views.put(batch, [one, one[order]]) for order in known.values()]
    doubled = one[torch.arange(n) // 2 * 2]
    other = one.roll(n // 2, 0)[torch.arange(n) // 2 * 2]
    batches.append(views.put(batch, [doubled, other]))  # neighbours equal, the views of a row not
    batches += [views.put(batch, [one, one[torch.randperm(n, generator=generator)]]) for _ in range(SHUFFLES)]
    names = [*known, "neighbours in one view"]
    prepare: list[Callable[[nn.Module], None] | None] = []
    for draw in range(DRAWS):
        prepare += [None if draw == 0 else _redrawn(draw)] * len(batches)

    def scores(losses: list[float]) -> list[list[float]]:
        """By draw of the weights, how far the right order and the known ones lie from random ones."""
        found = []
        for i in range(0, len(losses) - len(batches) + 1, len(batches)):
            others = torch.tensor(losses[i + 1 + len(names) : i + len(batches)], dtype=torch.float64)
            spread = max(float(others.std()), 1e-9 * max(1.0, abs(float(others.mean()))))
            found.append([(x - float(others.mean())) / spread for x in losses[i : i + 1 + len(names)]])
        return found

    def settled(losses: list[float]) -> bool:
        """Whether no order but the right one can still be the lowest in every draw."""
        table = scores(losses)
        if len(losses) % len(batches) or not table:
            return False
        return not _lowest(table) and not all(row[0] > EACH for row in table)

    table = scores(losses_of(patient, batches * DRAWS, precision, prepare, until=settled))
    if len(table) < DRAWS or not all(math.isfinite(score) for row in table for score in row):
        return []
    where = step_line(patient.module)
    mean = [sum(column) / DRAWS for column in zip(*table, strict=True)]
    for k in _lowest(table):
        if mean[k] < -TOGETHER and mean[0] > -EACH:
            return [
                alarm(
                    "mispaired",
                    "the loss pairs the wrong rows: for two equal views it is lowest when the second one's rows are "
                    f"{names[k - 1]} ({mean[k]:.1f} standard deviations from a random order, the right order "
                    f"{mean[0]:+.1f}; mean over {DRAWS} draws of the weights)",
                    "views of different samples are pulled together",
                    REMEDY,
                    where,
                )
            ]
    if all(row[0] > EACH for row in table) and mean[0] > TOGETHER:
        return [
            alarm(
                "pushes_apart",
                f"for two equal views the loss is higher in the right order than in random ones, by {mean[0]:.1f} "
                f"standard deviations (mean over {DRAWS} draws of the weights): it pushes the views of a sample apart",
                "a sign is wrong, or positives and negatives are exchanged",
                "look at the sign of the similarity, and at the mask of the positives",
                where,
            )
        ]
    return []


def _lowest(table: list[list[float]]) -> list[int]:
    """The orders that were lower than random ones in every draw so far, while the right one was not."""
    orders = range(1, len(table[0]))
    right = sum(row[0] for row in table) / len(table)
    found = [k for k in orders if all(row[k] < -EACH for row in table)]
    return sorted(found, key=lambda k: sum(row[k] for row in table)) if right > -EACH else []


def _redrawn(draw: int) -> Callable[[nn.Module], None]:
    """Shuffle the entries of each weight; tensors of one shape alike, so that copies stay copies."""

    @torch.no_grad()
    def prepare(module: nn.Module) -> None:
        for p in module.parameters():
            if p.ndim > 1:
                generator = torch.Generator().manual_seed(draw * 1_000_003 + p.numel())
                order = torch.randperm(p.numel(), generator=generator)
                p.copy_(p.flatten()[order].view_as(p))

    return prepare
