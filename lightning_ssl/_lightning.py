"""Lightning's private names: each with why it is needed and which public way was tried. No other file uses any."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy


def logging_step(trainer: L.Trainer) -> int:
    """The loggers' x-axis: batches that ended in an optimizer step, whatever the number of optimizers.

    `trainer.global_step` counts every optimizer's step, so that values written at it stand apart from those that
    `self.log` writes; nothing public holds this count.
    """
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def epoch_values(trainer: L.Trainer) -> dict[str, Any]:
    """Collective: what will be logged at the end of this epoch; asked in `on_train_epoch_end`.

    It is in `trainer.logged_metrics` only after the hook, and after the epoch's checkpoint.
    """
    return dict(trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["log"])


def logged_values(trainer: L.Trainer) -> dict[str, Any]:
    """What stands in `trainer.logged_metrics`, without what asking for those does: it reads the progress bar's values.

    Besides what is logged now, what was logged at other times.
    """
    connector, results = trainer._logger_connector, trainer._results
    found = dict(connector._logged_metrics)
    if results is not None:
        on_step = connector._first_loop_iter is not None
        for _, metric in results.valid_items():
            value = results._get_cache(metric, on_step)
            if metric.meta.logger and value is not None:
                found[results._forked_name(metric, on_step)[1]] = value
    return found


def remember_logged(trainer: L.Trainer, values: dict[str, Any]) -> None:
    """Put values among `trainer.logged_metrics`; asking for those would read the progress bar's."""
    trainer._logger_connector._logged_metrics.update(values)


def logs_this_step(trainer: L.Trainer) -> bool:
    """Whether Lightning reads and writes what this step logged, after `on_train_batch_end`."""
    return bool(trainer._logger_connector.should_update_logs)


