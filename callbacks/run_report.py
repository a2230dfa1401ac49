"""What came of a run, for people and programs: a summary on the screen, summary.json, and one HTML page."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.nn import Identity

from lightning_ssl._lightning import epoch_values, logged_values, logging_step
from lightning_ssl.callbacks._engine.report import warn_once, write_file
from lightning_ssl.callbacks.collapse_monitor import CollapseMonitor
from lightning_ssl.folder import run_dir
from lightning_ssl.quantities import Quantity, declared
from lightning_ssl.report import words
from lightning_ssl.report.page import report_page
from lightning_ssl.report.series import Series
from lightning_ssl.report.summary import FILE, SCHEMA, config_hash, quantities_of, read_summary, versions

MOST_UNREAD = 20_000  # values that wait on the device
MINUTES = 5  # between two pages of a long epoch


class RunReport(L.Callback):
    """Writes ``report.html``, which opens offline, and ``summary.json``, and prints a summary when a fit ends.

    The page begins with the verdict: what happened, when, on which evidence, the likely cause and the remedy. Then come
    a table, interactive curves and the pictures. It is written anew at the end of each epoch, and every five minutes
    of a longer one, so that a run can be watched in any browser. `lightning_ssl.report.summary` says what summary.json
    holds.

    Takes what any callback or module logs, whichever logger is used, and keeps it over resumes. An interrupted run
    gets its report, too. Values are read from the device in bulk, when a page is written. Put it last in the list of
    callbacks.

    Args:
        html: Write the page; the summary is written and printed in any case.

    Example:
        >>> report = RunReport(html=False)
    """

    def __init__(self, html: bool = True) -> None:
        super().__init__()
        self.html = html
        self.history: dict[str, Series] = {}
        self._seen: dict[str, Any] = {}
        self._unread: list[tuple[str, int, Any]] = []
        self._noted: dict[str, float] = {}  # at the end of an epoch or a validation, before it was logged
        self._folder: Path | None = None
        self._quantities: tuple[Quantity, ...] = declared(())
        self._began = self._written = time.time()
        self._earlier = 0.0  # seconds, before a resume

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._folder = run_dir(trainer)  # collective
        self._seen, self._noted, self._unread = {}, {}, []
        self._quantities = declared([*trainer.callbacks, pl_module])  # type: ignore[attr-defined]
        self._began = self._written = time.time()
        before = read_summary(self._folder) if self._folder is not None and self.history else None
        self._earlier = before["cost"]["seconds"] if before else 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._collect(trainer)
        if len(self._unread) > MOST_UNREAD:
            self._read()
        if time.time() - self._written > 60 * MINUTES:
            self._write(trainer, pl_module, "running")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._read()
        self._collect(trainer)
        keys = [key for key, *_ in self._unread]
        for key in keys:
            self._noted.pop(key, None)
        self._read()
        self._noted |= {key: self.history[key][-1][1] for key in keys}  # Lightning logs them after this

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Now, and not with the next batch: the epoch's checkpoint holds what there is by now.
        self._read()
        values = {key: value for key, value in epoch_values(trainer).items() if key != "epoch"}
        noted = dict(zip(values, to_host(list(values.values())), strict=True))
        for key, value in noted.items():
            self._note(key, logging_step(trainer), value)
        self._noted |= noted
        self._write(trainer, pl_module, "running")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._collect(trainer)
        self._finish(trainer, pl_module, "finished")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.history or self._unread:
            self._finish(trainer, pl_module, "stopped", type(exception).__name__)

    def _collect(self, trainer: L.Trainer) -> None:
        """Note what was logged since the last look: new values are new objects. None is read yet."""
        step = logging_step(trainer)
        for key, value in logged_values(trainer).items():
            if self._seen.get(key) is not value:
                self._seen[key] = value
                if key != "epoch":
                    self._unread.append((key, step, value))

    def _read(self) -> None:
        """Bring what was noted to the host, at once."""
        unread, self._unread = self._unread, []
        values = to_host([value for *_, value in unread])
        for (key, step, _), value in zip(unread, values, strict=True):
            if self._noted.pop(key, None) != value:
                self._note(key, step, value)

    def _note(self, key: str, step: int, value: float) -> None:
        self.history.setdefault(key, Series()).add(step, value)

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule, state: str, reason: str = "") -> dict[str, Any]:
        """The summary, also written to the folder, with the page."""
        if not trainer.is_global_zero:
            return {}
        try:
            self._read()
            summary = self.summary(trainer, pl_module, state, reason)
            folder = self._folder
            if folder is not None:
                text = json.dumps(summary, indent=1, allow_nan=False)
                write_file(trainer, folder / FILE, lambda file: file.write(text.encode()))
                if self.html:
                    page = report_page(summary, self.history, folder, _theory(folder) if state != "running" else ())
                    write_file(trainer, folder / "report.html", lambda file: file.write(page.encode()))
            return summary
        except Exception as error:  # a report that fails must not fail the run
            warn_once(trainer, f"{type(self).__name__}: no report: {error}")
            return {}
        finally:
            self._written = time.time()

    def _finish(self, trainer: L.Trainer, pl_module: L.LightningModule, state: str, reason: str = "") -> None:
        if summary := self._write(trainer, pl_module, state, reason):
            print(self.text(summary), flush=True)

    def summary(self, trainer: L.Trainer, pl_module: L.LightningModule, state: str, reason: str = "") -> dict[str, Any]:
        """What summary.json holds; `lightning_ssl.report.summary` explains it."""
        seconds = self._earlier + time.time() - self._began
        folder, steps = self._folder, trainer.global_step
        quantities, known = quantities_of(self.history, self._quantities)
        return {
            "schema": SCHEMA,
            "run": {
                "name": folder.name if folder is not None else type(pl_module).__name__,
                "method": type(pl_module).__name__,
                "data": _data_name(trainer),
                "state": state,
                "reason": reason,
                "began": self._began - self._earlier,
                "updated": time.time(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
            },
            "steps": steps,
            "epochs": trainer.current_epoch,
            "verdicts": verdicts_of(trainer.callbacks, self.history, facts(pl_module)),  # type: ignore[attr-defined]
            "quantities": quantities,
            "declared": known,
            "config_hash": config_hash(folder / "config.yaml") if folder is not None else None,
            "versions": versions(),
            "cost": {
                "seconds": seconds,
                "seconds_per_step": seconds / max(1, steps),
                "ranks": trainer.world_size,
                "device": trainer.strategy.root_device.type,
                "peak_memory_bytes": _peak_memory(trainer.strategy.root_device),
            },
        }

    def text(self, summary: dict[str, Any]) -> str:
        """The text printed at the end."""
        run = summary["run"]
        how = "finished" if run["state"] == "finished" else f"stopped by {run['reason']}"
        said = words.answer(summary)
        lines = [f"{run['method']} {how} after {summary['steps']} steps, {summary['epochs']} epochs"]
        lines += [f"  {said.title}", *(f"    {sentence}" for sentence in said.sentences if said.grade != "good")]
        if rows := [row[1:] for row in words.table(summary, headlines=True)]:
            rows = [("", "first @step", "best", "last"), *rows]
            widths = [max(len(row[i]) for row in rows) for i in range(4)]
            lines += [
                "  " + "  ".join([f"{row[0]:{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3))])
                for row in rows
            ]
        if self._folder is not None:
            if self.html:
                lines.append(f"  report and curves: {self._folder / 'report.html'}")
            lines.append(f"  log, pictures, checkpoints: {self._folder}")
        return "\n" + "\n".join(line.rstrip() for line in lines)

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"history": {key: [list(point) for point in series] for key, series in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._unread = []
        self.history = {
            key: Series((int(step), value) for step, value in points) for key, points in state_dict["history"].items()
        }


def to_host(values: list[Any]) -> list[float]:
    """Numbers, of which those on a device are brought over in one copy."""
    found = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    devices: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            devices.setdefault(value.device, []).append(place)
    for device, places in devices.items():
        kind = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        together = torch.stack([values[place].detach().reshape(()).to(kind) for place in places])
        for place, value in zip(places, together.tolist(), strict=True):
            found[place] = value
    return found


GRADES = ("healthy", "dimensional collapse", "complete collapse")
EVIDENCE = {"std": "spread (1 over the sphere, 0 one point)", "rank": "dimensions that hold most of the variance"}


def verdicts_of(callbacks: list[Any], history: dict[str, Series], known: list[str]) -> list[dict[str, Any]]:
    """What the monitors say, one for each place; to what is behind a collapse they add what is known of the module."""
    found: list[dict[str, Any]] = []
    for monitor in callbacks:
        if isinstance(monitor, CollapseMonitor):
            found += _told(monitor, history)
    for verdict in found:
        if not verdict["healthy"] and verdict["main"]:
            new = [fact for fact in known if fact.partition(",")[0] not in verdict["cause"]]
            verdict["cause"] = "; ".join([*new, *([verdict["cause"]] if verdict["cause"] else [])])
    return found


def facts(module: Any) -> list[str]:
    """What a module says of itself that lets features collapse."""
    found = []
    if getattr(module, "stop_gradient", None) is False:
        found.append("no stop-gradient, the module's stop_gradient is false")
    if getattr(module, "target", None) is not None and isinstance(
        getattr(module, "predictor", 0), (type(None), Identity)
    ):
        found.append("no predictor, though there is a target network")
    return found


def _told(monitor: Any, history: dict[str, Series]) -> list[dict[str, Any]]:
    if hasattr(monitor.verdict, "places"):
        return [_place(place, _begun(place, monitor.verdict.turns)) for place in monitor.verdict.places]
    start = f"collapse/{monitor.name}/" if monitor.name else "collapse/"
    looks = history.get(f"{start}verdict")
    if looks is None or not len(looks):
        return []
    grade = max(0, min(2, round(looks[-1][1])))
    healthy = [step for step, value in looks if round(value) == 0]
    turned = [step for step, value in looks if round(value) and (not healthy or step > healthy[-1])]
    std, rank = (history.get(start + name) for name in ("std", "rank"))
    evidence = f"{len(looks)} looks up to step {looks[-1][0]}"
    if std and rank:
        evidence = f"{EVIDENCE['std']} {std[-1][1]:.2g}, {EVIDENCE['rank']} {rank[-1][1]:.2g}, after {evidence}"
    cause = "a missing predictor, stop-gradient or negatives" if grade == 2 else ""
    told = {"place": monitor.features, "main": True, "kind": GRADES[grade], "healthy": grade == 0, "evidence": evidence}
    return [{**told, "step": turned[0] if turned else None, "cause": cause, "remedy": "", "forecast": ""}]


def _begun(place: Any, turns: Any) -> int | None:
    """The step at which a place was healthy last, before it turned to one kind of collapse or, later, another."""
    begun = None
    for turn in turns:
        if turn.place == place.place:  # a forecast is of a place that is healthy yet
            begun = None if turn.after in ("healthy", "forecast") else turn.step if begun is None else begun
    return place.since if begun is None else begun


def _place(place: Any, begun: int | None) -> dict[str, Any]:
    evidence = []
    for item in place.evidence:
        start = "" if item.start is None else f" ({item.start:.3g} at the start)"
        limit = "" if item.threshold is None else f", threshold {item.threshold:.3g}"
        evidence.append(f"{EVIDENCE.get(item.quantity, item.quantity)} {item.value:.3g}{start}{limit}")
    healthy = place.kind == "healthy"
    return {
        "place": place.place,
        "main": place.main,
        "kind": "healthy" if healthy else f"{place.kind} collapse",
        "healthy": healthy,
        "step": None if healthy else begun,
        "evidence": "; ".join(evidence) or f"looked at up to step {place.step}",
        "cause": place.cause,
        "remedy": place.remedy,
        "forecast": str(place.forecast or ""),
    }


def _theory(folder: Path) -> list[dict[str, Any]]:
    """The theory's modes beside the run's own, where it covers the run."""
    from lightning_ssl.theory.reproduce.overlay import page_charts  # takes a second to import

    try:
        return page_charts(folder)
    except Exception:  # rates that no flow describes: the page goes without
        return []


def _data_name(trainer: L.Trainer) -> str:
    data = getattr(trainer, "datamodule", None)
    if data is None:
        return "its own data"
    name = getattr(data, "dataset", None)
    return name if isinstance(name, str) else type(data).__name__


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
