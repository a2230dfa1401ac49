"""Products by oneDNN against the same in double precision, and what is there without it."""

import pytest
import torch

from lightning_ssl.functional import products


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.T.contiguous().T


@pytest.mark.parametrize("rows, others, inner", [(1, 1, 1), (7, 10, 513), (300, 100, 64), (16, 1000, 769)])
@pytest.mark.parametrize("fast", [True, False])
def test_product_is_that_of_double_precision_however_matrices_lie(rows, others, inner, fast, monkeypatch):
    if not fast:
        monkeypatch.setattr(products, "_fast", False)
    dice = torch.Generator().manual_seed(rows)
    a, b = torch.randn(rows, inner, generator=dice), torch.randn(others, inner, generator=dice)
    exact = a.double() @ b.double().T
    scale = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    for left in (a, _turned(a)):
        for right in (b, _turned(b)):
            off = (products.times_transposed(left, right).double() - exact).abs()
            assert bool((off <= 4e-7 * inner**0.5 * scale).all())  # 2^-8, a bfloat16's, would be far off


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_and_empty_matrices_are_left_to_torch(dtype):
    a, b = torch.randn(3, 4).to(dtype), torch.randn(5, 4).to(dtype)
    assert torch.equal(products.times_transposed(a, b), a @ b.T)
    assert products.times_transposed(torch.empty(0, 4), torch.randn(5, 4)).shape == (0, 5)
    assert torch.equal(products.times_transposed(torch.empty(3, 0), torch.empty(5, 0)), torch.zeros(3, 5))


def test_a_torch_without_the_operator_takes_its_own_product(monkeypatch):
    def missing(a, b):
        raise AttributeError("no such operator")

    monkeypatch.setattr(products, "_fast", None)
    monkeypatch.setattr(products, "_by_onednn", missing)
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(products.times_transposed(a, b), a @ b.T)
    assert products._fast is False


def test_columns_cut_out_of_a_matrix_are_left_to_torch(monkeypatch):
    """oneDNN takes them, at a hundredth of the speed."""
    asked = []
    monkeypatch.setattr(products, "_by_onednn", lambda a, b: asked.append(1) or a @ b.T)
    monkeypatch.setattr(products, "_fast", True)
    whole, other = torch.randn(6, 5), torch.randn(3, 4)
    cut = products.times_transposed(whole[:, :4], other)
    assert torch.equal(cut, whole[:, :4] @ other.T) and not asked
    products.times_transposed(whole[:4].T, whole[:4].T)
    assert asked == [1]
