"""The common part of the probes: clean images of a labelled dataset through the named encoder, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_ssl.callbacks._capture import as_rows, first_tensor, silence
from lightning_ssl.callbacks._places import check_path, find_module
from lightning_ssl.callbacks._ranks import agree, gather_rows, is_distributed, refuse_sharded
from lightning_ssl.callbacks._report import log_epoch, log_for_callbacks, log_now, logging_step, warn_once
from lightning_ssl.callbacks._watcher import _all_ranks_evaluate, check_interval, undisturbed

ProbeLoaders = Sequence[Any]  # of two DataLoaders

_IMAGE_KEYS = ("image", "images", "img", "x", "input", "inputs", "pixel_values", "data")
_LABEL_KEYS = ("label", "labels", "target", "targets", "y", "class")


class Features(NamedTuple):
    """Features [N, d] and labels [N] of a whole split, each sample once, ordered by dataset index."""

    rows: Tensor
    labels: Tensor


class Probe(L.Callback):
    """A callback that embeds a labelled dataset now and then and says what the features are worth.

    Args:
        encoder: dotted path of the submodule to evaluate.
        data: a DataModule with `probe_dataloaders`, or a pair of train and test DataLoaders or Datasets that yield
            clean images with labels; by default the trainer's DataModule. Loaders are cut into one shard a rank here.
        num_classes: by default the DataModule's, or as many as the labels name.
        every_n_epochs: probe at the end of every that many epochs and of the last.
        every_n_steps: probe before every that many training steps as well.
        baseline: probe before training, too.
        name: keeps several instances apart: ``val/<name>/...``.
    """

    def __init__(
        self,
        encoder: str,
        data: L.LightningDataModule | ProbeLoaders | None,
        num_classes: int | None,
        every_n_epochs: int | None,
        every_n_steps: int | None,
        baseline: bool,
        name: str | None,
    ) -> None:
        super().__init__()
        check_interval(every_n_steps, every_n_epochs)
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {num_classes}")
        self.encoder, self.data, self.num_classes = encoder, data, num_classes
        self.every_n_epochs, self.every_n_steps = every_n_epochs, every_n_steps
        self.baseline, self.name = baseline, name
        self._label = name
        self._last_step: int | None = None
        self._last_epoch: int | None = None

    def evaluate(self, train: Features, test: Features, num_classes: int, trainer: L.Trainer) -> dict[str, float]:
        """The values to log, from whole splits that are the same on all ranks; may use collectives."""
        raise NotImplementedError

    # Names and state -----------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        return self._generate_state_key(encoder=self.encoder, name=self.name)

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._last_step, "last_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_step, self._last_epoch = state_dict["last_step"], state_dict["last_epoch"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        refuse_sharded(trainer, self)
        check_path(pl_module, self.encoder, "encoder")
        self._label = self.name
        twins = [other for other in trainer.callbacks if type(other) is type(self) and other.name == self.name]  # type: ignore[attr-defined]
        if len(twins) > 1:
            if self.name is not None or any(o is not self and o.encoder == self.encoder for o in twins):  # type: ignore[attr-defined]
                raise MisconfigurationException(
                    f"two {type(self).__name__} callbacks would log under the same keys; give each its own `name=`"
                )
            self._label = self.encoder
        if stage in ("fit", "validate", "test"):
            self._check_data(trainer)

    def _check_data(self, trainer: L.Trainer) -> None:
        """Look at one sample of each split, so that bad data ends the run before it starts, on all ranks."""
        problem = ""
        try:
            for split, loader in zip(("train", "test"), self._loaders(trainer), strict=True):
                with isolate_rng():
                    batch = next(iter(_one_sample(loader)), None)
                if batch is not None:
                    image_and_label(batch, split)
                elif not is_distributed(trainer):
                    problem = f"the probe's {split} set is empty; pass `data=` with samples"
        except (MisconfigurationException, ValueError) as error:
            problem = str(error)
        if not agree(trainer, not problem)[0]:
            raise MisconfigurationException(f"{self._who}: {problem or 'another rank could not read the probe data'}")

    # When ----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.baseline and trainer.global_step == 0 and self._last_step is None:
            self._last_step = 0
            values = self._probe(trainer, pl_module, "val")
            log_now(trainer, values, step=0)
            trainer.callback_metrics.update({key: torch.tensor(value) for key, value in values.items()})

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        n, step = self.every_n_steps, logging_step(trainer)
        if n is not None and (self._last_step is None or step // n > self._last_step // n):
            self._last_step = step
            values = self._probe(trainer, pl_module, "val")
            log_for_callbacks(pl_module, values)
            log_now(trainer, values, step)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            log_epoch(pl_module, self._probe(trainer, pl_module, "val"))
        elif not trainer.sanity_checking and trainer.is_last_batch and _all_ranks_evaluate(trainer, pl_module):
            # With the epoch's validation, so that a checkpoint can be chosen by these values.
            self._end_of_epoch(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_of_epoch(trainer, pl_module)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log_epoch(pl_module, self._probe(trainer, pl_module, "test"))

    def _end_of_epoch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch
        if self.every_n_epochs is None or self._last_epoch == epoch:
            return
        if (epoch + 1) % self.every_n_epochs == 0 or epoch + 1 == trainer.max_epochs:
            self._last_epoch = epoch
            log_epoch(pl_module, self._probe(trainer, pl_module, "val"))

    # What ----------------------------------------------------------------------------------------------------------

    def key(self, stage: str, quantity: str) -> str:
        return f"{stage}/{self._label}/{quantity}" if self._label else f"{stage}/{quantity}"

    def _probe(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> dict[str, float]:
        encoder = find_module(pl_module, self.encoder, "encoder")
        with undisturbed(pl_module.device), isolate_rng(), evaluation_mode(encoder), silence():
            train_loader, test_loader = self._loaders(trainer)
            train = self._embed(trainer, pl_module, encoder, train_loader, "train")
            test = None if train is None else self._embed(trainer, pl_module, encoder, test_loader, "test")
            if train is None or test is None:
                return {}
            num_classes = self._num_classes(trainer, train, test)
            try:
                values = self.evaluate(train, test, num_classes, trainer)
            except (ValueError, torch.linalg.LinAlgError) as error:  # rows are the same on all ranks: so is this
                warn_once(self._who, "a probe failed, training goes on: ", f"step {logging_step(trainer)}, {error}")
                return {}
        return {self.key(stage, quantity): float(value) for quantity, value in values.items()}

    def _embed(
        self, trainer: L.Trainer, pl_module: L.LightningModule, encoder: nn.Module, loader: Any, split: str
    ) -> Features | None:
        """Collective: every rank embeds its shard, all of them get all rows."""
        problem: Exception | None = None
        pieces: list[tuple[Tensor, Tensor, Tensor]] = []
        precision = trainer.precision_plugin
        try:
            for batch, positions in shard(trainer, loader):
                image, label = image_and_label(batch, split)
                image = precision.convert_input(move_data_to_device(image, pl_module.device))
                with precision.forward_context():
                    output = first_tensor(encoder(image))
                if output is None:
                    raise ValueError(f"`encoder={self.encoder!r}` returned no features for a batch of images")
                rows = as_rows(output).float()
                label = label.to(rows.device)
                keep = label >= 0  # -1 marks samples without a label
                pieces.append((rows[keep], label[keep], positions.to(rows.device)[keep]))
        except Exception as error:
            problem = error
        if not agree(trainer, problem is None)[0]:
            if isinstance(problem, MisconfigurationException):
                raise problem
            detail = f"step {logging_step(trainer)}, {problem or 'on another rank'}"
            warn_once(self._who, "a probe failed, training goes on: ", detail)
            return None
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)] if pieces else [None] * 3
        rows, labels, index = (gather_rows(trainer, column) for column in columns)
        if rows is None or labels is None or index is None or not len(rows):
            raise MisconfigurationException(f"{self._who}: the probe's {split} set holds no labelled samples")
        order = index.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = index[order][1:] != index[order][:-1]  # a sampler's padding repeats samples
        order = order[first]
        return Features(rows[order], labels[order])

    def _num_classes(self, trainer: L.Trainer, train: Features, test: Features) -> int:
        if len(train.labels.unique()) < 2:
            raise MisconfigurationException(
                f"{self._who}: the probe's train set holds one class only (label {int(train.labels[0])}); "
                "a probe needs at least two"
            )
        source = self.data if isinstance(self.data, L.LightningDataModule) else None
        source = source or (trainer.datamodule if self.data is None else None)  # type: ignore[attr-defined]
        largest = int(max(train.labels.max(), test.labels.max())) + 1
        known = self.num_classes or getattr(source, "num_classes", None) or largest
        if known < largest:
            raise MisconfigurationException(
                f"{self._who}: `num_classes={known}`, but the labels go up to {largest - 1}; pass {largest} or more"
            )
        return known

    def _loaders(self, trainer: L.Trainer) -> ProbeLoaders:
        data = self.data if self.data is not None else getattr(trainer, "datamodule", None)
        if isinstance(data, L.LightningDataModule):
            if not hasattr(data, "probe_dataloaders"):
                raise MisconfigurationException(
                    f"`data`: {type(data).__name__} has no `probe_dataloaders()`, which returns train and test loaders "
                    "of clean, labelled images; add it, or pass `data=(train_loader, test_loader)`"
                )
            if data.trainer is None:  # a second dataset, which the trainer does not look after
                data.trainer = trainer
                self._prepare(trainer, data)
            loaders = data.probe_dataloaders()
            return [_Sharded(loader) for loader in loaders]
        if data is None:
            raise MisconfigurationException(
                "`data` is missing: the trainer has no DataModule; pass `data=(train_loader, test_loader)` with clean, "
                "labelled images, or a DataModule with `probe_dataloaders()`"
            )
        if not isinstance(data, Sequence) or len(data) != 2:
            raise MisconfigurationException(
                f"`data` must be a DataModule or a pair (train_loader, test_loader), got {type(data).__name__}"
            )
        return [DataLoader(part, batch_size=256) if isinstance(part, Dataset) else part for part in data]

    def _prepare(self, trainer: L.Trainer, data: L.LightningDataModule) -> None:
        """Collective: download on one rank of each machine, then set up on all."""
        problem: Exception | None = None
        if trainer.local_rank == 0:
            try:
                data.prepare_data()
            except Exception as error:
                problem = error
        if not agree(trainer, problem is None)[0]:
            raise MisconfigurationException(f"{self._who}: the probe data cannot be had: {problem or 'see rank 0'}")
        data.setup("fit")

    @property
    def _who(self) -> str:
        return f"{type(self).__name__}(encoder={self.encoder!r})"


class _Sharded:
    """Marks a loader that gives each rank its own samples already."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader


