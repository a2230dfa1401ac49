"""Whether augmentations are drawn anew: in each worker, each epoch, and other samples on each rank."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ssl.doctor.batches import find_views, tensors
from lightning_ssl.doctor.isolate import Isolation
from lightning_ssl.doctor.ranks import join_group
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Fit, Patient, line_of

SAMPLES = 6


def over_time(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    return isolation.one(_over_time, patient)


def _over_time(patient: Patient) -> tuple[list[Finding], str]:
    loader = own_loader(patient)
    if not isinstance(loader, DataLoader):
        return [], f"draws over workers and epochs were not tried: {type(loader).__name__} is no torch DataLoader"
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return _on_stream(loader)
    size = len(dataset)
    where = f"{type(dataset).__name__}.__getitem__ ({line_of(type(dataset).__getitem__)})"
    chosen = [int(i) for i in torch.linspace(0, size - 1, min(SAMPLES, size)).long()]
    with _seeding() as seeds:
        first = [_numbers(loader, [dataset[i]]) for i in chosen]
    again = [_numbers(loader, [dataset[i]]) for i in chosen]
    if any(x is None for x in first):
        return [], "the samples hold no floating-point tensors that could be compared"
    fresh = not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # type: ignore[arg-type]
    findings: list[Finding] = []
    if fresh:
        findings += _on_workers(loader, chosen, where)
        findings += _on_epochs(loader, chosen, where)
        findings += _on_redraws(loader, chosen, where)
    else:
        changed = _with_epoch(loader, chosen, first)
        if changed:
            findings.append(info("views_keyed", "views are the same for each draw of a sample, and others next epoch"))
        elif seeds and changed is not None:
            findings.append(_same_epochs(f"{where} seeds its random numbers ({seeds[0]})", where))
        else:
            findings.append(
                info(
                    "views_fixed",
                    "a sample has the same views whenever it is drawn: fixed pairs, or augmentation elsewhere",
                    "legitimate for pairs that are given; augmentations should differ from epoch to epoch",
                    where=where,
                )
            )
    return findings, ""


def own_loader(patient: Patient) -> Any:
    if patient.datamodule is not None:
        patient.datamodule.prepare_data()
        patient.datamodule.setup("fit")
        return patient.datamodule.train_dataloader()
    return patient.module.train_dataloader() if patient.loader is None else patient.loader


def _numbers(loader: Any, samples: list[Any]) -> Tensor | None:
    """All floating-point numbers of some samples."""
    try:
        batch = loader.collate_fn(samples)
    except Exception:
        batch = samples
    return fingerprint(batch)


def fingerprint(batch: Any, floating: bool = True) -> Tensor | None:
    """All numbers of a batch, or those of its floating-point tensors; None if there are none."""
    found = [x.detach().double().flatten().cpu() for _, x in tensors(batch) if x.is_floating_point() or not floating]
    return torch.cat(found) if found else None


@contextlib.contextmanager
def _seeding() -> Iterator[list[str]]:
    """Who sets a seed while samples are made."""
    seen: list[str] = []
    kept: list[tuple[Any, str, Any]] = []

    def watch(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                seen.append(label)
            return original(*args, **kwargs)

        kept.append((owner, name, original))
        setattr(owner, name, noting)

    class Noting(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seen.append("torch.Generator.manual_seed")
            return super().manual_seed(seed)

    watch(torch, "manual_seed", "torch.manual_seed")
    watch(random, "seed", "random.seed")
    watch(random, "Random", "random.Random")
    watch(np.random, "seed", "numpy.random.seed")
    watch(np.random, "default_rng", "numpy.random.default_rng")
    watch(np.random, "RandomState", "numpy.random.RandomState")
    kept.append((torch, "Generator", torch.Generator))
    torch.Generator = Noting  # type: ignore[misc]
    try:
        yield seen
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)


class _Chosen(Dataset[Any]):
    """Some samples of a dataset, in a given order, with repeats."""

    def __init__(self, dataset: Any, order: list[int]) -> None:
        self.dataset, self.order = dataset, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[self.order[i]]


def _again(loader: Any, order: list[int], workers: int) -> DataLoader[Any]:
    """The loader's own way of drawing, on chosen samples, one a batch."""
    return DataLoader(
        _Chosen(loader.dataset, order),
        batch_size=1,
        collate_fn=loader.collate_fn if loader.batch_size is not None else None,
        num_workers=workers,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )


