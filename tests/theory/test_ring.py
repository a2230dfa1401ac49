"""The ring of two objects: no operator for linear neurons, a positive one for selective ReLU neurons."""

from __future__ import annotations

import pytest
import torch

from lightning_ssl.theory.ring import amplification, neuron_operator, ring_population

D = torch.float64


@pytest.mark.parametrize("size", [4, 7, 12])
@pytest.mark.parametrize("field", [None, 2])
def test_linear_neuron_learns_nothing(size: int, field: int | None) -> None:
    assert neuron_operator(ring_population(size, field)).abs().max() < 1e-15


def test_pattern_frequencies_of_the_local_field() -> None:
    """Fig. 3: 11, 01, 10 once each for the object 11; 01 and 10 twice each for 101."""
    d = 9
    codes = (ring_population(d, 2) @ torch.tensor([2.0, 1.0], dtype=D)).long()
    counts = [torch.bincount(c, minlength=4).tolist() for c in codes]  # 00, 01, 10, 11
    assert counts == [[d - 3, 1, 1, 1], [d - 4, 2, 2, 0]]


@pytest.mark.parametrize(
    ("weight", "bias", "pattern", "gap"),
    [([1.0, 1.0], -1.5, [1.0, 1.0], 1), ([-1.0, 1.0], -0.5, [0.0, 1.0], -1), ([1.0, -1.0], -0.5, [1.0, 0.0], -1)],
)
def test_selective_neuron_is_amplified(weight: list[float], bias: float, pattern: list[float], gap: int) -> None:
    d = 8
    w, x = torch.tensor(weight, dtype=D), torch.tensor(pattern, dtype=D)
    op = neuron_operator(ring_population(d, 2), w, bias)
    c = (gap / d) ** 2 / 4  # two equally likely objects whose frequencies differ by gap / d
    torch.testing.assert_close(op, c * torch.outer(x, x))
    grown = amplification(ring_population(d, 2), w, bias, step=3.0)
    torch.testing.assert_close(x @ grown, (1 + 3.0 * c * x @ x) * (x @ w))
    assert x @ grown > x @ w > 0


def test_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`size` must be at least 4.*got 3"):
        ring_population(3)
    with pytest.raises(ValueError, match=r"`receptive_field` must lie .* got 9"):
        ring_population(5, 9)
