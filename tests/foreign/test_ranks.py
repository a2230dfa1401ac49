"""What is logged of other people's modules does not depend on the number of ranks."""

from __future__ import annotations

import pytest

from tests.ddp import run_ranks
from tests.foreign import runs
from tests.foreign.zoo import CASES, parametrized

ON_RANKS = [case for case in CASES.values() if case.ranks]


def logged(rank: int, ranks: int, name: str) -> list[tuple[int, dict[str, float]]]:
    case = CASES[name]
    built = runs.build(case)
    history = runs.history(case.package)
    runs.fit(case, built, runs.watchers(case), history, rank, ranks)
    return history.rows


@pytest.mark.slow
@pytest.mark.parametrize("name", parametrized(ON_RANKS))
def test_two_ranks_log_what_one_does(name):
    alone = run_ranks(1, logged, name)[0]
    together = run_ranks(2, logged, name)[0]  # rank 0 holds the logger
    assert [(step, row.keys()) for step, row in together] == [(step, row.keys()) for step, row in alone]
    assert any("train/uniformity" in row for _, row in alone)
    for (step, row), (_, expected) in zip(together, alone, strict=True):
        for key, value in row.items():
            relative = 1e-3 if key.startswith("cov_op") else 1e-4
            assert value == pytest.approx(float(expected[key]), rel=relative, abs=1e-6), (step, key)
