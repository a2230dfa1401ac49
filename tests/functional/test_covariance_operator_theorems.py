"""DDN-v2's theorems on the covariance operator, exactly, on finite populations of which every pair is listed."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

from lightning_ssl.functional import (
    covariance_operator,
    exact_contrastive_loss,
    pair_weight,
    simple_contrastive_loss,
    squared_distance,
)


def mlp() -> nn.Module:
    widths = [5, 7, 6, 6, 4]
    layers = [m for i, o in itertools.pairwise(widths) for m in (nn.Linear(i, o, bias=False), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 4, 3, bias=False),
    ).double()


NETWORKS = [(mlp, (5,)), (convnet, (2, 7, 7))]


def connection(model: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    """K: the transposed Jacobian of each sample's output with respect to vec(W), [n, P, n_L]."""
    weight = model.get_parameter(name).detach()

    def output(w: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return functional_call(model, {name: w}, (sample[None],))[0]

    return vmap(jacrev(output), (None, 0))(weight, x).flatten(2).transpose(1, 2).detach()


def population(model: nn.Module, shape: tuple[int, ...], n: int = 3, views: int = 3):
    """n equally likely samples with equally likely augmentations, [n, V, ...], and their un-augmented originals."""
    clean = torch.randn(n, *shape, dtype=torch.float64)
    return clean, clean[:, None] + 0.5 * torch.randn(n, views, *shape, dtype=torch.float64)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return {name: g.flatten() for name, g in zip(names, torch.autograd.grad(loss, weights), strict=True)}


def all_triples(n: int, views: int):
    """Every (x, x_1, x_+, x', x_-) with its equal chance: x' may be x, x_+ may be x_1, all draws are independent."""
    grid = torch.cartesian_prod(*(torch.arange(size) for size in (n, views, views, n, views)))
    return grid.unbind(1)


@pytest.mark.parametrize(("build", "shape"), NETWORKS)
def test_theorem_1_gradient_of_the_distance(build, shape):
    model, other = build(), build()
    x1, x2 = torch.randn(2, 1, *shape, dtype=torch.float64)
    r = squared_distance(model(x1), other(x2).detach()).sum()
    for name, gradient in gradients(model, r).items():
        k1, k2 = connection(model, name, x1)[0], connection(other, name, x2)[0]
        w1, w2 = (net.get_parameter(name).detach().flatten() for net in (model, other))
        torch.testing.assert_close(gradient, k1 @ (k1.T @ w1 - k2.T @ w2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, -0.5, 0.3])
@pytest.mark.parametrize(("build", "shape"), NETWORKS)
def test_theorem_3_and_corollary_1(build, shape, beta):
    model = build()
    _, x = population(model, shape)
    n, views = x.shape[:2]
    sample, one, plus, other, minus = all_triples(n, views)
    f = model(x.flatten(0, 1)).view(n, views, -1)
    # The theorems differentiate through the first network of the pair only ...
    anchor, stop = f[sample, one], f.detach()
    r_pos, r_neg = squared_distance(anchor, stop[sample, plus]), squared_distance(anchor, stop[other, minus])
    single = gradients(model, simple_contrastive_loss(r_pos, r_neg, beta))
    # ... autograd through both: by symmetry twice as much.
    f = model(x.flatten(0, 1)).view(n, views, -1)
    r_pos = squared_distance(f[sample, one], f[sample, plus])
    r_neg = squared_distance(f[sample, one], f[other, minus])
    both = gradients(model, simple_contrastive_loss(r_pos, r_neg, beta))
    for name in single:
        k = connection(model, name, x.flatten(0, 1)).unflatten(0, (n, views))
        op = covariance_operator(k)
        expected = -(op.inter - beta * op.intra) @ model.get_parameter(name).detach().flatten()
        assert expected.norm() > 1e-6
        torch.testing.assert_close(single[name], expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(both[name], 2 * expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loss", ["simple", "triplet", "nce"])
@pytest.mark.parametrize(("build", "shape"), NETWORKS)
def test_theorem_4_is_exact_for_the_exact_losses(build, shape, loss):
    model = build()
    clean, x = population(model, shape)
    n, views = x.shape[:2]
    sample, one, plus, other, minus = all_triples(n, views)
    f = model(x.flatten(0, 1)).view(n, views, -1)
    z = model(clean).detach()
    r = squared_distance(z[:, None], z[None])
    r_pos, r_neg = squared_distance(f[sample, one], f[sample, plus]), squared_distance(f[sample, one], f[other, minus])
    value = exact_contrastive_loss(r_pos, r_neg, r[sample, other], loss, tau=0.3, margin=0.2)
    xi = pair_weight(r, loss, tau=0.3, margin=0.2)
    for name, gradient in gradients(model, value).items():
        k = connection(model, name, x.flatten(0, 1)).unflatten(0, (n, views))
        op = covariance_operator(k, weight=xi).inter
        # Through both networks of a pair: the theorem's, twice. The weights are symmetric, so this is exact too.
        expected = -2 * op @ model.get_parameter(name).detach().flatten()
        assert expected.norm() > 1e-6
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


def test_operators_are_the_population_s_variances():
    k = torch.randn(4, 3, 5, 2, dtype=torch.float64)
    inter, intra = covariance_operator(k)
    mean = k.mean(1)
    a, b = mean - mean.mean(0), k - mean[:, None]
    torch.testing.assert_close(inter, torch.einsum("ipo,iqo->pq", a, a) / 4)
    torch.testing.assert_close(intra, torch.einsum("ivpo,ivqo->pq", b, b) / 12)
    assert torch.linalg.eigvalsh(inter).min() > -1e-12


def test_pair_weights_by_a_loop_over_pairs():
    k = torch.randn(5, 3, 4, 2, dtype=torch.float64)
    xi = torch.rand(5, 5, dtype=torch.float64)
    xi = xi + xi.T
    expected = torch.zeros(4, 4, dtype=torch.float64)
    unbiased = torch.zeros(4, 4, dtype=torch.float64)
    mean = k.mean(1)
    for i, j in itertools.product(range(5), repeat=2):
        d = mean[i] - mean[j]
        expected += xi[i, j] * d @ d.T / 50
        if i != j:  # different views only, of different samples only
            for v, w in itertools.permutations(range(3), 2):
                product = k[i, v] @ k[i, w].T + k[j, v] @ k[j, w].T
                product = product - mean[i] @ mean[j].T - mean[j] @ mean[i].T
                unbiased += xi[i, j] * product / (2 * 20 * 6)
    torch.testing.assert_close(covariance_operator(k, weight=xi).inter, expected)
    torch.testing.assert_close(covariance_operator(k, weight=xi, unbiased=True).inter, unbiased)


@pytest.mark.parametrize("weighted", [False, True])
def test_unbiased_estimates_average_to_the_population_s(weighted):
    """Over every batch of 2 samples (drawn with replacement) and 2 views that a small population can give."""
    k = torch.randn(3, 2, 3, 2, dtype=torch.float64)
    xi = torch.rand(3, 3, dtype=torch.float64)
    xi = (xi + xi.T) if weighted else torch.ones(3, 3, dtype=torch.float64)
    inter, intra, count = 0.0, 0.0, 0
    for i, j in itertools.product(range(3), repeat=2):
        for a, b, c, d in itertools.product(range(2), repeat=4):
            batch = torch.stack([torch.stack([k[i, a], k[i, b]]), torch.stack([k[j, c], k[j, d]])])
            op = covariance_operator(batch, weight=xi[[i, j]][:, [i, j]], unbiased=True)
            inter, intra, count = inter + op.inter, intra + op.intra, count + 1
    expected = covariance_operator(k, weight=xi)
    torch.testing.assert_close(inter / count, expected.inter)
    torch.testing.assert_close(intra / count, expected.intra)


@pytest.mark.parametrize(
    ("jacobians", "weight", "message"),
    [
        (torch.zeros(4, 3, 2), None, r"\[N, V, P, n_L\]"),
        (torch.zeros(1, 2, 3, 2), None, "at least 2 samples"),
        (torch.zeros(4, 1, 3, 2), None, "2 views"),
        (torch.zeros(4, 2, 3, 2), torch.ones(3, 3), r"\[4, 4\]"),
        (torch.zeros(4, 2, 3, 2), torch.arange(16.0).view(4, 4), "symmetric"),
    ],
)
def test_bad_input(jacobians, weight, message):
    with pytest.raises(ValueError, match=message):
        covariance_operator(jacobians, weight=weight, unbiased=True)