def _on_workers(loader: Any, chosen: list[int], where: str) -> list[Finding]:
    """The first sample again and again, by two workers in turn."""
    drawn = [fingerprint(batch) for batch in _again(loader, [chosen[0]] * 6, 2)]
    if any(x is None for x in drawn):
        return []
    workers = [drawn[0::2], drawn[1::2]]
    same = all(torch.equal(a, b) for a, b in zip(*workers, strict=True))  # type: ignore[arg-type]
    varies = not torch.equal(drawn[0], drawn[2])  # type: ignore[arg-type]
    if not same or not varies:
        return []
    texts = (
        "two workers draw the same augmentations, one number for another",
        "each worker holds a copy of the same generator: with W workers each draw is used W times, and batches hold "
        "fewer different augmentations than they seem to",
        "draw from torch's, Python's or NumPy's global generators, which the DataLoader seeds for each worker, or seed "
        "your own in worker_init_fn from torch.initial_seed()",
        where,
    )
    several = loader.num_workers >= 2
    return [alarm("same_draw_in_workers", *texts) if several else info("same_draw_in_workers", *texts)]


def _on_epochs(loader: Any, chosen: list[int], where: str) -> list[Finding]:
    workers = min(loader.num_workers, 1)
    again = _again(loader, chosen, workers)
    epochs = [[fingerprint(batch) for batch in again] for _ in range(2)]
    if any(x is None for epoch in epochs for x in epoch):
        return []
    if all(torch.equal(a, b) for a, b in zip(*epochs, strict=True)):  # type: ignore[arg-type]
        return [_same_epochs("the workers of each epoch begin from the same generator", where)]
    return []


def _same_epochs(text: str, where: str) -> Finding:
    return alarm(
        "same_draw_in_epochs",
        f"every epoch draws the same views: {text}",
        "each sample has two views for the whole run, which a network can learn by heart",
        "let the random numbers depend on the epoch, too: use the global generators, or key them by (seed, epoch, "
        "index)",
        where,
    )


def _with_epoch(loader: Any, chosen: list[int], first: list[Tensor | None]) -> bool | None:
    """Whether telling the epoch changes the views; None if there is nobody to tell who could not be asked."""
    dataset = loader.dataset
    told = False
    for thing in (dataset, loader.sampler, loader):
        if hasattr(thing, "set_epoch"):
            thing.set_epoch(7)
            told = True
    if not told and hasattr(dataset, "epoch"):
        dataset.epoch = 7
        told = True
    if not told:
        return False
    now = [_numbers(loader, [dataset[i]]) for i in chosen]
    return not all(torch.equal(a, b) for a, b in zip(first, now, strict=True))  # type: ignore[arg-type]


