"""summary.json: what came of a run, for programs; its schema only grows.

``schema``
    1. A reader of schema n reads all later ones with the same number; a number is raised when a field changes its
    meaning or goes.
``run``
    ``name``, ``method``, ``data``, ``state`` ("running", "finished" or "stopped"), ``reason`` it stopped for, ``began``
    and ``updated`` (seconds since 1970), ``host``, ``pid``.
``steps``, ``epochs``
    As far as it came.
``verdicts``
    One for each watched place: ``place``, ``main`` (whether the loss sees it: the whole verdict follows those),
    ``kind`` ("healthy", "complete collapse", ...), ``healthy``, ``step`` since when, ``evidence``, ``cause``,
    ``remedy``, ``forecast``; sentences are empty where there is nothing to say.
``quantities``
    By logged key: ``first``, ``best``, ``last``, ``min``, ``max``, each ``{"step", "value"}`` (``best`` is null where
    neither way is better; a value that is not finite is null), ``count`` of values kept, and ``declared``, the key of
    what follows.
``declared``
    What the callbacks say of their quantities: ``title``, ``read``, ``section``, ``better``, ``healthy``,
    ``collapsed``, ``unit``, ``form``, ``headline``, ``best``.
``config_hash``
    SHA-256 of config.yaml without what differs between runs of one config; null where there is none.
``versions``, ``cost``
    Of packages; ``seconds``, ``seconds_per_step``, ``ranks``, ``device``, ``peak_memory_bytes``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import yaml

from lightning_ssl.quantities import Quantity, find
from lightning_ssl.report.series import Series

SCHEMA = 1
FILE = "summary.json"
PACKAGES = ("lightning-ssl", "lightning", "torch", "torchvision", "torchmetrics", "numpy")
# Where, not what: the same in all other options is the same config.
PLACES = ("name", "root", "output", "ckpt_path", "config")


def quantities_of(
    history: Mapping[str, Series], known: Iterable[Quantity]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The fields ``quantities`` and ``declared``."""
    known, used, found = list(known), {}, {}
    for key, series in sorted(history.items()):
        if not len(series):
            continue
        quantity = find(key, known)
        least, greatest = _point(series.extreme(False)), _point(series.extreme(True))
        better = quantity.better if quantity is not None else ""
        found[key] = {
            "first": _point(series[0]),
            "best": {"higher": greatest, "lower": least}.get(better),
            "last": _point(series[-1]),
            "min": least,
            "max": greatest,
            "count": len(series),
            "declared": None if quantity is None else quantity.key,
        }
        if quantity is not None:
            used[quantity.key] = {name: value for name, value in asdict(quantity).items() if name != "key"}
    return found, used


def _point(point: tuple[int, float]) -> dict[str, Any]:
    return {"step": point[0], "value": point[1] if math.isfinite(point[1]) else None}


def config_hash(config: Path) -> str | None:
    """A hash of what a config says of a run."""
    try:
        content = yaml.safe_load(config.read_text())
    except (OSError, yaml.YAMLError):
        return None
    return hashlib.sha256(json.dumps(settings(content), sort_keys=True, default=str).encode()).hexdigest()


def settings(config: Any) -> dict[str, Any]:
    """The options of a config by their dotted names, without places; callbacks and loggers go by their class.

    Example:
        >>> settings({"name": "a", "trainer": {"callbacks": [{"class_path": "x.KNNProbe", "init_args": {"k": 3}}]}})
        {'trainer.callbacks.KNNProbe': 'on', 'trainer.callbacks.KNNProbe.k': 3}
    """
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict) and set(value) <= {"class_path", "init_args", "dict_kwargs"} and value:
            found[name] = str(value.get("class_path", "")).rpartition(".")[2]
            for part in ("init_args", "dict_kwargs"):
                add(name, value.get(part) or {})
        elif isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, list) and any(isinstance(entry, dict) and "class_path" in entry for entry in value):
            for entry in value:
                own = str(entry["class_path"]).rpartition(".")[2]
                while f"{name}.{own}" in found:
                    own += "+"
                add(f"{name}.{own}", entry)
                found[f"{name}.{own}"] = "on"
        else:
            found[name] = value

    add("", {key: value for key, value in (config or {}).items() if key not in PLACES})
    loggers = ("trainer.logger", "trainer.default_root_dir")
    return {key: value for key, value in found.items() if not key.startswith(loggers)}


def versions() -> dict[str, str]:
    """Of Python and the packages that a run stands on."""
    found = {"python": python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_summary(folder: Path) -> dict[str, Any] | None:
    """A run's summary; None where there is none that can be read."""
    try:
        summary = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get("schema") == SCHEMA else None
