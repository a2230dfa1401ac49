"""`lightning-ssl compare A B C`: which of some runs broke, from when, and in what their configs differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_ssl.report import words
from lightning_ssl.report.page import charts, document, sections
from lightning_ssl.runs.listing import columns, probes
from lightning_ssl.runs.records import Run, named_run

APART, IN_A_ROW = 0.05, 3  # of the curves' range, and looks, before two curves have parted


class Parting(NamedTuple):
    """Where a run's curve leaves the reference's for good, or for some looks at least."""

    step: int
    key: str
    title: str
    reference: float
    run: float


class Comparison(NamedTuple):
    """What a comparison found.

    Attributes:
        runs: The runs, as they were named.
        reference: The one that the others are held against: the first healthy one, else the first.
        differences: {option: its value in each run, "" where it has none}.
        partings: For each run the partings from the reference, the earliest first.
    """

    runs: list[Run]
    reference: Run
    differences: dict[str, list[str]]
    partings: list[list[Parting]]

    def sentences(self) -> list[str]:
        """What there is to say."""
        answers = {run.name: words.answer(run.summary) for run in self.runs}
        said = []
        for run, partings in zip(self.runs, self.partings, strict=True):
            found = answers[run.name]
            if found.grade in ("bad", "doubt"):
                broke = "broke" if found.grade == "bad" else "is in doubt"
                cause = [part for part in found.sentences if part.startswith(("Likely cause", "Remedy"))]
                said.append(f"{run.name} {broke}: {found.title}. {' '.join(cause)}".strip())
            if partings:
                at = partings[0]
                said.append(
                    f"{run.name} parts from {self.reference.name} at step {at.step}: {at.title} {at.run:.3g} against "
                    f"{at.reference:.3g}."
                )
        fine = [name for name, found in answers.items() if found.grade == "good"]
        if fine:
            said.append(f"{', '.join(fine)} {'is' if len(fine) == 1 else 'are'} healthy.")
        count = len(self.differences)
        said.append(f"Their configs differ in {count} option{'s' * (count != 1)}." if count else "Same configs.")
        return said

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "runs": [run.name for run in self.runs],
            "reference": self.reference.name,
            "verdicts": {run.name: words.answer(run.summary)._asdict() for run in self.runs},
            "differences": self.differences,
            "partings": {
                run.name: [at._asdict() for at in found] for run, found in zip(self.runs, self.partings, strict=True)
            },
            "sentences": self.sentences(),
        }


def compare(runs: Sequence[Run]) -> Comparison:
    """Hold runs against the first healthy one of them."""
    reference = next((run for run in runs if words.answer(run.summary).grade == "good"), runs[0])
    names = sorted(dict.fromkeys(name for run in runs for name in run.settings), key=_weight)  # stable
    table = {name: [_shown(run.settings.get(name, "")) for run in runs] for name in names}
    differences = {name: values for name, values in table.items() if len(set(values)) > 1}
    partings = [[] if run is reference else parted(reference, run) for run in runs]
    return Comparison(list(runs), reference, differences, partings)


def _weight(option: str) -> int:
    """What is trained comes before how it is watched."""
    heads = ("model", "data", "seed", "trainer.callbacks")
    return next((place for head, place in zip(heads, (0, 1, 2, 4), strict=True) if option.startswith(head)), 3)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def parted(reference: Run, run: Run) -> list[Parting]:
    """Where the headline curves of two runs part, the earliest first."""
    found = []
    for key in sorted(reference.curves.keys() & run.curves.keys()):
        entry = reference.summary["quantities"].get(key)
        about = reference.summary["declared"].get((entry or {}).get("declared") or "", {})
        if about.get("headline") and words.is_headline(key, about):
            at = first_parting(reference.curves[key], run.curves[key])
            if at is not None:
                found.append(Parting(at[0], key, about["title"], at[1], at[2]))
    return sorted(found)


def first_parting(
    reference: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]
) -> tuple[int, float, float] | None:
    """The first step from which two curves lie apart for three looks in a row, or for as many as follow.

    Apart is more than a twentieth of what both span and four times what they scatter from look to look.

    Example:
        >>> first_parting([(s, 1.0) for s in range(9)], [(s, 1.0 if s < 5 else 2.0) for s in range(9)])
        (5, 1.0, 2.0)
    """
    a, b = (np.array(points, dtype=np.float64).reshape(-1, 2) for points in (reference, other))
    a, b = a[np.isfinite(a[:, 1])], b[np.isfinite(b[:, 1])]
    if not len(a) or not len(b):
        return None
    a = a[(a[:, 0] >= b[0, 0]) & (a[:, 0] <= b[-1, 0])]
    if not len(a):
        return None
    theirs = np.interp(a[:, 0], b[:, 0], b[:, 1])
    both = np.concatenate([a[:, 1], theirs])
    scatter = max(
        (float(np.median(np.abs(np.diff(line, 2)))) / 2 for line in (a[:, 1], theirs) if len(line) > 3), default=0
    )
    apart = np.abs(a[:, 1] - theirs) > max(APART * float(np.ptp(both)), 4 * scatter, 1e-12)
    for place in np.flatnonzero(apart):
        if apart[place : place + IN_A_ROW].all():
            return int(a[place, 0]), float(a[place, 1]), float(theirs[place])
    return None


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row a run."""
    rows: list[tuple[str, ...]] = [("run", "verdict", "steps", "parts at", "probes, best (and last)", "config")]
    for run, partings in zip(comparison.runs, comparison.partings, strict=True):
        at = "reference" if run is comparison.reference else f"step {partings[0].step}" if partings else "nowhere"
        hashed = (run.summary["config_hash"] or "")[:8]
        rows.append(
            (run.name, words.answer(run.summary).title, str(run.summary["steps"]), at, probes(run.summary), hashed)
        )
    return rows


