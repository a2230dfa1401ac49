"""The losses against brute force, autograd, closed forms and lightly."""

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_ssl.functional import (
    barlow_twins_loss,
    byol_loss,
    cross_model_loss,
    exact_contrastive_loss,
    info_nce_loss,
    pair_weight,
    simple_contrastive_loss,
    soft_triplet_loss,
    squared_distance,
)

N, H, D = 6, 5, 4


@pytest.fixture
def distances():
    r_pos = torch.rand(N, dtype=torch.float64, requires_grad=True)
    r_neg = (2 * torch.rand(N, H, dtype=torch.float64)).requires_grad_()
    return r_pos, r_neg


def loop_mean(r_pos, r_neg, one):
    """The mean over the batch of `one(r_pos_i, [r_neg_ik for k])`, one Python float at a time."""
    rows = [one(p, n) for p, n in zip(r_pos.tolist(), r_neg.tolist(), strict=True)]
    return sum(rows) / len(rows)


def test_squared_distance_is_half_the_square_and_broadcasts():
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randn(H, D, dtype=torch.float64)
    r = squared_distance(x[:, None], y[None])
    expected = [[sum((a - b) ** 2 for a, b in zip(u, v, strict=True)) / 2 for v in y.tolist()] for u in x.tolist()]
    torch.testing.assert_close(r, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("beta", [0.0, -0.5, 0.2])
def test_simple_loss(distances, beta):
    expected = loop_mean(*distances, lambda p, n: (1 + beta) * p - sum(n) / len(n))
    assert simple_contrastive_loss(*distances, beta=beta).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("margin", "tau"), [(0.0, 1.0), (1.0, 0.2)])
def test_triplet_loss(distances, margin, tau):
    expected = loop_mean(
        *distances, lambda p, n: sum(tau * math.log(1 + math.exp((p - v + margin) / tau)) for v in n) / len(n)
    )
    assert soft_triplet_loss(*distances, margin=margin, tau=tau).item() == pytest.approx(expected, abs=1e-12)


def test_triplet_loss_becomes_the_hinge_as_tau_vanishes(distances):
    r_pos, r_neg = distances
    hinge = F.relu(r_pos[:, None] - r_neg + 0.3).mean()
    torch.testing.assert_close(soft_triplet_loss(r_pos, r_neg, margin=0.3, tau=1e-6), hinge, atol=1e-5, rtol=0)


@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_info_nce(distances, beta):
    tau = 0.5

    def one(p, n):
        partition = math.exp(-p / tau) + sum(math.exp(-v / tau) for v in n)
        return -math.log(math.exp(-p / tau) / partition) + beta * p

    assert info_nce_loss(*distances, tau=tau, beta=beta).item() == pytest.approx(loop_mean(*distances, one), abs=1e-12)


def test_info_nce_on_unit_rows_is_lightlys_nt_xent():
    ntx_ent = pytest.importorskip("lightly.loss").NTXentLoss(temperature=0.5)
    z1, z2 = (F.normalize(torch.randn(16, 8, dtype=torch.float64), dim=1) for _ in range(2))
    z = torch.cat([z1, z2])
    r = squared_distance(z[:, None], z[None])
    n = len(z1)
    positive = (torch.arange(2 * n) + n) % (2 * n)
    negatives = torch.ones(2 * n, 2 * n, dtype=torch.bool)
    negatives[torch.arange(2 * n), torch.arange(2 * n)] = False
    negatives[torch.arange(2 * n), positive] = False
    ours = info_nce_loss(r[torch.arange(2 * n), positive], r[negatives].view(2 * n, -1), tau=0.5)
    assert abs(ours.item() - ntx_ent(z1, z2).item()) < 1e-10


@pytest.mark.parametrize(
    ("loss", "beta"),
    [
        *[(lambda p, n, beta=beta: simple_contrastive_loss(p, n, beta), beta) for beta in (0.0, -0.5, 0.2)],
        *[(lambda p, n, beta=beta: info_nce_loss(p, n, 0.5, beta), beta) for beta in (0.0, -0.5, 0.2)],
        (lambda p, n: soft_triplet_loss(p, n, 0.1, 0.5), 0.0),
        *[
            (lambda p, n, name=name: exact_contrastive_loss(p, n, 1.1 * n, name, 0.5, 0.2), 0.0)
            for name in ("simple", "triplet", "nce")
        ],
    ],
)
def test_theorem_2_the_derivatives_sum_to_beta(distances, loss, beta):
    """DDN-v2 Theorem 2 (beta = 0): positive in r+, negative in each r-, sum 0; and sum beta in Sec. 4.2."""
    g_pos, g_neg = torch.autograd.grad(loss(*distances) * N, distances)
    assert (g_neg < 0).all()
    assert (g_pos > min(beta, 0)).all()
    torch.testing.assert_close(g_pos + g_neg.sum(dim=1), torch.full((N,), beta, dtype=torch.float64))


