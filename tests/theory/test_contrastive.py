"""The contrastive operators against autograd on enumerated populations of a small ReLU network."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_ssl.theory import contrastive
from lightning_ssl.theory.batchnorm import connections

D = torch.float64
N_IN, HIDDEN, OUTPUTS, SAMPLES, VIEWS, TAU, MARGIN = 4, 5, 3, 4, 3, 0.7, 0.2


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def forward(W: Tensor, top: Tensor, x: Tensor, normalize: bool) -> Tensor:
    f = torch.relu(x @ W.T) @ top.T
    return f / f.norm(dim=-1, keepdim=True) if normalize else f


def vec(W: Tensor) -> Tensor:
    return W.T.flatten()  # column-major


@pytest.fixture
def network() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clean samples, their views, the lower layer W (which learns) and the top layer."""
    clean = randn(SAMPLES, N_IN, seed=0)
    views = clean[:, None] + 0.3 * randn(SAMPLES, VIEWS, N_IN, seed=1)
    return clean, views, randn(HIDDEN, N_IN, seed=2), randn(OUTPUTS, HIDDEN, seed=3)


def K_of(W: Tensor, top: Tensor, views: Tensor) -> Tensor:
    gates = (views @ W.T > 0).to(D)
    return connections(views, top * gates.unsqueeze(-2))


def gradient(W: Tensor, loss) -> Tensor:  # type: ignore[no-untyped-def]
    """Of loss(branch that learns, branch held fixed), each a function of x."""
    learns = W.clone().requires_grad_()
    return vec(torch.autograd.grad(loss(learns, W), learns)[0])


@pytest.mark.parametrize("normalize", [False, True])
def test_outputs_and_pair_gradient(network, normalize: bool) -> None:  # type: ignore[no-untyped-def]
    """Eqs. 40 and 41."""
    _, views, W, top = network
    K = K_of(W, top, views)
    torch.testing.assert_close(torch.einsum("xvpa,p->xva", K, vec(W)), forward(W, top, views, False))
    a, b = views[0, 0], views[1, 2]

    def loss(one: Tensor, other: Tensor) -> Tensor:
        return (forward(one, top, a, normalize) - forward(other, top, b, normalize)).square().sum() / 2

    closed = contrastive.pair_gradient(K[0, 0], K[1, 2], vec(W), normalize)
    torch.testing.assert_close(closed, gradient(W, loss))


@pytest.mark.parametrize("normalize", [False, True])
def test_lemma_2(network, normalize: bool) -> None:  # type: ignore[no-untyped-def]
    """Eqs. 46 and 51, for InfoNCE with three negatives."""
    _, views, W, top = network
    K = K_of(W, top, views)

    def loss(one: Tensor, other: Tensor) -> Tensor:
        anchor = forward(one, top, views[0, 0], normalize)
        others = [views[0, 1], *views[1:, 0]]
        r = torch.stack([(anchor - forward(other, top, x, normalize)).square().sum() / 2 for x in others])
        return torch.logsumexp(-r / TAU, 0) + r[0] / TAU

    with torch.no_grad():
        anchor = forward(W, top, views[0, 0], normalize)
        r = (anchor - forward(W, top, torch.stack([views[0, 1], *views[1:, 0]]), normalize)).square().sum(-1) / 2
        slopes = -torch.softmax(-r / TAU, 0)[1:] / TAU
    closed = contrastive.sample_gradient(K[0, 0], K[0, 1], K[1:, 0], slopes, vec(W), normalize)
    torch.testing.assert_close(closed, gradient(W, loss))


