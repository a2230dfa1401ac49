"""What a probe reads: any kind of labelled data, in one shard a rank, each sample with its place in the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    default_collate,
)

from lightning_ssl._lightning import overrides
from lightning_ssl.callbacks._engine.record import first_tensor
from lightning_ssl.metrics.evaluation import Targets

_IMAGE_KEYS = ("image", "images", "img", "x", "input", "inputs", "pixel_values", "data")
_LABEL_KEYS = ("label", "labels", "target", "targets", "y", "class")


class Sharded:
    """Marks a loader that gives each rank its own samples already."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader


class Stream:
    """A loader that can only be run through: the first `samples` of it, the same on all ranks, which take turns."""

    def __init__(self, loader: Any, samples: int | None) -> None:
        self.loader, self.samples = loader, samples


def as_loader(part: Any, samples: int | None) -> Any:
    """A loader for what a user gives: a loader, a Dataset, a Hugging Face dataset, anything to iterate over."""
    if isinstance(part, IterableDataset) or not (isinstance(part, DataLoader) or hasattr(part, "__len__")):
        if not hasattr(part, "__iter__"):
            raise MisconfigurationException(
                f"`data` must hold loaders, datasets or iterables, got {type(part).__name__}; pass a DataLoader"
            )
        first = None if isinstance(part, IterableDataset) else part
        return Stream(first or DataLoader(part, batch_size=256, collate_fn=collate), samples)
    if isinstance(part, DataLoader) and isinstance(part.dataset, IterableDataset):
        return Stream(part, samples)
    batches = isinstance(part, (DataLoader, list, tuple))
    if not batches and (isinstance(part, Dataset) or hasattr(part, "__getitem__")):
        return DataLoader(part, batch_size=256, collate_fn=collate)
    return part


def collate(samples: list[Any]) -> Any:
    """Torch's own, with pictures as tensors between 0 and 1: a Hugging Face dataset yields them as they are."""
    return default_collate([_without_pictures(sample) for sample in samples])


def _without_pictures(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_pictures(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_without_pictures(item) for item in value]) if type(value) in (tuple, list) else value
    if type(value).__module__.startswith("PIL."):
        from torchvision.transforms.functional import pil_to_tensor

        return pil_to_tensor(value.convert("RGB")).float() / 255
    return value


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
    elif (
        isinstance(loader, Stream) or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
    ):
        seen, stream = 0, loader if isinstance(loader, Stream) else Stream(loader, None)
        for number, batch in enumerate(_limited(stream.loader, limit)):  # the same stream on all ranks: take turns
            size = len(inputs_and_label(batch, "probe", None)[1])
            if number % world_size == rank:
                places = torch.arange(seen, seen + size)
                if stream.samples is not None:
                    places[places >= stream.samples] = -1  # past the stated number: left out
                yield batch, places
            seen += size
            if stream.samples is not None and seen >= stream.samples:
                return
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
    if isinstance(loader.sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]
    with isolate_rng():
        torch.manual_seed(0)  # a sampler that draws must draw the same on all ranks
        return sorted({int(i) for i in loader.sampler})


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


def inputs_and_label(
    batch: Any, split: str, targets: Targets | None = "class"
) -> tuple[Tensor | dict[str, Any], Tensor]:
    """What enters the encoder, and the labels [N] or [N, C]: the first two of a tuple, or a dict's by name.

    A dict without an image (token ids, say) enters as keyword arguments, without its labels.
    """
    inputs: Any = None
    label: Any = None
    if isinstance(batch, Mapping):
        label = next((batch[key] for key in _LABEL_KEYS if key in batch), None)
        inputs = next((batch[key] for key in _IMAGE_KEYS if key in batch), None)
        if inputs is None:
            inputs = {key: value for key, value in batch.items() if key not in (*_LABEL_KEYS, "index")}
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        inputs, label = batch[0], batch[1]
    if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
        inputs = inputs[0]
    first = first_tensor(inputs, floating=False) if isinstance(inputs, (Tensor, Mapping)) else None
    if first is None or not first.ndim:
        raise MisconfigurationException(
            f"the probe's {split} loader must yield (image, label) or a dict with both, one clean image tensor a "
            f"batch; got {_describe(batch)}"
        )
    if isinstance(label, Tensor) and label.ndim == 1 and targets == "continuous":
        label = label[:, None]
    n = len(first)
    right = {
        "class": f"an integer tensor [{n}]",
        "multilabel": f"a tensor of zeros and ones [{n}, classes]",
        "continuous": f"a floating-point tensor [{n}] or [{n}, targets]",
    }
    if not isinstance(label, Tensor) or not label.ndim or (targets is not None and not _fits(label, targets)):
        raise MisconfigurationException(
            f"the probe's {split} loader yields no labels: {right[targets or 'class']} must follow the image; "
            f"got {_describe(batch)}"
        )
    return dict(inputs) if isinstance(inputs, Mapping) else inputs, label


def _fits(label: Tensor, targets: Targets) -> bool:
    if targets == "class":
        return not label.is_floating_point() and label.ndim == 1
    if targets == "multilabel":
        return label.ndim == 2
    return label.is_floating_point() and label.ndim == 2


def batch_index(batch: Any) -> Tensor | None:
    index = batch.get("index") if isinstance(batch, Mapping) else getattr(batch, "index", None)
    return index if isinstance(index, Tensor) else None


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)} of {batch.dtype}"
    if isinstance(batch, Mapping):
        return "a dict of " + ", ".join(f"{key}: {_describe(value)}" for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of (" + ", ".join(_describe(value) for value in batch[:4]) + ")"
    return type(batch).__name__


def transferred(batch: Any, pl_module: L.LightningModule, holder: Any, convert: Callable[[Any], Any]) -> Any:
    """A batch as the network gets it: through the hooks of the DataModule or, where that has none, the module."""

    def hook(name: str) -> Callable[..., Any]:
        owner = holder if holder is not None and overrides(holder, name) else pl_module
        return getattr(owner, name)  # type: ignore[no-any-return]

    batch = hook("on_before_batch_transfer")(convert(batch), 0)
    batch = hook("transfer_batch_to_device")(batch, pl_module.device, 0)
    return hook("on_after_batch_transfer")(batch, 0)
