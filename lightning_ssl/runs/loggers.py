"""A CSV log that survives kills, resumes and full disks, and a guard: a logger that fails does not end a run."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment

from lightning_ssl.callbacks._engine.report import warn_once


class ResumableCSVLogger(CSVLogger):
    """CSVLogger that keeps what an earlier part of the same run logged.

    Lightning's own deletes the file when the folder exists. This one reads it, and at the first new row drops what the
    resumed run is about to log again. Rows that cannot be written for lack of space are written later, if there is
    space then; the file is never left with half a row.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _Writer(self.log_dir)
        return self._experiment


class _Writer(ExperimentWriter):
    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._earlier: list[dict[str, Any]] | None = read_rows(self.metrics_file_path)

    def _check_log_dir_exists(self) -> None:
        """Delete nothing: the file stands until the resumed run's first row replaces it."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics_dict, step)
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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            for name in self.CALLS:
                if hasattr(logger, name) and name not in vars(logger):
                    setattr(logger, name, _guarded(logger, name, getattr(logger, name)))


def _guarded(logger: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            warn_once(logger, f"{type(logger).__name__}: {name} failed, training goes on: ", error)

    return guarded