def shard(trainer: L.Trainer, loader: Any) -> Iterator[tuple[Any, Tensor]]:
    """This rank's batches of a loader, each with the dataset positions of its samples."""
    rank, world_size = trainer.global_rank, trainer.world_size
    limit = int(trainer.fast_dev_run) or None  # type: ignore[attr-defined]
    if isinstance(loader, _Sharded):
        seen = 0
        for batch in _limited(loader.loader, limit):
            index = batch_index(batch)
            if index is None:
                size = len(image_and_label(batch, "probe")[1])
                index = rank + world_size * torch.arange(seen, seen + size)
                seen += size
            yield batch, index
    elif not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        seen = 0
        for number, batch in enumerate(_limited(loader, limit)):  # the same stream on all ranks: take turns
            size = len(image_and_label(batch, "probe")[1])
            if number % world_size == rank:
                yield batch, torch.arange(seen, seen + size)
            seen += size
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


def _positions(loader: DataLoader) -> list[int]:
    """The dataset positions a loader draws from, each once; an order or a shard of its own does not matter."""
    if isinstance(loader.sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]
    with isolate_rng():
        torch.manual_seed(0)  # a sampler that draws must draw the same on all ranks
        return sorted({int(i) for i in loader.sampler})


def _reload(loader: DataLoader, positions: list[int], batch_size: int, num_workers: int | None = None) -> DataLoader:
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


