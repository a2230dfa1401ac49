"""Features spread over ranks give what one process makes of all of them."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from lightning_ssl import distributed
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


def _some(rank, ranks):
    """Models of a part of the rows: copied, and left where it stands."""
    rows, labels, _ = problem("uneven", n=3000)
    kept = torch.arange(len(rows)) % 7 != 2
    own = cut(len(rows), "uneven", rank, ranks)
    at = (kept.cumsum(0) - 1)[own][kept[own]]
    ranks_ = dict(sharded=True, positions=at)
    several = torch.nn.functional.one_hot(labels, CLASSES)
    found = []
    for only in (None, kept[own].nonzero().flatten()):
        x = rows[own][kept[own]] if only is None else rows[own]
        which = dict(ranks_, only=only)
        labels_, several_ = (part[own][kept[own]] for part in (labels, several))
        models = fit_linear_path(x, labels_, CLASSES, [1e-2, 1e-3], **which)
        models += fit_linear_path(x, several_, CLASSES, [1e-2], **which)
        models += fit_ridge(x, several_.float(), [1e-2], **which)
        found.append([part for model in models for part in model])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_some_of_the_rows_are_fitted_where_they_stand(ranks):
    for copied, there in run_ranks(ranks, _some):
        for a, b in zip(copied, there, strict=True):
            assert torch.equal(a, b)


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
    own, sizes, add_up = cut(len(rows), "dealt", rank, ranks), [], distributed._add_up

    def count(x, group):
        sizes.append(x.numel())
        add_up(x, group)

    distributed._add_up = count
    try:
        fit_linear_probe(rows[own], labels[own], CLASSES, sharded=True, positions=own)
    finally:
        distributed._add_up = add_up
    look = CLASSES * (DIM + 1) + 9
    return sizes.count(look), len(sizes)


def test_exchanges_beside_the_looks_at_the_rows_are_few():
    """Checks, rows, spread, second moment, directions, three for each of two curvatures, and the model."""
    for looks, exchanges in run_ranks(2, _exchanges):
        assert looks > 10 and exchanges - looks <= 12


def _rounded(rank, ranks, l2):
    """The second rank's processor rounds otherwise."""
    dice, solve = torch.Generator().manual_seed(0), curvature.Curvature.solve
    x = torch.randn(4000, 24, generator=dice)
    y = (x @ torch.randn(24, 6, generator=dice) + torch.randn(4000, 6, generator=dice)).argmax(dim=1)
    own = torch.arange(rank, 4000, ranks)

    def rounds(*args):
        found = solve(*args)
        return found * (1 + 6e-8 * torch.randn(found.shape, dtype=found.dtype)) if rank else found

    curvature.Curvature.solve = rounds
    try:
        models = fit_linear_path(x[own], y[own], 6, l2, tolerance=1e-5, sharded=True, positions=own)
    finally:
        curvature.Curvature.solve = solve
    scale = x.double().std(0, correction=0)
    losses = [torch.nn.functional.cross_entropy(x.double() @ w.double().T + b.double(), y) for w, b in models]
    penalties = [0.5 * p * (w * scale).square().sum() for (w, _), p in zip(models, l2, strict=True)]
    return models, torch.stack(losses) + torch.stack(penalties)


@pytest.mark.parametrize("l2", [[1e-2], [1e-3], [1e-4], [1e-2, 3e-3, 1e-3, 1e-4]])
def test_ranks_that_round_otherwise_go_one_way(l2):
    _, expected = _rounded(0, 1, l2)
    (first, objectives), (second, _) = run_ranks(2, _rounded, l2)
    torch.testing.assert_close(objectives, expected, rtol=0, atol=1e-6)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


def _unequal(rank, ranks):
    with pytest.raises(ValueError, match=r"as many dimensions, got \[10, 11\] by rank"):
        fit_linear_probe(torch.randn(20, 10 + rank), torch.arange(20) % 2, 2, sharded=True)

    with pytest.raises(ValueError, match=r"of one type, got \['torch.float32', 'torch.float64'\] by rank"):
        fit_linear_probe(
            torch.randn(20, 10).to((torch.float32, torch.float64)[rank]), torch.arange(20) % 2, 2, sharded=True
        )
    with pytest.raises(ValueError, match=r"as many columns, got \[1, 2\] by rank"):
        fit_ridge(torch.randn(20, 10), torch.randn(20, 1 + rank), [1.0], sharded=True)
    with pytest.raises(RankError, match=r"rank 1: ValueError: `targets` must be floating point \[20, T\], got \(20,\)"):
        fit_ridge(torch.randn(20, 10), torch.randn(20, 1)[:, 0] if rank else torch.randn(20, 1), [1.0], sharded=True)
    return True


def test_what_is_unequal_between_ranks_is_refused():
    assert all(run_ranks(2, _unequal))


def _without_rows(rank, ranks):
    """Too much to be summed in double; a rank without rows does not know their type."""
    x, y, _ = problem("single precision")
    x, own = x.double().repeat(1, 6), torch.arange(len(x))
    if rank:
        x, y, own = torch.zeros(0, x.shape[1]), y[:0], own[:0]
    ranked = knn_predict(x[:30].float(), x, y, CLASSES, k=5, sharded=True, positions=own)
    return fit_linear_probe(x, y, CLASSES, 1e-2, sharded=True, positions=own), ranked


def test_a_rank_without_rows_takes_the_others_type():
    expected, ranked = _without_rows(0, 1)
    (found, first), (again, second) = run_ranks(2, _without_rows)
    assert torch.equal(first, ranked) and not len(second)
    for a, b, c in zip(expected, found, again, strict=True):
        assert a.dtype == b.dtype == torch.float64 and torch.equal(b, c)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def _dependent(rank, ranks):
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 3, generator=dice) @ torch.randn(3, 64, generator=dice)
    x, own = x + 1e-4 * torch.randn(20_000, 64, generator=dice), torch.arange(rank, 20_000, ranks)
    return fit_ridge(x[own], x[own, :2] - x[own, 2:4], [1e-8], sharded=True, positions=own)[0]


def test_ridge_of_features_that_depend_on_each_other():
    """In single precision the last digits decide: 0.2 of 5.8 with such features."""
    expected = _dependent(0, 1)
    for found in run_ranks(2, _dependent):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
