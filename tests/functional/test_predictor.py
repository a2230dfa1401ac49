"""The predictor's algebra against its defining equations and brute force."""

import math

import pytest
import torch
from torch import nn

from lightning_ssl.functional import (
    asymmetry,
    balance_residual,
    commutator_norm,
    direct_predictor,
    effective_predictor,
    eigenspace_alignment,
    optimal_predictor,
)

D = 5


def random_moment(values=(4.0, 2.0, 1.0, 0.5, 0.1)):
    basis = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64)).Q
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T, basis


def test_eigenspace_alignment_by_hand():
    F, basis = random_moment()
    W = torch.randn(D, D, dtype=torch.float64)
    result = eigenspace_alignment(F, W)
    for j, value in enumerate([4.0, 2.0, 1.0, 0.5, 0.1]):
        u = basis[:, j]
        image = W @ u
        assert result.eigenvalues[j].item() == pytest.approx(value)
        assert result.predictor_values[j].item() == pytest.approx((u @ image).item())
        assert result.cosines[j].item() == pytest.approx((u @ image / image.norm()).item())


def test_aligned_predictor_has_cosines_one_and_commutes():
    F, basis = random_moment()
    W = basis @ torch.diag(torch.tensor([1.0, 3.0, 2.0, 0.5, 5.0], dtype=torch.float64)) @ basis.T
    result = eigenspace_alignment(F, W)
    torch.testing.assert_close(result.cosines, torch.ones(D, dtype=torch.float64))
    torch.testing.assert_close(result.predictor_values, torch.tensor([1.0, 3.0, 2.0, 0.5, 5.0], dtype=torch.float64))
    assert commutator_norm(F, W).item() < 1e-12


def test_a_zero_predictor_gives_zeros_not_nans():
    F, _ = random_moment()
    zero = torch.zeros(D, D, dtype=torch.float64)
    assert eigenspace_alignment(F, zero).cosines.abs().max() == 0
    assert commutator_norm(F, zero) == 0
    assert asymmetry(zero) == 0


def test_commutator_norm_and_asymmetry_entry_by_entry():
    F, _ = random_moment()
    W = torch.randn(D, D, dtype=torch.float64)

    def norm(matrix):
        return math.sqrt(sum(v**2 for row in matrix.tolist() for v in row))

    product = [[sum(F[i, k] * W[k, j] - W[i, k] * F[k, j] for k in range(D)) for j in range(D)] for i in range(D)]
    expected = norm(torch.tensor(product)) / (norm(F) * norm(W))
    assert commutator_norm(F, W).item() == pytest.approx(expected, rel=1e-6)
    assert asymmetry(W).item() == pytest.approx(norm(W - W.T) / norm(W))
    assert asymmetry(W - W.T).item() == pytest.approx(2.0)


def test_direct_predictor_commutes_and_has_the_stated_spectrum():
    F, _ = random_moment()
    W = direct_predictor(F, eps=0.1)
    assert commutator_norm(F, W).item() < 1e-12
    torch.testing.assert_close(W, W.T)
    s = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    in_units_of_f = s.sqrt() + 0.1 * s.sqrt().max()  # Eq. 18, scale-free
    torch.testing.assert_close(eigenspace_alignment(F, W).predictor_values * 2.0, in_units_of_f)


@pytest.mark.parametrize("shift", [0.0, 0.05, -0.1])
def test_direct_predictor_ignores_the_scale_of_f(shift):
    F, _ = random_moment()
    W = direct_predictor(F, shift=shift)
    for scale in (1e-6, 3.0, 1e6):
        torch.testing.assert_close(direct_predictor(scale * F, shift=shift), W)


def test_direct_predictor_shift():
    F, _ = random_moment()
    values = eigenspace_alignment(F, direct_predictor(F, eps=0.0, shift=0.1)).predictor_values
    expected = torch.tensor([0.9, 0.4, 0.15, 0.025, 0.0], dtype=torch.float64).sqrt()
    torch.testing.assert_close(values, expected)


def test_direct_predictor_of_a_rank_deficient_f_has_finite_gradients():
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    (direct_predictor(x.T @ x / 3) * torch.randn(D, D, dtype=torch.float64)).sum().backward()
    assert direct_predictor(x.T @ x).isfinite().all()


