"""Bound's theorems on enumerated populations, and SimSiam's local dynamics against autograd and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_ssl.functional import correlation_loss
from lightning_ssl.theory import generalization as g

D = torch.float64


def population(seed: int, spread: float, shared: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Features of norm sqrt(d), their classes, class means, class probabilities, and eps."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(torch.randint(2, 8, (), generator=generator))
    dim = int(torch.randint(2, 9, (), generator=generator))
    centres = normalize(torch.randn(classes, dim, generator=generator, dtype=D), dim=1)
    if shared:
        centres[1] = centres[0]
    counts = torch.randint(2, 9, (classes,), generator=generator)
    labels = torch.arange(classes).repeat_interleave(counts)
    noise = normalize(torch.randn(len(labels), dim, generator=generator, dtype=D), dim=1)
    x = math.sqrt(dim) * normalize(centres[labels] + spread * noise, dim=1)
    means = torch.stack([x[labels == k].mean(0) for k in range(classes)])
    widest = max(torch.cdist(x[labels == k], x[labels == k]).max().item() for k in range(classes))
    return x, labels, means, counts.to(D) / counts.sum(), widest / math.sqrt(dim)


def test_theorem_1_no_confusion_of_separated_classes() -> None:
    """Every misclassified view goes to a class that the theorem does not rule out; some rulings are not empty."""
    wrong = ruled_out = 0
    for seed in range(200):
        x, labels, means, _, eps = population(seed, 0.02 + 0.1 * (seed % 3), shared=seed % 2 == 0)
        possible = g.confusable(means, eps)
        assert torch.equal(possible, possible.T) and not possible.diagonal().any()
        nearest = torch.cdist(x, means).argmin(1)
        mistakes = nearest != labels
        assert bool(possible[labels[mistakes], nearest[mistakes]].all())
        wrong += int(mistakes.sum())
        ruled_out += int((~possible).sum()) - len(means)
    assert wrong > 50 and ruled_out > 200


def test_theorem_2_bounds_the_products_of_means() -> None:
    tight = 0
    for seed in range(300):
        x, _, means, probs, eps = population(seed, 0.3 * (seed % 4), shared=seed % 2 == 0)
        dim = x.shape[1]
        left, right = g.mean_product(means, probs), g.mean_product_bound(correlation_loss(x), dim, probs, eps)
        pairs = [
            (float(probs[i] * probs[j]), float(means[i] @ means[j]) ** 2)
            for i in range(len(means)) for j in range(len(means)) if i != j
        ]  # fmt: skip
        assert left.item() == pytest.approx(sum(p * v for p, v in pairs) / sum(p for p, _ in pairs))
        assert left <= right + 1e-9
        tight += bool(left > 0.3 * right)
    assert tight > 10


def test_theorem_2_is_tight_for_orthogonal_classes() -> None:
    """K orthogonal classes without spread: the products are 0, and the bound without its factor 2 would be so too."""
    dim, classes = 12, 3
    x = math.sqrt(dim) * torch.eye(dim, dtype=D)[:classes]
    l_cor, probs = correlation_loss(x), torch.full((classes,), 1 / classes, dtype=D)
    assert g.mean_product(x, probs) == 0
    assert l_cor.item() == pytest.approx(dim**2 / classes - dim)
    bound = g.mean_product_bound(l_cor, dim, probs, 0.0)
    assert bound.item() == pytest.approx((2 * (dim**2 / classes - dim) + classes - dim) / (1 - 1 / classes))


def check_equation_13(first: Tensor, second: Tensor) -> tuple[float, float]:
    """The loss of two views, either of which may come first, and what the printed bound says it is at least."""
    dim = first.shape[1]
    eps = float((first - second).norm(dim=1).max()) / math.sqrt(dim)
    x, y = torch.cat([first, second]), torch.cat([second, first])
    loss = (x.T @ y / len(x) - torch.eye(dim, dtype=D)).square().sum()
    l_cor = correlation_loss(x)
    assert loss >= g.barlow_lower_bound(l_cor, dim, eps)
    return loss.item(), l_cor.item() / 2 - eps**2


def test_equation_13() -> None:
    """||C - I||^2 >= L_cor / 2 - d^2 eps^2, for any two views."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        dim = 6
        x = normalize(torch.randn(8, dim, generator=generator, dtype=D), dim=1)
        offset = normalize(torch.randn(8, dim, generator=generator, dtype=D), dim=1)
        y = normalize(x + 0.2 * (1 + seed % 3) * offset, dim=1)
        check_equation_13(math.sqrt(dim) * x, math.sqrt(dim) * y)


def test_equation_13_as_printed_fails() -> None:
    """One direction varies between views as well as samples, the rest only between samples: C is near I, Lambda not."""
    dim, between, within = 16, 1.0, math.sqrt(2.0)
    rows = []
    for sign in (-1, 1):
        for axis in range(1, dim):
            for views in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
                pair = torch.zeros(2, dim, dtype=D)
                for k, nuisance in enumerate(views):
                    pair[k, 0] = sign * between + nuisance * within
                    pair[k, axis] = math.sqrt(dim - float(pair[k, 0]) ** 2)
                rows.append(pair)
    first, second = torch.stack(rows).unbind(1)
    loss, printed = check_equation_13(first, second)
    assert loss < printed


