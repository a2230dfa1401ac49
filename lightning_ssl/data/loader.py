"""Loaders whose order is a function of (seed, epoch) at any number of ranks, and that resume in mid-epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ssl.rng import permutation


class ShardSampler(DistributedSampler[Any]):
    """Every `world_size`-th sample of an order that all ranks share.

    The b-th batches of all ranks together are the b-th batch of a single process with a batch `world_size` times as
    large. Being a `DistributedSampler` already, it is left in place by Lightning.

    Args:
        dataset: What to sample from.
        rank: This process.
        world_size: Number of processes.
        shuffle: Draw a new order each epoch; "once" keeps the first one.
        even: Give every rank equally many samples, leaving out what does not divide. Otherwise every sample is given
            once, and ranks may differ by one, or hold none.
        seed: Seed of the order.
    """

    def __init__(
        self,
        dataset: Sized,
        rank: int,
        world_size: int,
        shuffle: bool | str = False,
        even: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, seed=seed, drop_last=even)  # type: ignore[arg-type]
        self.shuffle = bool(shuffle)
        self.reshuffle = shuffle is True
        size = len(dataset)
        self.num_samples = size // world_size if even else len(range(rank, size, world_size))
        self.start = 0  # samples of all ranks to leave out: those before a resume

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)  # type: ignore[arg-type]
        order = permutation(size, self.seed, self.epoch) if self.shuffle else torch.arange(size)
        mine = order[self.start :][self.rank :: self.num_replicas]
        left = (size - self.start) // self.num_replicas if self.drop_last else len(mine)
        return iter(mine[:left].tolist())

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if self.reshuffle else 0


class EpochDataset(Dataset[Any]):
    """A dataset that fetches whole batches and knows the epoch, in its workers too."""

    def __init__(self) -> None:
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch.fill_(value)

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, rows: list[int]) -> Any:
        raise NotImplementedError

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])


_END = object()


class ShardLoader(DataLoader[Any]):
    """A DataLoader over an `EpochDataset` and a `ShardSampler` whose position can be saved and restored.

    The position is a number of samples, of all ranks together: a run goes on behind it at any number of ranks and with
    any batch size. Iteration is lazy, so that the epoch set between `iter` and the first batch counts: Lightning
    creates the first iterator before it sets the epoch.
    """

    def __init__(self, dataset: EpochDataset, **kwargs: Any) -> None:
        super().__init__(dataset, collate_fn=kwargs.pop("collate_fn", _whole_batch), **kwargs)
        self._position = {"epoch": 0, "samples": 0}
        self._resume: dict[str, int] | None = None
        self.untrained: Callable[[], int] = int  # batches handed out but not trained on; who knows sets it

    @property
    def even_rows(self) -> int:
        """Rows of each batch on each rank, where all are of one size; 0 where they may differ."""
        even = isinstance(self.sampler, ShardSampler) and self.sampler.drop_last and self.drop_last
        return (self.batch_size or 0) if even else 0

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a step."""
        ranks = self.sampler.num_replicas if isinstance(self.sampler, ShardSampler) else 1
        return (self.batch_size or 1) * ranks

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, start = getattr(self.sampler, "epoch", 0), 0
        if self._resume is not None and self._resume["epoch"] == epoch:
            start = self._resume["samples"]
        self._resume = None
        if isinstance(self.sampler, ShardSampler):
            self.sampler.start = start
        assert isinstance(self.dataset, EpochDataset)
        self.dataset.epoch = epoch
        self._position = {"epoch": epoch, "samples": start}
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches, _END)
            except (ConnectionError, EOFError, FileNotFoundError) as error:
                if not self.num_workers or "in DataLoader worker process" in str(error):
                    raise  # the dataset's own error
                # Torn while a batch was handed over: torch names the worker only between batches.
                raise RuntimeError(
                    f"DataLoader worker exited unexpectedly while it handed over a batch ({type(error).__name__}); it "
                    "was killed, perhaps for want of memory: lower num_workers, or set num_workers=0 to see its error"
                ) from error
            if batch is _END:
                return
            self._position["samples"] += self.global_batch
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, how many of its samples have been trained on by all ranks, and in steps of how many."""
        samples = self._position["samples"] - self.untrained() * self.global_batch
        return {**self._position, "samples": max(0, samples), "global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue behind those samples, if the next iteration is of the same epoch."""
        samples = state["samples"] if "samples" in state else state["batch"] * self.global_batch  # before 0.1.0
        self._resume = {"epoch": int(state["epoch"]), "samples": int(samples)}

    def count(self, samples: int, limit: int | float | None = None) -> tuple[int, int]:
        """How many steps lie behind a position in the epoch, and how many an epoch has.

        Where the position is not a whole number of steps, the steps are counted such that the last one that can be
        filled is the epoch's last.

        Args:
            samples: The position.
            limit: The Trainer's `limit_train_batches`.

        Example:
            >>> data = EpochDataset()
            >>> data.__class__ = type("Ten", (EpochDataset,), {"__len__": lambda self: 10})
            >>> loader = ShardLoader(data, sampler=ShardSampler(data, 0, 1, even=True), batch_size=3, drop_last=True)
            >>> loader.count(6), loader.count(5), loader.count(2)
            ((2, 3), (2, 3), (1, 3))
        """
        whole = len(self)
        if limit is not None:
            whole = min(whole, limit) if isinstance(limit, int) else int(whole * limit)
        left = (len(self.dataset) - samples) // self.global_batch  # type: ignore[arg-type]
        return max(samples // self.global_batch, whole - left), whole


def _whole_batch(batch: Any) -> Any:
    return batch


def as_rows(rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)