@pytest.mark.parametrize("name", ["simple", "triplet", "nce"])
def test_pair_weight_is_the_loss_derivative_without_augmentation(name):
    """Eq. 6: xi(r) is minus the derivative by r- at r+ = 0, by autograd of the loss itself."""
    tau, margin = 0.3, 0.2
    r = torch.linspace(0, 3, 7, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(r)
    loss = {
        "simple": lambda: simple_contrastive_loss(zero, r),
        "triplet": lambda: soft_triplet_loss(zero, r, margin, tau),
        "nce": lambda: info_nce_loss(zero, r, tau),
    }[name]()
    (gradient,) = torch.autograd.grad(loss * len(r), r)
    torch.testing.assert_close(pair_weight(r.detach(), name, tau, margin), -gradient)


def test_joint_pair_weight_is_the_derivative_with_many_negatives(distances):
    """Eq. 80 with its missing factor 1/tau."""
    _, r_neg = distances
    (gradient,) = torch.autograd.grad(info_nce_loss(r_neg.new_zeros(N), r_neg, 0.5) * N, r_neg)
    torch.testing.assert_close(pair_weight(r_neg.detach(), "nce", 0.5, joint=True), -gradient)


def test_exact_loss_sums_weighted_differences_and_stops_the_weights_gradient(distances):
    r_pos, r_neg = distances
    r_clean = torch.rand(N, H, dtype=torch.float64, requires_grad=True)

    def one(i):
        weights = [1 / 0.5 / (1 + math.exp(r / 0.5)) for r in r_clean[i].tolist()]
        return sum(w * (r_pos[i].item() - r) for w, r in zip(weights, r_neg[i].tolist(), strict=True))

    loss = exact_contrastive_loss(r_pos, r_neg, r_clean, "nce", tau=0.5)
    assert loss.item() == pytest.approx(sum(one(i) for i in range(N)) / N, abs=1e-12)
    loss.backward()
    assert r_clean.grad is None


def test_cross_model_loss_is_two_minus_two_cosines_and_byol_stops_the_target():
    p = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    z = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    expected = (F.normalize(p, dim=1) - F.normalize(z, dim=1)).square().sum(dim=1).mean()
    torch.testing.assert_close(cross_model_loss(p, z), expected)
    torch.testing.assert_close(byol_loss(p, z), expected)
    byol_loss(p, z).backward()
    assert p.grad is not None and z.grad is None
    cross_model_loss(p, z).backward()
    assert z.grad is not None


def test_raft_theorem_5_1():
    """L_BYOL'(W) - L_RAFT(-W) = 4 beta, and both have the same encoder gradient (RAFT Theorem 5.1)."""
    alpha, beta = 0.7, 1.3
    encoder = torch.randn(D, 3, dtype=torch.float64, requires_grad=True)
    x1, x2 = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
    target = torch.randn(N, D, dtype=torch.float64)
    w = torch.randn(D, D, dtype=torch.float64)

    def total(sign, w):
        p1, p2 = (x @ encoder.T @ w.T for x in (x1, x2))
        return alpha * cross_model_loss(p1, p2) + sign * beta * cross_model_loss(p1, target)

    byol_prime, raft = total(1, w), total(-1, -w)
    assert (byol_prime - raft).item() == pytest.approx(4 * beta, abs=1e-12)
    gradients = [torch.autograd.grad(loss, encoder)[0] for loss in (byol_prime, raft)]
    torch.testing.assert_close(*gradients)


def test_barlow_twins_against_lightly():
    lightly_loss = pytest.importorskip("lightly.loss").BarlowTwinsLoss(lambda_param=0.01)
    z1 = 3 * torch.randn(16, 6, dtype=torch.float64) + 1
    z2 = z1 + 0.5 * torch.randn(16, 6, dtype=torch.float64)
    torch.testing.assert_close(barlow_twins_loss(z1, z2, 0.01), lightly_loss(z1, z2), rtol=1e-5, atol=0)


def test_barlow_twins_against_explicit_correlations():
    z1, z2 = torch.randn(32, 5, dtype=torch.float64), torch.randn(32, 5, dtype=torch.float64)
    expected = 0.0
    for i in range(5):
        for j in range(5):
            a, b = (z[:, k] - z[:, k].mean() for z, k in ((z1, i), (z2, j)))
            c = (a * b).mean() / math.sqrt((a.square().mean() + 1e-5) * (b.square().mean() + 1e-5))
            expected += float((1 - c) ** 2 if i == j else 0.2 * c**2)
    assert barlow_twins_loss(z1, z2, 0.2).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, n: simple_contrastive_loss(p, n, 0.3),
        lambda p, n: soft_triplet_loss(p, n, 0.2, 0.5),
        lambda p, n: info_nce_loss(p, n, 0.5, 0.2),
    ],
)
def test_gradcheck(distances, loss):
    assert torch.autograd.gradcheck(loss, distances)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: squared_distance(torch.ones(2, 3), torch.ones(2, 4)), "last dimension"),
        (lambda: simple_contrastive_loss(torch.ones(2, 1), torch.ones(2)), "r_pos"),
        (lambda: info_nce_loss(torch.ones(2), torch.ones(3), 0.5), "r_neg"),
        (lambda: info_nce_loss(torch.ones(2), torch.ones(2, 0), 0.5), "r_neg"),
        (lambda: info_nce_loss(torch.ones(2), torch.ones(2), 0.0), "tau"),
        (lambda: soft_triplet_loss(torch.ones(2), torch.ones(2), 0.0, -1.0), "tau"),
        (lambda: pair_weight(torch.ones(2), "hinge", 0.5), "loss"),
        (lambda: pair_weight(torch.ones(2, 2), "simple", 0.5, joint=True), "joint"),
        (lambda: exact_contrastive_loss(torch.ones(2), torch.ones(2, 3), torch.ones(2, 4), "nce", 0.5), "r_clean"),
        (lambda: byol_loss(torch.ones(2, 3), torch.ones(3, 3)), "`p` and `z`"),
        (lambda: barlow_twins_loss(torch.ones(1, 3), torch.ones(1, 3)), "2 rows"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