@pytest.mark.parametrize("reg", [0.0, 0.3])
def test_optimal_predictor_solves_its_equation(reg):
    F, _ = random_moment()
    M = torch.randn(D, D, dtype=torch.float64)
    W = optimal_predictor(F, M, reg)
    regular = F + reg * torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close((W @ regular + regular @ W) / 2, (M + M.T) / 2)
    torch.testing.assert_close(W, W.T)


def test_optimal_predictor_minimises_the_error_over_symmetric_maps():
    """It is the optimum of E|W f - f_a|^2 over symmetric W: no small symmetric step lowers the error."""
    f, f_a = torch.randn(50, D, dtype=torch.float64), torch.randn(50, D, dtype=torch.float64)
    W = optimal_predictor(f.T @ f / 50, f_a.T @ f / 50).requires_grad_()
    ((f @ W.T - f_a).square().sum() / 50).backward()
    assert (W.grad + W.grad.T).abs().max() < 1e-12


def test_optimal_predictor_of_a_singular_f_is_finite():
    f = torch.randn(3, D, dtype=torch.float64)
    W = optimal_predictor(f.T @ f / 3, f.T @ f / 3)
    torch.testing.assert_close(f @ W.T, f)


def test_balance_residual_is_zero_on_the_invariant_and_what_its_formula_says_off_it():
    W = torch.randn(D, D, dtype=torch.float64)
    balanced = torch.linalg.cholesky(W.T @ W / 3.0)  # V V^T = W^T W / alpha_p
    assert balance_residual(balanced, W, alpha_p=3.0).item() < 1e-12
    V = torch.randn(D, 7, dtype=torch.float64)
    difference = [[float(V[i] @ V[j] - W[:, i] @ W[:, j] / 2) for j in range(D)] for i in range(D)]
    scale = math.sqrt(sum(float(V[i] @ V[j]) ** 2 for i in range(D) for j in range(D)))
    expected = math.sqrt(sum(v**2 for row in difference for v in row)) / scale
    assert balance_residual(V, W, alpha_p=2.0).item() == pytest.approx(expected)


@pytest.mark.parametrize("bias", [False, True])
def test_effective_predictor_recovers_a_linear_predictor(bias):
    layer = nn.Linear(D, 3, bias=bias).double()
    x = torch.randn(40, D, dtype=torch.float64) + 2
    torch.testing.assert_close(effective_predictor(x, layer(x).detach(), bias=bias), layer.weight.detach())


@pytest.mark.parametrize("bias", [False, True])
def test_effective_predictor_is_numpys_least_squares(bias):
    x, y = torch.randn(40, D, dtype=torch.float64) + 1, torch.randn(40, 3, dtype=torch.float64)
    design = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], dim=1) if bias else x
    expected = torch.linalg.lstsq(design, y).solution[:D].T
    torch.testing.assert_close(effective_predictor(x, y, bias=bias), expected)


def test_effective_predictor_of_collapsed_inputs_is_the_smallest_solution():
    x = torch.outer(torch.randn(20, dtype=torch.float64), torch.randn(D, dtype=torch.float64))
    expected = torch.linalg.lstsq(x, 2 * x, driver="gelsd").solution.T
    torch.testing.assert_close(effective_predictor(x, 2 * x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: eigenspace_alignment(torch.ones(2, 3), torch.ones(2, 3)), "`F` must be a square"),
        (lambda: eigenspace_alignment(torch.eye(2), torch.eye(3)), "must agree"),
        (lambda: commutator_norm(torch.eye(2), torch.full((2, 2), math.nan)), "`W` has non-finite"),
        (lambda: asymmetry(torch.ones(3)), "square"),
        (lambda: direct_predictor(torch.zeros(2, 2)), "collapsed"),
        (lambda: balance_residual(torch.ones(3, 2), torch.eye(2)), "`V` must be"),
        (lambda: optimal_predictor(torch.eye(2), torch.eye(2), reg=-1.0), "reg"),
        (lambda: effective_predictor(torch.ones(3, 2), torch.ones(4, 2)), "as many rows"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