@pytest.mark.parametrize("normalize", [False, True])
def test_simple_operator(network, normalize: bool) -> None:  # type: ignore[no-untyped-def]
    """Theorem 3 and Eq. 56: minus the gradient of E[r_+ - r_-] over all views of all pairs."""
    _, views, W, top = network
    K = K_of(W, top, views)

    def loss(one: Tensor, other: Tensor) -> Tensor:
        anchors, rest = forward(one, top, views, normalize), forward(other, top, views, normalize)
        r = (anchors[:, :, None, None] - rest[None, None]).square().sum(-1) / 2  # [x, x1, x', x-]
        return torch.stack([r[x, :, x].mean() for x in range(SAMPLES)]).mean() - r.mean()

    operator = contrastive.simple_operator(K, vec(W) if normalize else None)
    torch.testing.assert_close(operator @ vec(W), -gradient(W, loss))
    symmetric = torch.allclose(operator, operator.T)
    assert symmetric != normalize


@pytest.mark.parametrize("loss_name", ["simple", "triplet", "nce"])
def test_theorem_4_with_its_residue_is_the_gradient(network, loss_name: str) -> None:  # type: ignore[no-untyped-def]
    """Eqs. 57-79: operator and residue together are the exact update; without augmentation there is no residue."""
    clean, views, W, top = network
    outputs = forward(W, top, clean, False)

    def loss(one: Tensor, other: Tensor, views: Tensor) -> Tensor:
        total = torch.zeros((), dtype=D)
        n = views.shape[1]
        anchors, rest = forward(one, top, views, False), forward(other, top, views, False)
        for x, y in itertools.product(range(SAMPLES), repeat=2):
            for i, j, k in itertools.product(range(n), repeat=3):
                r_pos = (anchors[x, i] - rest[x, j]).square().sum() / 2
                r_neg = (anchors[x, i] - rest[y, k]).square().sum() / 2
                if loss_name == "simple":
                    total = total + r_pos - r_neg
                elif loss_name == "triplet":
                    total = total + TAU * torch.nn.functional.softplus((r_pos - r_neg + MARGIN) / TAU)
                else:
                    total = total + torch.nn.functional.softplus((r_pos - r_neg) / TAU)
        return total / (SAMPLES**2 * n**3)

    for population, has_residue in ((views, loss_name != "simple"), (clean[:, None], False)):
        K = K_of(W, top, population)
        operator = contrastive.weighted_operator(K, outputs, loss_name, TAU, MARGIN)
        theta = contrastive.residue(K, vec(W), outputs, loss_name, TAU, MARGIN)
        exact = -gradient(W, lambda one, other, population=population: loss(one, other, population))
        torch.testing.assert_close((operator + theta) @ vec(W), exact)
        assert (theta.abs().max() > 1e-4) == has_residue
        assert torch.linalg.eigvalsh(operator).min() > -1e-12


def test_expected_pair_gradient(network) -> None:  # type: ignore[no-untyped-def]
    """Eq. 65: the mean over the views of a pair of samples; symmetrised over the pair it is Eq. 67."""
    _, views, W, top = network
    K = K_of(W, top, views)
    xi = 0.37
    by_views = torch.stack(
        [-xi * K[0, i] @ ((K[0, j] - K[1, k]).T @ vec(W)) for i, j, k in itertools.product(range(VIEWS), repeat=3)]
    ).mean(0)
    mean = K.mean(1)
    closed = contrastive.expected_pair_gradient(mean[0], mean[1], xi, vec(W))
    torch.testing.assert_close(closed, by_views)
    both = closed + contrastive.expected_pair_gradient(mean[1], mean[0], xi, vec(W))
    gap = mean[0] - mean[1]
    torch.testing.assert_close(both, -xi * gap @ gap.T @ vec(W))


@pytest.mark.parametrize("loss_name", ["triplet", "nce"])
@pytest.mark.parametrize("strength", [0.01, 0.1, 1.0])
def test_the_residue_is_bounded(loss_name: str, strength: float) -> None:
    """Eq. 79 on random networks and populations, whose clean samples are not the views' means."""
    for seed in range(12):
        clean = randn(SAMPLES, N_IN, seed=10 * seed)
        views = clean[:, None] + strength * (randn(SAMPLES, VIEWS, N_IN, seed=10 * seed + 1) + 0.5)
        W, top = randn(HIDDEN, N_IN, seed=10 * seed + 2), randn(OUTPUTS, HIDDEN, seed=10 * seed + 3)
        K, outputs = K_of(W, top, views), forward(W, top, clean, False)
        for tau in (0.2, 1.0):
            theta = contrastive.residue(K, vec(W), outputs, loss_name, tau, MARGIN)
            norm = torch.linalg.matrix_norm(theta, ord=2)
            assert norm <= contrastive.residue_bound(K, vec(W), outputs, loss_name, tau)


