"""What every reproduction shares: a folder, finished stages kept in it, a progress bar, and a written report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm


@dataclass
class Table:
    """Rows of a Markdown table under a heading."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [
            f"**{self.title}**",
            "",
            "| " + " | ".join(map(_text, self.header)) + " |",
            "|" + "---|" * len(self.header),
        ]
        lines += ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in self.rows]
        return "\n".join(lines)


@dataclass
class Report:
    """The outcome of an experiment.

    Attributes:
        title: What is reproduced.
        claims: (what the paper states, whether our figures agree), each with the figures in its text.
        tables: Our figures beside the published ones.
        draw: Draws the picture on a fresh matplotlib figure.
    """

    title: str
    claims: list[tuple[str, bool]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    draw: Callable[[Any], None] | None = None

    def markdown(self) -> str:
        parts = [f"## {self.title}"]
        if self.claims:
            parts.append("\n".join(f"- {'holds' if ok else 'DOES NOT HOLD'}: {text}" for text, ok in self.claims))
        parts += [table.markdown() for table in self.tables]
        return "\n\n".join(parts) + "\n"


class Run:
    """One reproduction: its size, seed and folder.

    Args:
        name: The experiment.
        out: Where its folder is made.
        full: The published size rather than the default one.
        seed: Seed of everything random.
        options: Further options of the experiment.
    """

    def __init__(self, name: str, out: Path, full: bool = False, seed: int = 0, **options: Any) -> None:
        self.name, self.full, self.seed, self.options = name, full, seed, options
        size = "-full" if full else ""
        size += "".join(f"-{key}{options[key]}" for key in ("epochs", "loss") if key in options)
        self.folder = Path(out) / f"{name}{size}-seed{seed}"  # a run of another size is another run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.bar: tqdm | None = None

    def pick(self, default: Any, full: Any) -> Any:
        """The value for this size."""
        return full if self.full else default

    def start(self, total: int) -> None:
        """Open the progress bar: ``total`` units of work."""
        self.bar = tqdm(total=total, desc=self.name, unit="step", dynamic_ncols=True)

    def advance(self, n: int = 1) -> None:
        """Move the progress bar."""
        if self.bar is not None:
            self.bar.update(n)

    def load(self, key: str) -> Any | None:
        """What was kept under ``key`` by this or an interrupted run, or None."""
        path = self.folder / f"{key}.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def save(self, key: str, value: Any) -> None:
        """Keep tensors and plain values; written aside and renamed, so that an interruption leaves no half file."""
        path = self.folder / f"{key}.pt"
        torch.save(value, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def stage(self, key: str, work: int, compute: Callable[[], Any]) -> Any:
        """``compute()``, or its result kept from an interrupted run; moves the bar by ``work``."""
        value = self.load(key)
        if value is None:
            value = compute()
            self.save(key, value)
        self.advance(work)
        return value

    def finish(self, report: Report) -> str:
        """Write report.md and figure.png; returns the Markdown."""
        if self.bar is not None:
            self.bar.close()
        text = report.markdown()
        if report.draw is not None:
            import matplotlib

            matplotlib.use("Agg", force=False)
            from matplotlib.figure import Figure

            figure = Figure(layout="constrained")
            report.draw(figure)
            figure.savefig(self.folder / "figure.png", dpi=120)
            text += "\n![figure](figure.png)\n"
        (self.folder / "report.md").write_text(text, encoding="utf-8")
        return text


def z_score(ours: Sequence[float], published: tuple[float, float], n_published: int = 10) -> float:
    """(mean of ours - published mean) / sqrt(sd_ours^2 / n + sd_published^2 / n_published)."""
    values = torch.as_tensor(ours, dtype=torch.float64)
    mean, sd = published
    spread = math.sqrt(values.var().item() / len(values) + sd**2 / n_published)
    return (values.mean().item() - mean) / max(spread, 1e-12)


def _text(cell: Any) -> str:
    text = f"{cell:.3g}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "\\|")  # a bare bar would end the cell
