"""Peak memory of probes on 200,000 x 768 features with 1,000 classes, on 1, 2 and 4 ranks (gloo, one thread each).

Each rank holds its shard; what counts is how far its resident memory rises above the shard itself while it classifies
2,000 queries by their 20 nearest neighbours; while the regression runs: its preconditioners, and more steps than the 16
that it remembers; and while one of two penalties is chosen on a held-out part and the model tried on 50,000 test rows,
which are not counted as part of the shard. The aim is 0.3 of the shard and a constant for chunks; the law is fitted to
two sizes and carried on to ImageNet's 1.28 million rows.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from benchmarks._bench import Row, Section, in_ranks, main, peak_memory
from lightning_ssl.distributed import Together
from lightning_ssl.functional import fit_linear_probe, knn_predict
from lightning_ssl.metrics.evaluation import Shard, linear_evaluation

CONSTANT = 0.6  # GB: chunks of rows and similarities, the classes' blocks, and the weights of 16 steps
WEIGHTS = 2 * 16 * 4 + 8 * 8  # bytes for each class and feature: what is remembered of 16 steps, and the search's own
STEPS = 18  # of each stage of the regression: more than it remembers


KINDS = "kNN", "regression", "penalties"


def worker(rows: int, dim: int, classes: int, queries: int, steps: int, tests: int) -> dict[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dice = torch.Generator().manual_seed(rank)
    own = torch.arange(rank, rows, ranks)
    features = torch.randn(len(own), dim, generator=dice)
    labels = torch.randint(classes, (len(own),), generator=dice)
    asked = torch.randn(queries // ranks, dim, generator=dice)
    shard = dict(sharded=True, positions=own)
    few = slice(0, 64)
    warm = dict(sharded=True, positions=own[few])
    knn_predict(asked[few], features[few], labels[few], classes, 20, **warm)
    warnings.filterwarnings("ignore", message=".*max_iter.*")
    fit_linear_probe(features[few], labels[few], classes, 0.2, max_iter=1, **warm)

    def fit() -> None:
        fit_linear_probe(features, labels, classes, 4e-3, max_iter=steps, tolerance=0.0, **shard)

    places = torch.arange(rank, tests, ranks)
    test = Shard(torch.randn(len(places), dim, generator=dice), labels[: len(places)], places, tests)
    train, together = Shard(features, labels, own, rows), Together(features.device)
    return {
        "kNN": peak_memory(lambda: knn_predict(asked, features, labels, classes, 20, **shard)),
        "regression": peak_memory(fit),
        "penalties": peak_memory(lambda: linear_evaluation(train, test, classes, [1.0, 0.5], together)),
        "shard": features.numel() * features.element_size() / 1e9,
    }


def run(tiny: bool = False) -> Section:
    rows, dim, classes, queries, tests = (2000, 16, 10, 200, 600) if tiny else (200_000, 768, 1000, 2000, 50_000)
    table, above = [], {}
    for ranks in (1, 2) if tiny else (1, 2, 4):
        found = in_ranks("probe_memory.worker", ranks, rows, dim, classes, queries, STEPS, tests)
        for kind in KINDS:
            worst = max(found, key=lambda one: one[kind])
            above[kind, ranks] = worst[kind], worst["shard"]
            limit = 0.3 * worst["shard"] + CONSTANT
            table.append(
                Row(
                    f"{kind}, {ranks} rank{'s' if ranks > 1 else ''}, {rows:,} x {dim}, {classes} classes",
                    "0.3 of the shard + chunks",
                    f"{worst[kind]:.2f} GB above a shard of {worst['shard']:.2f} GB",
                    f"{limit:.2f} GB",
                    f"{worst[kind] / limit:.2f} of the limit",
                    "<= 1",
                    worst[kind] <= limit,
                )
            )
    notes = []
    for kind in KINDS:
        (large, big), (small, little) = above[kind, 1], above[kind, 2 if tiny else 4]
        slope = max(0.0, large - small) / max(1e-9, big - little)
        eight = 1.28e6 * 2048 * 4 / 8 / 1e9
        wider = 0.0 if kind == "kNN" else WEIGHTS * 1000 * (2048 - dim) / 1e9  # the weights of more features
        notes.append(
            f"{kind}: {small - slope * little:.2f} GB and {slope:.2f} of the shard; for 1.28 million x 2048 on eight "
            f"ranks, {eight:.2f} GB each, {small + slope * (eight - little) + wider:.2f} GB above it"
            + (f", of which {wider:.2f} for the weights of more features." if wider else ".")
        )
    return Section(table, notes)


if __name__ == "__main__":
    main(run, threads=1)
