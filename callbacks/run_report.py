"""A readable end to a run: a summary on the screen, and one self-contained HTML page in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L

from lightning_ssl._lightning import epoch_values, logging_step
from lightning_ssl.callbacks._engine.report import warn_once, write_file
from lightning_ssl.callbacks._html import page
from lightning_ssl.folder import run_dir
from lightning_ssl.quantities import Quantity, declared

MOST_POINTS = 1000  # of a curve
VERDICTS = ("healthy", "partial collapse", "dimensional collapse", "complete collapse")


class RunReport(L.Callback):
    """Prints a summary when a fit ends and writes ``report.html``, which opens offline, into the run's folder.

    Takes what any callback or module logs, whichever logger is used, and keeps it over resumes. An interrupted run
    gets its report, too. Put it last in the list of callbacks.

    Args:
        html: Write the page; the summary is printed in any case.

    Example:
        >>> report = RunReport(html=False)
    """

    def __init__(self, html: bool = True) -> None:
        super().__init__()
        self.html = html
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._seen: dict[str, Any] = {}
        self._noted: dict[str, float] = {}  # at the end of an epoch, before it was logged
        self._folder: Path | None = None
        self._quantities: tuple[Quantity, ...] = declared(())

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._folder = run_dir(trainer)  # collective
        self._seen, self._noted = {}, {}
        self._quantities = declared([*trainer.callbacks, pl_module])  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._collect(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._collect(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Now, and not with the next batch: the epoch's checkpoint holds what there is by now.
        self._noted = {key: float(value) for key, value in epoch_values(trainer).items() if key != "epoch"}
        for key, value in self._noted.items():
            self._note(key, logging_step(trainer), value)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._collect(trainer)
        self._finish(trainer, pl_module, "finished")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.history:
            self._finish(trainer, pl_module, f"stopped by {type(exception).__name__}")

    def _collect(self, trainer: L.Trainer) -> None:
        """Note what was logged since the last look: new values are new objects."""
        step = logging_step(trainer)
        for key, value in trainer.logged_metrics.items():
            if self._seen.get(key) is not value:
                self._seen[key] = value
                if key != "epoch" and self._noted.pop(key, None) != float(value):
                    self._note(key, step, float(value))

    def _note(self, key: str, step: int, value: float) -> None:
        points = self.history.setdefault(key, [])
        points.append((step, value))
        if len(points) > MOST_POINTS:  # a long run's memory and checkpoints stay small: thin the past
            del points[1:-1:2]

    def _finish(self, trainer: L.Trainer, pl_module: L.LightningModule, how: str) -> None:
        if not trainer.is_global_zero:
            return
        try:
            folder = self._folder if self.html else None
            if folder is not None:
                html = page(type(pl_module).__name__, self.history, folder, how, trainer.global_step, self._quantities)
                write_file(trainer, folder / "report.html", lambda file: file.write(html.encode()))
            print(self.summary(type(pl_module).__name__, trainer, how), flush=True)
        except Exception as error:  # a report that fails must not fail the run
            warn_once(trainer, f"{type(self).__name__}: no report: {error}")

    def summary(self, title: str, trainer: L.Trainer, how: str) -> str:
        """The text printed at the end."""
        lines = [f"{title} {how} after {trainer.global_step} steps, {trainer.current_epoch} epochs"]
        rows = [(words, points, form) for words, points, form in self._headlines() if points]
        if rows:
            width = max(len(words) for words, _, _ in rows)
            lines.append(f"  {'':{width}}  {'first':>8}  {'last':>8}")
        for words, points, form in rows:
            first, last = (form.format(points[i][1]) for i in (0, -1))
            lines.append(f"  {words:{width}}  {first:>8}  {last:>8}")
        if verdicts := [values for key, values in sorted(self.history.items()) if key.endswith("collapse/verdict")]:
            lines.append(f"  collapse: {VERDICTS[max(0, min(3, round(verdicts[0][-1][1])))]}")
        if self._folder is not None:
            if self.html:
                lines.append(f"  report and curves: {self._folder / 'report.html'}")
            lines.append(f"  log, pictures, checkpoints: {self._folder}")
        return "\n" + "\n".join(lines)

    def _headlines(self) -> list[tuple[str, list[tuple[int, float]], str]]:
        """What the summary shows: probes of held-out data, everything else of training."""
        found = []
        for quantity in self._quantities:
            if quantity.headline:
                stage = "val" if quantity.section == "learning" and "loss" not in quantity.key else "train"
                points = self.history.get(quantity.key.replace("*", stage, 1), [])
                found.append((quantity.title, points, quantity.form))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"history": {key: [list(point) for point in points] for key, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {key: [(s, v) for s, v in points] for key, points in state_dict["history"].items()}
