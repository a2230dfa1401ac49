"""The common part of the callbacks that watch: when a step is due, what was seen, and how it is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from lightning_ssl.callbacks._capture import Call, Recorder, as_rows, split_views
from lightning_ssl.callbacks._places import check_path, find_module
from lightning_ssl.callbacks._ranks import agree, is_distributed, refuse_sharded
from lightning_ssl.callbacks._report import log_epoch, log_for_callbacks, log_now, logging_step, run_dir, warn_once


def check_interval(every_n_steps: int | None, every_n_epochs: int | None) -> None:
    for name, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` must be a positive integer or None, got {value!r}")
    if every_n_steps is None and every_n_epochs is None:
        raise ValueError("give `every_n_steps` or `every_n_epochs`: both are None")


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Compute on captured tensors at full precision, without gradients, inside or outside inference mode."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class Watcher(L.Callback):
    """A callback that records calls of named submodules on the training steps that are due.

    Subclasses say what to do with them: `update` on this rank's own rows, without collectives, then `compute`, which
    all ranks enter or none. What goes wrong in either is a warning: watching never ends a run.

    Args:
        places: argument name -> dotted path of the submodule it names.
        every_n_steps: watch every that many steps, the first included.
        every_n_epochs: watch the first step of every that many epochs.
        name: keeps the keys of several instances apart: ``train/<name>/...``.
        inputs: record what enters the places, too.
        outputs: how many of the tensors that leave a call are recorded.
    """

    def __init__(
        self,
        places: Mapping[str, str],
        every_n_steps: int | None,
        every_n_epochs: int | None,
        name: str | None,
        inputs: bool = False,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        check_interval(every_n_steps, every_n_epochs)
        self.places = dict(places)
        self.every_n_steps, self.every_n_epochs, self.name = every_n_steps, every_n_epochs, name
        self._recorder = Recorder(inputs, outputs)
        self._label = name
        self._batch: Any = None
        self._due: int | None = None  # the step being recorded
        self._values: dict[str, float] = {}
        self._last_step: int | None = None
        self._last_epoch: int | None = None
        self.folder: Path | None = None

    # What a subclass does ------------------------------------------------------------------------------------------

    def update(self, pl_module: L.LightningModule, calls: dict[str, list[Call]], batch: Any) -> int:
        """Take in this rank's calls; return the number of views (ranks without rows learn it from the others)."""
        raise NotImplementedError

    def compute(self, trainer: L.Trainer, pl_module: L.LightningModule, views: int, stage: str) -> dict[str, float]:
        """Collective: the values to log, without the stage in their keys where `key` adds it."""
        raise NotImplementedError

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        """On all ranks after `compute`, outside the collectives: pictures and files."""

    def draws(self, step: int, stage: str, picture_every: int) -> bool:
        """Whether this observation is one of every `picture_every` (held-out ones all are)."""
        if not picture_every or stage != "train" or self.every_n_steps is None:
            return bool(picture_every)
        return step // self.every_n_steps % picture_every == 0

    # Names ---------------------------------------------------------------------------------------------------------

    def key(self, stage: str, quantity: str) -> str:
        return f"{stage}/{self._label}/{quantity}" if self._label else f"{stage}/{quantity}"

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            places=self.places, name=self.name, steps=self.every_n_steps, epochs=self.every_n_epochs
        )

    def _choose_label(self, trainer: L.Trainer) -> None:
        """Without a name, instances of one class that would share their keys take their places for a name."""
        self._label = self.name
        twins = [other for other in trainer.callbacks if type(other) is type(self) and other.name == self.name]  # type: ignore[attr-defined]
        if len(twins) < 2:
            return
        if self.name is not None or any(other is not self and other.places == self.places for other in twins):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                f"two {type(self).__name__} callbacks would log under the same keys; give each its own `name=`"
            )
        self._label = "_".join(self.places.values())

    # Life ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        refuse_sharded(trainer, self)
        self._choose_label(trainer)
        for argument, path in self.places.items():
            check_path(pl_module, path, argument)

    def _attach(self, pl_module: L.LightningModule) -> None:
        modules = {path: find_module(pl_module, path, argument) for argument, path in self.places.items()}
        self._recorder.attach(modules)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._attach(pl_module)
        self.folder = run_dir(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._recorder.detach()
        self._batch, self._due = None, None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._recorder.detach()
        self._batch, self._due = None, None

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._last_step, "last_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_step, self._last_epoch = state_dict["last_step"], state_dict["last_epoch"]

    # A training step -----------------------------------------------------------------------------------------------

    def _is_due(self, step: int, epoch: int) -> bool:
        """Once for each interval begun: of a step's micro-batches the first, and never skipped by a stride."""
        due = False
        if self.every_n_steps is not None:
            due |= self._last_step is None or step // self.every_n_steps > self._last_step // self.every_n_steps
        if self.every_n_epochs is not None:
            due |= self._last_epoch is None or epoch // self.every_n_epochs > self._last_epoch // self.every_n_epochs
        return due

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = logging_step(trainer)
        if self._is_due(step, trainer.current_epoch):
            self._last_step, self._last_epoch, self._due = step, trainer.current_epoch, step
            self._values = {}
            self._batch = batch
            self._recorder.start(grad_only=True)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._recorder.pause()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._recorder.resume()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        # Before the weights move: the first value is that of the untrained network. A second optimizer's calls come
        # after this and are not more views.
        self._observe(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due is None:
            return
        self._observe(trainer, pl_module)  # where no optimizer stepped: accumulation, a skipped batch
        if self._values:
            log_for_callbacks(pl_module, self._values)
            log_now(trainer, self._values, self._due)
            self._guard_report(trainer, self._due, "train")
        self._due, self._values = None, {}

    def _observe(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._due is None or self._batch is None:
            return
        calls, batch, self._batch = self._recorder.stop(), self._batch, None
        with undisturbed(pl_module.device):
            self.reset(trainer, pl_module)
            ok, views = self._guarded_update(trainer, pl_module, calls, batch)
            self._values = self._agreed_compute(trainer, pl_module, ok, views, "train")

    def reset(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget what earlier steps left."""

    def _guarded_update(
        self, trainer: L.Trainer, pl_module: L.LightningModule, calls: dict[str, list[Call]], batch: Any
    ) -> tuple[bool, int]:
        try:
            return True, self.update(pl_module, calls, batch)
        except Exception as error:
            warn_once(self._who, "a step was not logged, training goes on: ", f"step {logging_step(trainer)}, {error}")
            return False, 0

    def _agreed_compute(
        self, trainer: L.Trainer, pl_module: L.LightningModule, ok: bool, views: int, stage: str
    ) -> dict[str, float]:
        ok, views = agree(trainer, ok, views)
        if ok and not views and stage == "train":
            paths = ", ".join(repr(path) for path in self.places.values())
            warn_once(
                self._who,
                f"{paths} was not called with gradients during a training step, so there is nothing to log; name a "
                "submodule that `training_step` calls (hooks see `module(x)`, not its other methods)",
            )
        if not ok or not views:
            return {}
        try:
            return {key: float(value) for key, value in self.compute(trainer, pl_module, views, stage).items()}
        except torch.distributed.DistError:
            raise
        except Exception as error:  # the same on all ranks: after the reduction
            warn_once(self._who, "a step was not logged, training goes on: ", f"step {logging_step(trainer)}, {error}")
            return {}

    def _guard_report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        try:
            self.report(trainer, step, stage)
        except Exception as error:
            warn_once(self._who, "no picture: ", error)

    @property
    def _who(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.places.items())})"


class FeatureWatcher(Watcher):
    """A watcher of one submodule's outputs, on training views and, summed over the loader, on held-out ones.

    Subclasses take rows in `take` and give values in `compute`.

    Args:
        features: dotted path of the submodule whose outputs are the features.
        views: how many views a step holds; by default one for each call with gradients, or the equal parts of a
            call on several times the batch's samples.
        held_out: watch validation and test as well.
    """

    def __init__(
        self,
        features: str,
        views: int | None,
        every_n_steps: int | None,
        every_n_epochs: int | None,
        held_out: bool,
        name: str | None,
    ) -> None:
        super().__init__({"features": features}, every_n_steps, every_n_epochs, name)
        if views is not None and (not isinstance(views, int) or views < 1):
            raise ValueError(f"`views` must be a positive integer or None, got {views!r}")
        self.features, self.views, self.held_out = features, views, held_out
        self._evaluating = False
        self._eval_ok, self._eval_views = True, 0

    def take(self, views: list[Tensor]) -> None:
        """Take in the rows [N, d] of each view."""
        raise NotImplementedError

    def update(self, pl_module: L.LightningModule, calls: dict[str, list[Call]], batch: Any) -> int:
        rows = [as_rows(call.output) for call in calls.get(self.features, []) if call.output is not None]
        views = split_views(rows, batch, self.views)
        if views:
            self.take(views)
        return len(views)

    # Held-out data: accumulate over the loader, reduce once at its end -----------------------------------------------

    def _eval_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluating = self.held_out and not trainer.sanity_checking and _all_ranks_evaluate(trainer, pl_module)
        if not self._evaluating:
            return
        if not self._recorder.attached:
            self._attach(pl_module)
        if trainer.state.fn != "fit":
            self.folder = run_dir(trainer)
        self._eval_ok, self._eval_views = True, 0
        with undisturbed(pl_module.device):
            self.reset(trainer, pl_module)

    def _eval_batch_start(self, dataloader_idx: int) -> None:
        if self._evaluating and dataloader_idx == 0:
            self._recorder.start(grad_only=False)

    def _eval_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if not self._evaluating or dataloader_idx != 0:
            return
        calls = self._recorder.stop()
        with undisturbed(pl_module.device):
            try:
                rows = [as_rows(call.output) for call in calls.get(self.features, []) if call.output is not None]
                views = [
                    view[: rows_not_padded(trainer, batch_idx, len(view))]
                    for view in split_views(rows, batch, self.views)
                ]
                if views and len(views[0]):
                    self.take(views)
                    self._eval_views = max(self._eval_views, len(views))
            except Exception as error:
                self._eval_ok = False
                warn_once(self._who, "held-out features are not logged: ", error)

    def _eval_end(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self._evaluating:
            return
        self._evaluating = False
        with undisturbed(pl_module.device):
            values = self._agreed_compute(trainer, pl_module, self._eval_ok, self._eval_views, stage)
        log_epoch(pl_module, values)
        if values:
            self._guard_report(trainer, logging_step(trainer), stage)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_start(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._eval_batch_start(dataloader_idx)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._eval_batch_end(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_end(trainer, pl_module, "val")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_start(trainer, pl_module)

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._eval_batch_start(dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._eval_batch_end(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_end(trainer, pl_module, "test")


def _all_ranks_evaluate(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    """Lightning leaves a rank with an empty loader out of the evaluation hooks, where this switch allows one."""
    sources = [pl_module, getattr(trainer, "datamodule", None)]
    allowed = any(getattr(source, "allow_zero_length_dataloader_with_multiple_devices", False) for source in sources)
    return not (allowed and is_distributed(trainer))


def rows_not_padded(trainer: L.Trainer, batch_idx: int, rows: int) -> int:
    """How many of an evaluation batch's `rows` are samples, and not what a DistributedSampler adds to even out ranks.

    The sampler hands position r + j * world_size to rank r as its j-th sample; positions past the dataset's end are
    repetitions. They come last, so that a batch keeps its first rows.
    """
    loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    while isinstance(loaders, (list, tuple)) and loaders:
        loaders = loaders[0]
    if isinstance(loaders, dict) and loaders:
        loaders = next(iter(loaders.values()))
    sampler = getattr(loaders, "sampler", None)
    batch_size = getattr(loaders, "batch_size", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last or not batch_size:
        return rows
    own = -(-(len(sampler.dataset) - sampler.rank) // sampler.num_replicas)  # type: ignore[arg-type]
    here = min(batch_size, sampler.num_samples - batch_idx * batch_size)
    return rows if rows != here else max(0, min(rows, own - batch_idx * batch_size))
