"""The search's curvature against Hessians by autograd, and how many looks at the rows it takes."""

import pytest
import torch
import torch.nn.functional as F

from lightning_ssl.distributed import Together
from lightning_ssl.functional import descent, fit_linear_probe, regression


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


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("l2", [1e-4, 0.3])
def test_curvature_is_the_hessians_blocks(several, l2, monkeypatch):
    monkeypatch.setattr(descent, "_ROWS", 10**6)  # every row counts itself
    loss, x, y, weight = problem(several=several)
    penalty = l2 * torch.ones(7, dtype=torch.float64)
    penalty[-1] = 0
    exact = hessian(x, y, weight, penalty)
    curvature = descent.Curvature(loss, descent.Basis(loss.design), weight)
    gradient = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.stack([torch.linalg.solve(exact[c, :, c], gradient[c]) for c in range(4)])
    # All but a millionth of the mean weight, which keeps blocks regular.
    torch.testing.assert_close(curvature.solve(gradient, penalty), expected, rtol=1e-3, atol=1e-6)
    if several:  # attributes have no part in each other: it is the whole inverse
        whole = torch.linalg.solve(exact.reshape(28, 28), gradient.flatten()).view(4, 7)
        torch.testing.assert_close(curvature.solve(gradient, penalty), whole, rtol=1e-3, atol=1e-6)


def test_rows_beyond_the_heaviest_count_by_their_mean():
    loss, x, y, weight = problem(rows=4000)
    penalty = torch.zeros(7, dtype=torch.float64)
    exact = hessian(x, y, weight, penalty)
    curvature = descent.Curvature(loss, descent.Basis(loss.design), weight)
    traces = curvature._blocks.diagonal(dim1=1, dim2=2).sum(dim=1)
    expected = torch.stack([exact[c, :, c].trace() for c in range(4)])
    torch.testing.assert_close(traces, expected, rtol=0.2, atol=0)
    bias = torch.stack([exact[c, -1, c, -1] for c in range(4)])  # the mean weight itself, whichever rows are counted
    torch.testing.assert_close(curvature._blocks[:, -1, -1], bias, rtol=1e-5, atol=0)


def test_curvature_at_zero_is_the_second_moment():
    loss, x, y, weight = problem(rows=100)  # so few that all are in the basis
    penalty = torch.full((7,), 0.1, dtype=torch.float64)
    exact = hessian(x, y, torch.zeros_like(weight), penalty)
    curvature = descent.Curvature(loss, descent.Basis(loss.design))
    gradient = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.stack([torch.linalg.solve(exact[c, :, c], gradient[c]) for c in range(4)])
    torch.testing.assert_close(curvature.solve(gradient, penalty), expected)


def test_blocks_that_rounding_left_singular_are_mended():
    loss, _, _, weight = problem()
    curvature = descent.Curvature(loss, descent.Basis(loss.design), weight)
    curvature._blocks = (
        -1e-12 * torch.ones_like(curvature._blocks) + torch.diag(torch.tensor([1.0] + 6 * [0.0])).double()
    )
    solved = curvature.solve(torch.ones(4, 7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64))
    assert bool(solved.isfinite().all())


def test_few_looks_at_the_rows_are_enough(monkeypatch):
    """Classes with rows of their own: 35 looks, and 108 where blocks have one direction."""
    searches = []

    class Counted(descent.Descent):
        def __init__(self, loss):
            super().__init__(loss)
            searches.append(self)

    monkeypatch.setattr(regression, "Descent", Counted)
    dice = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 16, generator=dice)
    y = torch.randint(40, (6000,), generator=dice)
    latent = 0.8 * centres[y] + torch.randn(6000, 16, generator=dice)
    x = torch.relu(latent @ torch.randn(16, 64, generator=dice) + torch.randn(6000, 64, generator=dice))
    fit_linear_probe(x, y, 40)
    assert searches[0].evaluations <= 40
