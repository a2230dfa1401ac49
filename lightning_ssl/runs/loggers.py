"""A CSV log that survives kills, resumes and full disks, and a guard: a logger that fails does not end a run."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor


class ResumableCSVLogger(CSVLogger):
    """CSVLogger that keeps what an earlier part of the same run logged.

    Lightning's own deletes the file when the folder exists. This one reads it, and at the first new row drops what the
    resumed run is about to log again. Rows that cannot be written for lack of space are written later, if there is
    space then; the file is never left with half a row.

    Example:
        >>> logger = ResumableCSVLogger("runs", name="a", version="")
    """

    writer: _Writer | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self.writer is None:
            self.writer = _Writer(self.log_dir)
        return self.writer

    def finalize(self, status: str) -> None:
        if self.writer is not None:  # nothing was logged: leave no file behind
            self.save()


class _Writer:
    def __init__(self, log_dir: str) -> None:
        self.metrics: list[dict[str, Any]] = []  # rows not yet written
        self.metrics_keys: list[str] = []  # columns of the file, once this run has written one
        self.metrics_file_path = os.path.join(log_dir, "metrics.csv")
        os.makedirs(log_dir, exist_ok=True)
        # The file stands until the resumed run's first row replaces it.
        self._earlier: list[dict[str, Any]] | None = read_rows(self.metrics_file_path)

    def log_hparams(self, params: dict[str, Any]) -> None:
        """The run's config.yaml holds them."""

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        values = {key: value.item() if isinstance(value, Tensor) else value for key, value in metrics_dict.items()}
        self.metrics.append({**values, "step": len(self.metrics) if step is None else step})
        if self._earlier is not None:
            first = self.metrics[-1]["step"]
            self.metrics[:0] = [row for row in self._earlier if int(row["step"]) < first]
            self._earlier = None

    def save(self) -> None:
        if not self.metrics or self._earlier is not None:
            return
        if not self.metrics_keys:  # the first rows, earlier ones among them
            self._replace(self.metrics)
        elif set().union(*self.metrics) - set(self.metrics_keys):
            self._replace([*read_rows(self.metrics_file_path), *self.metrics])
        else:
            size = os.path.getsize(self.metrics_file_path)
            try:
                with open(self.metrics_file_path, "a", newline="") as file:
                    csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
            except OSError:
                os.truncate(self.metrics_file_path, size)
                raise
        self.metrics = []

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        """Write the file anew, with all the rows' keys."""
        temporary, keys = f"{self.metrics_file_path}.new", sorted(set().union(*rows))
        try:
            with open(temporary, "w", newline="") as file:
                writer = csv.DictWriter(file, keys)
                writer.writeheader()
                writer.writerows(rows)
            os.replace(temporary, self.metrics_file_path)
        except OSError:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        self.metrics_keys = keys


def read_rows(path: str) -> list[dict[str, Any]]:
    """The whole rows of a log, without their empty fields; a last one that was cut off by a kill is left out."""
    if not os.path.isfile(path):
        return []
    with open(path, newline="") as file:
        lines = file.readlines()
    whole = lines if not lines or lines[-1].endswith("\n") else lines[:-1]
    return [
        {key: value for key, value in row.items() if value != ""}
        for row in csv.DictReader(whole)
        if None not in row.values()
    ]


class GuardLoggers(L.Callback):
    """Turns what goes wrong in a logger during a run into a warning.

    Lightning lets a logger's exception end the run: a full disk, a service that is away. A logger that cannot even
    start still ends it, before the first step, when somebody is looking.

    Example:
        >>> trainer = L.Trainer(callbacks=[GuardLoggers()])
    """

    CALLS = ("log_metrics", "log_hyperparams", "log_graph", "log_image", "save", "after_save_checkpoint", "finalize")

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._warned.clear()  # each fit is told anew
        for logger in trainer.loggers:
            for name in self.CALLS:
                if hasattr(logger, name) and name not in vars(logger):
                    setattr(logger, name, self._guarded(logger, name, getattr(logger, name)))

    def _guarded(self, logger: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                who = type(logger).__name__
                if (who, name) not in self._warned:
                    self._warned.add((who, name))
                    rank_zero_warn(f"{who}: {name} failed, training goes on: {error}")

        return guarded
