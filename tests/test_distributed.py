"""One exchange carries rows, counts and errors; and what it brings is what was sent."""

from __future__ import annotations

import pytest
import torch

from lightning_ssl.distributed import RankError, deal, exchange
from tests.ddp import run_ranks


def value_of(rank):
    rows = torch.arange(3 * rank, dtype=torch.float64).view(rank, 3)
    return {
        "rows": rows,
        "half": [torch.full((2, 2), rank, dtype=torch.bfloat16)],
        "flag": torch.tensor(rank > 0),
        "n": rank,
    }


def send(rank, world_size, broken):
    problem = ValueError(f"bad batch on {rank}") if rank in broken else None
    try:
        return exchange(value_of(rank), torch.device("cpu"), problem)
    except RankError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_every_value(world_size):
    for received in run_ranks(world_size, send, ()):
        assert len(received) == world_size
        for rank, found in enumerate(received):
            expected = value_of(rank)
            assert found["n"] == rank and found["rows"].dtype == torch.float64
            assert torch.equal(found["rows"], expected["rows"]) and torch.equal(found["half"][0], expected["half"][0])
            assert found["flag"].item() == (rank > 0)


def test_a_problem_is_raised_on_all_ranks_in_its_own_words():
    assert set(run_ranks(3, send, (1,))) == {"rank 1: bad batch on 1"}
    assert set(run_ranks(2, send, (0, 1))) == {"rank 0: bad batch on 0; rank 1: bad batch on 1"}
    assert run_ranks(1, send, (0,)) == ["bad batch on 0"]


def test_rows_are_dealt_as_a_sampler_deals_them():
    rows = torch.arange(11)
    assert torch.equal(deal([rows[r::3] for r in range(3)]), rows)
    assert torch.equal(deal([rows[:0], rows]), rows)
