"""The blocks of code on a page of Markdown, and how they are run: in the order of the page, in one place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
_BLOCK = re.compile(
    r"(?:<!-- (?:snippet|example): (?P<name>[\w-]+) -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.S | re.M
)


class Block(NamedTuple):
    """A block of code: its language, what it says, the line of the page it begins on, and its name where it has one."""

    kind: str
    code: str
    line: int
    name: str | None


def blocks(page: str, *kinds: str) -> list[Block]:
    """The blocks of these languages on a page."""
    text = (ROOT / page).read_text()
    found = [
        Block(match["kind"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["name"])
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.kind in kinds]


def run_python(block: Block, page: str, names: dict[str, Any]) -> None:
    """Run a block; a traceback names the page and its line."""
    exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec"), names)


def run_bash(block: Block) -> str:
    """Run a block as a reader would, stopping at the first command that fails; returns what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        env={**os.environ, "PATH": path, "WANDB_MODE": "offline", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{block.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
