"""BYOL's update with a centred gradient, on enumerated populations, against autograd."""

from __future__ import annotations

import pytest
import torch

from lightning_ssl.theory import batchnorm

D = torch.float64
SAMPLES, VIEWS, N_IN, N_OUT, OUTPUTS = 7, 4, 5, 3, 3


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


class Centre(torch.autograd.Function):
    """The identity whose gradient is centred over the batch, as behind a BatchNorm's mean (Eq. 12)."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad - grad.mean((0, 1), keepdim=True)


def autograd_update(f, top, W, f_target, top_target, W_target, centred, stop_gradient=True):  # type: ignore[no-untyped-def]
    """-gradient of E 1/2 |top W f(x1') - top' W' f'(x2')|^2 over all pairs of views; linear above the layer."""
    W = W.clone().requires_grad_()
    hidden = f @ W.T
    # The layer's own mean may be subtracted or its gradient centred: the update of W is the same.
    hidden = Centre.apply(hidden) if centred else hidden
    other = f_target @ (W if not stop_gradient else W_target).T
    other = Centre.apply(other) if centred and not stop_gradient else other
    online, target = hidden @ top.T, other @ top_target.T
    pairs = online.unsqueeze(2) - target.unsqueeze(1)  # [x, v1, v2, a]
    (pairs.square().sum(-1).mean() / 2).backward()
    return -W.grad


@pytest.fixture
def population():  # type: ignore[no-untyped-def]
    x = randn(SAMPLES, 1, N_IN, seed=0) + 0.5 * randn(SAMPLES, VIEWS, N_IN, seed=1) + 0.7
    top, W = randn(OUTPUTS, N_OUT, seed=2), randn(N_OUT, N_IN, seed=3)
    return x, top, W


def vec(W: torch.Tensor) -> torch.Tensor:
    return W.T.reshape(-1)


def K(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    return batchnorm.connections(x, top.expand(*x.shape[:2], *top.shape))


def test_theorem_8(population) -> None:  # type: ignore[no-untyped-def]
    x, top, W = population
    x_t, top_t, W_t = x @ randn(N_IN, N_IN, seed=4), randn(OUTPUTS, N_OUT, seed=5), randn(N_OUT, N_IN, seed=6)
    online, target = K(x, top), K(x_t, top_t)
    plain = batchnorm.byol_update(online, vec(W), target, vec(W_t))
    torch.testing.assert_close(plain, vec(autograd_update(x, top, W, x_t, top_t, W_t, centred=False)))
    correction = batchnorm.batchnorm_correction(online, vec(W), target, vec(W_t))
    centred = vec(autograd_update(x, top, W, x_t, top_t, W_t, centred=True))
    torch.testing.assert_close(plain + correction, centred)
    ops = batchnorm.operators(online, target)  # Eq. 14
    torch.testing.assert_close(-(ops.intra + ops.inter) @ vec(W) + ops.cross @ vec(W_t), centred)


def test_corollary_1_no_correction_for_equal_networks(population) -> None:  # type: ignore[no-untyped-def]
    x, top, W = population
    k = K(x, top)
    assert batchnorm.batchnorm_correction(k, vec(W), k, vec(W)).abs().max() < 1e-12


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_corollary_2_predictor(population, stop_gradient: bool) -> None:  # type: ignore[no-untyped-def]
    x, base, W = population
    predictor = randn(OUTPUTS, OUTPUTS, seed=7)
    closed = batchnorm.predictor_update(K(x, base), vec(W), predictor, stop_gradient)
    exact = autograd_update(x, predictor @ base, W, x, base, W, centred=True, stop_gradient=stop_gradient)
    torch.testing.assert_close(closed, vec(exact))


def test_corollary_2_without_stop_gradient_sums_both_branches(population) -> None:  # type: ignore[no-untyped-def]
    """The printed "2 sym" counts the online branch twice; it is right for W_pred = I alone."""
    x, base, W = population
    k, eye = K(x, base), torch.eye(OUTPUTS, dtype=D)
    for predictor in (eye, eye + 0.1 * randn(OUTPUTS, OUTPUTS, seed=7)):
        exact = vec(autograd_update(x, predictor @ base, W, x, base, W, centred=True, stop_gradient=False))
        gap = k.mean(1) - k.mean((0, 1))
        gap = gap @ (eye - predictor).T
        shrink = torch.einsum("xpa,xqa->pq", gap, gap) / len(gap)
        online, target = batchnorm.operators(k @ predictor.T, k).intra, batchnorm.operators(k, k).intra
        torch.testing.assert_close(-(online + target + shrink) @ vec(W), exact)
        printed = -(2 * online + shrink) @ vec(W)
        off = float((printed - exact).norm() / exact.norm())
        assert off < 1e-12 if predictor is eye else off > 0.01


def test_small_identity_predictor_amplifies_between_samples(population) -> None:  # type: ignore[no-untyped-def]
    """W_pred = beta I gives beta (1 - beta) VE: the contrastive operator appears for 0 < beta < 1 and only there."""
    x, base, W = population
    k = K(x, base)
    ops = batchnorm.operators(k, k)
    for beta in (0.3, 1.0, 1.5):
        update = batchnorm.predictor_update(k, vec(W), beta * torch.eye(OUTPUTS, dtype=D))
        rest = update + beta**2 * ops.intra @ vec(W)
        torch.testing.assert_close(rest, beta * (1 - beta) * ops.inter @ vec(W), rtol=1e-9, atol=1e-10)
