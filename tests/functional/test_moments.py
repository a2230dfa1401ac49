"""Second moments, L_cor and the bounds against brute force, closed forms and sampling."""

import math

import pytest
import torch

from lightning_ssl.functional import (
    correlation_loss,
    error_rate_bound,
    error_rate_bound_as_printed,
    generalization_bound,
    second_moment,
)


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


def test_error_rate_bound_formulas():
    l_cor = torch.tensor(5.0, dtype=torch.float64)
    numerator = 2 / 16 * 5 + 2 * 0.1**4 + (3 - 4) / 16
    value = error_rate_bound(l_cor, dim=4, class_probs=[0.2, 0.3, 0.5], eps=0.1)
    assert value.item() == pytest.approx(numerator / (0.2 * (1 - 0.4 + 0.01) ** 2))
    printed = error_rate_bound_as_printed(l_cor, dim=4, class_probs=[0.2, 0.3, 0.5], eps=0.1)
    assert printed.item() == pytest.approx(numerator / ((1 - 0.38) * (1 - 0.4 + 0.01) ** 2))
    # Classes without samples are no classes.
    assert error_rate_bound(l_cor, 4, [0.2, 0.3, 0.5, 0.0], 0.1).item() == pytest.approx(value.item())


def clusters(directions: torch.Tensor, copies: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of norm sqrt(d) around directions [K, d] within `spread` (relative), and their classes."""
    classes, dim = directions.shape
    noise = torch.randn(classes * copies, dim, dtype=torch.float64)
    x = directions.repeat_interleave(copies, 0) + spread * noise / noise.norm(dim=1, keepdim=True)
    return x / x.norm(dim=1, keepdim=True) * math.sqrt(dim), torch.arange(classes).repeat_interleave(copies)


def class_means(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[labels == k].mean(0) for k in range(int(labels.max()) + 1)])


def nearest_mean_error(x: torch.Tensor, labels: torch.Tensor) -> float:
    return (torch.cdist(x, class_means(x, labels)).argmin(1) != labels).double().mean().item()


def diameter(x: torch.Tensor, labels: torch.Tensor) -> float:
    """The theorem's eps: the largest distance within a class, relative to the norm."""
    widest = max(float(torch.cdist(x[labels == k], x[labels == k]).max()) for k in labels.unique())
    return widest / math.sqrt(x.shape[1])


@pytest.mark.parametrize(
    ("classes", "error", "printed", "bound"),
    [(6, 0.164, 0.137, 0.686), (10, 0.099, 0.046, 0.410), (20, 0.050, 0.011, 0.204), (100, 0.0102, 0.0004, 0.041)],
)
def test_two_classes_on_one_direction_refute_the_printed_theorem(classes, error, printed, bound):
    """K = d orthogonal classes of which two share a direction: about half of these two are taken for each other."""
    torch.manual_seed(0)
    directions = torch.eye(classes, dtype=torch.float64)
    directions[1] = directions[0]
    spread = 0.0015
    x, labels = clusters(directions, max(400, 25 * classes), spread)
    arguments = correlation_loss(x), classes, [1 / classes] * classes, 2 * spread / (1 - spread)
    measured = nearest_mean_error(x, labels)
    as_printed, mended = error_rate_bound_as_printed(*arguments), error_rate_bound(*arguments)
    assert measured == pytest.approx(error, rel=0.2)
    assert as_printed.item() == pytest.approx(printed, rel=0.12)
    assert mended.item() == pytest.approx(bound, rel=0.02)
    assert as_printed.item() < measured <= mended.item()
    assert mended.item() == pytest.approx((classes - 1) * as_printed.item())


def test_error_rate_bound_holds_for_any_classes():
    """Random populations, unequal classes, directions shared or near: the mended bound is never exceeded."""
    torch.manual_seed(1)
    informative = refuted = 0
    for trial in range(120):
        classes = int(torch.randint(5, 40, ()))
        dim = classes + int(torch.randint(0, 4, ()))
        directions = torch.linalg.qr(torch.randn(dim, classes, dtype=torch.float64)).Q.T.contiguous()
        if trial % 3:
            chosen = torch.randperm(classes)[: 2 * int(torch.randint(1, 1 + max(1, classes // 8), ()))]
            directions[chosen[::2]] = directions[chosen[1::2]]
        x, labels = clusters(directions, 12, 0.003 * float(torch.rand(())))
        copies = torch.randint(3 if trial % 2 else 10, 13, (classes,))  # unequal classes, much or a little
        x = torch.cat([x[labels == k][:c] for k, c in enumerate(copies)])
        labels = torch.arange(classes).repeat_interleave(copies)
        probs = copies.double() / copies.sum()
        error = nearest_mean_error(x, labels)
        arguments = correlation_loss(x), dim, probs, diameter(x, labels)
        bound = error_rate_bound(*arguments).item()
        assert error <= bound + 1e-12
        informative += bound < 1 and error > 0
        refuted += error > error_rate_bound_as_printed(*arguments).item()
    assert informative >= 10 and refuted >= 10  # the trials are hard enough to tell the two apart


def test_error_rate_bound_holds_on_a_separable_mixture():
    """Tight clusters on orthogonal directions: the nearest class mean makes no error and the bound is below 1."""
    x, labels = clusters(torch.eye(6, dtype=torch.float64), 10, 0.01)
    bound = error_rate_bound(correlation_loss(x), 6, [1 / 6] * 6, diameter(x, labels))
    assert nearest_mean_error(x, labels) == 0 <= bound.item() < 0.05


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("rows", "dim"), [(3, 40), (7, 8), (8, 8), (9, 8)])
def test_correlation_loss_is_the_same_by_either_gram_matrix(rows, dim, unbiased):
    x = torch.randn(rows, dim, dtype=torch.float64)
    unit = math.sqrt(dim) * x / x.norm(dim=1, keepdim=True)
    moment = unit.T @ unit / rows
    squared = moment.square().sum()
    if unbiased:
        squared = (rows * squared - dim**2) / (rows - 1)
    expected = squared - 2 * moment.trace() + dim
    assert abs(correlation_loss(x, unbiased) - expected) < 1e-10 * max(1, abs(expected))


def test_correlation_loss_of_few_wide_rows_makes_no_square_matrix_of_their_dimension():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    with Largest() as seen:
        correlation_loss(torch.randn(4, 3000))
    assert seen.elements <= 4 * 3000


@pytest.mark.parametrize("unbiased", [False, True])
def test_gradcheck(unbiased):
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: correlation_loss(x, unbiased), (x,))
    wide = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: correlation_loss(x, unbiased), (wide,))
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