def test_the_residue_shrinks_with_the_augmentation() -> None:
    """Its order is that of the spread of the views: a tenth of it, a tenth of the residue (and of the bound)."""
    clean, W, top = randn(SAMPLES, N_IN, seed=0), randn(HIDDEN, N_IN, seed=2), randn(OUTPUTS, HIDDEN, seed=3)
    noise = randn(SAMPLES, VIEWS, N_IN, seed=1)
    outputs = forward(W, top, clean, False)
    norms, bounds = [], []
    for strength in (1e-2, 1e-3):
        K = K_of(W, top, clean[:, None] + strength * noise)
        norms.append(torch.linalg.matrix_norm(contrastive.residue(K, vec(W), outputs, "nce", TAU), ord=2).item())
        bounds.append(contrastive.residue_bound(K, vec(W), outputs, "nce", TAU).item())
    assert 5 < norms[0] / norms[1] < 20 and 5 < bounds[0] / bounds[1] < 20


def test_the_printed_residue_bound_misses_a_term() -> None:
    """Two samples with equal outputs, moved apart by an augmentation without variance: printed, the bound is 0."""
    W, top = torch.eye(2, dtype=D), torch.eye(2, dtype=D)
    clean = torch.ones(2, 2, dtype=D)
    views = torch.tensor([[[1.5, 1.0]], [[1.0, 1.5]]], dtype=D)
    K, outputs = K_of(W, top, views), forward(W, top, clean, False)
    norm = torch.linalg.matrix_norm(contrastive.residue(K, vec(W), outputs, "nce", 0.5), ord=2)
    assert norm > 1e-3
    assert contrastive.residue_bound(K, vec(W), outputs, "nce", 0.5, as_printed=True) == 0
    assert norm <= contrastive.residue_bound(K, vec(W), outputs, "nce", 0.5)


def test_a_linear_neuron_finds_the_principal_direction_of_the_preserved_subspace() -> None:
    """DDN-v1 Sec. 4.1: L_simp by samples, with a Gaussian matrix scrambling the nuisance subspace."""
    basis = torch.linalg.qr(randn(5, 5, seed=0)).Q
    U, Q = basis[:, :2], basis[:, 2:] @ basis[:, 2:].T  # nuisance, and the projector onto the rest
    root = randn(5, 5, seed=1)
    covariance = root @ root.T + 20 * U @ U.T  # the nuisance has the largest variance
    n = 400_000
    x = randn(n, 5, seed=2) @ torch.linalg.cholesky(covariance).T
    views = [x @ Q + torch.einsum("nij,nj->ni", randn(n, 2, 2, seed=s), x @ U) @ U.T for s in (3, 4)]
    # E[K K_+^T] - E[K K_-^T], K = x'; the negatives are the positives of other samples.
    operator = views[0].T @ views[1] / n - views[0].T @ views[1].roll(1, 0) / n
    closed = contrastive.preserved_operator(covariance, Q)
    assert (operator - closed).abs().max() < 0.02 * covariance.abs().max()
    w = randn(5, seed=5)
    for _ in range(2000):
        w = w + 0.01 * closed @ w
        w = w / w.norm()
    inside = torch.linalg.eigh(closed)
    assert abs(float(w @ inside.eigenvectors[:, -1])) == pytest.approx(1, abs=1e-6)
    assert float((w @ U).norm()) < 1e-6
    assert float((torch.linalg.eigh(covariance).eigenvectors[:, -1] @ U).norm()) > 0.9  # plain PCA would fall for it
