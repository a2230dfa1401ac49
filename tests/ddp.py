"""Real gloo processes for the tests: a pool per world size, started once and reused."""

from __future__ import annotations

import atexit
import tempfile
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_pools: dict[int, Pool] = {}


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in `world_size` gloo processes; return the results, ordered by rank.

    `fn` must be a module-level function; its results must pickle. A rank that raises, or that leaves the others
    waiting longer than `timeout` seconds, fails the call with every traceback there is.
    """
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    return _pools[world_size].run(fn, args, timeout)


class Pool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(world_size)]
        rendezvous = tempfile.mktemp(prefix="gloo_")
        self.processes = [
            context.Process(target=_worker, args=(r, world_size, rendezvous, self.tasks[r], self.results), daemon=True)
            for r in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for queue in self.tasks:
            queue.put((fn, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < self.world_size:
            try:
                # Once a rank has failed the others may wait for it in a collective: give them a moment only.
                rank, value, error = self.results.get(timeout=5.0 if errors else timeout)
            except Empty:
                missing = sorted(set(range(self.world_size)) - set(results) - set(errors))
                self.close()
                raise AssertionError(f"ranks {missing} did not answer; errors: {errors or 'none'}") from None
            if error is None:
                results[rank] = value
            else:
                errors[rank] = error
        if errors:
            self.close()
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        _pools.pop(self.world_size, None)
        for process in self.processes:
            process.kill()
            process.join()


def _worker(rank: int, world_size: int, rendezvous: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    while True:
        fn, args = tasks.get()
        torch.manual_seed(0)
        try:
            results.put((rank, fn(rank, world_size, *args), None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))


@atexit.register
def _close_all() -> None:
    for pool in list(_pools.values()):
        pool.close()
