"""From one process to two (gloo, one thread each), BYOL on ResNet-18 with the CIFAR stem, 32 samples a process.

The same work a process, so that the ideal is the same time: efficiency = step of one / step of two, in CPU seconds (the
work that ranks add, whatever else the machine does) and in wall seconds (waiting included). The callbacks' share is the
wall time rank 0 spends inside `torch.distributed` during their hooks, waiting for the other rank included, on a step
that is due, spread over their default intervals.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks._bench import Row, Section, main

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")


def worker(folder: str, ranks: int, backbone: str, batch: int, steps: int, watch: bool) -> None:
    """A fit whose rank 0 leaves its times in a file; started anew for each number of ranks."""
    import lightning.pytorch as L
    import torch
    from torch.utils.data import DataLoader

    from benchmarks.overhead import Clock, Hook, Images, every_step, watchers
    from lightning_ssl.methods import BYOL

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    callbacks = every_step(watchers()) if watch else []
    clock = Clock(callbacks)
    waited: dict[str, list[float]] = defaultdict(list)
    time_collectives(clock, waited)
    first, last = (Hook(name, getattr(clock, name)) for name in ("on_train_batch_start", "on_train_batch_end"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=1,
        callbacks=[first, *callbacks, last],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    torch.manual_seed(0)
    trainer.fit(BYOL(backbone, predictor="linear"), DataLoader(Images(steps, batch), batch_size=None))
    if trainer.is_global_zero:
        Path(folder, "times.json").write_text(
            json.dumps({"wall": clock.steps[1:], "cpu": clock.cpu[1:], "waited": waited})
        )


def time_collectives(clock: Any, waited: dict[str, list[float]]) -> None:
    """Charge the time in `torch.distributed` to the callback whose hook is running."""
    import torch.distributed as dist

    for name in COLLECTIVES:
        collective = getattr(dist, name)

        def call(*args: Any, collective: Any = collective, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return collective(*args, **kwargs)
            finally:
                if clock.running:
                    waited[clock.running].append(time.perf_counter() - start)

        setattr(dist, name, call)


def fit(ranks: int, watch: bool, *arguments: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ddp", "--worker", folder, ranks, *arguments, int(watch)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PL_DISABLE_FORK": "1"}
        found = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr[-3000:]
        return json.loads(Path(folder, "times.json").read_text())


def run(tiny: bool = False) -> Section:
    from benchmarks.overhead import watchers

    arguments = ("small_conv", 8, 3) if tiny else ("resnet18", 32, 4)
    single, double = fit(1, False, *arguments), fit(2, False, *arguments)
    watched = fit(2, True, *arguments)
    # Those that watch one place share an exchange, which is charged to the first of them.
    assert {"UniformityAlignment", "EigenspaceAlignment", "CovarianceOperatorNorm"} <= watched["waited"].keys(), watched
    rows = []
    for clock in ("cpu", "wall"):
        one, two = statistics.median(single[clock]), statistics.median(double[clock])
        ratios = [a / b for a, b in zip(single[clock], double[clock], strict=True)]
        spread = f"{one / two:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        work = f"a step on two ranks, {clock} time"
        rows.append(Row(work, "on one", f"{two:.2f} s", f"{one:.2f} s", spread, ">= 0.9", one / two >= 0.9))
    total = 0.0
    for callback in watchers():
        name = type(callback).__name__
        each = sum(watched["waited"].get(name, [])) / arguments[2]
        share = each / (callback.every_n_steps * two)
        total += share
        rows.append(Row(f"{name}'s collectives", "a step", f"{1e3 * each:.3g} ms", f"{two:.2f} s", f"{share:.4%}"))
    rows.append(Row("all callbacks' collectives", "a step", "", f"{two:.2f} s", f"{total:.3%}", "< 1%", total < 0.01))
    return Section(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        folder, ranks, backbone, batch, steps, watch = sys.argv[2:]
        worker(folder, int(ranks), backbone, int(batch), int(steps), bool(int(watch)))
    else:
        main(run, threads=1)
