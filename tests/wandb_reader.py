"""Reads an offline W&B run back from its `.wandb` file: W&B has no public reader, so this place alone knows how."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _FULL, _LAST = 32768, 1, 4


@dataclass
class OfflineRun:
    """What a run recorded: rows in the order they were logged, the config, metric definitions, id and resume mode."""

    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summaries: dict[str, str] = field(default_factory=dict)
    alerts: list[str] = field(default_factory=list)
    run_id: str = ""
    folder: Path = Path()

    def values(self, key: str) -> list[Any]:
        return [row[key] for row in self.history if key in row]

    @property
    def keys(self) -> set[str]:
        return {key for row in self.history for key in row}

    def media(self, entry: dict[str, Any]) -> list[Path]:
        """The files of a logged picture or table."""
        return [self.folder / "files" / name for name in entry.get("filenames", [entry.get("path")])]


def read_offline_run(folder: Path) -> OfflineRun:
    """Read the one ``*.wandb`` file in a folder ``offline-run-...``."""
    (file,) = folder.glob("*.wandb")
    run = OfflineRun(folder=folder)
    for record in _finished(file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            run.history.append(_flat(record.history.item))
        elif kind == "run":
            run.run_id = record.run.run_id
            _update(run.config, record.run.config.update)
        elif kind == "alert":
            run.alerts.append(record.alert.title)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "metric":
            summary = record.metric.summary
            chosen = [name for name in ("min", "max", "mean", "best", "last", "none") if getattr(summary, name, False)]
            run.summaries[record.metric.name or record.metric.glob_name] = ",".join(chosen)
    return run


def _finished(file: Path, timeout: float = 60.0) -> list[Any]:
    """All records, once the last one is there: a process of W&B's own writes them, also after `wandb.finish`."""
    from wandb.proto import wandb_internal_pb2

    end = time.monotonic() + timeout
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in _records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < end, f"{file} was not finished"
        time.sleep(0.2)


def _records(log: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB with pieces (crc, length, kind), after a header."""
    if log[:4] != b":W&B":
        raise ValueError(f"not a W&B log: it starts with {log[:4]!r}")
    at, record = 7, b""
    while at + 7 <= len(log):
        left = _BLOCK - at % _BLOCK
        if left < 7:  # no room for a piece's header: padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        if at + 7 + length > len(log):  # still being written
            return
        record += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def _name(item: Any) -> tuple[str, ...]:
    return tuple(item.nested_key) or (item.key,)


def _flat(items: Any) -> dict[str, Any]:
    """Nested keys belong to one value, a picture's or a table's entry: {key: {field: ...}}."""
    row: dict[str, Any] = {}
    for item in items:
        first, *rest = _name(item)
        value = json.loads(item.value_json)
        if rest:
            row.setdefault(first, {})["/".join(rest)] = value
        else:
            row[first] = value
    return row


def _update(config: dict[str, Any], items: Any) -> None:
    for item in items:
        first, *rest = _name(item)
        place = config
        for part in [first, *rest][:-1]:
            place = place.setdefault(part, {})
        place[[first, *rest][-1]] = json.loads(item.value_json)
