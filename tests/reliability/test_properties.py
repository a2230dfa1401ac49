"""What must hold for any data: across ranks, across chunk sizes, and for the gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssl import functional as F
from lightning_ssl import metrics
from tests.ddp import run_ranks

few = settings(max_examples=6, deadline=None, derandomize=True)


def draw(seed, rows, dim):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64)


# Ranks ----------------------------------------------------------------------------------------------------------------


def on_rank(rank, world_size, seed, rows, dim, order):
    """Every metric, this rank holding the shard that `order` gives it."""
    x = draw(seed, rows, dim)
    y, labels = x.sin(), torch.arange(rows) % 3
    mine = torch.arange(order[rank], rows, world_size)
    made = {
        "uniformity": metrics.Uniformity(),
        "alignment": metrics.Alignment(),
        "rank": metrics.EffectiveRank(),
        "moment": metrics.SecondMoment(),
        "bound": metrics.CorrelationBound(num_classes=3),
        "knn": metrics.KNNAccuracy(3, k=2),
    }
    made["alignment"].update(x[mine], y[mine])
    for name in ("uniformity", "rank", "moment", "bound"):
        made[name].update(x[mine])
    made["knn"].update(x[mine], labels[mine], mine, split="bank")
    made["knn"].update(y[mine], labels[mine], mine, split="query")
    return {name: metric.compute() for name, metric in made.items()}


@pytest.mark.slow
@few
@given(st.integers(0, 10**6), st.integers(6, 17), st.integers(2, 5), st.permutations([0, 1, 2]))
def test_which_rank_holds_which_rows_changes_nothing(seed, rows, dim, order):
    reference = on_rank(0, 1, seed, rows, dim, [0])
    for values in run_ranks(3, on_rank, seed, rows, dim, order):
        for name, value in values.items():
            torch.testing.assert_close(value, reference[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


# Chunks ---------------------------------------------------------------------------------------------------------------


@few
@given(st.integers(0, 10**6), st.integers(513, 1100), st.integers(2, 6), st.floats(0.5, 4.0))
def test_uniformity_in_blocks_is_that_of_all_pairs_at_once(seed, rows, dim, t):
    x = draw(seed, rows, dim)
    unit = x / x.norm(dim=1, keepdim=True)
    distances = torch.pdist(unit).square()
    expected = torch.logsumexp(-t * distances, 0) - math.log(len(distances))
    torch.testing.assert_close(F.uniformity(x, t), expected, rtol=1e-9, atol=1e-9)


@few
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 60))
def test_neighbours_found_query_by_query_are_those_found_at_once(seed, k, cut):
    bank, queries = draw(seed, 90, 5), draw(seed + 1, 60, 5)
    labels = torch.arange(90) % 4
    whole = F.knn_predict(queries, bank, labels, 4, k=k)
    parts = [F.knn_predict(part, bank, labels, 4, k=k) for part in queries.split(cut)]
    assert torch.equal(torch.cat(parts), whole)
    cosines = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(bank).T
    top = cosines.topk(k, dim=1)
    votes = torch.zeros(60, 4, dtype=torch.float64)
    for i in range(60):
        for value, j in zip(top.values[i], top.indices[i], strict=True):
            votes[i, labels[j]] += math.exp(value / 0.1)
    assert torch.equal(whole[:, 0], votes.argmax(1))


@few
@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_batches_give_the_same_moment_and_bound(seed, sizes):
    x = draw(seed, sum(sizes) + 2, 4)
    for metric, expected in (
        (metrics.SecondMoment(), F.second_moment(x)),
        (metrics.CorrelationBound(4, unbiased=False), F.correlation_loss(x)),
    ):
        for part in x.split([*sizes, 2]):
            metric.update(part)
        value = metric.compute()
        value = value["l_cor"] if isinstance(value, dict) else value
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)


# Gradients ------------------------------------------------------------------------------------------------------------

PAIRS = {
    "alignment": lambda x, y: F.alignment(x, y),
    "alignment, alpha 3": lambda x, y: F.alignment(x, y, alpha=3.0),
    "cross_model_loss": F.cross_model_loss,
    "byol_loss": lambda x, y: F.byol_loss(x, torch.ones_like(x)),  # the target has no gradient
    "barlow_twins_loss": lambda x, y: F.barlow_twins_loss(x, y, 0.1),
    "squared_distance": F.squared_distance,
    "effective_predictor": F.effective_predictor,
    "uniformity": lambda x, y: F.uniformity(x) + F.uniformity(y, t=1.0),
    "effective_rank": lambda x, y: F.effective_rank(x),
    "correlation_loss": lambda x, y: F.correlation_loss(x, unbiased=True),
    "commutator_norm": lambda x, y: F.commutator_norm(x.T @ x, x.T @ y),
    "asymmetry": lambda x, y: F.asymmetry(x.T @ y),
    "info_nce_loss": lambda x, y: F.info_nce_loss(x[:, 0].square(), y.square(), 0.5, beta=0.3),
    "soft_triplet_loss": lambda x, y: F.soft_triplet_loss(x[:, 0].square(), y.square(), 0.2, 0.5),
}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), rows=st.integers(5, 8), dim=st.integers(2, 4))
def test_gradients(name, seed, rows, dim):
    x, y = (draw(seed + i, rows, dim).requires_grad_() for i in range(2))
    assert torch.autograd.gradcheck(lambda a, b: PAIRS[name](a, b) + 0 * (a.sum() + b.sum()), (x, y), atol=1e-5)