def _on_redraws(loader: Any, chosen: list[int], where: str) -> list[Finding]:
    """Whether two views of a sample are closer than of two samples, as two draws of one view are."""
    dataset = loader.dataset
    more = [int(i) for i in torch.linspace(0, len(dataset) - 1, min(24, len(dataset))).long()]
    draws = []
    for _ in range(2):
        try:
            batch = loader.collate_fn([dataset[i] for i in more])
        except Exception:
            return []
        views = find_views(batch)
        if views is None:
            return []
        draws.append([x.double() for x in views.of(batch)[:2]])
    (a, b), (a2, b2) = draws
    if len(a) < 12 or a.shape != b.shape:
        return []
    spread = [float(x.std()) for x in (a, b)]
    if max(spread) > 1.3 * min(spread) or abs(float(a.mean() - b.mean())) > 0.3 * max(spread):
        return []  # views of another kind: their distances say nothing
    pair = min(closeness(a, b))
    again = [min(closeness(a, a2)), min(closeness(b, b2))]
    if pair < 0.93 or min(again) > 0.75 or 0.75 < max(again) < 0.9:
        return []
    return [
        alarm(
            "views_of_different_samples",
            f"the two views of an index are as far apart as views of different samples ({pair:.2f} of their distance), "
            f"while two draws of one view are not ({min(again):.2f})",
            "the loss pulls together what does not belong together",
            "make both views from the sample of this index",
            where,
        )
    ]


def closeness(x: Tensor, y: Tensor) -> list[float]:
    """The distance of two views of a sample relative to that of different samples: whole, and of their moments."""
    found = []
    for features in (lambda v: v.flatten(1), _moments):
        distances = torch.cdist(features(x), features(y))
        own = distances.diagonal()
        others = (distances.sum(dim=1) - own) / (len(x) - 1)
        found.append(float((own / others.clamp_min(1e-12)).median()))
    return found


def _moments(x: Tensor) -> Tensor:
    """Mean and spread of each channel: what crops leave alone."""
    flat = x.flatten(2) if x.ndim > 2 else x[:, None]
    return torch.cat([flat.mean(dim=2), flat.std(dim=2)], dim=1)


def _on_stream(loader: Any) -> tuple[list[Finding], str]:
    """An iterable dataset: each worker iterates a copy of it."""
    if loader.num_workers < 2:
        return [], "draws over workers and epochs were not tried: the dataset is iterable, and there are no workers"
    iterator = iter(loader)
    drawn = [fingerprint(batch) for batch in (next(iterator, None), next(iterator, None))]
    if any(x is None for x in drawn) or not torch.equal(*drawn):  # type: ignore[arg-type]
        return [], ""
    dataset = loader.dataset
    return [
        alarm(
            "same_samples_in_workers",
            "two workers yield the same batch: each iterates the whole dataset",
            "an epoch holds each sample once for each worker",
            "divide the stream by torch.utils.data.get_worker_info()",
            f"{type(dataset).__name__}.__iter__ ({line_of(type(dataset).__iter__)})",
        )
    ], ""


def over_ranks(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    """Whether ranks train on different samples, with the loader and the Trainer's settings as they are."""
    outcomes = isolation.several(_on_rank, 2, patient, 2)
    if problems := [outcome.problem for outcome in outcomes if outcome.problem]:
        return [], f"what two ranks draw could not be compared: {problems[0]}"
    a, b = (outcome.value for outcome in outcomes)
    if a is None or b is None or a.shape != b.shape or not torch.equal(a, b) or not a.numel():
        return [], ""
    return [
        alarm(
            "same_samples_on_ranks",
            "two ranks train on the same batch, number for number",
            "each gradient is computed once for each rank: W devices do the work of one",
            "leave use_distributed_sampler on, or divide samplers and iterable datasets by rank yourself",
        )
    ], ""


def _on_rank(rank: int, note: Callable[[Any], None], patient: Patient, world: int) -> Tensor | None:
    settings = join_group(patient, rank, world)
    settings["use_distributed_sampler"] = patient.options.get("use_distributed_sampler", True)
    caught: list[Any] = []

    def instead(step: Any, batch: Any, args: Any, kwargs: Any) -> Any:
        caught.append(fingerprint(batch, floating=False))
        raise _Enough

    fit = Fit(patient, steps=1, real=True, instead=instead, settings=settings)
    with contextlib.suppress(_Enough):
        fit.run()
    return caught[0] if caught else None


class _Enough(Exception):
    """Ends a fit that has shown what it was run for."""
