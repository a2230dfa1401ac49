"""What makes a Weights & Biases run readable: summaries, config and versions, spectra as tables and series."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import yaml
from lightning.pytorch.loggers import WandbLogger

from lightning_ssl._lightning import logging_step
from lightning_ssl.callbacks._engine.report import warn_once
from lightning_ssl.folder import run_dir
from lightning_ssl.quantities import Quantity, declared, find

STEP = "trainer/global_step"  # WandbLogger's x-axis


def summary_of(key: str, quantities: Iterable[Quantity]) -> str | None:
    """The summary a metric deserves: its best value, where that means something; None leaves W&B's own, the last."""
    quantity = find(key, quantities)
    if quantity is None or not quantity.best:
        return None
    return {"higher": "max", "lower": "min", "": None}[quantity.better]


class WandbSetup(L.Callback):
    """Makes what others log to W&B easy to read; does nothing to a run without a `WandbLogger`.

    Metrics are defined with their summaries (accuracies by their maximum, losses by their minimum); ``config.yaml`` in
    the run's folder and the versions of code and libraries become part of W&B's config. After each validation and at
    the end, the spectra that `EigenspaceAlignment` keeps (files ``*_spectra.npz`` in the run's folder) are logged as a
    table, ``predictor/spectra``, and as line series over the steps, ``predictor/eigenvalue_series``,
    ``predictor/value_series`` and ``predictor/cosine_series``, for the modes 0, 1, 2, 4, 8, ...

    Put it behind the callbacks that log.

    Args:
        spectra: Log the table and the series.
        observations: At most so many steps are in the table, evenly spread; the last always is.
        modes: At most so many modes of each step are in the table, evenly spread.

    Example:
        >>> setup = WandbSetup(spectra=False)
    """

    def __init__(self, spectra: bool = True, observations: int = 64, modes: int = 128) -> None:
        super().__init__()
        if observations < 1 or modes < 1:
            raise ValueError(f"`observations` and `modes` must be at least 1, got {observations} and {modes}")
        self.spectra, self.observations, self.modes = spectra, observations, modes
        self._defined: set[str] = set()
        self._logged: dict[str, int] = {}  # file of spectra -> its last step
        self._folder: Path | None = None
        self._quantities: tuple[Quantity, ...] = declared(())

    # Summaries -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._folder = run_dir(trainer)  # collective
        self._defined = set()
        self._quantities = declared([*trainer.callbacks, pl_module])  # type: ignore[attr-defined]
        if not trainer.is_global_zero:
            return
        # Before anything is logged, so that the first value counts; other keys when they are first seen.
        self._define(trainer, [q.key.replace("*", stage, 1) for q in self._quantities for stage in ("train", "val")])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:  # the run's config has been written by now
            for logger in _wandb_loggers(trainer):
                logger.experiment.config.update(self._facts(), allow_val_change=True)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._define(trainer, trainer.logged_metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._define(trainer, trainer.logged_metrics)
            self._log_spectra(trainer)

    def _define(self, trainer: L.Trainer, keys: Any) -> None:
        new = [key for key in keys if key not in self._defined]
        self._defined.update(new)
        if trainer.is_global_zero:
            for key in new:
                if "*" in key:
                    continue
                summary = summary_of(key, self._quantities)
                if summary is not None:
                    for logger in _wandb_loggers(trainer):
                        logger.experiment.define_metric(key, summary=summary, step_metric=STEP, step_sync=True)

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"versions": versions()}
        saved = None if self._folder is None else self._folder / "config.yaml"
        if saved is not None and saved.is_file():
            facts["run_config"] = yaml.safe_load(saved.read_text())
        return facts

    # Spectra -------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log_spectra(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._log_spectra(trainer)

    def _log_spectra(self, trainer: L.Trainer) -> None:
        loggers = _wandb_loggers(trainer)
        if not (self.spectra and loggers and trainer.is_global_zero and self._folder is not None):
            return
        for file in sorted(self._folder.glob("*_spectra.npz")):
            try:
                with np.load(file) as arrays:
                    steps, s, p, cosines = (arrays[k] for k in ("step", "eigenvalues", "predictor_values", "cosines"))
                if len(steps) and self._logged.get(file.name) != int(steps[-1]):
                    self._logged[file.name] = int(steps[-1])
                    label = file.name.removesuffix("_spectra.npz").replace("predictor", "", 1).strip("_")
                    prefix = f"predictor/{label}/" if label else "predictor/"
                    for logger in loggers:
                        self._log_table(logger, prefix, steps, s, p, cosines, logging_step(trainer))
            except Exception as error:  # reporting never ends a run
                warn_once(trainer, f"{type(self).__name__}: no table of {file.name}: {error}")

    def _log_table(
        self,
        logger: WandbLogger,
        prefix: str,
        steps: np.ndarray,
        s: np.ndarray,
        p: np.ndarray,
        cosines: np.ndarray,
        now: int,
    ) -> None:
        import wandb

        rows = [
            [int(steps[t]), int(j), float(s[t, j]), float(p[t, j]), float(cosines[t, j])]
            for t in evenly(len(steps), self.observations)
            for j in evenly(s.shape[1], self.modes)
        ]
        logger.log_table(
            f"{prefix}spectra", ["step", "mode", "eigenvalue", "predictor_value", "cosine"], rows, step=now
        )
        modes = [0, *(2**i for i in range(s.shape[1].bit_length()) if 2**i < s.shape[1])]
        at = evenly(len(steps), 4 * self.observations)
        charts: dict[str, Any] = {}
        for name, values in (("eigenvalue_series", s), ("value_series", p), ("cosine_series", cosines)):
            charts[f"{prefix}{name}"] = wandb.plot.line_series(
                xs=[int(steps[t]) for t in at],
                ys=[[float(values[t, j]) for t in at] for j in modes],
                keys=[f"mode {j}" for j in modes],
                title=name.replace("_", " "),
                xname="step",
            )
        logger.log_metrics(charts, step=now)


def evenly(length: int, most: int) -> list[int]:
    """At most `most` of the numbers below `length`, evenly spread, the last one among them."""
    return sorted({int(i) for i in np.linspace(length - 1, 0, min(length, most)).round()})


def versions() -> dict[str, str]:
    """The versions of this package and what it stands on, and the commit of a source checkout."""
    found = {}
    for name in ("lightning-ssl", "lightning", "torch", "torchvision", "torchmetrics"):
        try:
            found[name.replace("-", "_")] = version(name)
        except PackageNotFoundError:
            continue
    here = Path(__file__).resolve()
    # Only if this very file is tracked: an environment may lie inside somebody else's checkout.
    if _git(here.parent, "ls-files", here.name):
        found["commit"] = _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return found


def _git(folder: Path, *command: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _wandb_loggers(trainer: L.Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
