"""CPU seconds to import the package, and to print the command's help, each in a fresh process.

The bare LightningCLI takes any model and any DataModule, as ours does, and adds nothing to it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from benchmarks._bench import Row, Section, costs, main

LIGHTNING = "import lightning.pytorch"
CODE = {
    "lightning": LIGHTNING,
    "package": f"{LIGHTNING}; import lightning_ssl",
    "callbacks": f"{LIGHTNING}; import lightning_ssl.callbacks",
    "bare": """
import lightning.pytorch as L
from lightning.pytorch.cli import LightningCLI
LightningCLI(L.LightningModule, L.LightningDataModule, subclass_mode_model=True, subclass_mode_data=True)
""",
    "help": "from lightning_ssl.cli import main; main()",
}


def seconds(code: str, *arguments: str) -> float:
    """CPU time of a fresh interpreter: it must end well, and help must be printed where asked for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    if arguments:
        assert "usage:" in found.stdout and "fit" in found.stdout, found.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(tiny: bool = False) -> Section:
    times: dict[str, list[float]] = {name: [] for name in (*CODE, "fit", "bare fit")}
    for turn in range(1 if tiny else 8):
        for name, code in CODE.items():
            spent = seconds(code, *(["--help"] if name in ("bare", "help") else []))
            if turn or tiny:  # the first turn fills the disk cache
                times[name].append(spent)
        for name, code in () if tiny else (("fit", CODE["help"]), ("bare fit", CODE["bare"])):
            spent = seconds(code, "fit", "--help")
            if turn:
                times[name].append(spent)
    rows = []
    for name, label in (("package", "import lightning_ssl"), ("callbacks", "import lightning_ssl.callbacks")):
        added = [a - b for a, b in zip(times[name], times["lightning"], strict=True)]
        median = sorted(added)[len(added) // 2]
        rows.append(
            Row(
                label,
                "import lightning.pytorch",
                f"+{median:.2f} s ({min(added):.2f} to {max(added):.2f})",
                f"{sorted(times['lightning'])[len(added) // 2]:.2f} s",
                "",
                "< 0.3 s" if name == "package" else "",
                median < 0.3 if name == "package" else None,
            )
        )
    rows.append(costs("lightning-ssl --help", "a bare LightningCLI --help", times["help"], times["bare"], 1.5))
    if not tiny:
        rows.append(
            costs("lightning-ssl fit --help", "a bare LightningCLI fit --help", times["fit"], times["bare fit"])
        )
    return Section(rows, peers=["jsonargparse"])


if __name__ == "__main__":
    main(run)
