"""The common part of the probes: clean images of a labelled dataset through the named encoder, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_ssl._lightning import is_a, logging_step, overrides
from lightning_ssl.callbacks._engine.layout import (
    Layout,
    Layouts,
    check_layout,
    puts_sequences_first,
    rows_of,
    settle,
)
from lightning_ssl.callbacks._engine.places import check_path, find_module
from lightning_ssl.callbacks._engine.ranks import all_ranks_evaluate, ranks_of
from lightning_ssl.callbacks._engine.record import copied, first_tensor, silence
from lightning_ssl.callbacks._engine.replay import evaluation_mode
from lightning_ssl.callbacks._engine.report import log_epoch, log_for_callbacks, log_now
from lightning_ssl.callbacks.diagnostic import Diagnostic, as_floats
from lightning_ssl.callbacks.watcher import undisturbed
from lightning_ssl.distributed import agree, exchange

ProbeLoaders = Sequence[Any]  # of two DataLoaders

_IMAGE_KEYS = ("image", "images", "img", "x", "input", "inputs", "pixel_values", "data")
_LABEL_KEYS = ("label", "labels", "target", "targets", "y", "class")


class Features(NamedTuple):
    """Features [N, d] and labels [N] of a whole split, each sample once, ordered by dataset index."""

    rows: Tensor
    labels: Tensor


class Probe(Diagnostic):
    """Embeds a labelled dataset now and then, on all ranks, and says what the features are worth.

    A subclass defines :meth:`evaluate`. Batches go through the same transfer hooks as in training (a module that
    normalises on the device does so here too), with the trainer in validation.

    Args:
        encoder: Dotted path of the submodule that the images, tokens or series enter.
        data: A DataModule with `probe_dataloaders`, or a pair of train and test DataLoaders or Datasets that yield
            clean images with labels; by default the trainer's DataModule. Loaders are cut into one shard a rank here.
        num_classes: By default the DataModule's, or as many as the labels name.
        every_n_epochs: Probe at the end of every n-th epoch and of the last.
        every_n_steps: Probe before every n-th training step as well.
        baseline: Probe before training, too.
        name: Keeps several instances apart: ``val/<name>/...``.
        features: Dotted path of a part of the encoder whose output counts; by default the encoder's own.
        layout: The axes of the features; see :class:`Watcher`.

    Example:
        >>> class ClassSizes(Probe):
        ...     def evaluate(self, train, test, num_classes, trainer):
        ...         return {"largest_class": train.labels.bincount().max()}
        >>> probe = ClassSizes("backbone")  # logs val/largest_class
    """

    def __init__(
        self,
        encoder: str = "backbone",
        data: L.LightningDataModule | ProbeLoaders | None = None,
        num_classes: int | None = None,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        baseline: bool = True,
        name: str | None = None,
        features: str | None = None,
        layout: Layout | None = None,
    ) -> None:
        super().__init__({"encoder": encoder}, every_n_steps, every_n_epochs, name)
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {num_classes}")
        check_layout(layout)
        if features is not None and not f"{features}.".startswith(f"{encoder}."):
            raise ValueError(f"`features` must lie inside encoder={encoder!r}, got {features!r}")
        if features is not None:
            self.places["features"] = features
        self.encoder, self.data, self.num_classes = encoder, data, num_classes
        self.features, self.layout, self.baseline = features, layout, baseline
        self._layout: str | None = None

    def evaluate(
        self, train: Features, test: Features, num_classes: int, trainer: L.Trainer
    ) -> Mapping[str, Tensor | float]:
        """The values to log, from whole splits that are the same on all ranks; may use collectives."""
        raise NotImplementedError

    # Life -------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        encoder = check_path(pl_module, self.encoder, "encoder")
        if encoder is not None and not any(True for _ in encoder.parameters()):
            raise MisconfigurationException(
                f"`encoder` names {self.encoder!r} ({type(encoder).__name__}), which has no weights: images would pass "
                f"through it as they are; name the network that images enter as `encoder=`, and this part of it as "
                f"`features={self.encoder!r}`"
            )
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
                    inputs_and_label(batch, split)
                elif ranks_of(trainer) == 1:
                    problem = f"the probe's {split} set is empty; pass `data=` with samples"
        except (MisconfigurationException, ValueError) as error:
            problem = str(error)
        if not self._agree(trainer, not problem):
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
        step = logging_step(trainer)
        if self._is_due(step):
            self._last_step = step
            values = self._probe(trainer, pl_module, "val")
            log_for_callbacks(pl_module, values)
            log_now(trainer, values, step)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            log_epoch(pl_module, self._probe(trainer, pl_module, "val"))
        elif not trainer.sanity_checking and trainer.is_last_batch and all_ranks_evaluate(trainer, pl_module):
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

    def _probe(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> dict[str, float]:
        with undisturbed(pl_module.device), isolate_rng(), evaluation_mode(pl_module), silence(), validating(trainer):
            train_loader, test_loader = self._loaders(trainer)
            train = self._embed(trainer, pl_module, train_loader, "train")
            test = None if train is None else self._embed(trainer, pl_module, test_loader, "test")
            if train is None or test is None:
                return {}
            num_classes = self._num_classes(trainer, train, test)
            try:
                values = self.evaluate(train, test, num_classes, trainer)
            except torch.distributed.DistError:
                raise
            except (ValueError, RuntimeError) as error:  # rows are the same on all ranks: so is this
                self._failed(trainer, error)
                return {}
            return as_floats({self.key(stage, quantity): value for quantity, value in values.items()})

    def _failed(self, trainer: L.Trainer, error: object) -> None:
        self.warn("a probe failed, training goes on: ", f"step {logging_step(trainer)}, {error}")

    def _agree(self, trainer: L.Trainer, ok: bool) -> bool:
        return agree(ok, device=trainer.strategy.root_device)[0] if ranks_of(trainer) > 1 else ok

    def _embed(self, trainer: L.Trainer, pl_module: L.LightningModule, loader: Any, split: str) -> Features | None:
        """Collective: every rank embeds its shard, all of them get all rows."""
        problem: Exception | None = None
        mine: dict[str, Tensor] = {}
        try:
            pieces = [
                (rows[label >= 0], label[label >= 0], positions[label >= 0])  # -1 marks samples without a label
                for rows, label, positions in self._pieces(trainer, pl_module, loader, split)
            ]
            if pieces:
                columns = (torch.cat(column) for column in zip(*pieces, strict=True))
                mine = dict(zip(("rows", "labels", "index"), columns, strict=True))
        except Exception as error:
            problem = error
        try:
            if ranks_of(trainer) > 1:
                parts = [part for part in exchange(mine, pl_module.device, problem) if part]
            elif problem is not None:
                raise problem
            else:
                parts = [mine] if mine else []
        except torch.distributed.DistError:
            raise
        except Exception as error:
            self._failed(trainer, error)
            return None
        if not parts or not sum(len(part["rows"]) for part in parts):
            raise MisconfigurationException(f"{self._who}: the probe's {split} set holds no labelled samples")
        rows, labels, index = (torch.cat([part[name] for part in parts]) for name in ("rows", "labels", "index"))
        order = index.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = index[order][1:] != index[order][:-1]  # a sampler's padding repeats samples
        order = order[first]
        return Features(rows[order], labels[order])

    def _pieces(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loader: Any, split: str
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's rows, labels and positions, batch by batch."""
        encoder, precision = find_module(pl_module, self.encoder, "encoder"), trainer.precision_plugin
        exit_at = find_module(pl_module, self.features or self.encoder, "features")
        holder = self.data if is_a(self.data, "LightningDataModule") else getattr(trainer, "datamodule", None)
        for batch, positions in shard(trainer, loader):
            moved = transferred(batch, pl_module, holder, precision.convert_input)
            inputs, label = inputs_and_label(moved, split)
            layouts = Layouts()
            left: list[tuple[Any, str | None]] = []
            handles = layouts.follow(encoder) if self._layout is None else []
            handles.append(exit_at.register_forward_hook(partial(_keep, left, layouts)))
            try:
                with precision.forward_context():
                    encoder(**inputs) if isinstance(inputs, Mapping) else encoder(inputs)
            finally:
                for handle in handles:
                    handle.remove()
            if not left:
                raise ValueError(f"`features={self.features!r}` was not called when {self.encoder!r} ran")
            output, seen = left[-1]
            rows = self._rows(output, seen, len(label), pl_module).float()
            if len(rows) != len(label):
                raise ValueError(f"{len(rows)} rows of features for {len(label)} labels; pass `layout=`")
            yield rows, label.to(rows.device), positions.to(rows.device)

    def _rows(self, output: Any, seen: str | None, samples: int, pl_module: L.LightningModule) -> Tensor:
        if callable(self.layout):
            return self.layout(output)
        x = first_tensor(output)
        if x is None:
            raise ValueError(f"`encoder={self.encoder!r}` returned no features for a batch of images")
        if self._layout is None or len(self._layout) != max(2, x.ndim):
            self._layout = self.layout or settle(x, seen, [samples], puts_sequences_first(pl_module))
        return rows_of(x, self._layout)

    def _num_classes(self, trainer: L.Trainer, train: Features, test: Features) -> int:
        if len(train.labels.unique()) < 2:
            raise MisconfigurationException(
                f"{self._who}: the probe's train set holds one class only (label {int(train.labels[0])}); "
                "a probe needs at least two"
            )
        source = self.data if is_a(self.data, "LightningDataModule") else None
        source = source or (trainer.datamodule if self.data is None else None)  # type: ignore[attr-defined]
        largest = int(max(train.labels.max(), test.labels.max())) + 1
        known = self.num_classes or getattr(source, "num_classes", None) or largest
        if known < largest:
            raise MisconfigurationException(
                f"{self._who}: `num_classes={known}`, but the labels go up to {largest - 1}; pass {largest} or more"
            )
        return known

    def _loaders(self, trainer: L.Trainer) -> ProbeLoaders:
        data: Any = self.data if self.data is not None else getattr(trainer, "datamodule", None)
        if is_a(data, "LightningDataModule"):
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
        if not self._agree(trainer, problem is None):
            raise MisconfigurationException(f"{self._who}: the probe data cannot be had: {problem or 'see rank 0'}")
        data.setup("fit")


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
                size = len(inputs_and_label(batch, "probe")[1])
                index = rank + world_size * torch.arange(seen, seen + size)
                seen += size
            yield batch, index
    elif not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        seen = 0
        for number, batch in enumerate(_limited(loader, limit)):  # the same stream on all ranks: take turns
            size = len(inputs_and_label(batch, "probe")[1])
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


def _one_sample(loader: Any) -> Any:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _reload(loader, _positions(loader)[:1], 1, num_workers=0)
    return loader.loader if isinstance(loader, _Sharded) else loader


def inputs_and_label(batch: Any, split: str) -> tuple[Tensor | dict[str, Any], Tensor]:
    """What enters the encoder, and the labels [N]: the first two of a tuple, or a dict's by name.

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
    if not isinstance(label, Tensor) or label.is_floating_point() or label.ndim != 1:
        raise MisconfigurationException(
            f"the probe's {split} loader yields no labels: an integer tensor [{len(first)}] must follow the image; "
            f"got {_describe(batch)}"
        )
    return dict(inputs) if isinstance(inputs, Mapping) else inputs, label


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


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Let hooks that ask the trainer find it in validation: they would augment in training."""
    stage = trainer.state.stage
    if stage is not None:
        trainer.state.stage = type(stage).VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = stage


def _keep(left: list[tuple[Any, str | None]], layouts: Layouts, module: nn.Module, args: Any, output: Any) -> None:
    first = first_tensor(output)
    left.append((copied(output), None if first is None else layouts.of(first, module, args)))
