"""Runs on the disk: found, named and read. Imports no torch."""

from __future__ import annotations

import csv
import os
import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lightning_ssl.quantities import LOSSES
from lightning_ssl.report.page import embedded_curves
from lightning_ssl.report.series import Series
from lightning_ssl.report.summary import FILE, SCHEMA, config_hash, quantities_of, read_summary, settings
from lightning_ssl.runs.owner import CONFIG, is_run

Curves = dict[str, list[tuple[int, float]]]


@dataclass
class Run:
    """A run's folder.

    Attributes:
        name: The folder's name.
        folder: Where it is.
        summary: What summary.json holds; of a run without a RunReport what its log and config tell.
    """

    name: str
    folder: Path
    summary: dict[str, Any] = field(repr=False)

    @property
    def state(self) -> str:
        """ "running", "finished", "stopped"; "killed" where the process that wrote "running" is gone."""
        run = self.summary["run"]
        if run["state"] != "running" or run["host"] != socket.gethostname():
            return str(run["state"])
        try:
            os.kill(run["pid"], 0)
        except ProcessLookupError:
            return "killed"
        except OSError:
            pass
        return "running"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config's options by their dotted names."""
        return settings(_load(self.folder / CONFIG))

    @cached_property
    def curves(self) -> Curves:
        """The points of every logged key, from the page, or from the log where there is no page."""
        page = self.folder / "report.html"
        if page.is_file():
            try:
                return embedded_curves(page.read_text())
            except (ValueError, KeyError):
                pass
        return {key: list(series) for key, series in _logged(self.folder).items()}


def find_runs(root: Path) -> list[Run]:
    """All runs in a folder, the oldest first."""
    found = [read_run(folder) for folder in sorted(root.iterdir()) if folder.is_dir()] if root.is_dir() else []
    return sorted((run for run in found if run is not None), key=lambda run: float(run.summary["run"]["began"]))


def read_run(folder: Path) -> Run | None:
    """The run of a folder; None where it holds no training."""
    for place in (folder, *(path.parent for path in sorted(folder.glob(f"*/*/{FILE}")))):  # W&B's own folder
        if summary := read_summary(place):
            return Run(folder.name, place, summary)
    if not is_run(folder) or not ((folder / "checkpoints").is_dir() or (folder / "metrics.csv").is_file()):
        return None
    history = _logged(folder)
    if not (folder / "checkpoints").is_dir() and not any(key.startswith("train/") for key in history):
        return None  # an evaluation's
    return Run(folder.name, folder, _from_log(folder, history))


def named_run(name: str, root: Path) -> Run:
    """The run that is called so in `root`, or whose folder it is."""
    for folder in (root / name, Path(name)):
        run = read_run(folder) if folder.is_dir() else None
        if run is not None:
            return run
    known = ", ".join(run.name for run in find_runs(root)[-10:]) or "none"
    raise ValueError(f"there is no run {name!r}, neither in {str(root)!r} nor as a folder; runs there: {known}")


def _logged(folder: Path) -> dict[str, Series]:
    """What metrics.csv holds; a last row that was cut off by a kill is left out."""
    path = folder / "metrics.csv"
    history: dict[str, Series] = {}
    if not path.is_file():
        return history
    with open(path, newline="") as file:
        for row in csv.DictReader(line for line in file if line.endswith("\n")):
            for key, text in row.items():
                if key not in (None, "step", "epoch") and text:
                    history.setdefault(key, Series()).add(int(row["step"]), float(text))
    return history


def _from_log(folder: Path, history: dict[str, Series]) -> dict[str, Any]:
    config = _load(folder / CONFIG)
    options = settings(config)
    quantities, known = quantities_of(history, LOSSES)
    changed = folder.stat().st_mtime
    run = {
        "method": str(options.get("model", "?")),
        "data": str(options.get("data.dataset") or options.get("data", "?")),
    }
    return {
        "schema": SCHEMA,
        "run": {"name": folder.name, **run, "state": "without a summary", "reason": "", "began": changed}
        | {"updated": changed, "host": "", "pid": 0},
        "steps": max((series[-1][0] + 1 for series in history.values()), default=0),
        "epochs": 0,
        "verdicts": [],
        "quantities": quantities,
        "declared": known,
        "config_hash": config_hash(folder / CONFIG),
        "versions": {},
        "cost": {"seconds": 0.0, "seconds_per_step": 0.0, "ranks": 0, "device": "", "peak_memory_bytes": 0},
    }


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}


def age(seconds_since_1970: float) -> str:
    """How long ago, in one unit.

    Example:
        >>> age(time.time() - 7300)
        '2 h'
    """
    seconds = max(0.0, time.time() - seconds_since_1970)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
