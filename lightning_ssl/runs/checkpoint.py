"""Checkpoints that are whole or not there, and that stand for what the log holds."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from lightning_ssl._lightning import OpenModelCheckpoint, dump_checkpoint, validation_follows


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written; its message says what to do."""


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
        raise CheckpointError(f"ckpt_path={str(path)!r}: there is no such file.{_others(path)}") from error
    except pickle.UnpicklingError as error:
        found = re.search(
            r"unsupported (?:global|class|operand).*?(?= was not| whose|\.\s|$)", str(error), re.IGNORECASE
        )
        if found is None:
            raise CheckpointError(f"ckpt_path={str(path)!r} is damaged, or no checkpoint.{_others(path)}") from error
        raise CheckpointError(
            f"ckpt_path={str(path)!r} holds more than tensors and plain values ({found[0]}). Loading that runs code "
            f"from the file, so it is refused.{_others(path)}"
        ) from error
    except Exception as error:  # whatever foreign bytes lead to: EOFError, KeyError, RuntimeError, ...
        reason = f"{type(error).__name__}: {str(error).split('. ')[0][:150]}"
        raise CheckpointError(
            f"ckpt_path={str(path)!r} is cut off, damaged, or no checkpoint ({reason}).{_others(path)}"
        ) from error


def _others(path: Any) -> str:
    """The checkpoints beside a bad one, the newest first."""
    folder = Path(path).parent
    others = [p for p in folder.glob("*.ckpt") if p.name != Path(path).name]
    others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    return f" Others in {folder}: {', '.join(p.name for p in others[:5])}" if others else ""


class RunCheckpoint(OpenModelCheckpoint):
    """ModelCheckpoint whose checkpoints resume exactly, wherever a run is killed.

    Three things are different. A checkpoint takes its place only when the log holds the values of the step it was made
    in (Lightning logs them after it saves), so that none is missing after a resume. A step that a validation follows
    is saved after the validation: Lightning would leave the validation out when it resumes. And after an exception
    only the first rank saves, without waiting for ranks that may never come.

    Args:
        *args: The arguments of `lightning.pytorch.callbacks.ModelCheckpoint`.
        save_on_exception: Save what there is when an exception ends the run.
        **kwargs: Likewise.

    Example:
        >>> saver = RunCheckpoint(every_n_train_steps=100, save_last=True)
        >>> saver.every_n_train_steps
        100
    """

    _after_validation = False

    def __init__(self, *args: Any, save_on_exception: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_on_exception = save_on_exception  # Lightning has it since 2.6 only

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if validation_follows(trainer) or trainer.is_last_batch:
            every = self.every_n_train_steps
            self._after_validation = every > 0 and trainer.global_step % every == 0
            return
        with self._hold(trainer):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._after_validation and not trainer.sanity_checking and not trainer.is_last_batch:
            self._save(trainer)
        else:
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with self._hold(trainer):
            if self._after_validation:
                self._save(trainer)
            else:
                super().on_train_epoch_end(trainer, pl_module)

    def _save(self, trainer: L.Trainer) -> None:
        self._after_validation = False
        if self.may_save(trainer):
            self.save_now(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._release(trainer)
        if not (self.save_on_exception and self.may_save(trainer)) or isinstance(exception, CheckpointError):
            return
        if trainer.world_size == 1:
            self.save_unranked(trainer)
        elif trainer.is_global_zero and self.save_last:
            self.last_model_path = self.last_path(trainer)
            checkpoint = dump_checkpoint(trainer, self.save_weights_only)
            trainer.strategy.checkpoint_io.save_checkpoint(checkpoint, self.last_model_path)

    # Everything that follows the logging of a step lets its checkpoint take its place -----------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._release(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._release(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._release(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._release(trainer)
        super().on_train_end(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release(trainer)
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
