"""Logistic regression at the size of an ImageNet probe: 200,000 x 768, 1,000 classes; paths; two ranks against one.

scikit-learn's LogisticRegression minimises the same objective on the same standardised features, on one thread as ours,
for 100 steps; a remark says how low both come. A path of ten penalties is compared with a single fit of the weakest.
Two ranks of one thread each have half of the rows each; their times are by the clock on the wall, so that they want two
idle cores.
"""

from __future__ import annotations

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
SHORTFALL = """\
Two ranks at 50,000 rows: a look at the rows takes a rank 25 ms there. What every rank does for itself (directions, the
blocks' inverses) adds 5 ms, and an exchange 2 to 4 ms, of which gloo's own threads spend most waiting for a core: the
ranks use both."""
PATH = [10.0 ** (-k / 2) for k in range(2, 12)]


def fit_shard(rows: int, dim: int, classes: int, repeats: int) -> list[float]:
    """Seconds of fits in which each rank has its part of the rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = features(rows, dim, classes, torch.Generator().manual_seed(0))
    own = torch.arange(rank, rows, ranks)
    x, y = x[own].clone(), y[own].clone()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        fit_linear_probe(x, y, classes, L2, sharded=True, positions=own)
        seconds.append(time.perf_counter() - start)
    return seconds


def timed(fit: Callable[[], Any], repeats: int = 1) -> tuple[Any, list[float], list[float]]:
    """The answer, seconds of the processor and seconds on the wall."""
    busy, wall = [], []
    for _ in range(repeats):
        start = time.process_time(), time.perf_counter()
        answer = fit()
        busy.append(time.process_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return answer, busy, wall


def run(tiny: bool = False) -> Section:
    warnings.filterwarnings("ignore", module="sklearn")
    rows, notes = [], []
    for n, dim, classes, repeats in [(600, 16, 5, 1)] if tiny else [(50_000, 512, 100, 3), (200_000, 768, 1000, 1)]:
        work = f"{n:,} x {dim}, {classes:,} classes"
        two = in_ranks("probe_scale.fit_shard", 2, n, dim, classes, repeats)[0]
        x, y = features(n, dim, classes, torch.Generator().manual_seed(0))
        ours, busy, wall = timed(lambda x=x, y=y, c=classes: fit_linear_probe(x, y, c, L2), repeats)
        rows.append(faster(f"{work}, 2 ranks", "1 process", two, wall, 1.7))
    notes += [] if tiny or rows[0].reached else [SHORTFALL]
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
