"""Sums by sockets between the ranks of one host: right, the same on all, and never waited for in vain."""

from __future__ import annotations

import os
import socket
import tempfile
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_ssl import _wires, distributed
from lightning_ssl.distributed import Together
from tests.ddp import Pool, run_ranks

CPU = torch.device("cpu")
PIECE = _wires._ROOM // 8


def rows(rank, size, dtype):
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def total(rank, world_size, size, dtype):
    """The sum, and how many numbers went by the group's own collective."""
    asked, all_reduce = [], dist.all_reduce
    x = rows(rank, size, dtype)
    distributed._add_up(x[:1].clone(), None)  # the first one lays the wires
    dist.all_reduce = lambda x, **kwargs: (asked.append(x.numel()), all_reduce(x, **kwargs))
    try:
        distributed._add_up(x, None)
    finally:
        dist.all_reduce = all_reduce
    return x, sum(asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_get_one_sum_to_the_last_bit(ranks, dtype):
    for size in (1, 7, PIECE // ranks + 1, PIECE // 2 + 3):
        found = run_ranks(ranks, total, size, dtype)
        expected = sum(rows(rank, size, dtype).double() for rank in range(ranks))
        for x, otherwise in found:
            assert not otherwise and torch.equal(x, found[0][0])
        tolerance = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0][0].double(), expected, rtol=tolerance, atol=tolerance)


def test_other_numbers_go_by_the_group():
    for x, otherwise in run_ranks(2, total, 9, torch.bfloat16):
        assert otherwise == 9
        torch.testing.assert_close(x, rows(0, 9, torch.bfloat16) + rows(1, 9, torch.bfloat16))


def test_what_is_large_goes_by_less_traffic():
    size = distributed._SHORT // 8
    for ranks, otherwise in ((2, 0), (3, size)):
        found = run_ranks(ranks, total, size, torch.float64)
        expected = sum(rows(rank, size, torch.float64) for rank in range(ranks))
        for x, asked in found:
            assert asked == otherwise
            torch.testing.assert_close(x, expected)


def wait(rank, world_size):
    """The sum, how often this rank gave way to others while it waited, its seconds on the processor."""
    given, give_way = [], _wires._give_way
    distributed._add_up(torch.ones(1), None)
    _wires._give_way = lambda: (given.append(1), give_way())
    try:
        dist.barrier()
        start = time.process_time()
        if rank:
            time.sleep(1.0)
        found = Together(CPU).sum(lambda: [torch.tensor(rank + 1.0)], [()])
        return float(found[0]), len(given), time.process_time() - start
    finally:
        _wires._give_way = give_way


def test_a_rank_waits_awake_for_a_moment_and_then_asleep():
    (found, given, busy), (same, *_) = run_ranks(2, wait)
    assert found == same == 3 and given > 0 and busy < 0.5


def without(rank, world_size, lacking, folder):
    """Rank 1 lacks something; the sum of all ranks all the same, whether there are wires, what is left behind."""
    groups, listen, connect, empty = dist.new_group(), socket.socket.bind, socket.socket.connect, np.empty

    def fails(*args, **kwargs):
        np.empty = empty
        raise OSError("not here") if lacking != "memory" else MemoryError("out of memory")

    if rank == 1:
        socket.socket.bind = fails if lacking == "door" else listen
        socket.socket.connect = fails if lacking == "way" else connect
        np.empty = fails if lacking == "memory" else empty
    before, tempfile.tempdir, start = tempfile.tempdir, folder, time.monotonic()
    try:
        wires = distributed._wires_of(groups)
    finally:
        tempfile.tempdir = before
        socket.socket.bind, socket.socket.connect, np.empty = listen, connect, empty
    seconds = time.monotonic() - start
    found = [Together(CPU, group=groups).sum(lambda: [torch.tensor(rank + 1.0)], [()])[0].item() for _ in range(2)]
    dist.barrier()
    return wires is None, found, seconds, os.listdir(folder)


@pytest.mark.parametrize("lacking", ["nothing", "door", "way", "memory"])
def test_where_wires_cannot_be_had_the_group_adds_up(lacking):
    with tempfile.TemporaryDirectory() as folder:  # of a short name, as a socket's must be
        for none, found, seconds, left in run_ranks(3, without, lacking, folder):
            assert none == (lacking != "nothing") and found == [6.0, 6.0] and seconds < _wires._ARRIVAL / 2
            assert not left


def among(rank, world_size):
    """The sum over the first and the last of three ranks, each with its number in that group."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    return [Together(CPU, group=group).sum(lambda: [torch.tensor(10.0**rank)], [()])[0].item() for _ in range(2)]


def test_some_of_the_ranks_have_wires_of_their_own():
    assert run_ranks(3, among) == [[101.0, 101.0], None, [101.0, 101.0]]


def lose(rank, world_size, how):
    """What the others are told, and after how long, when rank 1 goes, stands still or is interrupted in a sum."""
    wires = distributed._wires_of(None)
    distributed._add_up(torch.ones(3), None)
    if rank == 1:
        if how == "gone":
            wires.__del__()
        elif how == "interrupted":
            _wires._move = _interrupt
            with pytest.raises(KeyboardInterrupt):
                distributed._add_up(torch.ones(3), None)
        else:
            time.sleep(3)
        return None
    wires._patience = 1.0
    start = time.monotonic()
    try:
        Together(CPU).sum(lambda: [torch.ones(3)], [(3,)])
    except dist.DistNetworkError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def _interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "words", "most"),
    [("gone", "rank 1 has closed", 1), ("interrupted", "rank 1 has closed", 1), ("still", "no word from ranks [1]", 3)],
)
def test_nobody_waits_for_ever(how, words, most):
    pool = Pool(2)  # one of its own: its wires are broken
    try:
        (told, seconds), _ = pool.run(lose, (how,), 60)
    finally:
        pool.close()
    assert words in told and seconds < most
