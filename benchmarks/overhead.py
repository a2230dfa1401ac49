"""What the watching callbacks add to a training run: BYOL on ResNet-18 with the CIFAR stem, batch 256, 32 x 32.

A step takes many seconds on a processor and a default interval is up to 500 steps, so the share is put together from
what is timed inside a real fit: the median plain step, and the time each callback spends in its hooks, recorder and
pictures on a step that is due. Share = time of an observation / (default interval x plain step). Steps that are not due
cost what the last line says. The probes, once an epoch over a labelled set, are not part of it.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from benchmarks._bench import Row, Section, main
from lightning_ssl import callbacks as ours
from lightning_ssl.callbacks import collapse_monitor
from lightning_ssl.data import ViewBatch
from lightning_ssl.methods import BYOL
from lightning_ssl.nn import LinearBackbone

WATCHING = [
    "UniformityAlignment",
    "CorrelationBound",
    "EffectiveRank",
    "EigenspaceAlignment",
    "CollapseMonitor",
    "FeatureQuality",
    "TargetLag",
    "RepresentationCircle",
    "CovarianceOperatorNorm",
]
HOOKS = ["on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
HOOKS += ["on_train_batch_end"]


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


class Clock:
    """Times whole steps, and the hooks of the callbacks it wraps.

    What they record through hooks on the submodules is shared; it is in the difference of whole steps.
    """

    def __init__(self, watched: list[L.Callback]) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.steps: list[float] = []
        self.cpu: list[float] = []
        self.now: dict[str, float] = defaultdict(float)
        self.running: str | None = None  # the callback whose hook is at work
        for callback in watched:
            name = type(callback).__name__
            for hook in HOOKS:
                setattr(callback, hook, self._timed(name, getattr(callback, hook)))

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start, self.running = time.perf_counter(), name
            try:
                return inner(*args)
            finally:
                self.running = None
                self.now[name] += time.perf_counter() - start

        return timed

    def on_train_batch_start(self, *args: Any) -> None:
        self.now.clear()
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(time.perf_counter() - self.start)
        self.cpu.append(time.process_time() - self.cpu_start)
        for name, seconds in self.now.items():
            self.spent[name].append(seconds)


class Hook(L.Callback):
    """A single hook. Lightning calls callbacks in the order of the list: the clock starts first and stops last."""

    def __init__(self, name: str, hook: Callable[..., None]) -> None:
        setattr(self, name, hook)


def fit(method: L.LightningModule, callbacks: list[L.Callback], steps: int, batch_size: int) -> Clock:
    clock = Clock(callbacks)
    first, last = (Hook(name, getattr(clock, name)) for name in ("on_train_batch_start", "on_train_batch_end"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[first, *callbacks, last],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(method, DataLoader(Images(steps, batch_size), batch_size=None))
    return clock


def watchers() -> list[L.Callback]:
    return [getattr(ours, name)() for name in WATCHING]


def every_step(callbacks: list[L.Callback]) -> list[L.Callback]:
    """Each step is due, and each observation is of the dear kind: eigenvalues, all places, a window's end."""
    collapse_monitor.SPECTRUM_EVERY = 1
    for callback in callbacks:
        callback.every_n_steps = 1
        if hasattr(callback, "window"):
            callback.window = 1
    return callbacks


def idle_cost(steps: int) -> float:
    """Seconds that a step which no callback is due on takes longer, all of them together, on a network of no size."""
    medians = []
    for callbacks in ([], watchers()):
        for callback in callbacks:
            callback.every_n_steps = 10**9
        clock = fit(
            BYOL(LinearBackbone(out_features=8), projector_hidden=8, projector_dim=8, predictor="linear"),
            callbacks,
            steps,
            2,
        )
        medians.append(statistics.median(clock.steps[5:]))
    return medians[1] - medians[0]


def run(tiny: bool = False) -> Section:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    backbone, batch_size, steps = ("small_conv", 16, 3) if tiny else ("resnet18", 256, 4)
    intervals = {type(callback).__name__: callback.every_n_steps for callback in watchers()}

    torch.manual_seed(0)
    method = BYOL(backbone, predictor="linear")
    plain = fit(method, [], steps, batch_size).steps[1:]
    weights = [p.detach().clone() for p in method.parameters()]
    torch.manual_seed(0)
    method = BYOL(backbone, predictor="linear")
    watched = fit(method, every_step(watchers()), steps, batch_size)
    assert all(torch.equal(a, b) for a, b in zip(weights, method.parameters(), strict=True)), "watching changed the run"

    step = statistics.median(plain)
    rows, total = [], 0.0
    for name in WATCHING:
        times = watched.spent[name][1:]
        cost = statistics.median(times)
        share = cost / (intervals[name] * step)
        total += share
        spread = f" ({min(times) / step:.2g}-{max(times) / step:.2g})"
        every = f"every {intervals[name]} steps: {share:.4%}"
        rows.append(
            Row(name, "a plain step", f"{cost:.3g} s", f"{step:.3g} s", f"{cost / step:.3g} steps{spread}, {every}")
        )
    idle = idle_cost(20 if tiny else 300)
    rows.append(
        Row("all, at their defaults", "a plain step", "", f"{step:.3g} s", f"{total:.2%}", "<= 3%", total <= 0.03)
    )
    rows.append(
        Row("all, a step not due", "a plain step", f"{1e6 * idle:.3g} µs", f"{step:.3g} s", f"{idle / step:.2g}")
    )
    return Section(rows, [f"The plain step: median of {len(plain)}, {min(plain):.3g} to {max(plain):.3g} s."])


if __name__ == "__main__":
    main(run)
