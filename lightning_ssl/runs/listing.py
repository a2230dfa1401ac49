"""`lightning-ssl runs`: the runs in a folder, one line each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lightning_ssl.report import words
from lightning_ssl.runs.records import Run, age, find_runs

HEADER = ("run", "method", "data", "state", "steps", "verdict", "probes, best (and last)", "age")


def main(argv: list[str]) -> int:
    """Run ``lightning-ssl runs`` with its arguments; returns the exit code."""
    parser = argparse.ArgumentParser("lightning-ssl runs", description="List the runs in a folder, the latest last.")
    parser.add_argument("root", nargs="?", help="the folder that holds the runs (default: runs)")
    parser.add_argument("--root", dest="root_flag", metavar="ROOT", help="the same")
    parser.add_argument("--json", action="store_true", help="their summaries as JSON")
    args = parser.parse_args(argv)
    root = Path(args.root or args.root_flag or "runs")
    if not root.is_dir():
        parser.error(f"{str(root)!r} is no folder: name the one that holds the runs")
    runs = find_runs(root)
    if args.json:
        print(json.dumps([{**run.summary, "folder": str(run.folder), "state": run.state} for run in runs], indent=1))
    elif not runs:
        print(f"no runs in {root}; `lightning-ssl fit` makes one")
    else:
        print(columns([HEADER, *map(line, runs)]))
    return 0


def line(run: Run) -> tuple[str, ...]:
    """What the list says of a run."""
    summary = run.summary
    about = summary["run"]
    said = words.answer(summary).title
    steps = str(summary["steps"])
    return (run.name, about["method"], about["data"], run.state, steps, said, probes(summary), age(about["updated"]))


def probes(summary: dict[str, Any]) -> str:
    """The best values of the probes with their steps, and the last ones where they are others."""
    found = []
    for key, title, _, best, last in words.table(summary, headlines=True):
        if summary["declared"].get(summary["quantities"][key]["declared"] or "", {}).get("section") != "learning":
            continue
        if "loss" not in key:
            found.append(f"{title.partition(' probe')[0]} {best}" + (f" ({last})" if last != best else ""))
    return ", ".join(found)


def columns(rows: list[tuple[str, ...]]) -> str:
    """Rows as text, each column as wide as it needs."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
