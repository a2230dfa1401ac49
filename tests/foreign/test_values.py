"""On other people's modules every logged value is the true one, or there is a warning that says what to pass."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from lightning_ssl.callbacks import CovarianceOperatorNorm
from tests.foreign.data import Items
from tests.foreign.runs import build, catch, compare, history, loaders, ours, trainer, watch
from tests.foreign.truth import Caught
from tests.foreign.zoo import CASES, parametrized


@lru_cache(maxsize=1)
def caught(name: str) -> Caught:
    return catch(CASES[name])


def told(text: list[str]) -> str:
    return "\n".join(text)


@pytest.mark.parametrize("name", parametrized(list(CASES.values())))
def test_values(name):
    case = CASES[name]
    watched = watch(case)
    problems = compare(case, caught(name), watched, bare=False)
    assert not problems, f"{told(problems)}\nwarnings: {told(ours(watched))}"


BARE = [case for case in CASES.values() if (case.declared or case.bare_features) and case.bare != "skip"]


@pytest.mark.parametrize("name", parametrized(BARE))
def test_values_without_arguments(name):
    case = CASES[name]
    watched = watch(case, bare=True)
    problems = compare(case, caught(name), watched, bare=True)
    assert not problems, f"{told(problems)}\nwarnings: {told(ours(watched))}"


def test_operator_stays_while_no_weight_moves():
    """The running statistics of BatchNorm settle over many forwards; what the step's network does is the same."""
    case = CASES["batch_norm"]
    built = build(case)
    built.module.configure_optimizers = lambda: torch.optim.SGD(built.module.parameters(), lr=0.0)
    built.train = Items(built.train.items[: case.batch] * 20)
    log = history(case.package)
    operator = CovarianceOperatorNorm(["backbone.0", "projector"], "backbone", "projector", exact=True, every_n_steps=1)
    run = trainer(case, [operator], log, limit_train_batches=20)
    run.fit(built.module, **loaders(case, built))
    for layer in ("backbone.0", "projector"):
        values = [value for _, value in log.series(f"cov_op/{layer}")]
        assert len(values) == 20
        assert values == pytest.approx([values[0]] * 20, rel=1e-5)