def shows_bar(module: L.LightningModule) -> bool:
    """Whether a progress bar reads what is logged for it, which it does at each step; there may be no Trainer yet."""
    return getattr(module._trainer, "progress_bar_callback", None) is not None


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether a validation comes after this training batch; asked in `on_train_batch_end`.

    Computing it from `val_check_interval`, `check_val_every_n_epoch` and `limit_val_batches` repeats five rules, one of
    which (an interval counted over epochs) depends on the fetcher.
    """
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))  # type: ignore[arg-type]


def step_completed(trainer: L.Trainer) -> bool:
    """Whether the batch just trained on ended in an optimizer step; asked in `on_train_batch_end`.

    Computing it from `accumulate_grad_batches` repeats the rules on the last batch of an epoch.
    """
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def checkpoint_between_steps(trainer: L.Trainer, logged: int, weights_only: bool | None) -> dict[str, Any] | None:
    """The checkpoint that `on_train_batch_end` would have written after the last step, made by this rank alone.

    None in the middle of a step, of a validation, of gradient accumulation or of the logging, and where the state is
    not replicated. `trainer.save_checkpoint` waits for all ranks, and after an exception some may never come. What
    tells that no batch was begun, nor fetched, since the last step are the loop's and the fetcher's counts.

    Args:
        trainer: The Trainer, in `on_exception`.
        logged: The :func:`logging_step` at the last step's `on_train_batch_end`.
        weights_only: As for `trainer.save_checkpoint`.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches = loop.batch_progress.current
    if not (
        isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
        and trainer.training
        and fetcher is not None
        and 0 < batches.ready == batches.completed == fetcher.fetched
        and not loop.batch_progress.is_last_batch
        and not loop._should_accumulate()
        and not loop._should_check_val_fx(fetcher)
        and logging_step(trainer) == logged + 1
    ):
        return None
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(bool(weights_only))
    counts = checkpoint["loops"]["fit_loop"]
    for count in ("total", "current"):
        counts["epoch_loop.batch_progress"][count]["completed"] -= 1
    counts["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    return checkpoint


def recount_batches(trainer: L.Trainer, batches: int, whole: int) -> None:
    """Let a fit that is being restored have trained on so many batches of the epoch; all of them, if it had before.

    A DataModule is shown its own part of the checkpoint only, and the loops' counts have no setter.

    Args:
        trainer: The Trainer, while it restores a checkpoint.
        batches: Those trained on, of the present size.
        whole: Those of a whole epoch.
    """
    progress = trainer._checkpoint_connector._loaded_checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    counts = progress["current"]
    shift = (whole if progress["is_last_batch"] else min(batches, whole - 1)) - counts["processed"]
    for name in counts:
        counts[name] += shift


RESUMES_BEHIND_THE_STEP = hasattr(_TrainingEpochLoop, "update_restart_stage")  # since Lightning 2.5


def count_the_step(checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint made in the midst of an epoch count the batch whose step it holds.

    It is made before Lightning counts that batch. Before 2.5 Lightning does not make up for it when it resumes, and
    trains a step too many.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loop.get("epoch_loop.batch_progress")
    if RESUMES_BEHIND_THE_STEP or progress is None or progress["is_last_batch"] or not progress["current"]["processed"]:
        return
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def cluster_environment(trainer: L.Trainer) -> Any:
    """What started this process; a strategy of one device does not hold it."""
    return trainer._accelerator_connector.cluster_environment


def group_timeout(trainer: L.Trainer) -> timedelta:
    """How long the strategy lets a collective wait; the process group does not tell."""
    return getattr(trainer.strategy, "_timeout", None) or timedelta(minutes=30)


class OpenModelCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that can be told to save, and that keeps the last few where it monitors nothing.

    `trainer.save_checkpoint` writes a file, but keeps no account of the best and the last ones, removes none and tells
    no logger; a second ModelCheckpoint would keep an account of its own. Lightning keeps the last one, or all.
    """

    keep = 1
    kept: tuple[str, ...] = ()

    @property
    def every_n_train_steps(self) -> int:
        """The constructor's argument, which it keeps to itself."""
        return int(self._every_n_train_steps or 0)

    def epoch_is_due(self, trainer: L.Trainer) -> bool:
        """Whether the constructor's arguments ask for a checkpoint at the end of this epoch, or did in the midst of it.

        A due step without the monitored value waits for the validation that brings it (since Lightning 2.6).
        """
        due = self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0
        return due or getattr(self, "_defer_save_until_validation", False)

    def waits_for_validation(self, trainer: L.Trainer) -> bool:
        """Whether the end of an epoch is saved only if there was a validation."""
        return not self._should_save_on_train_epoch_end(trainer)

    def may_save(self, trainer: L.Trainer) -> bool:
        """Whether a fit is under way whose last step has not been saved yet."""
        return not self._should_skip_saving_checkpoint(trainer)

    def save_now(self, trainer: L.Trainer) -> None:
        """Save as at a due step: the best ones, and the last."""
        self._defer_save_until_validation = False
        values = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, values)
        self._save_last_checkpoint(trainer, values)

    def save_only_last(self, trainer: L.Trainer) -> None:
        """Save the last one, where that is kept, and leave the others alone."""
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def last_path(self, trainer: L.Trainer) -> str:
        """Where the last checkpoint goes."""
        return self.last_model_path or self.format_checkpoint_name(self._monitor_candidates(trainer), "last")

    def _save_none_monitor_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Any]) -> None:
        if self.save_top_k != 1 or self.keep == 1:
            super()._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, self.best_model_path)
        earlier = [kept for kept in self.kept if kept != path]
        # Before it is saved: both are part of the state.
        self.kept, self.best_model_path = (*earlier[-self.keep + 1 :], path), path
        self._save_checkpoint(trainer, path)
        for old in earlier[: -self.keep + 1]:
            if self._should_remove_checkpoint(trainer, old, path):
                self._remove_checkpoint(trainer, old)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kept": list(self.kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.dirpath == state_dict.get("dirpath"):
            self.kept = tuple(state_dict.get("kept", ()))


TWINS = ("lightning.", "pytorch_lightning.")


def overrides(thing: Any, method: str) -> bool:
    """Whether a class has its own form of one of Lightning's methods, whichever package it imports Lightning from."""
    owner = next((cls for cls in type(thing).__mro__ if method in vars(cls)), None)
    return owner is not None and not owner.__module__.startswith(TWINS)


def is_a(thing: Any, name: str) -> bool:
    """Whether something is of one of Lightning's classes, by name: `lightning` and `pytorch_lightning` have twins."""
    return any(cls.__name__ == name and cls.__module__.startswith(TWINS) for cls in type(thing).__mro__)
