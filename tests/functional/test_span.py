"""The predictor's quantities from few wide rows, and roots from products, against dense float64."""

from __future__ import annotations

import pytest
import torch

from lightning_ssl.functional import (
    balance_residual,
    direct_predictor,
    effective_predictor,
    predictor_values,
    predictor_values_of_rows,
    second_moment,
)
from lightning_ssl.functional.roots import relative_root
from lightning_ssl.functional.span import smallest_eigenvalue


def rows_and_predictor(n, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -2, dim, dtype=torch.float64)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64) * spread + 0.1
    W = torch.randn(dim, dim, generator=generator, dtype=torch.float64) / dim**0.5 + 0.5 * torch.eye(dim).double()
    return x, W, torch.tanh(x @ W.T)


def dense(x, W, y, kind):
    F = second_moment(x)
    return predictor_values(F, W if kind == "linear" else effective_predictor(x, y, kind == "intercept"))


def of_rows(x, W, y, kind):
    if kind == "linear":
        return predictor_values_of_rows(x, W=W)
    return predictor_values_of_rows(x, y, intercept=kind == "intercept")


def compare(found, expected, rows, dim, tolerance):
    modes = min(rows, dim)
    for name in ("eigenvalues", "predictor_values", "cosines"):
        torch.testing.assert_close(found[name], expected[name][:modes], rtol=tolerance, atol=tolerance, msg=name)
    for name in ("cosine_weighted", "commutator_norm", "asymmetry", "smallest_symmetric_value"):
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)
    torch.testing.assert_close(found["cosine_mean"], expected["cosines"][:modes].mean(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["linear", "mlp", "intercept"])
@pytest.mark.parametrize(("rows", "dim"), [(40, 12), (12, 12), (9, 40), (1, 5)])
def test_few_wide_rows_say_what_the_matrix_says(rows, dim, kind):
    if rows == 1 and kind == "intercept":
        pytest.skip("one row has no intercept")
    x, W, y = rows_and_predictor(rows, dim)
    compare(of_rows(x, W, y, kind), dense(x, W, y, kind), rows, dim, 1e-8)


def test_rows_that_repeat_make_no_modes():
    x, W, _ = rows_and_predictor(4, 20)
    found, once = predictor_values_of_rows(x.repeat(3, 1), W=W), predictor_values_of_rows(x, W=W)
    torch.testing.assert_close(found["eigenvalues"][:4], once["eigenvalues"])
    assert not found["eigenvalues"][4:].any() and not found["cosines"][4:].any()
    torch.testing.assert_close(found["cosine_mean"], once["cosine_mean"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_2048_dimensions_of_256_rows(kind):
    """Values equal to float64's at 1e-4 for the modes that exist; how fast, `benchmarks/step.py` tells."""
    x, W, y = rows_and_predictor(256, 2048)
    compare(of_rows(x, W, y, kind), dense(x, W, y, kind), 256, 2048, 1e-4)


def test_the_smallest_eigenvalue_of_a_large_matrix():
    _, W, _ = rows_and_predictor(2, 700)
    symmetric = W + W.T
    expected = torch.linalg.eigvalsh(symmetric)[0] / 2
    torch.testing.assert_close(smallest_eigenvalue(symmetric, W), expected, rtol=1e-4, atol=1e-4)


def test_the_balance_of_a_large_predictor():
    x, W, _ = rows_and_predictor(64, 600)
    V = x.T / 4
    gram = V @ V.T
    expected = (gram - W.T @ W / 3).norm() / gram.norm()
    assert float(balance_residual(V, W, 3.0)) == pytest.approx(float(expected), rel=1e-5)


SPECTRA = {
    "full": torch.linspace(1, 0.1, 24),
    "few": torch.cat([torch.linspace(1, 0.1, 5), torch.zeros(19)]),
    "falling": torch.logspace(0, -14, 24),
    "twins": torch.cat([torch.ones(2), torch.tensor([1 - 1e-6]), torch.linspace(0.9, 0, 21)]),
    "one": torch.cat([torch.ones(1), torch.zeros(23)]),
    "tiny": torch.linspace(1, 0, 24) * 1e-24,
}


@pytest.mark.parametrize("name", SPECTRA)
def test_a_root_from_products_is_the_eigenbasis_one(name):
    basis = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q
    F = basis * SPECTRA[name].double() @ basis.T
    expected = direct_predictor(F, eps=0.0)
    found = relative_root(torch.stack([F, 3 * F]))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1], expected, rtol=0, atol=1e-6)  # whatever the scale
    torch.testing.assert_close(found[0], found[0].T)
