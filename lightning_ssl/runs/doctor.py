"""The command `lightning-ssl doctor`: examines what `lightning-ssl fit` with the same arguments would train."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ssl.doctor import CHECKS, Report, examine
from lightning_ssl.runs.run import RunCLI

DESCRIPTION = """\
Look for silent bugs before the first epoch: in the module, the data and the settings that `lightning-ssl fit` would
train with the same arguments (`lightning-ssl fit --help` lists them). Nothing is trained or written; exit code 1 when
something is wrong."""


def read(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The doctor's own options, and what belongs to `fit`."""
    parser = argparse.ArgumentParser("lightning-ssl doctor", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--checks", help=f"Some of {','.join(CHECKS)}, joined by commas; all by default.")
    parser.add_argument("--ranks", type=int, default=2, help="Number of processes to compare with one.")
    parser.add_argument("--limit", type=float, default=60.0, help="Seconds that each process of a check may take.")
    parser.add_argument("--rows", type=int, default=32, help="How many rows of a batch the checks use.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the report there, too; - prints it instead.")
    chosen, rest = parser.parse_known_args(args)
    if chosen.json is not None and str(chosen.json) != "-" and not chosen.json.absolute().parent.is_dir():
        parser.error(f"--json {chosen.json}: its folder does not exist; make it first")
    chosen.checks = None if chosen.checks is None else [name for name in chosen.checks.split(",") if name]
    if unknown := [name for name in chosen.checks or [] if name not in CHECKS]:
        parser.error(f"--checks {','.join(unknown)}: there are {', '.join(CHECKS)}")
    return chosen, rest


class DoctorCLI(RunCLI):
    """Builds what `fit` would train, and examines it instead."""

    writes = False

    def __init__(self, chosen: argparse.Namespace, **kwargs: Any) -> None:
        self.chosen = chosen
        super().__init__(**kwargs)

    def before_fit(self) -> None:
        """Called by LightningCLI where training would begin; ends the command."""
        config = self.config["fit"]
        settings = {**config.trainer, "callbacks": list(self.trainer.callbacks)}  # type: ignore[attr-defined]
        settings = {name: value for name, value in settings.items() if name != "plugins"}
        chosen = self.chosen
        try:
            report = examine(
                self.model,
                self.datamodule,
                ranks=chosen.ranks,
                checks=chosen.checks,
                trainer=settings,
                limit=chosen.limit,
                rows=chosen.rows,
                say=_progress(),
            )
        except (TypeError, ValueError) as error:
            self.parser.exit(2, f"lightning-ssl: error: {error}\n")
        tell(report, chosen.json)
        sys.exit(0 if report.healthy else 1)


def _progress() -> Callable[[str], None] | None:
    """Say on a terminal what is being done."""
    if not sys.stderr.isatty():
        return None
    return lambda name: print(f"\r\x1b[K{name} ...", end="\r", file=sys.stderr, flush=True)


def tell(report: Report, file: Path | None) -> None:
    """Print the report; write it as JSON where that was asked for."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    text = json.dumps(report.to_dict(), indent=2)
    if file is not None and str(file) == "-":
        print(text)
        return
    print(report)
    if file is not None:
        file.write_text(f"{text}\n")