def _one_sample(loader: Any) -> Any:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _reload(loader, _positions(loader)[:1], 1, num_workers=0)
    return loader.loader if isinstance(loader, _Sharded) else loader


def image_and_label(batch: Any, split: str) -> tuple[Tensor, Tensor]:
    """The clean image [N, ...] and label [N] of a probe batch: the first two of a tuple, or a dict's by name."""
    image: Any = None
    label: Any = None
    if isinstance(batch, Mapping):
        image = next((batch[key] for key in _IMAGE_KEYS if key in batch), None)
        label = next((batch[key] for key in _LABEL_KEYS if key in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        image, label = batch[0], batch[1]
    if isinstance(image, (tuple, list)) and len(image) == 1:
        image = image[0]
    if not isinstance(image, Tensor) or not image.is_floating_point():
        raise MisconfigurationException(
            f"the probe's {split} loader must yield (image, label) or a dict with both, one clean image tensor a "
            f"batch; got {_describe(batch)}"
        )
    if not isinstance(label, Tensor) or label.is_floating_point() or label.shape != (len(image),):
        raise MisconfigurationException(
            f"the probe's {split} loader yields no labels: an integer tensor [{len(image)}] must follow the image; "
            f"got {_describe(batch)}"
        )
    return image, label


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


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode; afterwards every submodule is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
