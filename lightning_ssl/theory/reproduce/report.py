"""What every reproduction shares: a folder, finished stages kept in it, a progress bar, and a written report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
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


LEVEL = 0.05  # of every test; a claim that chance explains better than that is not said to hold


class Claim(NamedTuple):
    """What the paper states, with our figures in the text, and whether they agree.

    Attributes:
        text: The statement and the figures.
        agrees: Whether our figures point the way the paper says.
        p: How likely figures as good are by chance alone; None where nothing is random, or the claim is itself a
            comparison with a published number within its error.
    """

    text: str
    agrees: bool
    p: float | None = None

    def verdict(self) -> str:
        """ "holds", "DOES NOT HOLD", or "not shown" where it agrees but chance would do as well."""
        if not self.agrees:
            return "DOES NOT HOLD"
        return "holds" if self.p is None or self.p <= LEVEL else "not shown"

    def markdown(self) -> str:
        chance = "" if self.p is None else f" (p = {self.p:.2g})"
        return f"- {self.verdict()}: {self.text}{chance}"


@dataclass
class Report:
    """The outcome of an experiment.

    Attributes:
        title: What is reproduced.
        claims: Claims, or tuples of their fields.
        tables: Our figures beside the published ones.
        draw: Draws the picture on a fresh matplotlib figure.
        text: What is to be said first.
    """

    title: str
    claims: Sequence[Claim | tuple[Any, ...]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    draw: Callable[[Any], None] | None = None
    text: str = ""

    def markdown(self) -> str:
        parts = [f"## {self.title}", *([self.text] if self.text else [])]
        if self.claims:
            parts.append("\n".join(Claim(*claim).markdown() for claim in self.claims))
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
        size += "-pilot" if options.get("pilot") else ""
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


def sign_test(successes: int, trials: int) -> float:
    """The probability of as many successes or more among fair coins: a trial that did not move is no success."""
    from scipy.stats import binomtest

    return float(binomtest(successes, trials, 0.5, "greater").pvalue) if trials else 1.0


def greater_test(larger: Tensor, smaller: Tensor) -> float:
    """Welch's one-sided p that the first sample's mean is not above the second's; 1 with fewer than 2 of either."""
    from scipy.stats import ttest_ind

    if len(larger) < 2 or len(smaller) < 2:
        return 1.0
    if larger.var() == 0 and smaller.var() == 0:
        return 0.0 if larger.mean() > smaller.mean() else 1.0
    return float(ttest_ind(larger.numpy(), smaller.numpy(), equal_var=False, alternative="greater").pvalue)


def paired_test(after: Tensor, before: Tensor) -> float:
    """The one-sided t-test's p that the mean of the pairs' differences is not above 0."""
    from scipy.stats import ttest_rel

    if len(after) < 2:
        return 1.0
    if (after - before).var() == 0:
        return 0.0 if after.mean() > before.mean() else 1.0
    return float(ttest_rel(after.numpy(), before.numpy(), alternative="greater").pvalue)


def rank_test(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Spearman's rank correlation, and its two-sided p: exact over all orders for up to 9 pairs."""
    from scipy.stats import rankdata, spearmanr

    rho = float(spearmanr(x, y).statistic)
    if len(x) > 9:
        return rho, float(spearmanr(x, y).pvalue)
    a = torch.from_numpy(rankdata(x) - (len(x) + 1) / 2)
    b = torch.from_numpy(rankdata(y) - (len(y) + 1) / 2)
    orders = torch.tensor(list(itertools.permutations(range(len(x)))))
    products = (b[orders] * a).sum(1).abs()
    return rho, float((products >= (a * b).sum().abs() - 1e-9).double().mean())


def z_score(ours: Sequence[float], published: tuple[float, float], n_published: int = 10) -> float:
    """(mean of ours - published mean) / sqrt(sd_ours^2 / n + sd_published^2 / n_published)."""
    values = torch.as_tensor(ours, dtype=torch.float64)
    mean, sd = published
    spread = math.sqrt(values.var().item() / len(values) + sd**2 / n_published)
    return (values.mean().item() - mean) / max(spread, 1e-12)


def _text(cell: Any) -> str:
    text = f"{cell:.3g}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "\\|")  # a bare bar would end the cell