def compare_page(comparison: Comparison) -> str:
    """One page: what is to be said, the table, the configs' difference, and the runs' curves over each other."""
    runs, names = comparison.runs, [run.name for run in comparison.runs]
    grades = [words.answer(run.summary).grade for run in runs]
    worst = next((grade for grade in ("bad", "doubt", "unknown") if grade in grades), "good")
    broken = [name for name, grade in zip(names, grades, strict=True) if grade == "bad"]
    title = f"{', '.join(broken)} broke" if broken else f"{len(runs)} runs"
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in comparison.sentences())
    body = f"<h1>{escape(' · '.join(names))}</h1>"
    body += f'<section class="verdict {worst}" id="verdict"><h2>{escape(title)}</h2>{said}</section>'
    body += _html_table("runs", table(comparison), grades)
    if comparison.differences:
        rows = [("option", *names), *((option, *values) for option, values in comparison.differences.items())]
        body += "<h2>What differs in the configs</h2>" + _html_table("differences", rows)
    partings = [
        (run.name, at.title, str(at.step), f"{at.reference:.4g}", f"{at.run:.4g}")
        for run, found in zip(runs, comparison.partings, strict=True)
        for at in found
    ]
    if partings:
        head = ("run", "quantity", "parts at step", comparison.reference.name, "the run")
        body += "<h2>Where the curves part</h2>" + _html_table("partings", [head, *partings])
    declared = {key: about for run in reversed(runs) for key, about in run.summary["declared"].items()}
    owners = {key: entry["declared"] for run in runs for key, entry in run.summary["quantities"].items()}
    drawn = charts({run.name: run.curves for run in runs}, declared, owners)
    return document(f"{title}: {', '.join(names)}", body + sections(drawn), names, drawn)


def _html_table(name: str, rows: Sequence[Sequence[str]], grades: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    lines = ""
    for number, row in enumerate(rows[1:]):
        grade = grades[number] if grades else ""
        lines += (
            "<tr>" + "".join(f'<td class="{grade * (i == 1)}">{escape(c)}</td>' for i, c in enumerate(row)) + "</tr>"
        )
    return f'<div class="scroll"><table id="{name}"><tr>{head}</tr>{lines}</table></div>'


def main(argv: list[str]) -> int:
    """Run ``lightning-ssl compare`` with its arguments; returns the exit code."""
    parser = argparse.ArgumentParser(
        "lightning-ssl compare", description="Which run broke, from when, and in what their configs differ."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names of runs, or their folders")
    parser.add_argument("--root", default="runs", help="the folder that holds the runs")
    parser.add_argument("--output", help="the page; by default compare-A-B-C.html in --root")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, instead of a table")
    args = parser.parse_args(argv)
    try:
        runs = [named_run(name, Path(args.root)) for name in dict.fromkeys(args.runs)]
    except ValueError as error:
        parser.error(str(error))
    if len(runs) < 2:
        parser.error("name two runs or more")
    comparison = compare(runs)
    name = "-".join(["compare", *(run.name for run in runs)])[:120] + ".html"
    output = Path(args.output) if args.output else Path(args.root) / name
    if not output.absolute().parent.is_dir():
        parser.error(f"--output {str(output)!r}: its folder does not exist; make it first")
    output.write_text(compare_page(comparison))
    if args.json:
        print(json.dumps({**comparison.to_dict(), "page": str(output)}, indent=1))
        return 0
    print(columns(table(comparison)), "", *comparison.sentences(), sep="\n")
    if comparison.differences:
        rows = [("option", *(run.name for run in runs))]
        rows += [(option, *(value[:40] for value in values)) for option, values in comparison.differences.items()]
        print("", columns(rows), sep="\n")
    print(f"\ncurves: {output}")
    return 0
