"""The counter-based generator against plain Python integers, and its statistics."""

import pytest
import torch
from scipy import stats

from lightning_ssl.rng import permutation, random_bits, uniforms

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def word(index, *key):
    state = 0
    for part in key:
        state = mix((state + 2 * part + 1 + GOLDEN) & MASK)
    return mix((mix((state + GOLDEN) & MASK) + index * GOLDEN) & MASK)


@pytest.mark.parametrize("key", [(), (0,), (7, -1, 3), (2**63 + 5, 1, 0)])
def test_equals_plain_integers(key):
    index = torch.tensor([0, 1, 2, 59_999, 2**40])
    bits = random_bits(index, *key).tolist()
    assert [b & MASK for b in bits] == [word(i, *key) for i in index.tolist()]
    u = uniforms(index, 3, *key).double()
    expected = [[(mix((word(i, *key) + j * GOLDEN) & MASK) >> 40) / 2**24 for j in (1, 2, 3)] for i in index.tolist()]
    assert u.tolist() == expected


def test_uniform_and_independent():
    u = uniforms(torch.arange(50_000), 6, 0, 0, 1, 0).double()
    for column in u.T:
        assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-4
    neighbours = [uniforms(torch.arange(50_000), 1, *key)[:, 0] for key in [(0, 0, 1, 1), (0, 0, 2, 0), (1, 0, 1, 0)]]
    table = torch.stack([*u.T, u[:, 0].roll(1), *neighbours])  # parameters, sample, view, epoch, seed
    assert (torch.corrcoef(table) - torch.eye(len(table), dtype=torch.float64)).abs().max() < 0.03


def test_a_sample_does_not_see_its_batch():
    whole = uniforms(torch.arange(1000), 5, 3, 1)
    rows = torch.tensor([999, 3, 500])
    assert torch.equal(uniforms(rows, 5, 3, 1), whole[rows])


def test_permutation():
    order = permutation(1000, 5, 2)
    assert sorted(order.tolist()) == list(range(1000))
    assert not torch.equal(order, permutation(1000, 5, 3))
    places = torch.stack([permutation(10, seed).argsort() for seed in range(4000)])
    counts = torch.stack([torch.bincount(column, minlength=10) for column in places.T])
    assert (counts / 4000 - 0.1).abs().max() < 0.025  # five standard deviations
