"""Scalars, pictures and files: to whichever logger takes them, and never at the cost of the run."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from lightning_ssl._lightning import is_a, remember_logged

_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def warn_once(owner: Any, message: str, detail: object = "") -> None:
    """Warn on rank 0, once for each message of one owner (a trainer, a logger), with the detail of its first time."""
    told = _warned.setdefault(owner, set())
    if message not in told:
        told.add(message)
        rank_zero_warn(f"{message}{detail}")


def log_now(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Write training values at the step they belong to.

    Not `pl_module.log`: it would write them at the trainer's next logging step, and again at those after.
    """
    remember_logged(trainer, {key: _scalar(value) for key, value in values.items()})
    row = {**values, "epoch": trainer.current_epoch}
    for logger in trainer.loggers:
        _guarded(logger, "log_metrics", partial(logger.log_metrics, row, step=step))
        _guarded(logger, "save", logger.save)  # as Lightning does: a killed run keeps what it logged


def log_for_callbacks(pl_module: LightningModule, values: Mapping[str, float]) -> None:
    """Make training values known to EarlyStopping, ModelCheckpoint and the like."""
    for key, value in values.items():
        pl_module.log(key, _scalar(value), on_step=True, on_epoch=False, logger=False, batch_size=1)


def log_epoch(pl_module: LightningModule, values: Mapping[str, float]) -> None:
    """Log values that are the same on all ranks at the end of an epoch or an evaluation."""
    for key, value in values.items():
        # The value is global already; Lightning's advice to average it over ranks does not apply.
        warnings.filterwarnings("ignore", message=rf"It is recommended to use `self\.log\('{key}'")
        pl_module.log(key, _scalar(value), on_step=False, on_epoch=True, batch_size=1)


def alert(trainer: Trainer, title: str, text: str, serious: bool) -> None:
    """On rank 0: an alert of the loggers that send them (W&B), kept with an offline run as well."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if is_a(logger, "WandbLogger"):
            _guarded(logger, "alert", partial(_alert, logger, title, text, "WARN" if serious else "INFO"))


def _alert(logger: Any, title: str, text: str, level: str) -> None:
    logger.experiment.alert(title=title, text=text, level=level)
    logger.experiment.summary["collapse"] = title.removeprefix("collapse: ")


def log_figure(trainer: Trainer, folder: Path | None, key: str, draw: Callable[[], Figure], step: int) -> None:
    """On rank 0: draw, write ``<folder>/pictures/<key>/step_<step>.png``, hand to the loggers that take figures."""
    if not trainer.is_global_zero or (folder is None and not trainer.loggers):
        return
    try:
        figure = draw()
    except Exception as error:
        warn_once(trainer, f"{key}: the picture could not be drawn: ", error)
        return
    if folder is not None:
        path = folder / "pictures" / key / f"step_{step:08d}.png"
        write_file(trainer, path, lambda f: figure.savefig(f, format="png"))
    for logger in trainer.loggers:
        if hasattr(type(logger), "log_image"):  # W&B
            _guarded(logger, "log_image", partial(_log_image, logger, key, figure, step))
        elif is_a(logger, "TensorBoardLogger"):
            _guarded(logger, "add_figure", partial(_add_figure, logger, key, figure, step))


def _add_figure(logger: Any, key: str, figure: Figure, step: int) -> None:
    logger.experiment.add_figure(key, figure, step)


def _log_image(logger: Any, key: str, figure: Figure, step: int) -> None:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    with Image.open(buffer) as image:
        logger.log_image(key, [image.convert("RGB")], step=step)


def write_file(trainer: Trainer, path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that a reader, or a killed run, never sees half of it; a full disk is a warning."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are private
        os.replace(temporary, path)
    except Exception as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        warn_once(trainer, f"{path.parent}: could not write files: ", error)


def _guarded(logger: Any, what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception as error:
        warn_once(logger, f"{type(logger).__name__}: {what} failed, training goes on: ", error)


def _scalar(value: float) -> Tensor:
    """A number that stays where it is: Lightning would copy a plain one to the device, one by one."""
    return torch.tensor(float(value))
