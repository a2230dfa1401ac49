"""Invariances, bounds and agreements that must hold for any features, tried on generated ones."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssl.functional import (
    alignment,
    asymmetry,
    commutator_norm,
    correlation_loss,
    direct_predictor,
    effective_predictor,
    effective_rank,
    eigenspace_alignment,
    info_nce_loss,
    knn_predict,
    pair_weight,
    uniformity,
)
from lightning_ssl.metrics import Alignment, EffectiveRank, SecondMoment, Uniformity

settings.register_profile("suite", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("suite")


@st.composite
def features(draw, min_rows=2, max_rows=12, max_dim=6):
    rows, dim = draw(st.integers(min_rows, max_rows)), draw(st.integers(2, max_dim))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x += 3 * torch.randn(dim, generator=generator, dtype=torch.float64)  # far from the origin
    return x


def rotation(dim, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@given(features(), st.integers(0, 100))
def test_rotations_change_nothing(x, seed):
    q = rotation(x.shape[1], seed)
    y = x.flip(0) + 0.1
    close(uniformity(x @ q), uniformity(x))
    close(alignment(x @ q, y @ q), alignment(x, y))
    close(effective_rank(x @ q), effective_rank(x))
    close(correlation_loss(x @ q), correlation_loss(x))


@given(features(min_rows=6), st.integers(0, 100))
def test_rotating_the_space_rotates_the_predictor_with_it(x, seed):
    q = rotation(x.shape[1], seed)
    F, W = x.T @ x, torch.randn(x.shape[1], x.shape[1], dtype=torch.float64)
    ours, turned = eigenspace_alignment(F, W), eigenspace_alignment(q.T @ F @ q, q.T @ W @ q)
    for a, b in zip(ours, turned, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    close(commutator_norm(q.T @ F @ q, q.T @ W @ q), commutator_norm(F, W))
    torch.testing.assert_close(q.T @ direct_predictor(F) @ q, direct_predictor(q.T @ F @ q), rtol=1e-5, atol=1e-6)


@given(features(), st.floats(1e-3, 1e3))
def test_scale_changes_nothing_where_promised(x, scale):
    y = x.flip(0) + 0.1
    close(uniformity(scale * x), uniformity(x))
    close(alignment(scale * x, y), alignment(x, y))
    close(effective_rank(scale * x), effective_rank(x))
    close(correlation_loss(scale * x), correlation_loss(x))


@given(features(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(x, random):
    order = list(range(len(x)))
    random.shuffle(order)
    close(uniformity(x[order]), uniformity(x))
    close(effective_rank(x[order]), effective_rank(x))
    close(correlation_loss(x[order]), correlation_loss(x))
    close(effective_predictor(x[order], x[order].sin()), effective_predictor(x, x.sin()))


@given(features())
def test_bounds(x):
    assert -8 - 1e-9 <= uniformity(x) <= 1e-9  # t = 2, distances at most 2
    assert 0 <= alignment(x, x.flip(0)) <= 4 + 1e-9
    assert 1 - 1e-9 <= effective_rank(x) <= min(x.shape) + 1e-9
    assert correlation_loss(x) >= 0
    W = x[:, :2].T @ x[:, :2].flip(0)
    assert 0 <= asymmetry(W) <= 2 + 1e-9
    assert 0 <= commutator_norm(W @ W.T, W) <= 2


@given(st.lists(st.floats(0, 50), min_size=1, max_size=8), st.floats(0, 50), st.floats(0.05, 2))
def test_info_nce_is_positive_and_falls_as_negatives_leave(negatives, r_pos, tau):
    r_pos, r_neg = torch.tensor([r_pos], dtype=torch.float64), torch.tensor([negatives], dtype=torch.float64)
    near, far = info_nce_loss(r_pos, r_neg, tau), info_nce_loss(r_pos, r_neg + 1, tau)
    assert near >= far >= 0
    weights = pair_weight(r_neg, "nce", tau, joint=True)
    assert (weights >= 0).all() and weights.sum() <= 1 / tau + 1e-9


@given(features(min_rows=3), st.integers(1, 12))
def test_neighbours_of_the_bank_are_the_bank(x, k):
    labels = torch.arange(len(x))
    assert (knn_predict(x, x, labels, len(x), k=1)[:, 0] == labels).all()
    ranked = knn_predict(x, x, labels, len(x), k=k)
    assert (ranked.sort(dim=1).values == labels).all()


@given(features(min_rows=4), st.data())
def test_any_split_into_batches_gives_the_same_metric(x, data):
    cut = data.draw(st.integers(1, len(x) - 1))
    y = x.cos()
    for metric, value in ((Uniformity(), uniformity(x)), (EffectiveRank(), effective_rank(x))):
        metric.update(x[:cut])
        metric.update(x[cut:])
        torch.testing.assert_close(metric.compute(), value, rtol=1e-6, atol=1e-6)
    pairs, moment = Alignment(), SecondMoment()
    for part in (slice(0, cut), slice(cut, None)):
        pairs.update(x[part], y[part])
        moment.update(x[part])
    close(pairs.compute(), alignment(x, y))
    close(moment.compute(), x.T @ x / len(x))
    assert math.isclose(moment.compute().trace().item(), x.square().sum().item() / len(x))
