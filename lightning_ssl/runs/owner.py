"""Whose a folder is: a run's folder is that run's for ever, and `last` is its own last checkpoint."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

CONFIG, LAST = "config.yaml", Path("checkpoints", "last.ckpt")
LEFT_BY_A_RUN = (CONFIG, "metrics.csv", "summary.json", "report.html", "checkpoints")
MINUTES = 10  # a folder that is younger may have been made by this very run's first rank


def is_run(folder: Path) -> bool:
    """Whether a folder holds what a run leaves."""
    return any((folder / name).exists() for name in LEFT_BY_A_RUN)


def run_meant(root: str, name: str | None, configs: Sequence[str]) -> Path | None:
    """The folder of the run that a command goes on with, or evaluates; None where there is none.

    Args:
        root: The folder of the runs.
        name: The run's name, if one was given: then it is that one.
        configs: The command's config files: the run whose own config is among them comes next, the latest last.
    """
    if name:
        return Path(root, name)
    for config in map(Path, reversed(configs)):
        if config.name == CONFIG and (config.parent / "checkpoints").is_dir():
            return config.parent
    written = sorted(Path(root).glob(f"*/{LAST}"), key=lambda path: path.stat().st_mtime)
    return written[-1].parents[1] if written else None


def evaluation_name(root: str, name: str | None, checkpoint: str | None, command: str) -> str | None:
    """A new name for what is written while a run is evaluated, after that run's; None where it is not known."""
    source = Path(checkpoint).absolute().parent.parent if checkpoint else None
    run = name or (source.name if source is not None and is_run(source) else None)
    if run is None:
        return None
    wanted = taken = f"{run}-{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    count = 1
    while Path(root, taken).exists():
        count += 1
        taken = f"{wanted}-{count}"
    return taken


def refusal(folder: Path, checkpoint: str | None, model: str, again: bool) -> str:
    """Why a run may not train in a folder that holds one; empty if it goes on with that one.

    Args:
        folder: The folder.
        checkpoint: What the run begins from: "last", a path, or None.
        model: The class that is trained.
        again: Whether a scheduler has started the command again.
    """
    config = folder / CONFIG
    if checkpoint == "last" or again:
        before = _trained_class(config)
        if before and before != model:
            return (
                f"{folder} trained {before.rpartition('.')[2]}, not {model.rpartition('.')[2]}: name the run to go on "
                "with by --name, or give its --config"
            )
        return ""
    if checkpoint and folder.absolute() in Path(checkpoint).absolute().parents:
        return ""
    if not is_first_rank() and time.time() - folder.stat().st_ctime < 60 * MINUTES:
        return ""
    return (
        f"--name {folder.name!r} is taken: {folder} belongs to a run, and stays as it is. Go on with that run by "
        "--ckpt_path last, or choose another --name"
    )


def _trained_class(config: Path) -> str | None:
    """The class_path of a run's model."""
    try:
        model = yaml.safe_load(config.read_text())["model"]
        return str(model["class_path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def is_first_rank() -> bool:
    """Whether this process was not started as one of the further ranks of several."""
    return not any(int(os.environ.get(name) or 0) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))


def one_of_many() -> bool:
    """Whether this process was started as one rank of several."""
    return any(int(os.environ.get(name) or 1) > 1 for name in ("WORLD_SIZE", "SLURM_NTASKS"))


def started_again(written: Path) -> bool:
    """Whether SLURM has queued this job again, or torchrun has started its workers again.

    torchrun does not tell the workers of a host that start again because another host's do. But then there is a
    checkpoint, or a config, that is younger than the agent, which started this process.
    """
    if any(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")):
        return True
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if not restarts or not written.exists() or not sys.platform.startswith("linux"):
        return False
    ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return written.stat().st_mtime > float(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
