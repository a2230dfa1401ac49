"""One exchange carries rows, counts and errors; and what it brings is what was sent."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from lightning_ssl import distributed
from lightning_ssl.distributed import Board, RankError, Together, Vote, deal, exchange
from tests.ddp import run_ranks


def value_of(rank):
    rows = torch.arange(3 * rank, dtype=torch.float64).view(rank, 3)
    return {
        "rows": rows,
        "half": [torch.full((2, 2), rank, dtype=torch.bfloat16)],
        "flag": torch.tensor(rank > 0),
        "last": torch.full((3,), rank / 3, dtype=torch.float64),  # behind a single byte
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
            assert found["flag"].item() == (rank > 0) and torch.equal(found["last"], expected["last"])


def test_a_problem_is_raised_on_all_ranks_in_its_own_words():
    assert set(run_ranks(3, send, (1,))) == {"rank 1: bad batch on 1"}
    assert set(run_ranks(2, send, (0, 1))) == {"rank 0: bad batch on 0; rank 1: bad batch on 1"}
    assert run_ranks(1, send, (0,)) == ["bad batch on 0"]


def gather(rank, world_size):
    """Each fails once on one rank: what makes the value, and the room for all of them."""
    together, load = Together(torch.device("cpu")), distributed._Parcel.load
    broken, told = [rank == 1], []

    def fails(*args):
        if broken[0]:
            broken[0] = False
            raise MemoryError("no room")
        return load(*args) if args else value_of(rank)

    distributed._Parcel.load = fails
    try:
        for make in (fails, lambda: value_of(rank)):
            broken[0] = rank == 1
            with pytest.raises(RankError) as caught:
                together.gather(make)
            told.append(str(caught.value))
        return told, together.gather(fails)
    finally:
        distributed._Parcel.load = load


def test_what_ranks_gather_needs_room_on_all_of_them():
    for told, received in run_ranks(2, gather):
        assert told == ["rank 1: MemoryError: no room"] * 2
        for rank, found in enumerate(received):
            expected = value_of(rank)
            assert torch.equal(found["rows"], expected["rows"]) and torch.equal(found["half"][0], expected["half"][0])
            assert found["flag"].item() == (rank > 0) and found["n"] == rank


def stack(rank, world_size):
    return Together(torch.device("cpu")).each(lambda: [torch.full((2,), rank / 3), torch.tensor(rank)], [(2,), ()])


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_every_small_tensor_by_one_sum(world_size):
    for pair, number in run_ranks(world_size, stack):
        ranks = torch.arange(world_size, dtype=torch.float64)
        assert torch.equal(number, ranks) and torch.equal(pair[:, 1], torch.stack([r / 3 for r in ranks.float()]))


def without_a_buffer(rank, world_size):
    """The memory for what is exchanged is not to be had while the rank's own part stands there."""
    zeros, left = torch.zeros, [rank == 1]

    def scarce(*args, **kwargs):
        if left[0]:
            left[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*args, **kwargs)

    torch.zeros = scarce
    together = Together(torch.device("cpu"))
    try:
        together.sum(lambda: [torch.ones(5)], [(5,)])
    except RankError as error:
        return str(error), together.sum(lambda: [torch.ones(5)], [(5,)])[0].tolist()
    finally:
        torch.zeros = zeros


def test_an_exchange_for_which_one_rank_lacks_memory_is_an_error_on_all():
    for told, after in run_ranks(2, without_a_buffer):
        assert told == "rank 1: OutOfMemoryError: CUDA out of memory" and after == [2.0] * 5


def send_beside(rank, world_size):
    """Where the ranks' own group has no part for the host, as NCCL's has not, plain data goes by one that has."""
    before = distributed.host_group()
    distributed.dist.get_backend_config = lambda group=None: "cuda:nccl"
    found = [exchange({"n": rank, "x": torch.full((2,), rank)})[1 - rank]["n"] for _ in range(2)]
    group = distributed.host_group()
    return before, found, group is distributed.host_group(), group is not None, distributed.dist.get_backend(group)


def test_plain_data_stays_on_the_hosts():
    for rank, (before, found, same, own, backend) in enumerate(run_ranks(2, send_beside)):
        assert before is None and found == [1 - rank] * 2
        assert same and own and backend == "gloo"


def test_rows_are_dealt_as_a_sampler_deals_them():
    rows = torch.arange(11)
    assert torch.equal(deal([rows[r::3] for r in range(3)]), rows)
    assert torch.equal(deal([rows[:0], rows]), rows)


def vote(rank, world_size):
    """At the third call rank 1 asks for 15, at the fifth the last rank for -1."""
    asked, found = Vote(), []
    asked.open(timedelta(seconds=30))
    for call in range(8):
        mine = 15 if (call, rank) == (2, 1) else -1 if (call, rank) == (4, world_size - 1) else 0
        found.append(asked.cast(mine, rank * call))
    asked.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_rank_asks_for_all_know_one_call_later(world_size):
    most = world_size - 1
    asked = {3: 15, 5: -1}
    expected = [[asked.get(call, 0), most * max(0, call - 1)] for call in range(8)]
    assert run_ranks(world_size, vote) == [expected] * world_size


def votes(rank, world_size):
    return [vote(rank, world_size) for _ in range(30)]


def test_a_vote_that_ends_leaves_nobody_waiting():
    """Its group's threads end while the interpreter is held: with torch 2.6 a tensor of theirs once made them wait."""
    first, second = run_ranks(2, votes, timeout=60)
    assert first == second and len(first) == 30


def note(rank, world_size, silent, name):
    board = Board(name)
    if rank in silent:
        return None
    found = board.collect(f"from {rank}", timedelta(seconds=1.0 if silent else 30.0))
    words = board.read()
    if not silent:
        torch.distributed.barrier()
        board.post(f"rank {rank} ended")
        torch.distributed.barrier()
        words = words, board.read()
    return found, words


def test_notes_of_ranks_that_answer_in_time():
    everyone = run_ranks(3, note, (), "all")
    assert all(found == {rank: f"from {rank}" for rank in range(3)} for found, _ in everyone)
    before, after = zip(*(words for _, words in everyone), strict=True)
    assert set(before) == {""} and len(set(after)) == 1 and "ended" in after[0]  # the first one's last words
    found = run_ranks(3, note, (1,), "some")
    assert found[1] is None and found[0] == found[2] == ({0: "from 0", 2: "from 2"}, "")
