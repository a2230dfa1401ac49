"""Lightning's private names: each with why it is needed and which public way was tried. No other file uses any."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint


def logging_step(trainer: L.Trainer) -> int:
    """The loggers' x-axis: batches that ended in an optimizer step, whatever the number of optimizers.

    `trainer.global_step` counts every optimizer's step, so that values written at it stand apart from those that
    `self.log` writes; nothing public holds this count.
    """
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether a validation comes after this training batch; asked in `on_train_batch_end`.

    Computing it from `val_check_interval`, `check_val_every_n_epoch` and `limit_val_batches` repeats five rules, one of
    which (an interval counted over epochs) depends on the fetcher.
    """
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))  # type: ignore[arg-type]


def dump_checkpoint(trainer: L.Trainer, weights_only: bool | None) -> dict[str, Any]:
    """The content of a checkpoint, made by this rank alone.

    `trainer.save_checkpoint` waits for all ranks, and after an exception some may never come.
    """
    return trainer._checkpoint_connector.dump_checkpoint(bool(weights_only))


class OpenModelCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that can be told to save.

    `trainer.save_checkpoint` writes a file, but keeps no account of the best and the last ones, removes none and tells
    no logger; a second ModelCheckpoint would keep an account of its own.
    """

    @property
    def every_n_train_steps(self) -> int:
        """The constructor's argument, which it keeps to itself."""
        return int(self._every_n_train_steps or 0)

    def may_save(self, trainer: L.Trainer) -> bool:
        """Whether a fit is under way whose last step has not been saved yet."""
        return not self._should_skip_saving_checkpoint(trainer)

    def save_now(self, trainer: L.Trainer) -> None:
        """Save as at a due step: the best ones, and the last."""
        values = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, values)
        self._save_last_checkpoint(trainer, values)

    def save_unranked(self, trainer: L.Trainer) -> None:
        """Save whatever the monitored value, and the last."""
        values = self._monitor_candidates(trainer)
        self._save_checkpoint(trainer, self.format_checkpoint_name(values))
        self._save_last_checkpoint(trainer, values)

    def last_path(self, trainer: L.Trainer) -> str:
        """Where the last checkpoint goes."""
        return self.format_checkpoint_name(self._monitor_candidates(trainer), "last")


TWINS = ("lightning.", "pytorch_lightning.")


def overrides(thing: Any, method: str) -> bool:
    """Whether a class has its own form of one of Lightning's methods, whichever package it imports Lightning from."""
    owner = next((cls for cls in type(thing).__mro__ if method in vars(cls)), None)
    return owner is not None and not owner.__module__.startswith(TWINS)


def is_a(thing: Any, name: str) -> bool:
    """Whether something is of one of Lightning's classes, by name: `lightning` and `pytorch_lightning` have twins."""
    return any(cls.__name__ == name and cls.__module__.startswith(TWINS) for cls in type(thing).__mro__)
