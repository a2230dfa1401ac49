"""Each method's loss against loops over samples, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from lightly.loss import BarlowTwinsLoss, NTXentLoss

from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, DirectPred, SimCLR, SimSiam
from tests.methods.helpers import make_batch, norm_free


def double(method, **options):
    return norm_free(method, **options).double()


def outputs(model, batch):
    """Projections and, if there are, predictions and targets of both views."""
    z = [model.project(x) for x in batch.views]
    p = [model.predictor(x) for x in z] if hasattr(model, "predictor") else None
    t = [model.target(x) for x in batch.views] if hasattr(model, "target") else None
    return z, p, t


@pytest.fixture
def batch():
    return make_batch(rows=6, dtype=torch.float64)


def contrastive_by_loops(z1, z2, clean, per_anchor):
    """The mean over all 2N anchors of per_anchor(r_pos, r_negs, r_cleans)."""
    n, total = len(z1), 0.0
    views, twins = [*z1, *z2], [*z2, *z1]

    def r(a, b):
        return 0.5 * ((a - b) ** 2).sum()

    for i in range(2 * n):
        others = [j for j in range(2 * n) if j % n != i % n]
        total = total + per_anchor(
            r(views[i], twins[i]),
            torch.stack([r(views[i], views[j]) for j in others]),
            torch.stack([r(clean[i % n], clean[j % n]) for j in others]),
        )
    return total / (2 * n)


TAU, MARGIN = 0.4, 0.3
CONTRASTIVE = {
    "simple": lambda p, n, c: p - n.mean(),
    "triplet": lambda p, n, c: (TAU * torch.log1p(torch.exp((p - n + MARGIN) / TAU))).mean(),
    "nce": lambda p, n, c: -torch.log(torch.exp(-p / TAU) / (torch.exp(-p / TAU) + torch.exp(-n / TAU).sum())),
    "exact_simple": lambda p, n, c: (p - n).sum(),
    "exact_triplet": lambda p, n, c: ((p - n) / (1 + torch.exp((c - MARGIN) / TAU))).sum(),
    "exact_nce": lambda p, n, c: ((p - n) / (1 + torch.exp(c / TAU)) / TAU).sum(),
}


@pytest.mark.parametrize("form", ["table", "text"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_simclr(loss, normalize, form, batch):
    model = double(SimCLR, loss=loss, tau=TAU, margin=MARGIN, beta=0.7, normalize=normalize, beta_form=form)
    (z1, z2), *_ = outputs(model, batch)
    clean = model.project(batch.image).detach()
    if normalize:
        z1, z2, clean = (F.normalize(z, dim=1) for z in (z1, z2, clean))
    expected = contrastive_by_loops(z1, z2, clean, CONTRASTIVE[loss])
    r_pos = 0.5 * ((z1 - z2) ** 2).sum(1).mean()
    table = loss == "nce" and form == "table"  # the extended loss behind DDN-v2's Table 3
    expected = (expected + 0.7 / TAU * r_pos) / 1.7 if table else expected + 0.7 * r_pos
    value = model.losses(batch)["loss"]
    torch.testing.assert_close(value, expected)
    ours, theirs = (torch.autograd.grad(v, list(model.parameters())) for v in (value, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_simclr_is_the_peers_nt_xent(batch):
    model = double(SimCLR, tau=0.2)
    (z1, z2), *_ = outputs(model, batch)
    torch.testing.assert_close(model.losses(batch)["loss"], NTXentLoss(temperature=0.2)(z1, z2))


def test_simclr_exact_losses_can_weigh_jointly_or_by_augmented_distances(batch):
    joint = double(SimCLR, loss="exact_nce", tau=TAU, joint_weights=True)
    (z1, z2), *_ = outputs(joint, batch)
    z1, z2, clean = (F.normalize(z, dim=1) for z in (z1, z2, joint.project(batch.image)))

    def jointly(p, n, c):
        shares = torch.exp(-c.detach() / TAU)
        return (shares / (1 + shares.sum()) / TAU * (p - n)).sum()

    torch.testing.assert_close(joint.losses(batch)["loss"], contrastive_by_loops(z1, z2, clean, jointly))

    augmented = double(SimCLR, loss="exact_triplet", tau=TAU, margin=MARGIN, exact_weights="augmented")
    expected = contrastive_by_loops(z1, z2, z1, lambda p, n, c: ((p - n) * torch.sigmoid((MARGIN - n) / TAU)).sum())
    torch.testing.assert_close(augmented.losses(make_batch(6, dtype=torch.float64, image=False))["loss"], expected)


def test_simclr_draws_negatives_of_other_samples_without_repeats(batch):
    model = double(SimCLR, negatives=3)
    columns = model._choose_negatives(6, 0, 6)
    assert columns.shape == (12, 3)
    for i, row in enumerate(columns.tolist()):
        assert len(set(row)) == 3
        assert all(j % 6 != i % 6 and 0 <= j < 12 for j in row)
    # The same picks whichever ranks hold the rows, others in the next step.
    torch.testing.assert_close(model._choose_negatives(2, 4, 6), columns[[4, 5, 10, 11]])
    every = double(SimCLR)._choose_negatives(6, 0, 6)
    assert all(sorted(row) == [j for j in range(12) if j % 6 != i % 6] for i, row in enumerate(every.tolist()))


def test_both_views_of_a_sample_draw_their_own_few_negatives():
    first, second = double(SimCLR, negatives=3)._choose_negatives(6, 0, 6).sort(dim=1).values.split(6)
    assert (first != second).any(dim=1).sum() >= 4


def test_simclr_with_few_negatives_uses_just_these(batch):
    model = double(SimCLR, negatives=3, tau=TAU)
    (z1, z2), *_ = outputs(model, batch)
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    views, twins, total = [*z1, *z2], [*z2, *z1], 0.0
    for i, row in enumerate(model._choose_negatives(6, 0, 6).tolist()):
        logits = torch.stack([views[i] @ twins[i], *(views[i] @ views[j] for j in row)]) / TAU
        total = total - torch.log_softmax(logits, 0)[0] / 12
    torch.testing.assert_close(model.losses(batch)["loss"], total)


@pytest.mark.parametrize("predictor", ["mlp", "linear", "none"])
def test_byol(predictor, batch):
    model = double(BYOL, predictor=predictor, target_init="independent")
    _, (p1, p2), (t1, t2) = outputs(model, batch)
    expected = sum(
        ((F.normalize(p, dim=1) - F.normalize(t, dim=1)) ** 2).sum(1).mean() for p, t in ((p1, t2), (p2, t1))
    )
    torch.testing.assert_close(model.losses(batch)["loss"], expected)


def test_byol_plain_squared_error_is_the_linear_theorys(batch):
    model = double(BYOL, predictor="linear", normalize=False, target_init="independent")
    _, (p1, p2), (t1, t2) = outputs(model, batch)
    expected = (0.5 * ((p1 - t2) ** 2).sum(1).mean() + 0.5 * ((p2 - t1) ** 2).sum(1).mean()) / 2
    torch.testing.assert_close(model.losses(batch)["loss"], expected)


def test_direct_pred_has_byols_loss(batch):
    direct = double(DirectPred, target_init="independent")
    byol = double(BYOL, predictor="linear", predictor_bias=False)
    byol.load_state_dict(direct.state_dict())
    torch.testing.assert_close(direct.losses(batch)["loss"], byol.losses(batch)["loss"])


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_simsiam(stop_gradient, batch):
    model = double(SimSiam, stop_gradient=stop_gradient)
    (z1, z2), (p1, p2), _ = outputs(model, batch)
    if stop_gradient:
        z1, z2 = z1.detach(), z2.detach()
    expected = -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2
    value = model.losses(batch)["loss"]
    torch.testing.assert_close(value, expected)
    ours, theirs = (torch.autograd.grad(v, list(model.parameters())) for v in (value, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_barlow_twins(batch):
    model = double(BarlowTwins, lambd=0.02)
    (z1, z2), *_ = outputs(model, batch)
    n, d, total = *z1.shape, 0.0
    a, b = ((z - z.mean(0)) / torch.sqrt(z.var(0, correction=0) + 1e-5) for z in (z1, z2))
    for i in range(d):
        for j in range(d):
            c = (a[:, i] * b[:, j]).sum() / n
            total = total + ((1 - c) ** 2 if i == j else 0.02 * c**2)
    torch.testing.assert_close(model.losses(batch)["loss"], total)
    torch.testing.assert_close(total, BarlowTwinsLoss(lambda_param=0.02)(z1, z2), rtol=0.02, atol=0.0)  # other eps


@pytest.mark.parametrize("method,sign", [(RAFT, -1), (BYOLPrime, 1)])
def test_raft_and_byol_prime(method, sign, batch):
    model = double(method, align_weight=0.5, cross_model_weight=3.0, target_init="independent")
    _, (p1, p2), (t1, t2) = outputs(model, batch)
    p1, p2, t1, t2 = (F.normalize(x, dim=1) for x in (p1, p2, t1, t2))
    align = ((p1 - p2) ** 2).sum(1).mean()
    cross = (((p1 - t1) ** 2).sum(1).mean() + ((p2 - t2) ** 2).sum(1).mean()) / 2
    values = model.losses(batch)
    torch.testing.assert_close(values["align"], align)
    torch.testing.assert_close(values["cross_model"], cross)
    torch.testing.assert_close(values["loss"], 0.5 * align + sign * 3.0 * cross)


@pytest.mark.parametrize("tangential", [True, False])
def test_byol_prime_is_raft_with_the_opposite_predictor(tangential, batch):
    """RAFT Theorem 5.1: the losses differ by 4 beta, encoder gradients agree, predictor gradients are opposite."""
    options = {"predictor": "linear", "predictor_bias": False, "cross_model_weight": 0.7, "tangential": tangential}
    prime, raft = double(BYOLPrime, **options), double(RAFT, **options)
    raft.load_state_dict(prime.state_dict())
    with torch.no_grad():
        raft.predictor.weight.neg_()
    losses = [model.losses(batch)["loss"] for model in (prime, raft)]
    assert float((losses[0] - losses[1]).detach()) == pytest.approx(4 * 0.7)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(prime.named_parameters(), raft.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, -b.grad if name.startswith("predictor") else b.grad)


def test_byol_prime_bounds_byol(batch):
    """RAFT Theorem 4.1, for one order of the views at a time it holds for their mean too."""
    prime, byol = double(BYOLPrime, target_init="independent"), double(BYOL, target_init="independent")
    byol.load_state_dict(prime.state_dict())
    for alpha, beta in ((1.0, 1.0), (0.3, 2.0)):
        prime.align_weight, prime.cross_model_weight = alpha, beta
        bound = (1 / alpha + 1 / beta) * float(prime.losses(batch)["loss"])
        assert float(byol.losses(batch)["loss"]) / 2 <= bound
    assert math.isfinite(bound)
