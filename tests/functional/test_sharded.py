"""Features spread over ranks give what one process makes of all of them."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.linear_model import LogisticRegression, Ridge

from lightning_ssl.distributed import RankError, Together
from lightning_ssl.functional import (
    curvature,
    fit_linear_path,
    fit_linear_probe,
    fit_ridge,
    knn_predict,
    knn_scores,
    probes,
    regression,
)
from tests.ddp import run_ranks

CLASSES, DIM = 6, 10


def problem(case, n=400, q=70):
    """Rows, labels, queries; some rows stand there many times over, with other labels."""
    dice = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (n,), generator=dice)
    rows = torch.randn(CLASSES, DIM, generator=dice)[labels] + torch.randn(n, DIM, generator=dice)
    queries = torch.randn(q, DIM, generator=dice)
    if case == "ties":
        rows = rows[torch.arange(n) % 23]
    if case == "single precision":  # too much to be summed in double
        return problem("dealt", 20_000, q)
    return (rows.half(), labels, queries.half()) if case == "half" else (rows, labels, queries)


def cut(n, case, rank, ranks):
    """Which rows a rank has: dealt in turn, in very uneven stretches, or all but the first have none of them."""
    every = torch.arange(n)
    if case == "empty":
        return every if rank == ranks - 1 else every[:0]
    if case == "uneven":
        edges = [0, *(n // 2 ** (ranks - r) for r in range(1, ranks)), n]
        return every[edges[rank] : edges[rank + 1]]
    return every[rank::ranks]


def _sharded(rank, ranks, case):
    rows, labels, queries = problem(case)
    own, asked = cut(len(rows), case, rank, ranks), cut(len(queries), case, rank, ranks)
    shard = dict(sharded=True, positions=own)
    ranked = knn_predict(queries[asked], rows[own], labels[own], CLASSES, k=20, temperature=0.2, **shard)
    fit = fit_linear_probe(rows[own], labels[own], CLASSES, 1e-3, **shard)
    ridge = fit_ridge(rows[own], rows[own].float() ** 2, [1e-3, 1.0], **shard)
    if case == "single precision":
        return (asked, ranked), [*fit, *ridge[0]]
    several = torch.nn.functional.one_hot(labels, CLASSES)
    attributes = fit_linear_path(rows[own], several[own], CLASSES, [1e-2, 1e-3], **shard)
    return (asked, ranked), [*fit, *ridge[0], *ridge[1], *attributes[0], *attributes[1]]


@pytest.mark.parametrize("case", ["dealt", "uneven", "empty", "ties", "half", "single precision"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_with_one_process(ranks, case):
    (_, whole), weights = _sharded(0, 1, case)
    for (asked, ranked), fitted in run_ranks(ranks, _sharded, case):
        assert torch.equal(ranked, whole[asked])
        for ours, theirs in zip(fitted, weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _wide(rank, ranks):
    dice = torch.Generator().manual_seed(0)
    labels = torch.randint(50, (20_000,), generator=dice)
    latent = torch.randn(50, 32, generator=dice)[labels] + torch.randn(20_000, 32, generator=dice)
    rows = torch.relu(latent @ torch.randn(32, 256, generator=dice) + torch.randn(20_000, 256, generator=dice))
    own = cut(len(rows), "dealt", rank, ranks)
    fitted = fit_linear_probe(rows[own], labels[own], 50, 1e-4, sharded=True, positions=own.int())
    design = regression.Design(rows[own], Together(rows.device), own, 2**20)
    leading = curvature.Basis(design).vectors[:, -100:]
    return fitted, leading @ leading.T


def test_directions_of_equal_spread():
    """Most of the 256 are noise of one variance: which of them are taken for leading ones hangs on the last digit."""
    (weight, bias), leading = _wide(0, 1)
    for fitted, same in run_ranks(2, _wide):
        torch.testing.assert_close(fitted.weight, weight, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fitted.bias, bias, rtol=0, atol=1e-5 * float(bias.abs().max()))
        torch.testing.assert_close(same, leading, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**25])
def test_neighbours_level_at_the_last_place_are_the_first_of_the_bank(monkeypatch, chunk):
    """In exact numbers: unit rows along the axes, so that all cosines are 0 or 1."""
    monkeypatch.setattr(probes, "_SIMILARITIES", chunk * 50)
    monkeypatch.setattr(probes, "_BLOCK", (64, 64))
    bank = torch.eye(4)[torch.arange(150) % 4]
    labels = torch.arange(150) // 4 % 5
    scores = knn_scores(torch.eye(4), bank, labels, 5, k=13)
    for query in range(4):
        nearest = labels[query::4][:13]
        expected = torch.bincount(nearest, minlength=5).double() / 13
        torch.testing.assert_close(scores[query], expected)


def test_a_path_ends_where_separate_fits_end():
    rows, labels, _ = problem("dealt", n=600)
    x = rows.double()
    mean, std = x.mean(0), x.std(0, correction=0)

    def objective(weight, bias, l2):
        loss = torch.nn.functional.cross_entropy(x @ weight.double().T + bias.double(), labels)
        return float(loss + l2 / 2 * (weight.double() * std).square().sum())

    penalties = [1e-3, 1.0, 1e-5, 3e-2, 1e-4]
    for l2, fitted in zip(penalties, fit_linear_path(rows, labels, CLASSES, penalties), strict=True):
        model = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-10, max_iter=5000).fit((x - mean) / std, labels)
        weight = torch.from_numpy(model.coef_) / std
        best = objective(weight, torch.from_numpy(model.intercept_) - weight @ mean, l2)
        assert best - 1e-9 <= objective(*fitted, l2) <= best + 5e-6
        alone = fit_linear_probe(rows, labels, CLASSES, l2)
        warm = fit_linear_probe(rows, labels, CLASSES, l2, start=fitted)
        assert abs(objective(*alone, l2) - objective(*fitted, l2)) <= 1e-5 >= objective(*warm, l2) - best


def test_ridge_and_attributes_are_scikit_learns():
    x = problem("dealt")[0].double() * torch.logspace(-2, 2, DIM, dtype=torch.float64) + 3
    y = x @ torch.randn(DIM, 3, dtype=torch.float64) + torch.randn(len(x), 3, dtype=torch.float64)
    standard = (x - x.mean(0)) / x.std(0, correction=0)
    for l2, fitted in zip((1e-6, 0.3), fit_ridge(x, y, [1e-6, 0.3]), strict=True):
        model = Ridge(alpha=l2 * len(x)).fit(standard.numpy(), y.numpy())
        ours = x @ fitted.weight.T + fitted.bias
        torch.testing.assert_close(ours, torch.from_numpy(model.predict(standard.numpy())), rtol=1e-7, atol=1e-7)
    labels = (y > 0).long()
    fitted = fit_linear_probe(x, labels, 3, 1e-2, tolerance=1e-8)
    for attribute in range(3):
        model = LogisticRegression(C=1 / (1e-2 * len(x)), tol=1e-10, max_iter=5000)
        model.fit(standard.numpy(), labels[:, attribute].numpy())
        expected = torch.from_numpy(model.decision_function(standard.numpy()))
        torch.testing.assert_close(
            x @ fitted.weight[attribute] + fitted.bias[attribute], expected, rtol=1e-4, atol=1e-4
        )


def test_votes_for_values_are_their_weighted_mean():
    rows, labels, queries = problem("dealt")
    hot = torch.nn.functional.one_hot(labels, CLASSES).double()
    torch.testing.assert_close(
        knn_scores(queries, rows, hot, CLASSES, k=9), knn_scores(queries, rows, labels, CLASSES, k=9)
    )


def _one_fails(rank, ranks, where):
    rows, labels, queries = problem("dealt")
    own = cut(len(rows), "dealt", rank, ranks)
    if rank == 1 and where == "labels":
        labels = labels + 100
    if rank == 1 and where == "rows":
        rows = rows * np.nan
    try:
        knn_predict(queries, rows[own], labels[own], CLASSES, sharded=True)
    except RankError as error:
        first = str(error)
    try:
        fit_linear_probe(rows[own], labels[own], CLASSES, sharded=True)
    except RankError as error:
        return first, str(error), float(Together(torch.device("cpu")).sum(lambda: [torch.ones(())], [()])[0])


@pytest.mark.parametrize(("where", "words"), [("labels", "must lie in"), ("rows", "non-finite")])
def test_what_one_rank_cannot_use_is_raised_on_all(where, words):
    for first, second, after in run_ranks(2, _one_fails, where):
        assert "rank 1" in first and words in first and words in second and after == 2


def _exchanges(rank, ranks):
    rows, labels, _ = problem("dealt", n=5000)
    own, sizes, reduce = cut(len(rows), "dealt", rank, ranks), [], dist.all_reduce

    def count(x, *args, **kwargs):
        sizes.append(x.numel())
        return reduce(x, *args, **kwargs)

    dist.all_reduce = count
    try:
        fit_linear_probe(rows[own], labels[own], CLASSES, sharded=True, positions=own)
    finally:
        dist.all_reduce = reduce
    look = CLASSES * (DIM + 1) + 3
    return sizes.count(look), len(sizes)


def test_exchanges_beside_the_looks_at_the_rows_are_few():
    """Checks, rows, spread, second moment, directions, and three for each of two curvatures."""
    for looks, exchanges in run_ranks(2, _exchanges):
        assert looks > 10 and exchanges - looks <= 11


def _unequal(rank, ranks):
    with pytest.raises(ValueError, match=r"as many dimensions, got \[10, 11\] by rank"):
        fit_linear_probe(torch.randn(20, 10 + rank), torch.arange(20) % 2, 2, sharded=True)
    return True


def test_ranks_of_unequal_dimensions_are_refused():
    assert all(run_ranks(2, _unequal))
