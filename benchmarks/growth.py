"""How the cost of each callback's metric grows as a size doubles, against the law in docs/callbacks.md.

The exponent is fitted to the median CPU times of three doublings, in the double precision the callbacks compute in. A
law is kept when the exponent exceeds it by less than 0.3: caches make large sizes a little dearer. Ranks are gloo
processes with the same rows each, so that all rows grow with them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks._bench import Row, Section, main
from benchmarks.knn import clusters
from lightning_ssl import metrics
from lightning_ssl.functional import covariance_operator_norms, fit_linear_probe, knn_predict, principal_plane


def rows(n: int, d: int) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def metric(make: Callable[[], metrics.Uniformity], *inputs: Tensor) -> Callable[[], object]:
    def run() -> object:
        found = make()
        found.update(*inputs)
        return found.compute()

    return run


def eigenspace(d: int) -> Callable[[], object]:
    x = rows(256, d)
    return metric(metrics.EigenspaceAlignment, x, x @ rows(d, d))


def circle(d: int) -> Callable[[], object]:
    x = rows(512, d)
    return lambda: principal_plane(x)


def operator(samples: int, layers: int) -> Callable[[], object]:
    convs = [part for _ in range(layers) for part in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 32, 3), *convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32))
    views = [torch.randn(samples, 3, 16, 16) for _ in range(2)]
    return lambda: covariance_operator_norms(model, views, directions=8, principal=5)


def neighbours(queries: int, bank: int, d: int) -> Callable[[], object]:
    x, y = clusters(bank, d, 10, torch.Generator().manual_seed(0))
    q = rows(queries, d).float()
    return lambda: knn_predict(q, x, y, 10, k=20)


def probe(n: int, d: int, classes: int) -> Callable[[], object]:
    x, y = clusters(n, d, classes, torch.Generator().manual_seed(0))
    return lambda: fit_linear_probe(x, y, classes)


# what, by which size, smallest size, law's exponent, the work at a size
CASES: list[tuple[str, str, int, float, Callable[[int], Callable[[], object]]]] = [
    ("UniformityAlignment", "N", 512, 2, lambda n: metric(metrics.Uniformity, rows(n, 128))),
    ("UniformityAlignment", "d", 128, 1, lambda d: metric(metrics.Uniformity, rows(1024, d))),
    ("EffectiveRank", "N > d", 512, 1, lambda n: metric(metrics.EffectiveRank, rows(n, 128))),
    ("EffectiveRank", "d < N", 64, 2, lambda d: metric(metrics.EffectiveRank, rows(1024, d))),
    ("CorrelationBound", "N", 512, 1, lambda n: metric(lambda: metrics.CorrelationBound(10), rows(n, 128))),
    ("CorrelationBound", "d", 128, 2, lambda d: metric(lambda: metrics.CorrelationBound(10), rows(512, d))),
    ("EigenspaceAlignment", "d", 64, 3, eigenspace),
    ("RepresentationCircle", "d", 64, 3, circle),
    ("CovarianceOperatorNorm", "samples", 8, 1, lambda n: operator(n, 4)),
    ("CovarianceOperatorNorm", "layers", 4, 1, lambda n: operator(16, n)),
    ("KNNProbe", "test rows", 250, 1, lambda n: neighbours(n, 10_000, 128)),
    ("KNNProbe", "train rows", 2500, 1, lambda n: neighbours(1000, n, 128)),
    ("KNNProbe", "d", 64, 1, lambda d: neighbours(1000, 5000, d)),
    ("LinearProbe", "train rows", 2500, 1, lambda n: probe(n, 128, 10)),
    ("LinearProbe", "d", 64, 3, lambda d: probe(5000, d, 10)),
    ("LinearProbe", "classes", 10, 1, lambda c: probe(5000, 128, c)),
]
# with rows gathered, all of them count on each rank; with sums, a rank's own: metric, law, rows a rank
REDUCED: dict[str, tuple[Callable[[], metrics.Uniformity], float, int]] = {
    "UniformityAlignment": (metrics.Uniformity, 2, 1024),
    "CorrelationBound": (lambda: metrics.CorrelationBound(10), 0, 16384),
}


def cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def exponent(sizes: list[int], times: list[float]) -> float:
    x = [math.log(size) for size in sizes]
    y = [math.log(t) for t in times]
    mx, my = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def on_rank(rank: int, ranks: int, folder: str, name: str, n: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    run = metric(REDUCED[name][0], rows(n, 128))
    seconds = cpu_seconds(run, repeats)
    if rank == 0:
        Path(folder, "seconds").write_text(str(seconds))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(name: str, ranks: int, n: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (ranks, folder, name, n, repeats), nprocs=ranks)
        return float(Path(folder, "seconds").read_text())


def run(tiny: bool = False) -> Section:
    steps, repeats = (2, 1) if tiny else (4, 5)
    table = []

    def judge(name: str, size: str, sizes: list[int], times: list[float], law: float) -> None:
        found = exponent(sizes, times)
        assert all(math.isfinite(t) and t > 0 for t in times), (name, times)
        ours = f"{1e3 * times[0]:.3g} to {1e3 * times[-1]:.3g} ms"
        ratio = f"{size} {sizes[0]} to {sizes[-1]}: exponent {found:.2f}"
        table.append(Row(name, "its law", ours, "", ratio, f"{law:g}", found <= law + 0.3))

    for name, size, smallest, law, make in CASES:
        sizes = [max(2, smallest // (4 if tiny else 1)) * 2**i for i in range(steps)]
        judge(name, size, sizes, [cpu_seconds(make(n), repeats) for n in sizes], law)
    for name, (_, law, n) in REDUCED.items():
        sizes = [1, 2] if tiny else [1, 2, 4]
        judge(name, "ranks", sizes, [on_ranks(name, r, 32 if tiny else n, repeats) for r in sizes], law)
    return Section(table)


if __name__ == "__main__":
    main(run, threads=1)
