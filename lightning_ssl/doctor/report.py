"""What the doctor says: findings, grouped by check, as text and as plain data."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["alarm", "info"]


@dataclass(frozen=True)
class Finding:
    """One thing that a check saw.

    Args:
        kind: A short name that stays the same from release to release.
        seen: What was seen, with figures.
        severity: "alarm" where something is wrong, "info" where it may be meant.
        why: Why it matters.
        where: The module, parameter or line.
        remedy: What to do.

    Example:
        >>> Finding("identical_views", "both views are equal in all 12 rows", "alarm").severity
        'alarm'
    """

    kind: str
    seen: str
    severity: Severity = "info"
    why: str = ""
    where: str = ""
    remedy: str = ""


def alarm(kind: str, seen: str, why: str, remedy: str, where: str = "") -> Finding:
    return Finding(kind, seen, "alarm", why, where, remedy)


def info(kind: str, seen: str, why: str = "", remedy: str = "", where: str = "") -> Finding:
    return Finding(kind, seen, "info", why, where, remedy)


@dataclass
class Result:
    """What one check came to.

    Args:
        check: Its name.
        findings: What it saw.
        untold: Why it could not tell, or could not tell everything; empty if it could.
        ended: Whether the examined module hung, crashed or ran out of memory or time, which ended the check.
        seconds: How long it took.

    Example:
        >>> Result("ranks", untold="the batch has one row").status
        'unknown'
    """

    check: str
    findings: list[Finding] = field(default_factory=list)
    untold: str = ""
    ended: bool = False
    seconds: float = 0.0

    @property
    def status(self) -> str:
        if any(finding.severity == "alarm" for finding in self.findings):
            return "alarm"
        return "unknown" if self.untold else "ok"


@dataclass
class Report:
    """What an examination came to.

    Args:
        module: The name of the examined module's class.
        results: The checks', in the order in which they ran.

    Example:
        >>> report = Report("SimCLR", [Result("views", [Finding("identical_views", "equal", "alarm")])])
        >>> report.healthy, [finding.kind for finding in report.alarms]
        (False, ['identical_views'])
    """

    module: str
    results: list[Result] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether no check raised an alarm."""
        return not self.alarms

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.findings() if finding.severity == "alarm"]

    @property
    def untold(self) -> dict[str, str]:
        """By check, why it could not tell."""
        return {result.check: result.untold for result in self.results if result.untold}

    @property
    def ended(self) -> list[str]:
        """The checks that a hang, a crash, or a lack of memory or time in the examined module ended."""
        return [result.check for result in self.results if result.ended]

    def findings(self, check: str | None = None) -> list[Finding]:
        """All findings, or those of one check."""
        return [f for result in self.results if check in (None, result.check) for f in result.findings]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it is written to JSON."""
        checks = {
            result.check: {
                "status": result.status,
                "seconds": round(result.seconds, 2),
                "untold": result.untold,
                "ended": result.ended,
                "findings": [asdict(finding) for finding in result.findings],
            }
            for result in self.results
        }
        return {"module": self.module, "healthy": self.healthy, "checks": checks}

    def __str__(self) -> str:
        width = min(shutil.get_terminal_size((100, 24)).columns, 110)
        wrong = len(self.alarms)
        verdict = "nothing wrong was found" if not wrong else f"{wrong} thing{'s' if wrong > 1 else ''} wrong"
        lines = [f"{self.module}: {verdict}", ""]
        for result in self.results:
            lines += _told(result, width)
        return "\n".join(lines)


_MARKS = {"ok": "ok", "alarm": "WRONG", "unknown": "could not tell"}


def _told(result: Result, width: int) -> Iterable[str]:
    yield f"{result.check:<10} {_MARKS[result.status]}  ({result.seconds:.1f} s)"
    for finding in sorted(result.findings, key=lambda finding: finding.severity):
        first = "! " if finding.severity == "alarm" else "- "
        yield from _wrapped(f"{finding.seen} [{finding.kind}]", first, width)
        for name in ("where", "why", "remedy"):
            if text := getattr(finding, name):
                yield from _wrapped(f"{name}: {text}", "    ", width)
    if result.untold:
        yield from _wrapped(f"could not tell: {result.untold}", "? ", width)


def _wrapped(text: str, first: str, width: int) -> list[str]:
    inner = "  " + " " * len(first)
    return textwrap.wrap(" ".join(text.split()), width, initial_indent="  " + first, subsequent_indent=inner)
