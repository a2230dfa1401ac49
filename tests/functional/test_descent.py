"""The search's curvature against Hessians by autograd, and how many looks at the rows it takes."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from lightning_ssl.distributed import Together
from lightning_ssl.functional import curvature, descent, fit_linear_probe, regression


def problem(rows=300, dim=6, outputs=4, several=False):
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(rows, dim, generator=dice, dtype=torch.float64) @ torch.diag(torch.arange(1.0, dim + 1).double())
    y = torch.randint(outputs, (rows,), generator=dice)
    y = F.one_hot(y, outputs) if several else y
    design = regression.Design(x, Together(x.device, False), None, regression.BUDGET, outputs)
    weight = 0.7 * torch.randn(outputs, dim + 1, generator=dice, dtype=torch.float64)
    ones = torch.ones(rows, 1, dtype=torch.float64)
    standard = torch.cat([(x - x.mean(0)) / x.std(0, correction=0), ones], dim=1)
    return (regression.Attributes if several else regression.Classes)(design, y, outputs), standard, y, weight


def hessian(x, y, weight, penalty):
    """``[C, d + 1, C, d + 1]``, of the mean loss and the penalty."""

    def objective(w):
        if y.ndim == 2:
            loss = F.binary_cross_entropy_with_logits(x @ w.T, y.double(), reduction="sum") / len(x)
        else:
            loss = F.cross_entropy(x @ w.T, y)
        return loss + 0.5 * (penalty * w.square()).sum()

    return torch.autograd.functional.hessian(objective, weight)


def solved(loss, weight, gradient, penalty):
    """By the curvature there, in standardised coordinates."""
    basis = curvature.Basis(loss.design)
    at = None if weight is None else weight @ basis.vectors
    return curvature.Curvature(loss, basis, at).solve(gradient @ basis.vectors, penalty) @ basis.vectors.T


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("l2", [1e-4, 0.3])
def test_curvature_is_the_hessians_blocks(several, l2, monkeypatch):
    monkeypatch.setattr(curvature, "_ROWS", (10**6, 10**6))  # every row counts itself
    loss, x, y, weight = problem(several=several)
    penalty = l2 * torch.ones(7, dtype=torch.float64)
    penalty[-1] = 0
    exact = hessian(x, y, weight, penalty)
    gradient = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.stack([torch.linalg.solve(exact[c, :, c], gradient[c]) for c in range(4)])
    # All but a millionth of the mean weight, which keeps blocks regular.
    found = solved(loss, weight, gradient, penalty)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    if several:  # attributes have no part in each other: it is the whole inverse
        whole = torch.linalg.solve(exact.reshape(28, 28), gradient.flatten()).view(4, 7)
        torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-6)


def test_blocks_are_the_same_in_stretches_of_rows_and_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(curvature, "_ROWS", (10**6, 10**6))
    loss, _, _, weight = problem()
    basis = curvature.Basis(loss.design)
    whole = curvature.Curvature(loss, basis, weight @ basis.vectors)._blocks
    monkeypatch.setattr(curvature, "_BLOCKS", 512)  # 64 rows, and one output
    torch.testing.assert_close(curvature.Curvature(loss, basis, weight @ basis.vectors)._blocks, whole)


def test_rows_beyond_the_heaviest_count_by_their_mean():
    loss, x, y, weight = problem(rows=4000)
    penalty = torch.zeros(7, dtype=torch.float64)
    exact = hessian(x, y, weight, penalty)
    basis = curvature.Basis(loss.design)
    blocks = curvature.Curvature(loss, basis, weight @ basis.vectors)._blocks
    traces = blocks.diagonal(dim1=1, dim2=2).sum(dim=1)
    expected = torch.stack([exact[c, :, c].trace() for c in range(4)])
    torch.testing.assert_close(traces, expected, rtol=0.2, atol=0)
    bias = torch.stack([exact[c, -1, c, -1] for c in range(4)])  # the mean weight itself, whichever rows are counted
    torch.testing.assert_close(blocks[:, -1, -1], bias, rtol=1e-5, atol=0)


def test_curvature_at_zero_is_the_second_moment():
    loss, x, y, weight = problem(rows=100)  # so few that all are in the basis
    penalty = torch.full((7,), 0.1, dtype=torch.float64)
    exact = hessian(x, y, torch.zeros_like(weight), penalty)
    gradient = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.stack([torch.linalg.solve(exact[c, :, c], gradient[c]) for c in range(4)])
    torch.testing.assert_close(solved(loss, None, gradient, penalty), expected)


def test_blocks_that_rounding_left_singular_are_mended():
    loss, _, _, weight = problem()
    known = curvature.Curvature(loss, curvature.Basis(loss.design), weight)
    known._blocks = -1e-12 * torch.ones_like(known._blocks) + torch.diag(torch.tensor([1.0] + 6 * [0.0])).double()
    solved = known.solve(torch.ones(4, 7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64))
    assert bool(solved.isfinite().all())


def test_the_basis_turns_weights_and_gradients_as_autograd_does():
    loss, x, y, weight = problem()
    basis = curvature.Basis(loss.design)
    value, gradient = loss.loss(basis.raw(weight @ basis.vectors), None)
    variable = weight.clone().requires_grad_()
    expected = F.cross_entropy(x @ variable.T, y, reduction="sum")
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(basis.along(gradient), torch.autograd.grad(expected, variable)[0] @ basis.vectors)


def at(search, point):
    """The mean loss and its gradient at a point."""
    found = []

    def look():
        found.extend((yield point, ())[:2])

    search._drive(look())
    return found


@pytest.mark.parametrize("known", [False, True])
def test_a_direction_is_that_of_the_memorys_whole_matrix(known):
    """The inverse that L-BFGS stands for, built pair by pair; the newest change by the curvature known or not."""
    loss, _, _, weight = problem()
    basis = curvature.Basis(loss.design)
    search = descent.Descent(loss, basis)
    kept = curvature.Curvature(loss, basis, weight @ basis.vectors)
    penalty = 0.01 * torch.ones(7, dtype=torch.float64)
    penalty[-1] = 0
    points = 0.3 * torch.randn(4, 4, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    points = [loss.settle(point) for point in points]
    gradients = [at(search, point)[1] for point in points]
    for k in range(3):  # each under another penalty
        search._penalise((k + 2) * penalty)
        assert search._remember(points[k + 1] - points[k], gradients[k + 1] - gradients[k])
    whole = [g + penalty * w for g, w in zip(gradients, points, strict=True)]

    eye = torch.eye(28, dtype=torch.float64)
    inverse = torch.stack([kept.solve(row.view(4, 7), penalty).flatten() for row in eye])
    steps = [(b - a).flatten() for a, b in pairwise(points)]
    changes = [(b - a).flatten() for a, b in pairwise(whole)]
    inverse *= (steps[-1] @ changes[-1]) / (changes[-1] @ inverse @ changes[-1])
    for s, y in zip(steps, changes, strict=True):
        off = eye - torch.outer(y, s) / (s @ y)
        inverse = off.T @ inverse @ off + torch.outer(s, s) / (s @ y)
    expected = loss.settle((inverse @ whole[-1].flatten()).view(4, 7))

    last = kept.solve(whole[-2], penalty) if known else None
    norm, direction, slope, solved = search._direction(whole[-1], last, kept, penalty)
    torch.testing.assert_close(direction, -expected)
    torch.testing.assert_close(slope, float(-(expected * whole[-1]).sum()))
    torch.testing.assert_close(solved, kept.solve(whole[-1], penalty))
    assert norm == pytest.approx(max(float((solved * whole[-1]).sum()), -slope) ** 0.5)


@pytest.mark.parametrize("period", [1, 4, 64, 1000, 5000, 256])
@pytest.mark.parametrize("share", [1 / 4, 0.01])
def test_scattered_rows_take_a_part_of_everything(period, share):
    """Rows in order of their classes, or classes by turns: each gives about its share."""
    design = regression.Design(torch.randn(100_000, 2), Together(torch.device("cpu"), False), None, 2**20)
    rows = design.scattered(share)
    assert len(rows) == pytest.approx(share * 100_000, rel=0.01)
    for labels in (torch.arange(100_000) % period, torch.arange(100_000) // period):
        size = torch.bincount(labels)
        found = torch.bincount(labels[rows], minlength=len(size))[size == size.max()]
        assert bool(((found - share * size.max()).abs() <= 4 + 0.2 * share * size.max()).all())


@pytest.fixture
def searches(monkeypatch):
    """Those that a fit makes."""
    made = []

    class Counted(descent.Descent):
        def __init__(self, loss, basis):
            super().__init__(loss, basis)
            made.append(self)

    monkeypatch.setattr(regression, "Descent", Counted)
    return made


@pytest.mark.parametrize("ordered", [False, True])
def test_few_looks_at_the_rows_are_enough(ordered, searches):
    """Classes with rows of their own: 35 looks, and 108 where blocks have one direction."""
    dice = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 16, generator=dice)
    y = torch.randint(40, (6000,), generator=dice)
    y = y.sort().values if ordered else y
    latent = 0.8 * centres[y] + torch.randn(6000, 16, generator=dice)
    x = torch.relu(latent @ torch.randn(16, 64, generator=dice) + torch.randn(6000, 64, generator=dice))
    fit_linear_probe(x, y, 40)
    assert searches[0].evaluations <= 40


def test_little_data_ends_in_one_place_from_wherever_it_began():
    """Of some rows with many features the objective is flat: with the tolerance as it is weights were 6e-4 apart."""
    dice = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 256, generator=dice), torch.arange(24) % 4
    cold = fit_linear_probe(x, y, 4, 0.01)
    other = fit_linear_probe(torch.randn(24, 256, generator=dice), y, 4, 0.01)
    warm = fit_linear_probe(x, y, 4, 0.01, start=other)
    assert float((warm.weight - cold.weight).abs().max() / cold.weight.abs().max()) < 1e-4


def far_out(case):
    """Rows of very unequal norms; or one number that is far out, on a row that the directions are found from."""
    dice = torch.Generator().manual_seed(0)
    y = torch.randint(10, (20_000,), generator=dice)
    x = 0.5 * torch.randn(10, 32, generator=dice)[y] + torch.randn(20_000, 32, generator=dice)
    if case == "norms":
        x *= torch.exp(1.5 * torch.randn(20_000, 1, generator=dice))
    else:
        design = regression.Design(x, Together(x.device, False), None, regression.BUDGET, 10)
        x[curvature.Basis(design).rows[7], 3] = 3000
    return x, y


@pytest.mark.parametrize("case", ["norms", "one number"])
def test_far_out_rows_neither_stop_the_search_early_nor_hold_it_up(case, searches):
    """It ended 5e-4 and 2e-4 above the optimum, the first after 585 looks at the rows."""
    x, y = far_out(case)
    weight, bias = (part.double() for part in fit_linear_probe(x, y, 10))
    wide = x.double()
    mean, std = wide.mean(0), wide.std(0, correction=0)
    model = LogisticRegression(C=1 / (1e-4 * len(x)), solver="newton-cholesky", tol=1e-6, max_iter=100)
    model.fit((wide - mean) / std, y)
    best = torch.from_numpy(model.coef_) / std

    def objective(weight, bias):
        return float(F.cross_entropy(wide @ weight.T + bias, y) + 0.5e-4 * (weight * std).square().sum())

    assert objective(weight, bias) <= objective(best, torch.from_numpy(model.intercept_) - best @ mean) + 1e-5
    assert searches[0].evaluations <= 200


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_mean_and_spread_are_exact_in_one_pass(dtype):
    """Far from zero, in many parts, the last of one row; constant columns carry nothing, whatever they round to."""
    dice = torch.Generator().manual_seed(0)
    x = 300 + torch.randn(256 * 12 + 1, 5, generator=dice, dtype=torch.float64) * torch.arange(1.0, 6)
    x[:, 2], x[:, 4] = 0.1, 0
    x = x.to(dtype)
    design = regression.Design(x, Together(x.device, False), None, 2**20)
    exact = x.double().numpy()
    assert design.scale[[2, 4]].tolist() == [0, 0]
    np.testing.assert_allclose(design.scale[[0, 1, 3]], 1 / exact.std(0)[[0, 1, 3]], rtol=1e-13)
    np.testing.assert_allclose(design.mean, exact.mean(0), rtol=1e-14 if design.dtype == torch.float64 else 1e-7)
