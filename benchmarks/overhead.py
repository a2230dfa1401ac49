"""What the watching callbacks add to a training step: ResNet-18 on CIFAR-size images, default intervals.

    python benchmarks/overhead.py [--batch-size 256] [--steps 2] [--backbone resnet18]

Every ratio is taken within this run: the median time of a plain step against the median time each callback spends in
its own hooks when a step is due (an observation), spread over its default interval. Recording adds a copy of the
features to due steps only, and is inside the hooks' time. The probes are measured apart: they run once an epoch.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections import defaultdict
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ssl import callbacks as ours
from lightning_ssl.data import ViewBatch
from lightning_ssl.methods import BYOL

WATCHING = [
    "UniformityAlignment",
    "CorrelationBound",
    "EffectiveRank",
    "EigenspaceAlignment",
    "CollapseMonitor",
    "RepresentationCircle",
    "CovarianceOperatorNorm",
]
HOOKS = ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"]


class Images(Dataset):
    """Noise of CIFAR's size: what is timed does not depend on what it shows."""

    def __init__(self, batches: int, batch_size: int) -> None:
        self.batches, self.batch_size = batches, batch_size

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, i: int) -> ViewBatch:
        generator = torch.Generator().manual_seed(i)
        views = tuple(torch.randn(self.batch_size, 3, 32, 32, generator=generator) for _ in range(2))
        return ViewBatch(views, torch.zeros(self.batch_size, dtype=torch.long), torch.arange(self.batch_size))


class Clock(L.Callback):
    """Times whole steps, and every hook of the callbacks it wraps."""

    def __init__(self, watched: list[L.Callback]) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.steps: list[float] = []
        for callback in watched:
            for hook in HOOKS:
                self._wrap(callback, hook)

    def _wrap(self, callback: L.Callback, hook: str) -> None:
        inner = getattr(callback, hook)

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            inner(*args)
            self.now[type(callback).__name__] += time.perf_counter() - start

        setattr(callback, hook, timed)

    def on_train_batch_start(self, *args: Any) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(time.perf_counter() - self.start)
        for name, seconds in self.now.items():
            self.spent[name].append(seconds)


def fit(arguments: argparse.Namespace, callbacks: list[L.Callback], clock: Clock) -> None:
    torch.manual_seed(0)
    method = BYOL(arguments.backbone, predictor="linear")
    loader = DataLoader(Images(arguments.steps + 1, arguments.batch_size), batch_size=None)
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=1,
        callbacks=[clock, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=arguments.folder,
    )
    trainer.fit(method, loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each run; one more warms up")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--folder", default="benchmarks/results/overhead", help="where the pictures go")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    plain = Clock([])
    fit(arguments, [], plain)
    step = statistics.median(plain.steps[1:])

    watched = [getattr(ours, name)() for name in WATCHING]
    intervals = {type(callback).__name__: callback.every_n_steps for callback in watched}
    for callback in watched:
        callback.every_n_steps = 1  # each step is due: what is timed is an observation
    clock = Clock(watched)
    fit(arguments, watched, clock)

    print(f"plain step: {step:.3f} s (median of {arguments.steps}; {arguments.backbone}, batch {arguments.batch_size})")
    print(f"{'callback':<24}{'observation':>13}{'in steps':>10}{'interval':>10}{'share':>9}")
    shares = 0.0
    for name in WATCHING:
        seconds = statistics.median(clock.spent[name][1:])
        share = seconds / (intervals[name] * step)
        shares += share
        print(f"{name:<24}{seconds:>11.3f} s{seconds / step:>10.3f}{intervals[name]:>10}{100 * share:>8.2f}%")
    print(f"{'all, default intervals':<57}{100 * shares:>8.2f}%")


if __name__ == "__main__":
    main()
