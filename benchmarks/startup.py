"""CPU seconds to import the package, and to print the command's help, each in a fresh process.

The bare LightningCLI takes any model and any DataModule, as ours does, and adds nothing to it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

from benchmarks._bench import Row, Section, costs, main

IMPORTS = """
import time, lightning.pytorch
start = time.process_time()
import {name}
print(time.process_time() - start, start)
"""
BARE = """
import lightning.pytorch as L
from lightning.pytorch.cli import LightningCLI
LightningCLI(L.LightningModule, L.LightningDataModule, subclass_mode_model=True, subclass_mode_data=True)
"""
OURS = "from lightning_ssl.runs.cli import main; main()"


def start(code: str, *arguments: str) -> tuple[float, str]:
    """CPU seconds of a fresh interpreter, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found.stdout


def added(name: str, repeats: int) -> Row:
    """What importing a package adds to importing Lightning, timed inside the process."""
    times = [[float(part) for part in start(IMPORTS.format(name=name))[1].split()] for _ in range(repeats)]
    more, before = (statistics.median(column) for column in zip(*times, strict=True))
    spread = f"{min(t[0] for t in times):.3f} to {max(t[0] for t in times):.3f}"
    return Row(
        f"import {name}",
        "import lightning.pytorch",
        f"+{more:.3f} s ({spread})",
        f"{before:.2f} s",
        "",
        "< 0.3 s",
        more < 0.3,
    )


def run(tiny: bool = False) -> Section:
    repeats = 1 if tiny else 5
    rows = [added(name, repeats) for name in ("lightning_ssl", "lightning_ssl.callbacks", "lightning_ssl.methods")]
    for arguments, aim in ((["--help"], 1.5), (["fit", "--help"], None))[: 1 if tiny else 2]:
        times: dict[str, list[float]] = {BARE: [], OURS: []}
        for _ in range(repeats):
            for code, spent in times.items():
                seconds, printed = start(code, *arguments)
                assert "usage:" in printed and "fit" in printed, printed
                spent.append(seconds)
        command = " ".join(arguments)
        rows.append(costs(f"lightning-ssl {command}", f"a bare LightningCLI {command}", times[OURS], times[BARE], aim))
    return Section(rows, peers=["jsonargparse"])


if __name__ == "__main__":
    main(run)
