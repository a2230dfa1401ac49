"""Deviations and participation ratio against NumPy, closed forms, and the bound that the collapse monitor uses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssl import functional


@pytest.mark.parametrize("shape", [(40, 7), (5, 30), (1, 3), (6, 6)])
def test_against_numpy(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100 + 50
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    std = unit.std(axis=0) * math.sqrt(shape[1])
    values = np.linalg.eigvalsh(np.cov(unit, rowvar=False, bias=True)) if shape[0] > 1 else np.zeros(1)
    found = functional.spread(x, alive=0.3)
    assert float(found.std) == pytest.approx(std.mean(), rel=1e-9, abs=1e-12)
    assert float(found.alive) == pytest.approx((std > 0.3).mean())
    if shape[0] > 1:
        assert float(found.participation) == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-9)


def test_closed_forms():
    axes = torch.cat([torch.eye(4), -torch.eye(4)]).double()  # evenly over 4 of the dimensions of the sphere
    found = functional.spread(axes)
    assert [float(value) for value in found[:3]] == pytest.approx([1.0, 1.0, 4.0])
    point = functional.spread(torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double())
    assert float(point.std) < 1e-12 and float(point.alive) == 0
    assert [float(value) for value in functional.spread(torch.zeros(3, 2))[:3]] == [0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 10_000))
def test_participation_is_a_lower_bound_of_the_effective_rank(n, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, dtype=torch.float64, generator=generator)
    x = x * torch.logspace(0, -3, dim, dtype=torch.float64)
    found = functional.spread(x)
    if float(found.std) > 1e-9:
        assert float(found.participation) <= float(functional.effective_rank(found.centred)) * (1 + 1e-9)
        rotation = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator))[0]
        assert float(functional.spread(x @ rotation).participation) == pytest.approx(float(found.participation))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="`x` must be a matrix"):
        functional.spread(torch.zeros(3))
    with pytest.raises(ValueError, match="non-finite"):
        functional.spread(torch.tensor([[math.nan, 1.0]]))
