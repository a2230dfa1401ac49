"""Two-layer networks on a mixture: Theorem 5 against autograd, its conserved quantity, and many runs at once."""

from __future__ import annotations

import pytest
import torch

from lightning_ssl.data.synthetic import GaussianMixture, MixtureDataModule
from lightning_ssl.theory import linear
from lightning_ssl.theory.mixture import TwoLayer, two_layer_flow

D = torch.float64


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


@pytest.fixture
def population() -> torch.Tensor:
    return randn(6, 1, 4, seed=0) + 0.3 * randn(6, 5, 4, seed=1)


@pytest.mark.parametrize("is_linear", [True, False])
def test_flow_is_the_gradient_of_the_simple_loss(population: torch.Tensor, is_linear: bool) -> None:
    """L_simp = r+ - r- over all samples and views: positives share the sample, negatives are independent draws."""
    w1, w2 = randn(3, 4, seed=2).requires_grad_(), randn(3, seed=3).requires_grad_()
    hidden = population @ w1.T
    f = (hidden if is_linear else hidden.relu()) * w2
    r_pos = (f.unsqueeze(2) - f.unsqueeze(1)).square().sum(-1).mean() / 2
    flat = f.flatten(0, 1)
    r_neg = (flat.unsqueeze(1) - flat.unsqueeze(0)).square().sum(-1).mean() / 2
    (r_pos - r_neg).backward()
    flow = two_layer_flow(population, w1.detach(), w2.detach(), is_linear)
    # Both branches of a pair carry gradient: twice the covariance operator of Theorem 3.
    torch.testing.assert_close(-w1.grad, 2 * flow.w1)
    torch.testing.assert_close(-w2.grad, 2 * flow.w2)


def test_conserved_quantity(population: torch.Tensor) -> None:
    w1, w2 = randn(3, 4, seed=2), randn(3, seed=3)
    before = w1.square().sum(1) - w2.square()

    def field(state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        flow = two_layer_flow(population, *state)
        return flow.w1, flow.w2

    # The gate makes the field jump where a view changes side; both weights jump together, so the invariant does not.
    W1, W2 = linear.integrate(field, (w1, w2), [0.0, 0.2], rtol=1e-8)
    torch.testing.assert_close(W1[-1].square().sum(1) - W2[-1].square(), before, rtol=1e-6, atol=1e-7)
    assert (W2[-1].abs() >= W2[0].abs()).all() and (W2[-1].abs() > W2[0].abs()).any()


def test_two_clusters_linear_case_finds_their_difference() -> None:
    means = randn(2, 4, seed=5)
    population = means.unsqueeze(1)
    w1, w2 = 0.05 * randn(2, 4, seed=6), torch.full((2,), 0.1, dtype=D)
    for _ in range(400):  # units are independent and grow super-exponentially: each has its own shrinking step
        flow = two_layer_flow(population, w1, w2, linear=True)
        step = 0.05 * torch.minimum(w1.norm(dim=1) / flow.w1.norm(dim=1), (w2 / flow.w2).abs())
        w1, w2 = w1 + step[:, None] * flow.w1, w2 + step * flow.w2
    direction = torch.nn.functional.normalize(means[1] - means[0], dim=0)
    cosine = torch.nn.functional.normalize(w1, dim=1) @ direction
    assert (cosine.abs() > 0.99).all()


def test_runs_train_as_alone_and_grow() -> None:
    mixture = GaussianMixture(runs=3, dim=6, components=5)
    generator = torch.Generator().manual_seed(0)
    many, one = TwoLayer(6, 8, 3, "simple", False), TwoLayer(6, 8, 3, "simple", False)
    one.w1, one.b1, one.w2 = many.w1[1:2].clone(), many.b1[1:2].clone(), many.w2[1:2].clone()
    start = many.w2.abs().mean()
    for _ in range(20):
        a, c = mixture.sample_component(32, generator), mixture.sample_component(32, generator)
        triple = mixture.sample(a, generator), mixture.sample(a, generator), mixture.sample(c, generator)
        many.step(*triple, lr=0.05)
        one.step(*(t[1:2] for t in triple), lr=0.05)
    torch.testing.assert_close(many.w1[1:2], one.w1, rtol=1e-4, atol=1e-6)
    assert many.w2.abs().mean() > start
    assert many.active_clusters(mixture.means).shape == (3, 8)
    with pytest.raises(ValueError, match=r"`loss` must be .*got 'triplet'"):
        TwoLayer(loss="triplet")


def test_mixture_law_and_datamodule() -> None:
    mixture = GaussianMixture(components=4, dim=3, runs=2, seed=1)
    assert (mixture.means[:, 0] == 0).all()
    generator = torch.Generator().manual_seed(0)
    component = mixture.sample_component(40_000, generator)
    x = mixture.sample(component, generator)
    for run in range(2):
        for k in range(4):
            rows = x[run][component[run] == k]
            torch.testing.assert_close(rows.mean(0), mixture.means[run, k], atol=0.02, rtol=0)
            torch.testing.assert_close(rows.T.cov(), 0.1 * torch.eye(3), atol=0.01, rtol=0)
    module = MixtureDataModule(draws=64, batch_size=32, probe_draws=20)
    batch = next(iter(module.train_dataloader()))
    assert batch.views[0].shape == (32, 10) and not torch.equal(*batch.views)
    train, _ = module.probe_dataloaders()
    assert next(iter(train)).image.shape == (20, 10) and module.num_classes == module.num_features == 10
    with pytest.raises(ValueError, match="`variance` must not be negative, got -1"):
        GaussianMixture(variance=-1)
