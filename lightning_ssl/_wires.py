"""Sums over ranks that compute on the cores of one host: by sockets, watched awake.

A group's own threads find no free core there and are woken late, by some milliseconds where the clock ticks slowly.
Here nobody is woken: whoever waits for the others looks after its sockets itself.
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

# How long the others are waited for awake, in seconds.
_AWAKE = 0.01
# Bytes of all ranks that are held at a time.
_ROOM = 2**21
# Seconds in which the others connect, once all can be reached.
_ARRIVAL = 10.0
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Wires:
    """A socket to every other rank.

    Args:
        rank: This rank.
        ranks: How many there are.
        patience: Seconds without a byte after which the others are given up.
    """

    def __init__(self, rank: int, ranks: int, patience: float) -> None:
        self._rank, self._patience = rank, patience
        self._peers: dict[int, socket.socket] = {}
        # Had before any sum, so that none wants memory which one rank may lack.
        self._room = np.empty((ranks, _ROOM // ranks // 64 * 64), np.uint8)

    def __del__(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def call(self, paths: Sequence[str]) -> None:
        """Connect to the ranks before this one, where they listen."""
        for r in range(self._rank):
            self._peers[r] = socket.socket(socket.AF_UNIX)
            self._peers[r].connect(paths[r])
            self._peers[r].sendall(self._rank.to_bytes(4, "big"))
            self._peers[r].setblocking(False)

    def answer(self, door: socket.socket) -> None:
        """Let in the ranks after this one, all of which have called."""
        door.settimeout(_ARRIVAL)
        for _ in range(len(self._room) - 1 - self._rank):
            peer, _ = door.accept()
            self._peers[int.from_bytes(peer.recv(4), "big")] = peer
            peer.setblocking(False)

    def add_up(self, x: Tensor) -> None:
        """Collective: put the sum over ranks, the same to the last bit on all of them, in the place of `x` ``[n]``.

        Numbers are of single or double precision.
        """
        numbers, room = x.numpy(), self._room.view(x.numpy().dtype)
        few = room.shape[1]
        try:
            for start in range(0, len(numbers), few):
                part = numbers[start : start + few]
                rows = room[:, : len(part)]
                self._swap(part.data.cast("B"), [row.data.cast("B") for row in rows])
                if len(rows) == 2:
                    part += rows[1 - self._rank]
                else:  # in one order on all ranks
                    rows[self._rank] = part
                    np.add.reduce(rows, axis=0, out=part)
        except BaseException:  # by Ctrl-C, too: half of a message must not be taken for the next one's
            for peer in self._peers.values():
                peer.close()
            raise

    def _swap(self, own: memoryview, rows: Sequence[memoryview]) -> None:
        """Send this rank's numbers to all others, and receive theirs."""
        to_send, to_receive = dict.fromkeys(self._peers, own), {r: rows[r] for r in self._peers}
        since = time.monotonic()
        while to_send or to_receive:
            moved = sum([_move(to_send, r, self._peers[r].send) for r in [*to_send]])
            moved += sum([_move(to_receive, r, self._peers[r].recv_into) for r in [*to_receive]])
            now = time.monotonic()
            if moved:
                since = now
            elif now - since < _AWAKE:
                _give_way()
            elif now - since < self._patience:
                self._sleep(set(to_send), set(to_receive))
            else:
                left = sorted({*to_send, *to_receive})
                raise dist.DistNetworkError(f"no word from ranks {left} for {now - since:.0f} seconds")

    def _sleep(self, to_send: set[int], to_receive: set[int]) -> None:
        """Until something can be moved; for a second at most."""
        poll = select.poll()
        for r in to_send | to_receive:
            poll.register(self._peers[r], select.POLLOUT * (r in to_send) | select.POLLIN * (r in to_receive))
        poll.poll(1000)


def _move(left: dict[int, memoryview], r: int, by: Callable[[memoryview], int]) -> int:
    """Bytes of what is left for or from a rank that could be moved at once."""
    try:
        moved = by(left[r])
    except BlockingIOError:
        return 0
    except OSError:
        moved = 0
    if not moved:
        raise dist.DistNetworkError(f"rank {r} has closed its connection")
    left[r] = left[r][moved:]
    if not len(left[r]):
        del left[r]
    return moved


def connect(rank: int, ranks: int, tell: Callable[[Any], list[Any]], patience: float) -> Wires | None:
    """Collective: sockets between all ranks; None on all where some cannot be had, between hosts for one.

    Args:
        rank: This rank.
        ranks: How many there are.
        tell: Gives every rank every rank's value.
        patience: See :class:`Wires`.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    with ExitStack() as until_then:
        made: list[Any] = []

        def open_door() -> None:
            path = f"{until_then.enter_context(tempfile.TemporaryDirectory())}/door"
            door = until_then.enter_context(socket.socket(socket.AF_UNIX))
            door.bind(path)
            door.listen(ranks)
            made.extend((path, door, Wires(rank, ranks, patience)))

        def on_all(step: Callable[[], None]) -> bool:
            well = False
            with suppress(OSError, RuntimeError, MemoryError):
                step()
                well = True
            return all(tell(well))

        if on_all(open_door):
            path, door, wires = made
            paths = tell(path)
            if on_all(lambda: wires.call(paths)) and on_all(lambda: wires.answer(door)):
                return wires  # type: ignore[no-any-return]
    return None
