"""Checkpoints that are whole or not there, and that stand for what the log holds."""

from __future__ import annotations

import os
import pickle
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from lightning_ssl._lightning import (
    OpenModelCheckpoint,
    checkpoint_between_steps,
    count_the_step,
    group_timeout,
    logging_step,
    step_completed,
    validation_follows,
)
from lightning_ssl.distributed import Vote
from lightning_ssl.runs.signals import StopSignals


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written; its message says what to do."""


class UnreadableError(CheckpointError):
    """A file that cannot be loaded as a checkpoint."""


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its place, syncs it to the disk, and only then renames it.

    Lightning's own goes through the system's folder of temporary files: where that is another file system, the last
    step is a copy, which a kill or a full disk leaves cut off in the place of the good checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self._holding = False
        self._held: list[tuple[str, str]] = []  # (written file or "" to remove, its place), in order

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Write checkpoints at once, but let them take their places only at :meth:`release`."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def release(self) -> None:
        """Let the checkpoints that were held take their places."""
        while self._held:
            written, path = self._held.pop(0)
            if written:
                os.replace(written, path)
            else:
                super().remove_checkpoint(path)

    def discard(self) -> None:
        """Forget the checkpoints that were held; those in their places stay."""
        while self._held:
            written, _ = self._held.pop()
            if written and os.path.exists(written):
                os.unlink(written)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        folder, name = os.path.split(path)
        written = os.path.join(folder, f".{name}.part")  # always the same, so that kills leave one at most
        content = BytesIO()
        torch.save(checkpoint, content)  # not to the file: torch hides why it cannot write
        try:
            os.makedirs(folder or ".", exist_ok=True)
            with open(written, "wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if os.path.exists(written):
                os.unlink(written)
            raise CheckpointError(
                f"the checkpoint {path} could not be written ({error}); earlier checkpoints are untouched. Free space, "
                "or choose another folder, and resume with --ckpt_path last"
            ) from error
        self._held = [entry for entry in self._held if entry[0] != written] + [(written, str(path))]
        if not self._holding:
            self.release()

    def remove_checkpoint(self, path: Any) -> None:
        self._held.append(("", str(path)))
        if not self._holding and len(self._held) == 1:
            self.release()

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Tensors and plain values, whatever `weights_only` and torch's default: pickled objects are refused."""
        with readable(path):
            if "://" in str(path):
                checkpoint = super().load_checkpoint(path, map_location)
            else:
                checkpoint = torch.load(path, map_location=map_location, weights_only=True)
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise CheckpointError(
                f"ckpt_path={str(path)!r} was not written by Lightning: it has no 'pytorch-lightning_version'. Load "
                f"bare weights with torch.load and load_state_dict.{_others(path)}"
            )
        return checkpoint