def pairs(seed: int = 0, n: int = 9, dim: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator, dtype=D) for shape in ((n, dim), (n, dim), (dim, dim)))  # type: ignore[return-value]


def test_theorem_4_gradients_are_autograds() -> None:
    z1, z2, W = pairs()
    z1.requires_grad_(), W.requires_grad_()
    similarity = torch.nn.functional.cosine_similarity(z1 @ W.T, z2, dim=1)
    by_predictor = torch.autograd.grad(similarity.mean(), W, retain_graph=True)[0]
    by_features = torch.autograd.grad(similarity.sum(), z1)[0]
    closed = g.cosine_gradients(z1.detach(), z2, W.detach())
    torch.testing.assert_close(closed.predictor, by_predictor)
    torch.testing.assert_close(closed.features, by_features)


@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_theorem_4_drift_of_the_correlation_matrix(eta: float) -> None:
    """By finite differences; weight decay of the features does nothing to Lambda, whose trace is 1."""
    z1, z2, W = pairs(1)
    step = g.cosine_gradients(z1, z2, W).features - eta * z1

    def moment(t: float) -> Tensor:
        unit = normalize(z1 + t * step, dim=1)
        return unit.T @ unit / len(unit)

    numeric = (moment(1e-6) - moment(-1e-6)) / 2e-6
    drift = g.correlation_drift(z1, z2, W, eta)
    torch.testing.assert_close(drift, numeric, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(drift, g.correlation_drift(z1, z2, W))
    assert abs(drift.trace().item()) < 1e-12
    # Eq. 41: the projection onto the sphere's tangent is there already.
    unit = normalize(z1, dim=1)
    assert ((g.cosine_gradients(z1, z2, W).features * unit).sum(1)).abs().max() < 1e-12


def test_theorem_4_closed_form_with_constant_norms_and_similarity() -> None:
    """Rotation by one angle in every plane, views equal: c = cos, and E[Delta z^T] = (I - c W~) Lambda."""
    angle, scale = 0.4, 1.7
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=D)
    W = scale * torch.block_diag(rotation, rotation)
    z = normalize(torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=D), dim=1)
    moment = z.T @ z / len(z)
    tilde = W / scale  # |z| / |p| = 1 / scale
    expected = (torch.eye(4, dtype=D) - math.cos(angle) * tilde) @ moment
    torch.testing.assert_close(g.cosine_gradients(z, z, W).predictor, expected / scale)
    half = W.T @ expected / scale
    torch.testing.assert_close(g.correlation_drift(z, z, W), half + half.T)


def test_modes_have_three_regions() -> None:
    """Eqs. 18-19: below 0, between 0 and 1/c, above 1/c."""
    c = 0.8
    lambda_p = torch.tensor([-0.5, 0.4, 2.0], dtype=D)
    drift = g.simsiam_modes(lambda_p, torch.full((3,), 0.3, dtype=D), c)
    assert drift.predictor.sign().tolist() == [1, 1, -1]
    assert drift.correlation.sign().tolist() == [-1, 1, -1]
    for rest in (0.0, 1 / c):
        still = g.simsiam_modes(torch.tensor(rest, dtype=D), torch.tensor(0.3, dtype=D), c)
        assert still.correlation.abs() < 1e-15


def test_modes_with_epsilon_and_weight_decay() -> None:
    """E.2: conditions 56 and 57 are where the derivatives change sign; the printed decay of lambda is kept apart."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        lambda_p, lam, epsilon, eta, z, p = (torch.rand(6, generator=generator, dtype=D) * 2 + 0.01).tolist()
        epsilon, tilde = 0.05 * epsilon, lambda_p * z / p
        arguments = torch.tensor(lambda_p, dtype=D), torch.tensor(lam, dtype=D), 0.9, epsilon, eta, z, p
        drift, printed = g.simsiam_modes(*arguments), g.simsiam_modes(*arguments, as_printed=True)
        assert bool(drift.predictor > 0) == ((1 - 0.9 * tilde + epsilon / lam) * lam > eta * p**2 / z**2 * tilde)
        assert bool(printed.correlation > 0) == (tilde / z**2 * (1 - 0.9 * tilde + epsilon / lam) > eta)
        assert printed.correlation.item() == pytest.approx(drift.correlation.item() - 2 * eta * lam)


def test_modes_follow_the_matrices() -> None:
    """Aligned W_p and Lambda, equal views, equal norms: the modes' law is the matrices'."""
    z = torch.cat([torch.eye(3, dtype=D), -torch.eye(3, dtype=D)]).repeat_interleave(torch.tensor([3, 2, 1] * 2), 0)
    W = 0.6 * torch.eye(3, dtype=D)
    lam = (z.T @ z / len(z)).diagonal()
    drift = g.simsiam_modes(W.diagonal(), lam, c=1.0, p_norm=0.6)
    torch.testing.assert_close(g.cosine_gradients(z, z, W).predictor.diagonal(), drift.predictor)
    torch.testing.assert_close(g.correlation_drift(z, z, W).diagonal(), drift.correlation)
