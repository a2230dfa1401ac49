"""What a probe reads: any kind of labelled data, in one shard a rank, each sample with its place in the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_ssl._lightning import overrides
from lightning_ssl.callbacks._engine.batch import batch_index, collate, inputs_and_label
from lightning_ssl.callbacks._engine.stream import Grouped, Stream
from lightning_ssl.metrics.evaluation import Targets


class Sharded:
    """Marks a loader that gives each rank its own samples already."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader


def as_loader(part: Any, samples: int | None, split: bool = False, targets: Targets = "class") -> Any:
    """A loader for what a user gives: a loader, a Dataset, a Hugging Face dataset, anything to iterate over."""
    if isinstance(part, IterableDataset) or not (isinstance(part, DataLoader) or hasattr(part, "__len__")):
        if not hasattr(part, "__iter__"):
            raise MisconfigurationException(
                f"`data` must hold loaders, datasets or iterables, got {type(part).__name__}; pass a DataLoader"
            )
        return Stream(Grouped(part, targets) if isinstance(part, IterableDataset) else part, samples, split)
    if isinstance(part, DataLoader) and isinstance(part.dataset, IterableDataset):
        return Stream(part, samples, split)
    if isinstance(part, DataLoader):
        return part
    if not isinstance(part, (list, tuple)) and (isinstance(part, Dataset) or hasattr(part, "__getitem__")):
        return DataLoader(part, batch_size=256, collate_fn=collate)
    return Stream(part, samples, split)


def own_samples(trainer: L.Trainer, loader: Any) -> int | None:
    """About how many samples this rank will read, where that can be known."""
    ranks, limit = trainer.world_size, int(trainer.fast_dev_run)  # type: ignore[attr-defined]
    if isinstance(loader, Stream):
        size = getattr(loader.loader, "batch_size", None) or 0
        known = None if loader.samples is None else -(-loader.samples // ranks) + size
    else:
        inner = loader.loader if isinstance(loader, Sharded) else loader
        sampler = getattr(inner, "sampler", None)
        whole = sampler if isinstance(loader, Sharded) else getattr(inner, "dataset", None)
        if not isinstance(loader, (Sharded, DataLoader)) or not hasattr(whole, "__len__"):
            return None
        known = len(whole) if isinstance(loader, Sharded) else -(-len(_positions(inner)) // ranks)  # type: ignore[arg-type]
        size = getattr(inner, "batch_size", None) or getattr(getattr(inner, "batch_sampler", None), "batch_size", 0)
    return min(known, limit * size) if known is not None and limit and size else known


def shard(trainer: L.Trainer, loader: Any) -> Iterator[tuple[Any, Tensor]]:
    """This rank's batches of a loader, each with the dataset positions of its samples."""
    rank, world_size = trainer.global_rank, trainer.world_size
    limit = int(trainer.fast_dev_run) or None  # type: ignore[attr-defined]
    if isinstance(loader, Sharded):
        seen = 0
        for batch in _limited(loader.loader, limit):
            index = batch_index(batch)
            if index is None:
                size = len(inputs_and_label(batch, "probe", None)[1])
                index = rank + world_size * torch.arange(seen, seen + size)
                seen += size
            yield batch, index
    elif isinstance(loader, Stream):
        yield from loader.own(_limited(loader.loader, limit), rank, world_size)
    else:
        own = _positions(loader)[rank::world_size]
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 64
        for number, batch in enumerate(_limited(_reload(loader, own, size), limit)):
            yield batch, torch.tensor(own[number * size : (number + 1) * size])


def _limited(loader: Any, limit: int | None) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number == limit:
            return
        yield batch


def _positions(loader: DataLoader[Any]) -> list[int]:
    """The dataset positions a loader draws from, each once; an order or a shard of its own does not matter."""
    drawn: Any = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:  # `sampler` is then none of its own
        batches: Any = loader.batch_sampler
        drawn = getattr(batches, "sampler", None) or (i for batch in batches for i in batch)
    if isinstance(drawn, (SequentialSampler, RandomSampler, DistributedSampler)):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]
    with isolate_rng():
        torch.manual_seed(0)  # a sampler that draws must draw the same on all ranks
        return sorted({int(i) for i in drawn})


def _reload(
    loader: DataLoader[Any], positions: list[int], batch_size: int, num_workers: int | None = None
) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        sampler=positions,
        num_workers=loader.num_workers if num_workers is None else num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if num_workers is None else None,
    )


def one_sample(loader: Any) -> Any:
    """A loader of one sample, or of batches where that cannot be had."""
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _reload(loader, _positions(loader)[:1], 1, num_workers=0)
    return loader.loader if isinstance(loader, (Sharded, Stream)) else loader


def transferred(batch: Any, pl_module: L.LightningModule, holder: Any, convert: Callable[[Any], Any]) -> Any:
    """A batch as the network gets it: through the hooks of the DataModule or, where that has none, the module."""

    def hook(name: str) -> Callable[..., Any]:
        owner = holder if holder is not None and overrides(holder, name) else pl_module
        return getattr(owner, name)  # type: ignore[no-any-return]

    batch = hook("on_before_batch_transfer")(convert(batch), 0)
    batch = hook("transfer_batch_to_device")(batch, pl_module.device, 0)
    return hook("on_after_batch_transfer")(batch, 0)
