"""The base of callbacks that watch training steps: a class with one method from all ranks' rows to values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from lightning_ssl._lightning import logging_step
from lightning_ssl.callbacks._engine.layout import Layout, check_layout
from lightning_ssl.callbacks._engine.observation import Observatory, Seen, Spec, observatory
from lightning_ssl.callbacks._engine.pair import Declared, Pairing, Reading
from lightning_ssl.callbacks._engine.places import check_path, find_module
from lightning_ssl.callbacks._engine.ranks import all_ranks_evaluate, ranks_of
from lightning_ssl.callbacks._engine.report import log_epoch, log_for_callbacks, log_now
from lightning_ssl.callbacks.diagnostic import Diagnostic, as_floats
from lightning_ssl.folder import run_dir
from lightning_ssl.functional.checks import check_rows, trusting
from lightning_ssl.precision import undisturbed


def precise(x: Tensor) -> Tensor:
    """Double precision, where the device has it: the logarithm of a mean near 1 (a collapse) keeps few digits."""
    return x.float() if x.device.type == "mps" else x.double()


class Watcher(Diagnostic):
    """Watches what leaves a submodule during training steps, and held-out ones if asked to.

    A subclass defines :meth:`measure`, a function from all ranks' rows to values; they are then the same at any number
    of ranks. What goes wrong in it is a warning: watching never ends a run.

    Args:
        features: Dotted path of the submodule whose outputs are the features.
        views: How many views of a sample a training step holds; by default as the calls and the batch show.
        pairing: How they lie: "calls" (a call a view), "blocked" (one view after the other in a call), "interleaved"
            (sample by sample), or a function from the list of the calls' rows to the list of views.
        layout: Which axis of the features is the sample's (N), the feature's (C), a position's: "NCHW", "NHWC", "NLC",
            "NCL", "LNC", or a function from what left the submodule to rows [N, d]; positions are averaged. By default
            as the submodule's type tells.
        target: Dotted path of a target network's twin of `features`, whose calls supply the second view where the
            online network sees one view only.
        every_n_steps: Look at every n-th training step, the first included.
        every_n_epochs: Look at the first step of every n-th epoch.
        held_out: Watch validation and test as well; a dict declares `views` and `pairing` there.
        name: Keeps several instances apart: ``train/<name>/...``.

    Example:
        >>> class MedianNorm(Watcher):
        ...     def measure(self, rows):
        ...         return {"median_norm": rows.norm(dim=1).median()}
        >>> watch = MedianNorm("projector", every_n_steps=10)  # logs train/median_norm
    """

    paired: ClassVar[bool] = False  # True: `measure` gets the views of each sample, [N, V, d]
    wants_inputs: ClassVar[bool] = False
    prefix: ClassVar[str | None] = None  # what keys begin with instead of the stage

    def __init__(
        self,
        features: str = "projector",
        views: int | None = None,
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
        every_n_steps: int | None = 50,
        every_n_epochs: int | None = None,
        held_out: bool | Mapping[str, Any] = False,
        name: str | None = None,
        argument: str = "features",
    ) -> None:
        super().__init__({argument: features}, every_n_steps, every_n_epochs, name)
        declared = Declared(views, pairing)
        declared.check()
        check_layout(layout)
        self.features, self.views, self.pairing, self.layout, self.target = features, views, pairing, layout, target
        self.held_out = held_out
        try:
            aside = Declared(**held_out) if isinstance(held_out, Mapping) else Declared()
        except TypeError:
            raise ValueError(
                f"`held_out` must be a bool or a dict of `views` and `pairing`, got {held_out!r}"
            ) from None
        aside.check()
        # Validation has its own views: what is declared of training does not hold there.
        self._specs = {
            "train": Spec(features, argument, layout, declared, target),
            "held": Spec(features, argument, layout, aside, target),
        }
        self._due: int | None = None  # the step being watched
        self._pending = False
        self._values: dict[str, float] = {}
        self._evaluating = False
        self.folder: Path | None = None

    def begin_run(self) -> None:
        super().begin_run()
        self._readings: dict[str, tuple[str, tuple[int, ...]]] = {}

    # What a subclass does ---------------------------------------------------------------------------------------------

    def measure(self, rows: Tensor) -> Mapping[str, Tensor | float]:
        """The values, by name, of the features of all ranks.

        Args:
            rows: All rows of all views, ``[M, d]``; with `paired`, those of each sample, ``[N, V, d]``. In double
                precision, samples in the order in which they were dealt to the ranks, the same on all of them.
        """
        raise NotImplementedError

    def observe(self, trainer: L.Trainer, pl_module: L.LightningModule, seen: Seen, stage: str) -> dict[str, Any]:
        """For callbacks that need more than rows: the values to log by their keys."""
        rows = seen.views if self.paired else seen.rows
        assert rows is not None
        values = self.measure(precise(rows))
        return {self.key(self.prefix or stage, name): value for name, value in values.items()}

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        """On all ranks after `observe`, outside the collectives: pictures and files."""

    def draws(self, stage: str, picture_every: int) -> bool:
        """Whether this observation is one of every `picture_every` (held-out ones all are)."""
        return bool(picture_every) and (stage != "train" or (self._looks - 1) % picture_every == 0)

    # Life -------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.target is not None:
            check_path(pl_module, self.target, "target")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.folder = run_dir(trainer)
        self.check_places(pl_module)

    def check_places(self, pl_module: L.LightningModule) -> None:
        """Refuse, before the first step, what cannot be watched; the module is complete now."""
        for argument, path in self.places.items():
            find_module(pl_module, path, argument)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        observatory(trainer).clear()
        self._due = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        observatory(trainer).clear()
        self._due = None

    def state_dict(self) -> dict[str, Any]:
        readings = {stage: [kind, list(parts)] for stage, (kind, parts) in self._readings.items()}
        return {**super().state_dict(), "readings": readings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._readings = {
            stage: (kind, tuple(parts)) for stage, (kind, parts) in state_dict.get("readings", {}).items()
        }

    # A training step --------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = logging_step(trainer)
        if self._is_due(step, trainer.current_epoch):
            self._last_step, self._last_epoch, self._due = step, trainer.current_epoch, step
            self._values, self._pending, self._looks = {}, True, self._looks + 1
            watched = observatory(trainer)
            watched.begin(self, pl_module, "train", (step, batch_idx), batch)
            self.ask(watched, pl_module)

    def ask(self, watched: Observatory, pl_module: L.LightningModule) -> None:
        """Say which places to record in the step about to run."""
        spec = self._specs["train"]
        if "train" in self._readings and (spec, "train") not in watched.settled:
            watched.settled[spec, "train"] = Reading(*self._readings["train"])
        watched.want(spec, inputs=self.wants_inputs)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._pending:
            observatory(trainer).recorder.backward(True)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._pending:
            observatory(trainer).recorder.backward(False)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        # Before the weights move: the first value is that of the untrained network. A second optimizer's calls come
        # after this and are not more views.
        self._look(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due is None:
            return
        self._look(trainer, pl_module)  # where no optimizer stepped: accumulation, a skipped batch
        observatory(trainer).end(self)
        if self._values:
            log_for_callbacks(pl_module, self._values)
            log_now(trainer, self._values, self._due)
            self._guard_report(trainer, self._due, "train")
        self._due, self._values = None, {}

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._pending:
            return
        self._pending = False
        with undisturbed(pl_module.device):
            self._values = self._guarded(trainer, pl_module, "train")

    def see(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> Seen | None:
        """Collective: what all ranks saw of the place."""
        watched, device, ranks = observatory(trainer), pl_module.device, ranks_of(trainer)
        spec = self._specs["train" if stage == "train" else "held"]
        seen = watched.rows(spec, device, ranks) if stage == "train" else watched.held_rows(spec, stage, device, ranks)
        if reading := watched.settled.get((spec, stage)):
            self._readings[stage] = reading.kind, reading.parts
        return seen

    def _measured(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> dict[str, Any] | None:
        """Collective: the values by their keys; None where the place was not called on any rank."""
        seen = self.see(trainer, pl_module, stage)
        if seen is None:
            return None
        if self.paired and seen.views is None:
            raise ValueError(seen.doubt)
        return self.observe(trainer, pl_module, seen, stage)

    def _guarded(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> dict[str, float]:
        """Collective: the values; what goes wrong is the same on all ranks, and a warning."""
        what = "a step was not logged, training goes on" if stage == "train" else "held-out features are not logged"
        try:
            values = self._on_host(trainer, pl_module, stage)
            if values is None and stage == "train":
                self._warn_not_called(trainer, pl_module)
            return values or {}
        except torch.distributed.DistError:
            raise
        except Exception as error:
            self.warn(f"{what}: ", f"step {logging_step(trainer)}, {error}")
            return {}

    def _on_host(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> dict[str, float] | None:
        """Collective: the values as numbers, for which the host waits once."""
        if pl_module.device.type == "cpu":
            values = self._measured(trainer, pl_module, stage)
            return None if values is None else as_floats(values)
        with trusting():
            values = self._measured(trainer, pl_module, stage)
            found = None if values is None else as_floats(values)
        if found is not None and not all(map(math.isfinite, found.values())):
            self.check_rows(trainer, pl_module, stage)
        return found

    def check_rows(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Collective: raise if what was seen holds non-finite numbers; asked where values are."""
        seen = self.see(trainer, pl_module, stage)
        if seen is not None:
            check_rows(seen.rows, self.features)

    def _warn_not_called(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        paths = ", ".join(repr(path) for path in self.places.values())
        parts = observatory(trainer).called_inside(next(iter(self.places.values())))
        hint = f"; of its parts {', '.join(map(repr, parts))} were called" if parts else ""
        self.warn(
            f"{paths} was not called with gradients during a training step, so there is nothing to log{hint}; name a "
            "submodule that `training_step` calls (hooks see `module(x)`, not its other methods)"
        )

    def _guard_report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        try:
            self.report(trainer, step, stage)
        except Exception as error:
            self.warn("no picture: ", error)

    # Held-out data: kept batch by batch, exchanged once at the end ----------------------------------------------------

    def _eval_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        wanted = bool(self.held_out) or isinstance(self.held_out, Mapping)
        self._evaluating = wanted and not trainer.sanity_checking and all_ranks_evaluate(trainer, pl_module)
        if self._evaluating:
            if trainer.state.fn != "fit":
                self.folder = run_dir(trainer)
            observatory(trainer).begin_holding(self)

    def _eval_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if self._evaluating and dataloader_idx == 0:
            stage = "test" if trainer.testing else "val"
            watched = observatory(trainer)
            watched.begin_batch(self, pl_module, stage, batch_idx, batch)
            watched.want(self._specs["held"], inputs=self.wants_inputs)

    def _eval_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch_idx: int, dataloader_idx: int
    ) -> None:
        if self._evaluating and dataloader_idx == 0:
            with undisturbed(pl_module.device):
                observatory(trainer).hold(self._specs["held"], own_samples(trainer, batch_idx))

    def _eval_end(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self._evaluating:
            return
        self._evaluating = False
        with undisturbed(pl_module.device):
            values = self._guarded(trainer, pl_module, stage)
        observatory(trainer).end(self)
        log_epoch(pl_module, values)
        if values:
            self._guard_report(trainer, logging_step(trainer), stage)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_start(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_start(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._eval_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._eval_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any, dataloader_idx: int = 0
    ) -> None:
        self._eval_batch_end(trainer, pl_module, rest[2], rest[3] if len(rest) > 3 else dataloader_idx)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any, dataloader_idx: int = 0
    ) -> None:
        self._eval_batch_end(trainer, pl_module, rest[2], rest[3] if len(rest) > 3 else dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_end(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._eval_end(trainer, pl_module, "test")


def own_samples(trainer: L.Trainer, batch_idx: int) -> tuple[int, int] | None:
    """Samples of an evaluation batch, and how many are not what a DistributedSampler adds to even out ranks.

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
        return None
    own = -(-(len(sampler.dataset) - sampler.rank) // sampler.num_replicas)  # type: ignore[arg-type]
    here = min(batch_size, sampler.num_samples - batch_idx * batch_size)
    return here, max(0, min(here, own - batch_idx * batch_size))
