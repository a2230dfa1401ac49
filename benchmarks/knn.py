"""Weighted nearest neighbours: a bank of 50,000, 10,000 queries, d = 512, k = 200, 10 classes.

The limit is the product of the normalised features and `topk` alone, in the same chunks of queries: no votes. lightly's
`knn_predict` takes batches of 256 queries, as its kNN benchmark module does; scikit-learn's classifier gets the cosine
by normalised rows, and the same weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._bench import Row, Section, costs, faster, main, peak_memory, race
from lightning_ssl.functional import knn_predict
from lightning_ssl.functional.probes import _SIMILARITIES


def clusters(rows: int, dim: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features as a network leaves them: overlapping classes, variances that fall like a power of the index."""
    spectrum = torch.arange(1, dim + 1).float() ** -0.5
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(1)) * spectrum
    labels = torch.randint(classes, (rows,), generator=generator)
    return 0.5 * centres[labels] + torch.randn(rows, dim, generator=generator) * spectrum, labels


def run(tiny: bool = False) -> Section:
    from lightly.utils.benchmarking import knn_predict as lightly_predict
    from sklearn.neighbors import KNeighborsClassifier

    n, q, dim, k, classes, repeats = (500, 100, 16, 20, 5, 1) if tiny else (50_000, 10_000, 512, 200, 10, 5)
    dice = torch.Generator().manual_seed(0)
    (bank, labels), (queries, _) = clusters(n, dim, classes, dice), clusters(q, dim, classes, dice)
    unit, unit_queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    columns = unit.T.contiguous()  # as lightly wants it

    def ours() -> Tensor:
        return knn_predict(queries, bank, labels, classes, k)[:, 0]

    def bare() -> None:
        for chunk in unit_queries.split(max(1, _SIMILARITIES // n)):
            (chunk @ unit.T).topk(k, dim=1)

    def lightly() -> Tensor:
        parts = [lightly_predict(chunk, columns, labels, classes, k, 0.1) for chunk in unit_queries.split(256)]
        return torch.cat(parts)[:, 0]

    classifier = KNeighborsClassifier(
        k, weights=lambda d: torch.exp(-(torch.as_tensor(d) ** 2) / 0.2).numpy(), n_jobs=-1
    )
    classifier.fit(unit.numpy(), labels.numpy())

    def sklearn() -> Tensor:
        return torch.from_numpy(classifier.predict(unit_queries.numpy()))

    answers = {run.__name__: run() for run in (ours, lightly, sklearn)}
    for name, answer in answers.items():  # rounding decides between classes that are level
        assert (answer == answers["ours"]).float().mean() > 0.999, name
    memory = peak_memory(ours)
    seconds = race({run.__name__: run for run in (ours, bare, lightly)}, repeats)
    slow = race({"ours": ours, "sklearn": sklearn}, min(repeats, 3), warm_up=0)
    work = f"{q:,} queries, bank {n:,} x {dim}, k = {k}"
    return Section(
        [
            costs(work, "matmul + topk", seconds["ours"], seconds["bare"], 1.1),
            faster(work, "lightly", seconds["ours"], seconds["lightly"], 1),
            faster(work, "scikit-learn", slow["ours"], slow["sklearn"], 1),
            Row("peak memory above the bank", "1 GB", f"{memory:.2f} GB", "", "", "< 1 GB", memory < 1),
        ],
        peers=["lightly", "scikit-learn"],
    )


if __name__ == "__main__":
    main(run)
