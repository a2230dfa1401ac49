"""The streaming covariance operator on real processes against one process on the concatenated data."""

import pickle

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection

from lightning_ssl.functional import covariance_operator_norms
from lightning_ssl.metrics import CovarianceOperator
from tests.ddp import run_ranks


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 48),
        nn.ReLU(),
        nn.Linear(48, 16),
    )


def batches(n: int = 24) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(n, 3, 8, 8) + 2
    return [x + 0.3 * torch.randn_like(x) for _ in range(2)]


def assert_same(actual, expected, rtol=1e-5):
    assert list(actual) == list(expected)
    for name in expected:
        for field in ("inter_norm", "inter_trace", "inter_top", "intra_norm", "intra_trace"):
            a, b = getattr(actual[name], field), getattr(expected[name], field)
            torch.testing.assert_close(a, b, rtol=rtol, atol=0, msg=lambda m, n=name, f=field: f"{n}.{f}: {m}")


def shard(rank, world, sizes):
    start = sum(sizes[:rank])
    metric = CovarianceOperator()
    views = [view[start : start + sizes[rank]] for view in batches()]
    metric.update(network(), views if sizes[rank] else [])
    first = metric.compute()
    metric.reset()
    metric.update(network(), views)  # again, with tensors of no rows where there are none
    return first, metric.compute()


@pytest.mark.parametrize("sizes", [(17, 7), (0, 24), (10, 14, 0), (3, 1, 20)])
def test_any_number_of_ranks_gives_the_value_of_the_concatenated_data(sizes):
    expected = covariance_operator_norms(network(), batches())
    for results in run_ranks(len(sizes), shard, sizes):
        for result in results:
            assert_same(result, expected)


def test_batches_add_up():
    metric = CovarianceOperator()
    for part in (slice(0, 16), slice(16, 17), slice(17, 24)):
        metric(network(), [view[part] for view in batches()])
    assert_same(metric.compute(), covariance_operator_norms(network(), batches()))


def bad_on_one_rank(rank, world):
    views = batches(8)
    if rank == 1:
        views = views[:1]
    try:
        CovarianceOperator().update(network(), views)
    except ValueError as error:
        return str(error)


def non_finite_on_one_rank(rank, world):
    views = batches(4)
    if rank == 1:
        views[0][0] = float("nan")
    try:
        CovarianceOperator().update(network(), views)
    except ValueError as error:
        return str(error)


def test_an_error_on_one_rank_is_raised_on_all():
    assert all("at least 2 batches" in message for message in run_ranks(2, bad_on_one_rank))
    assert all("non-finite" in message for message in run_ranks(2, non_finite_on_one_rank))


def test_pickle_clone_reset_and_collection():
    expected = covariance_operator_norms(network(), batches())
    metric = CovarianceOperator()
    metric.update(network(), [view[:16] for view in batches()])
    for copy in (pickle.loads(pickle.dumps(metric)), metric.clone()):
        copy.update(network(), [view[16:] for view in batches()])
        assert_same(copy.compute(), expected)
    metric.reset()
    metric.update(network(), batches())
    assert_same(metric.compute(), expected, rtol=1e-12)
    collection = MetricCollection({"all": CovarianceOperator(), "last": CovarianceOperator(layers=["9"], seed=1)})
    collection.update(network(), batches())
    values = collection.compute()
    assert {key.split("_")[-1] for key in values} == {"0", "3", "7", "9"}


def test_bad_use():
    metric = CovarianceOperator()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="seen no rows"):
        metric.compute()
    metric.update(network(), [view[:1] for view in batches()])
    with pytest.raises(ValueError, match="at least 2"):
        metric.compute()
    with pytest.raises(ValueError, match="must be 2, as in the first"):
        metric.update(network(), batches() + batches()[:1])
    with pytest.raises(ValueError, match="did you mean"):
        CovarianceOperator(layers=["77"]).update(network(), batches())
    with pytest.raises(ValueError, match="principal"):
        CovarianceOperator(directions=4, principal=5)
