"""The common part of the probes: clean images of a labelled dataset through the named encoder, on all ranks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_ssl._lightning import is_a, logging_step
from lightning_ssl.callbacks._engine.batch import inputs_and_label
from lightning_ssl.callbacks._engine.embedding import (
    Features,
    Reader,
    embed,
    fingerprint,
    gathered,
    validating,
)
from lightning_ssl.callbacks._engine.layout import Layout, check_layout, puts_sequences_first, rows_of, settle
from lightning_ssl.callbacks._engine.places import check_path
from lightning_ssl.callbacks._engine.probe_data import Sharded, as_loader, one_sample, own_samples, shard
from lightning_ssl.callbacks._engine.ranks import all_ranks_evaluate, ranks_of
from lightning_ssl.callbacks._engine.record import first_tensor, silence
from lightning_ssl.callbacks._engine.replay import evaluation_mode
from lightning_ssl.callbacks._engine.report import log_epoch, log_for_callbacks, log_now
from lightning_ssl.callbacks._engine.stream import Stream, is_split, marks_of, read_by_several
from lightning_ssl.callbacks.diagnostic import Diagnostic, as_floats
from lightning_ssl.distributed import Together, agree, gather_objects
from lightning_ssl.functional.regression import BUDGET
from lightning_ssl.metrics.evaluation import Shard, Targets, place
from lightning_ssl.precision import undisturbed

__all__ = ["Features", "Probe", "Shard", "shard"]

ProbeLoaders = Sequence[Any]  # of two DataLoaders, Datasets or iterables
_SPLITS = ("train", "test")
_REPEATED = 0.05  # of a stream's samples; datasets hold some twice
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class _Shared:
    """What the probes of one trainer share: the features of one moment, and how small chunks must be."""

    moment: tuple[Any, ...] = ()
    shards: dict[tuple[Any, ...], Shard] = field(default_factory=dict)
    waiting: dict[tuple[Any, ...], set[int]] = field(default_factory=dict)  # who has still to use them
    halvings: int = 0
    ran_out: bool = False

    def clear(self) -> None:
        self.shards.clear()
        self.waiting.clear()


_shared: WeakKeyDictionary[Any, _Shared] = WeakKeyDictionary()


class Probe(Diagnostic):
    """Embeds a labelled dataset now and then, on all ranks, and says what the features are worth.

    A subclass defines :meth:`evaluate`, of whole splits, or, where those do not fit on one rank,
    :meth:`evaluate_shards`. Batches go through the same transfer hooks as in training (a module that normalises on the
    device does so here too), with the trainer in validation. Probes of the same dataset at the same moment share one
    pass over it, and those of the same encoder one forward pass, whatever parts of it they look at.

    Args:
        encoder: Dotted path of the submodule that the images, tokens or series enter.
        data: A DataModule with `probe_dataloaders`, or a pair of train and test sets that yield clean images with
            labels: DataLoaders, Datasets (Hugging Face's too) or iterables; by default the trainer's DataModule. Each
            rank embeds its own share, of iterables also where they are split between the ranks already.
        num_classes: By default the DataModule's, or as many as the labels name.
        every_n_epochs: Probe at the end of every n-th epoch and of the last.
        every_n_steps: Probe before every n-th training step as well.
        baseline: Probe before training, too.
        name: Keeps several instances apart: ``val/<name>/...``.
        features: Dotted path of a part of the encoder whose output counts; by default the encoder's own.
        layout: The axes of the features; see :class:`Watcher`.
        targets: What labels are: "class" (integers [N]), "multilabel" (zeros and ones [N, C]) or "continuous".
        dtype: The precision in which features are kept: "float32", "float16" or "bfloat16".
        num_samples: How many samples iterables of train and test data have, or are to be taken from them.

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
        targets: Targets = "class",
        dtype: str = "float32",
        num_samples: Sequence[int] | None = None,
    ) -> None:
        super().__init__({"encoder": encoder}, every_n_steps, every_n_epochs, name)
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {num_classes}")
        check_layout(layout)
        if features is not None and not f"{features}.".startswith(f"{encoder}."):
            raise ValueError(f"`features` must lie inside encoder={encoder!r}, got {features!r}")
        if targets not in ("class", "multilabel", "continuous"):
            raise ValueError(f'`targets` must be "class", "multilabel" or "continuous", got {targets!r}')
        if dtype not in _DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        if num_samples is not None and (len(num_samples) != 2 or any(n < 1 for n in num_samples)):
            raise ValueError(f"`num_samples` must be two positive integers, of train and test, got {num_samples}")
        if features is not None:
            self.places["features"] = features
        self.encoder, self.data, self.num_classes = encoder, data, num_classes
        self.features, self.layout, self.baseline = features, layout, baseline
        self.targets, self.dtype, self.num_samples = targets, dtype, num_samples
        self._layout: str | None = None
        self._split: dict[str, bool] = {}  # of streams, whether each rank has its own part
        self._trying = False  # on a few rows, before training

    def evaluate(
        self, train: Features, test: Features, num_classes: int, trainer: L.Trainer
    ) -> Mapping[str, Tensor | float]:
        """The values to log, from whole splits that are the same on all ranks; may use collectives."""
        raise NotImplementedError

    def evaluate_shards(
        self, train: Shard, test: Shard, num_classes: int, trainer: L.Trainer
    ) -> Mapping[str, Tensor | float]:
        """The values to log, from each rank's own rows; by default they are gathered for :meth:`evaluate`."""
        together = self.together(trainer)
        return self.evaluate(gathered(together, train), gathered(together, test), num_classes, trainer)

    def operations(self, train: int, test: int, dim: int, num_classes: int) -> float:
        """About how many multiplications an evaluation takes, for the cost that is stated before training."""
        return 0.0

    def together(self, trainer: L.Trainer) -> Together:
        """The ranks, for work on shards."""
        return Together(trainer.strategy.root_device, sharded=ranks_of(trainer) > 1)

    def budget(self, trainer: L.Trainer) -> int:
        """How many numbers a chunk may hold; half as many after each time that memory ran out."""
        return max(2**14, BUDGET >> self._shares(trainer).halvings)

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
        """Collective: look at a sample of each split, so that bad data ends the run before it starts, on all ranks."""
        problem, first = "", {}
        try:
            for split, loader in zip(_SPLITS, self._loaders(trainer), strict=True):
                with isolate_rng():
                    batch = next(iter(one_sample(loader)), None)
                if batch is not None:
                    inputs_and_label(batch, split, self.targets)
                elif ranks_of(trainer) == 1:
                    problem = f"the probe's {split} set is empty; pass `data=` with samples"
                if isinstance(loader, Stream):
                    first[split] = [] if batch is None else marks_of(batch)
        except (MisconfigurationException, ValueError) as error:
            problem = str(error)
        except Exception as error:  # also what reads a file may fail on one rank alone
            problem = f"the probe data cannot be read: {type(error).__name__}: {error}"
        every = gather_objects((problem, first)) if ranks_of(trainer) > 1 else [(problem, first)]
        if not problem and not any(words for words, _ in every):
            try:
                self._split = {split: is_split([marks[split] for _, marks in every]) for split in first}
                return
            except ValueError as error:
                problem = str(error)
        raise MisconfigurationException(f"{self._who}: {problem or 'another rank could not read the probe data'}")

    # When ----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.baseline and trainer.global_step == 0 and self._last_step is None:
            self._last_step = 0
            values = self._probe(trainer, pl_module, "val", ("start",))
            log_now(trainer, values, step=0)
            trainer.callback_metrics.update({key: torch.tensor(value) for key, value in values.items()})
        else:
            self._try_out(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = logging_step(trainer)
        if self._shares(trainer).moment[:1] != (("step", step),):
            self._shares(trainer).clear()
        if self._is_due(step):
            self._last_step = step
            values = self._probe(trainer, pl_module, "val", ("step", step))
            log_for_callbacks(pl_module, values)
            log_now(trainer, values, step)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            log_epoch(pl_module, self._probe(trainer, pl_module, "val", ("val",)))
        elif not trainer.sanity_checking and trainer.is_last_batch and all_ranks_evaluate(trainer, pl_module):
            # With the epoch's validation, so that a checkpoint can be chosen by these values.
            self._end_of_epoch(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_of_epoch(trainer, pl_module)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log_epoch(pl_module, self._probe(trainer, pl_module, "test", ("test",)))

    def _end_of_epoch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch
        if self._is_due_at(("epoch", epoch), trainer):
            self._last_epoch = epoch
            log_epoch(pl_module, self._probe(trainer, pl_module, "val", ("epoch", epoch)))

    def _is_due_at(self, moment: tuple[Any, ...], trainer: L.Trainer) -> bool:
        """Whether this probe is to run at a moment at which another does."""
        kind, *number = moment
        if kind == "start":
            return self.baseline and self._last_step is None
        if kind == "step":
            return self._is_due(number[0])
        if kind == "epoch":
            n, epoch = self.every_n_epochs, number[0]
            due = n is not None and ((epoch + 1) % n == 0 or epoch + 1 == trainer.max_epochs)
            return due and self._last_epoch != epoch
        return True

    # What ----------------------------------------------------------------------------------------------------------

    def _shares(self, trainer: L.Trainer) -> _Shared:
        return _shared.setdefault(trainer, _Shared())

    def _probe(
        self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str, moment: tuple[Any, ...]
    ) -> dict[str, float]:
        began = time.perf_counter()
        self._moment = moment
        with undisturbed(pl_module.device), isolate_rng(), evaluation_mode(pl_module), silence(), validating(trainer):
            train = self._embed(trainer, pl_module, "train")
            test = None if train is None else self._embed(trainer, pl_module, "test")
            if train is None or test is None:
                return {}
            num_classes = self._num_classes(trainer, train, test)
            try:
                values = self.evaluate_shards(train, test, num_classes, trainer)
            except torch.distributed.DistError:
                raise
            except (ValueError, RuntimeError, MemoryError) as error:  # the same on all ranks
                self._failed(trainer, error)
                return {}
            finally:
                self._release(trainer)
            if moment == ("start",):
                self._state_cost(trainer, train, test, time.perf_counter() - began)
            return as_floats({self.key(stage, quantity): value for quantity, value in values.items()})

    def _failed(self, trainer: L.Trainer, error: Exception) -> None:
        """One warning, and training goes on; where memory ran out, on all ranks, and the next probe takes less."""
        words = f"step {logging_step(trainer)}, {type(error).__name__ if not str(error) else error}"
        if not out_of_memory(error):
            self.warn("a probe failed, training goes on: ", words)
            return
        shares = self._shares(trainer)
        shares.halvings += 1
        shares.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(
            f"{self._who}: a probe ran out of memory, training goes on, the next one takes half the chunk: {words}",
            stacklevel=2,
        )

    def _agree(self, trainer: L.Trainer, ok: bool) -> bool:
        return agree(ok, device=trainer.strategy.root_device)[0] if ranks_of(trainer) > 1 else ok

    # One pass for all -------------------------------------------------------------------------------------------------

    def _source(self, trainer: L.Trainer) -> Any:
        return self.data if self.data is not None else getattr(trainer, "datamodule", None)

    def _data_key(self, trainer: L.Trainer) -> tuple[Any, ...]:
        source = self._source(trainer)
        parts = source if isinstance(source, (tuple, list)) else [source]
        return (*(id(part) for part in parts), self.targets, tuple(self.num_samples or ()))

    def _reader(self, pl_module: L.LightningModule) -> Reader:
        place_ = self.features or self.encoder
        layout = self.layout if isinstance(self.layout, str) or self.layout is None else id(self.layout)
        return Reader(
            self.encoder,
            place_,
            _DTYPES[self.dtype],
            (self.encoder, place_, layout, self.dtype),
            lambda output, seen, samples: self._rows(output, seen, samples, pl_module),
            lambda: self._layout is None,
        )

    def _embed(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> Shard | None:
        """Collective: this rank's shard of a split, from the pass that all probes of this moment share."""
        shares, data, moment = self._shares(trainer), self._data_key(trainer), self._moment
        reader = self._reader(pl_module)
        now = moment, trainer.global_step, fingerprint(pl_module)
        if self._agree(trainer, shares.moment == now and (data, split, reader.key) in shares.shards):
            return shares.shards[data, split, reader.key]
        if shares.moment != now:
            shares.clear()
        others = [
            other
            for other in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(other, Probe) and other is not self
            if other._data_key(trainer) == data and other._is_due_at(moment, trainer)
        ]
        found = self._pass(trainer, pl_module, split, [self, *others])
        if found is None and others and not shares.ran_out:  # another's wishes may be what failed
            found = self._pass(trainer, pl_module, split, others := [self])
        if found is None:
            return None
        shares.moment = now
        for other in [self, *others]:
            key = data, split, other._reader(pl_module).key
            shares.shards[key] = found[key[2]]
            shares.waiting.setdefault(key, set()).add(id(other))
        if not found[reader.key].total:
            raise MisconfigurationException(f"{self._who}: the probe's {split} set holds no labelled samples")
        return found[reader.key]

    def _pass(
        self, trainer: L.Trainer, pl_module: L.LightningModule, split: str, probes: Sequence[Probe]
    ) -> dict[tuple[Any, ...], Shard] | None:
        """Collective: the shards of one pass over a split for several probes, or None and a warning."""
        shares = self._shares(trainer)
        shares.ran_out = False
        loader: Any = None

        def make() -> dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]:
            nonlocal loader
            loader = self._loaders(trainer)[split == "test"]
            readers = [probe._reader(pl_module) for probe in probes]
            pieces = 2**shares.halvings
            return embed(trainer, pl_module, self._holder(trainer), loader, split, readers, self.targets, pieces)

        try:
            found = place(self.together(trainer), make)
            if isinstance(loader, Stream):
                self._look_at(loader, split, trainer)
            return found
        except torch.distributed.DistError:
            raise
        except Exception as error:
            shares.ran_out = out_of_memory(error)
            if len(probes) == 1 or shares.ran_out:
                self._failed(trainer, error)
            return None

    def _look_at(self, stream: Stream, split: str, trainer: L.Trainer) -> None:
        """Collective: say what a stream did not give, or gave twice."""
        together = self.together(trainer)
        parts = together.gather(lambda: [torch.tensor(stream.marks, dtype=torch.long), stream.taken])
        again = together.run(lambda: read_by_several([marks for marks, _ in parts]))
        taken = sum(number for _, number in parts)
        if again > _REPEATED * taken:
            self.warn(
                f"`data`: samples of the {split} stream were read by several ranks, so that others may be missing: all "
                "ranks must read it in the same order (not shuffled), or each a part of its own: ",
                f"{again} of {taken}",
            )
        if stream.samples is not None and not trainer.fast_dev_run and taken < stream.samples:  # type: ignore[attr-defined]
            self.warn(
                f"`num_samples`: the {split} stream ended before the stated number, of which each rank that has a part "
                "of its own is to take its share; state what there is, or nothing to take all: ",
                f"{taken} of {stream.samples} samples",
            )

    def _holder(self, trainer: L.Trainer) -> Any:
        """The DataModule whose transfer hooks apply."""
        return self.data if is_a(self.data, "LightningDataModule") else getattr(trainer, "datamodule", None)

    def _release(self, trainer: L.Trainer) -> None:
        """Let go of the features that nobody waits for any more."""
        shares = self._shares(trainer)
        for key in list(shares.shards):
            shares.waiting.get(key, set()).discard(id(self))
            if not shares.waiting.get(key):
                del shares.shards[key]
                shares.waiting.pop(key, None)

    def _rows(self, output: Any, seen: str | None, samples: int, pl_module: L.LightningModule) -> Tensor:
        if callable(self.layout):
            return self.layout(output)
        x = first_tensor(output)
        if x is None:
            raise ValueError(f"`encoder={self.encoder!r}` returned no features for a batch of images")
        if self._layout is None or len(self._layout) != max(2, x.ndim):
            self._layout = self.layout or settle(x, seen, [samples], puts_sequences_first(pl_module))
        return rows_of(x, self._layout)

    def _num_classes(self, trainer: L.Trainer, train: Shard, test: Shard) -> int:
        """Collective."""
        if self.targets != "class":
            return int(train.labels.shape[1])
        present = self.together(trainer).gather(lambda: {s: x.labels.unique() for s, x in (("a", train), ("b", test))})
        seen = torch.cat([part["a"].cpu() for part in present]).unique()
        if len(seen) < 2:
            raise MisconfigurationException(
                f"{self._who}: the probe's train set holds one class only (label {int(seen[0])}); "
                "a probe needs at least two"
            )
        source = self.data if is_a(self.data, "LightningDataModule") else None
        source = source or (trainer.datamodule if self.data is None else None)  # type: ignore[attr-defined]
        largest = int(max(int(part[s].max()) for part in present for s in "ab" if len(part[s]))) + 1
        known = self.num_classes or getattr(source, "num_classes", None) or largest
        if known < largest:
            raise MisconfigurationException(
                f"{self._who}: `num_classes={known}`, but the labels go up to {largest - 1}; pass {largest} or more"
            )
        return int(known)

    # What it will cost ------------------------------------------------------------------------------------------------

    def _try_out(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Collective: embed a batch, try the collectives on a few rows, and say what a probe will take."""
        with undisturbed(pl_module.device), isolate_rng(), evaluation_mode(pl_module), silence(), validating(trainer):
            together, reader = self.together(trainer), self._reader(pl_module)
            holder = self._holder(trainer)
            began = time.perf_counter()
            try:
                loaders = self._loaders(trainer)
                few = [
                    place(
                        together,
                        lambda loader=loader, split=split: embed(  # type: ignore[misc]
                            trainer, pl_module, holder, loader, split, [reader], self.targets, batches=1
                        ),
                    )[reader.key]
                    for loader, split in zip(loaders, ("train", "test"), strict=True)
                ]
                seconds = time.perf_counter() - began
                some = [_alternating(part, self.targets) for part in few]
                self._trying = True
                classes = 2 if self.targets == "class" else some[0].labels.shape[1]
                self.evaluate_shards(some[0], some[1], classes, trainer)
            except torch.distributed.DistError:
                raise
            except Exception as error:
                self._failed(trainer, error)
                return
            finally:
                self._trying = False
            own = [own_samples(trainer, loader) for loader in loaders]
            if any(n is None for n in own):
                self.tell(
                    "how many samples its data has is not known; pass `num_samples=` to be told what a probe takes"
                )
                return
            totals = [n * trainer.world_size for n in own if n is not None]
            speed = max(1, sum(len(part.rows) for part in few)) / seconds
            dim, classes = few[0].rows.shape[1], self.num_classes or getattr(holder, "num_classes", None) or 1000
            work = (
                self.operations(totals[0], totals[1], dim, classes)
                / trainer.world_size
                / _multiplications_a_second(together.device)
            )
            self._say(trainer, totals, dim, sum(n for n in own if n is not None) / speed + work, "about ")

    def _state_cost(self, trainer: L.Trainer, train: Shard, test: Shard, seconds: float) -> None:
        self._say(trainer, [train.total, test.total], train.rows.shape[1], seconds, "")

    def _say(self, trainer: L.Trainer, totals: Sequence[int], dim: int, seconds: float, about: str) -> None:
        size, ranks = sum(totals) * dim * _DTYPES[self.dtype].itemsize, max(1, ranks_of(trainer))
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        self.tell(
            f"a probe takes {totals[0]:,} + {totals[1]:,} rows of {dim} features, {size / ranks / 1e6:.3g} MB{each}, "
            f"at most {6 * 4 * BUDGET / 1e6:.0f} MB more for chunks, {about}{seconds:.2g} s"
        )

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
            return [Sharded(loader) for loader in loaders]
        if data is None:
            raise MisconfigurationException(
                "`data` is missing: the trainer has no DataModule; pass `data=(train_loader, test_loader)` with clean, "
                "labelled images, or a DataModule with `probe_dataloaders()`"
            )
        if not isinstance(data, Sequence) or len(data) != 2:
            raise MisconfigurationException(
                f"`data` must be a DataModule or a pair (train_loader, test_loader), got {type(data).__name__}"
            )
        samples = self.num_samples or (None, None)
        splits = [self._split.get(split, False) for split in _SPLITS]
        parts = zip(data, samples, splits, strict=True)
        return [as_loader(part, n, split, self.targets) for part, n, split in parts]

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


def _alternating(part: Shard, targets: Targets) -> Shard:
    """A few rows with two classes among them."""
    labels = part.positions % 2 if targets == "class" else part.labels
    return part._replace(labels=labels)


def _multiplications_a_second(device: torch.device) -> float:
    x = torch.ones(512, 512, device=device)
    float((x @ x)[0, 0])  # the first one wakes libraries
    began = time.perf_counter()
    float((x @ x)[0, 0])
    return float(512**3 / max(1e-6, time.perf_counter() - began))


def out_of_memory(error: BaseException) -> bool:
    """Whether this, or what another rank said, is about memory that could not be had."""
    words = f"{type(error).__name__}: {error}".lower()
    told = ("out of memory", "outofmemory", "can't allocate memory", "cannot allocate memory", "memoryerror")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in words for word in told)
