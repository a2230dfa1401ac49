"""Uniformity of 50,000 x 128 features: the log of the mean Gaussian kernel over all 1.25 billion pairs.

The limit is the product x xᵀ alone, block by block, of the pairs i < j that count: no kernel, no sum. `torch.pdist`
holds every distance at once, 5 GB here, and is timed at 20,000 rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._bench import Row, Section, costs, faster, main, peak_memory, race
from lightning_ssl.functional import uniformity
from lightning_ssl.functional.geometry import _BLOCK


def bare(x: Tensor) -> None:
    for start in range(0, len(x), _BLOCK):
        for other in range(start, len(x), _BLOCK):
            x[start : start + _BLOCK] @ x[other : other + _BLOCK].T


def by_pdist(x: Tensor) -> Tensor:
    return torch.pdist(x).pow(2).mul(-2).exp().mean().log()


def run(tiny: bool = False) -> Section:
    n, small, dim, repeats = (600, 300, 8, 1) if tiny else (50_000, 20_000, 128, 5)
    x = F.normalize(torch.randn(n, dim, generator=torch.Generator().manual_seed(0)) + 0.3, dim=1)
    assert torch.isclose(uniformity(x[:small]), by_pdist(x[:small].double()).float(), rtol=1e-5)
    seconds = race({"ours": lambda: uniformity(x), "bare": lambda: bare(x)}, repeats)
    peers = race({"ours": lambda: uniformity(x[:small]), "pdist": lambda: by_pdist(x[:small])}, repeats)
    memory = peak_memory(lambda: uniformity(x))
    memory_pdist = peak_memory(lambda: by_pdist(x[:small]))
    return Section(
        [
            costs(f"{n:,} x {dim}", "matmul of the pairs", seconds["ours"], seconds["bare"], 1.5),
            faster(f"{small:,} x {dim}", "torch.pdist", peers["ours"], peers["pdist"], 1),
            Row(
                f"peak memory, {n:,} rows",
                f"torch.pdist, {small:,} rows",
                f"{memory:.2f} GB",
                f"{memory_pdist:.2f} GB",
                "",
                "< 0.2 GB",
                memory < 0.2,
            ),
        ]
    )


if __name__ == "__main__":
    main(run)