@contextmanager
def readable(path: Any) -> Iterator[None]:
    """Say of a file that cannot be loaded as a checkpoint what is wrong with it, and which others there are."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnreadableError(f"ckpt_path={str(path)!r}: there is no such file.{_others(path)}") from error
    except pickle.UnpicklingError as error:
        found = re.search(
            r"unsupported (?:global|class|operand).*?(?= was not| whose|\.\s|$)", str(error), re.IGNORECASE
        )
        if found is None:
            raise UnreadableError(f"ckpt_path={str(path)!r} is damaged, or no checkpoint.{_others(path)}") from error
        raise UnreadableError(
            f"ckpt_path={str(path)!r} holds more than tensors and plain values ({found[0]}). Loading that runs code "
            f"from the file, so it is refused.{_others(path)}"
        ) from error
    except Exception as error:  # whatever foreign bytes lead to: EOFError, KeyError, RuntimeError, ...
        reason = f"{type(error).__name__}: {str(error).split('. ')[0][:150]}"
        raise UnreadableError(
            f"ckpt_path={str(path)!r} is cut off, damaged, or no checkpoint ({reason}).{_others(path)}"
        ) from error


def _others(path: Any) -> str:
    """The checkpoints beside a bad one, the newest first."""
    folder = Path(path).parent
    others = [p for p in folder.glob("*.ckpt") if p.name != Path(path).name]
    others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    return f" Others in {folder}: {', '.join(p.name for p in others[:5])}" if others else ""


class RunCheckpoint(OpenModelCheckpoint):
    """ModelCheckpoint whose checkpoints stand between two steps and resume exactly, wherever a run ends.

    A checkpoint takes its place only when the log holds the values of the step it was made in (Lightning logs them
    after it saves), so that none is missing after a resume. A step that a validation follows is saved after the
    validation, which Lightning would leave out when it resumes. Ctrl-C, SIGTERM and SIGUSR1 are heeded at the end of
    the step, by all ranks at the same one, and the run ends when it is saved: with exit code 75, on which schedulers
    can queue it again, or 130 after Ctrl-C. An exception in the middle of a step changes no checkpoint: what there is
    of that step cannot be taken back, and the last checkpoint is whole.

    There is one at the end of each epoch, whatever the validation interval, and one at least every
    `train_time_interval`.

    Args:
        *args: The arguments of `lightning.pytorch.callbacks.ModelCheckpoint`.
        save_on_exception: Save the last step when an exception ends the run between two steps, as when a batch cannot
            be loaded; by the first rank, which does not wait for others.
        train_time_interval: The longest time without a checkpoint; None for no limit. Unlike Lightning's it adds to the
            other intervals. The clock is the first rank's.
        keep: How many checkpoints are kept besides the last one, the newest, where nothing is monitored and
            `save_top_k` is 1.
        **kwargs: Likewise.

    Example:
        >>> saver = RunCheckpoint(every_n_train_steps=100, save_last=True)
        >>> saver.every_n_train_steps
        100
    """

    _due = False  # a checkpoint that waits for the validation, or the end of the epoch, that follows its step
    _stop = 0  # why the run is about to end: a signal, or -1
    _logged = -2

    def __init__(
        self,
        *args: Any,
        save_on_exception: bool = False,
        train_time_interval: timedelta | None = timedelta(minutes=30),
        keep: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}; save_top_k=0 keeps none but the last")
        self.save_on_exception = save_on_exception  # Lightning has it since 2.6 only
        self.train_time_interval, self.keep = train_time_interval, keep
        self._signals, self._vote = StopSignals(), Vote()
        self._saved_at = 0.0

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        count_the_step(checkpoint)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._due, self._stop, self._saved_at = False, 0, time.monotonic()
        self._vote.open(group_timeout(trainer))
        self._signals.listen(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not step_completed(trainer):
            return
        self._logged = logging_step(trainer)
        asked = self._asked(trainer)
        if validation_follows(trainer) or trainer.is_last_batch:
            every = self.every_n_train_steps
            self._due = asked or (every > 0 and trainer.global_step % every == 0)
            return
        with self._hold(trainer):
            if asked:
                self._save(trainer)
            else:
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _asked(self, trainer: L.Trainer) -> bool:
        """Whether a signal, or the clock, asks for a checkpoint of this step; the same on all ranks."""
        longest = self.train_time_interval
        late = longest is not None and time.monotonic() - self._saved_at >= longest.total_seconds()
        stop, due = self._vote.cast(self._signals.pending(), int(late and trainer.is_global_zero))
        self._stop = self._stop or stop
        if due:
            self._saved_at = time.monotonic()
        return bool(stop or due)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_last_batch:
            if self._due and not trainer.sanity_checking:
                self._save(trainer)
            else:
                super().on_validation_end(trainer, pl_module)
        elif self.waits_for_validation(trainer):
            self._due = self._due or self.epoch_is_due(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for _ in range(2):  # a signal that came in the validation is known to all ranks at the second call
            self._asked(trainer)
        with self._hold(trainer):
            if self._due or (self.monitor is None and self.epoch_is_due(trainer)):
                self._save(trainer)
            else:
                super().on_train_epoch_end(trainer, pl_module)
            if self.save_last and self.may_save(trainer):
                self._saved_at = time.monotonic()
                self.save_only_last(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        self._due = False
        if self.may_save(trainer):
            self._saved_at = time.monotonic()
            self.save_now(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._signals.restore()
        self._vote = Vote()  # the other ranks may be gone: nothing is asked of them any more
        files = trainer.strategy.checkpoint_io
        if isinstance(files, CheckpointFiles):
            if logging_step(trainer) > self._logged:
                files.release()
            else:
                files.discard()  # the log does not hold their step
        if not (self.save_on_exception and self.save_last and trainer.is_global_zero and self.may_save(trainer)):
            return
        path = self.last_path(trainer)
        if os.path.exists(path) and path != self.last_model_path:  # another run's
            return
        self.last_model_path = path
        checkpoint = checkpoint_between_steps(trainer, self._logged, self.save_weights_only)
        if checkpoint is not None:
            files.save_checkpoint(checkpoint, path)

    # Everything that follows the logging of a step lets its checkpoint take its place, and may be the end -----------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._release(trainer)
        self._end_if_asked(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._release(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._release(trainer)
        self._end_if_asked(trainer)

    def _end_if_asked(self, trainer: L.Trainer) -> None:
        if not self._stop:
            return
        path = str(self.last_model_path or self.best_model_path or self.dirpath)
        ended = self._signals.stopped(self._stop, trainer.global_step, path)
        if trainer.is_global_zero:
            print(f"lightning-ssl: {ended.reason}{self._signals.requeue(self._stop)}", file=sys.stderr, flush=True)
        raise ended

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._release(trainer)
        self._signals.restore()
        self._vote.close()
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning 2.6 saves there even so
            super().on_train_end(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release(trainer)
        self._signals.restore()
        super().teardown(trainer, pl_module, stage)

    @staticmethod
    @contextmanager
    def _hold(trainer: L.Trainer) -> Iterator[None]:
        files = trainer.strategy.checkpoint_io
        if isinstance(files, CheckpointFiles):
            with files.hold():
                yield
        else:
            yield

    @staticmethod
    def _release(trainer: L.Trainer) -> None:
        files = trainer.strategy.checkpoint_io
        if isinstance(files, CheckpointFiles):
            files.release()
