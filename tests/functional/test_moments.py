"""Second moments, L_cor and the bounds against brute force, closed forms and sampling."""

import math

import pytest
import torch

from lightning_ssl.functional import correlation_loss, error_rate_bound, generalization_bound, second_moment


def test_second_moment_is_the_mean_outer_product():
    x = torch.randn(9, 4, dtype=torch.float64)
    torch.testing.assert_close(second_moment(x), torch.stack([torch.outer(row, row) for row in x]).mean(dim=0))


def test_correlation_loss_from_its_definition():
    x = torch.randn(9, 4, dtype=torch.float64)
    rows = [2.0 * row / row.norm() for row in x]  # norm sqrt(d) = 2
    moment = torch.stack([torch.outer(row, row) for row in rows]).mean(dim=0)
    torch.testing.assert_close(correlation_loss(x), (moment - torch.eye(4)).square().sum())


@pytest.mark.parametrize(("classes", "dim"), [(3, 3), (3, 8), (10, 20), (1, 5)])
def test_orthogonal_zero_variance_classes(classes, dim):
    """K equiprobable orthogonal points: |Lambda - I|^2 = d^2/K - d, whatever the rows' lengths."""
    directions = torch.linalg.qr(torch.randn(dim, classes, dtype=torch.float64)).Q.T
    x = directions.repeat(4, 1) * torch.rand(4 * classes, 1, dtype=torch.float64).add(0.5)
    assert correlation_loss(x).item() == pytest.approx(dim**2 / classes - dim)


def test_unbiased_estimate_has_the_population_value_as_its_mean():
    """Over all batches of 3 drawn with replacement from 5 points, the corrected estimate's mean is exact."""
    points = torch.randn(5, 3, dtype=torch.float64)
    batches = torch.cartesian_prod(*[torch.arange(5)] * 3)
    corrected = torch.stack([correlation_loss(points[b], unbiased=True) for b in batches]).mean()
    plain = torch.stack([correlation_loss(points[b]) for b in batches]).mean()
    population = correlation_loss(points)
    torch.testing.assert_close(corrected, population)
    squared_norm = population + 2 * 3 - 3  # |Lambda|^2, as tr Lambda = d
    torch.testing.assert_close(plain - population, (9 - squared_norm) / 3)


def test_generalization_bound_has_its_minimum_at_twice_the_classes():
    classes = 7
    values = [generalization_bound(torch.tensor(0.0, dtype=torch.float64), d, classes).item() for d in range(1, 60)]
    assert min(values) == values[2 * classes - 1] == pytest.approx(-1 / (4 * classes))


def test_generalization_bound_formula():
    assert generalization_bound(torch.tensor(5.0), dim=4, num_classes=10).item() == pytest.approx(2 / 16 * 5 + 6 / 16)


def test_error_rate_bound_formula():
    value = error_rate_bound(torch.tensor(5.0, dtype=torch.float64), dim=4, class_probs=[0.2, 0.3, 0.5], eps=0.1)
    expected = (2 / 16 * 5 + 2 * 0.1**4 + (3 - 4) / 16) / ((1 - 0.38) * (1 - 0.4 + 0.01) ** 2)
    assert value.item() == pytest.approx(expected)


def test_error_rate_bound_holds_on_a_separable_mixture():
    """Tight clusters on orthogonal directions: the nearest class mean makes no error and the bound is below 1."""
    eps, classes = 0.02, 6
    noise = torch.randn(60, classes, dtype=torch.float64)
    x = torch.eye(classes, dtype=torch.float64).repeat(10, 1) + 0.5 * eps * noise / noise.norm(dim=1, keepdim=True)
    bound = error_rate_bound(correlation_loss(x), classes, [1 / classes] * classes, eps)
    assert 0 <= bound.item() < 0.05


@pytest.mark.parametrize("unbiased", [False, True])
def test_gradcheck(unbiased):
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: correlation_loss(x, unbiased), (x,))
    assert torch.autograd.gradcheck(second_moment, (x,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: second_moment(torch.ones(3)), "matrix"),
        (lambda: second_moment(torch.ones(0, 3)), "at least 1 rows"),
        (lambda: correlation_loss(torch.ones(1, 3), unbiased=True), "at least 2 rows"),
        (lambda: correlation_loss(torch.zeros(2, 3)), "all-zero"),
        (lambda: correlation_loss(torch.full((2, 3), math.nan)), "non-finite"),
        (lambda: generalization_bound(torch.tensor(1.0), 0, 10), "dim"),
        (lambda: generalization_bound(torch.tensor(1.0), 4, 0), "num_classes"),
        (lambda: error_rate_bound(torch.tensor(1.0), 4, [0.5, 0.6], 0.1), "class_probs"),
        (lambda: error_rate_bound(torch.tensor(1.0), 4, [1.0], 0.1), "class_probs"),
        (lambda: error_rate_bound(torch.tensor(1.0), 4, [0.5, 0.5], 0.3), "eps"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
