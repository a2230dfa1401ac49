"""Runs of the console script that can be killed, each in a process of its own, and what they leave behind.

The processes are forked from a server that has imported everything, so that a run costs its own seconds only.
"""

from __future__ import annotations

import atexit
import csv
import functools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.test_cli import SHORT

WATCH = "{{class_path: lightning_ssl.callbacks.{0}, init_args: {{{1}}}}}"
CALLBACKS = [
    WATCH.format("LinearProbe", "every_n_epochs: 2, baseline: false, l2: 0.1"),
    WATCH.format("KNNProbe", "every_n_epochs: 1, every_n_steps: 4, k: 20, baseline: false"),
    WATCH.format("UniformityAlignment", "every_n_steps: 2"),
    WATCH.format("EffectiveRank", "every_n_steps: 3"),
    WATCH.format("CorrelationBound", "every_n_steps: 2, picture_every: 2"),
    WATCH.format("EigenspaceAlignment", "predictor: predictor, every_n_steps: 3, picture_every: 2"),
    WATCH.format("CovarianceOperatorNorm", "every_n_steps: 5, samples: 16, directions: 4, principal: 2"),
    WATCH.format("CollapseMonitor", "every_n_steps: 2"),
    WATCH.format("RepresentationCircle", "every_n_steps: 6"),
    WATCH.format("RunReport", "html: false"),
    "{class_path: lightning_ssl.runs.checkpoint.RunCheckpoint, init_args: {save_last: true, every_n_train_steps: 2}}",
]
REPORT = WATCH.format("RunReport", "")
BACKBONE = ["--model.backbone=lightning_ssl.nn.SmallConv", "--model.backbone.width=4", "--model.backbone.depth=2"]
NORM_FREE = {
    "SimCLR": ["--model.projector_norm=none"],
    "BYOL": ["--model.projector_norm=none", "--model.predictor_norm=none"],
    "SimSiam": ["--model.projector=linear", "--model.predictor=linear"],
    "DirectPred": ["--model.projector_norm=none"],
    "BarlowTwins": ["--model.projector_norm=none"],
    "RAFT": ["--model.projector_norm=none"],
    "BYOLPrime": ["--model.projector_norm=none"],
}
METHODS = list(NORM_FREE)
SMALL_HEADS = ["--model.projector_hidden=16", "--model.projector_dim=8"]
SIZES = {
    "BYOL": [*SMALL_HEADS, "--model.predictor_hidden=16"],
    "SimSiam": ["--model.projector_hidden=16", "--model.dim=8"],
    "DirectPred": SMALL_HEADS,
    "BarlowTwins": ["--model.projector_hidden=16", "--model.dim=8"],
    "RAFT": [*SMALL_HEADS, "--model.predictor_hidden=16"],
    "BYOLPrime": [*SMALL_HEADS, "--model.predictor_hidden=16"],
}


def config(path: Path, callbacks: list[str] = CALLBACKS) -> str:
    """Write the watchers of a test run, every one of them often, to a YAML file."""
    path.write_text("trainer:\n  callbacks:\n" + "".join(f"    - {entry}\n" for entry in callbacks))
    return f"--config={path}"


def job(method: str, folder: Path, *flags: str, callbacks: list[str] = CALLBACKS) -> list[str]:
    """A fit of two epochs of seven steps, with a checkpoint every second one."""
    return [
        "fit",
        config(folder / "watch.yaml", callbacks),
        f"--model={method}",
        *BACKBONE,
        *SIZES.get(method, []),
        *SHORT,
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=7",
        "--name=run",
        *flags,
    ]


def run(folder: Path, args: list[str], kill: tuple[str, int] | None = None, timeout: float = 240.0) -> int:
    """Run ``lightning-ssl`` with `args` in `folder`; returns its exit code, -9 where killed at (place, count)."""
    process = start(folder, args, kill)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"{args} did not end in {timeout} s:\n{output(folder)[-3000:]}")
    return int(process.exitcode)


def references(folders: Any, command: Callable[[str, Path], list[str]]) -> Callable[[str], Path]:
    """The folder of the run to compare with, of each method, made when it is first asked for."""

    @functools.cache
    def reference(method: str) -> Path:
        folder = folders.mktemp(method)
        assert run(folder, command(method, folder)) == 0, output(folder)[-3000:]
        return folder / "runs" / "run"

    return reference


def start(
    folder: Path, args: list[str], kill: tuple[str, int] | None = None, environment: dict[str, str] | None = None
) -> Any:
    """The process of a run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["lightning_ssl.runs.run", "sklearn.datasets", "matplotlib.figure", "scipy.optimize"]
    )
    process = context.Process(target=_main, args=(str(folder), args, kill, environment or {}))
    process.start()
    return process


def output(folder: Path) -> str:
    """All that the runs in a folder printed."""
    return (folder / "output.txt").read_text()


def _main(folder: str, args: list[str], kill: tuple[str, int] | None, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.pop("WANDB_SERVICE", None)  # that of an earlier test in this process, which knows its runs
    os.environ.update(environment)
    with open("output.txt", "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["lightning-ssl"]
    torch.set_num_threads(1)
    if kill is not None:
        _kill_at(*kill)
    from lightning_ssl.runs.cli import main

    try:
        main(args)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    finally:
        atexit._run_exitfuncs()  # as a console script does, and `multiprocessing` does not: W&B ends its run there


PLACES = {
    "step": ("lightning_ssl.methods.base", "Method", "_weighted_losses"),
    "optimizer": ("lightning_ssl.methods.base", "Method", "_on_optimizer_stepped"),
    "validation": ("lightning_ssl.methods.base", "Method", "_log_held_out"),
    "probe": ("lightning_ssl.callbacks.probe", "Probe", "_embed"),
    "watch": ("lightning_ssl.callbacks.watcher", "Watcher", "_look"),
    "checkpoint": ("lightning_ssl.runs.checkpoint", "os", "fsync"),
    "rename": ("lightning_ssl.runs.checkpoint", "os", "replace"),
    "log": ("lightning_ssl.runs.loggers", "_Writer", "save"),
}


def _kill_at(place: str, count: int) -> None:
    """Let this process kill itself, -9, when it comes to a place for the `count`-th time."""
    import importlib

    module, owner, name = PLACES[place]
    target = getattr(importlib.import_module(module), owner)
    original, calls = getattr(target, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            if place == "log":  # in the middle of a row
                with open(args[0].metrics_file_path, "a") as file:
                    file.write("0.25,0,")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(target, name, counted)


# What a run leaves behind ---------------------------------------------------------------------------------------------


def log(run_folder: Path) -> list[tuple[int, str, str]]:
    """Every logged value in its order, as it was printed: (step, key, digits)."""
    with open(run_folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return sorted(
        (int(row["step"]), key, value) for row in rows for key, value in row.items() if value and key != "step"
    )


def checkpoint(run_folder: Path) -> dict[str, Any]:
    return torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=True)


def pictures(run_folder: Path) -> dict[str, bytes]:
    """The pictures' bytes by their names."""
    return {path.relative_to(run_folder).as_posix(): path.read_bytes() for path in run_folder.rglob("*.png")}


def arrays(run_folder: Path) -> dict[str, Any]:
    """The pictures' data: every array of every .npz file."""
    found = {}
    for path in sorted(run_folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            found |= {f"{path.name}/{name}": file[name] for name in file.files}
    return found


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested states are not bit for bit the same."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        same = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [found for i in range(len(a)) for found in differences(a[i], b[i], f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a!r} != {b!r}"[:200]]
