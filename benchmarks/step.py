"""What a training step costs the host beyond the networks' own work: time, operator calls, collectives.

Each method with a small network and a batch of 16, so that the host is all there is to see: median CPU time of a step
in one process, operator calls of a step (forward, backward, optimizer, target, what is logged) and, on two gloo ranks,
the collectives of ours in it, DDP's own apart. "Before" is the same program's outcome with the step that still waited
for its device; its times were taken in another run and are no contest. Last, what a look at a predictor of 2,048
dimensions costs from 256 rows, against working with d x d matrices in double precision.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._bench import Row, Section, faster, main, race
from lightning_ssl import functional, methods
from lightning_ssl.data import ImageDataModule
from lightning_ssl.distributed import last_collective

METHODS: dict[str, dict[str, Any]] = {
    "SimCLR": {},
    "BYOL": {},
    "SimSiam": {"projector_hidden": 128, "dim": 128},
    "DirectPred": {},
    "BarlowTwins": {"projector_hidden": 128, "dim": 128, "warmup_epochs": 0},
    "RAFT": {},
    "BYOLPrime": {},
}
BEFORE = {  # milliseconds, operator calls, collectives
    "SimCLR": (17.3, 444, 7),
    "BYOL": (21.6, 446, 2),
    "SimSiam": (16.5, 439, 2),
    "DirectPred": (24.5, 473, 5),
    "BarlowTwins": (15.9, 416, 6),
    "RAFT": (26.1, 618, 2),
    "BYOLPrime": (27.0, 618, 2),
}


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Meter(L.Callback):
    """Each step's CPU time and collectives, and the last one's operator calls."""

    def __init__(self, last: int) -> None:
        self.last, self.times, self.collectives, self.calls = last, [], [], Calls()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            self.calls.__enter__()
        self._begun, self._start = last_collective().number, time.process_time()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            self.calls.__exit__(None, None, None)
        else:
            self.times.append(time.process_time() - self._start)
        self.collectives.append(last_collective().number - self._begun)


def fit(name: str, steps: int, ranks: int, folder: str) -> tuple[float, int, int]:
    """Milliseconds, operator calls and collectives of a step."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meter = Meter(steps - 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=steps,
        limit_val_batches=0,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = getattr(methods, name)(backbone="small_conv", **METHODS[name])
    trainer.fit(model, datamodule=ImageDataModule("digits", batch_size=16 // ranks))
    return 1e3 * statistics.median(meter.times[1:]), meter.calls.count, meter.collectives[-1]


def worker(rank: int, folder: str, names: list[str]) -> None:
    environment = {
        "LOCAL_RANK": rank,
        "NODE_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29511,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {name: fit(name, 3, 2, folder)[2] for name in names}
    if rank == 0:
        torch.save(found, f"{folder}/collectives.pt")
    dist.barrier()
    dist.destroy_process_group()


def predictor_rows(tiny: bool) -> list[Row]:
    """What `EigenspaceAlignment` computes from 256 rows of 2,048 dimensions, against the d x d matrices."""
    n, d = (8, 32) if tiny else (256, 2048)
    torch.manual_seed(0)
    x, W, V = (torch.randn(shape, dtype=torch.float64) / d**0.5 for shape in ((n, d), (d, d), (d, d)))
    y = torch.tanh(x @ W.T)
    F = functional.second_moment(x)
    works = {
        "linear": (
            lambda: functional.predictor_values_of_rows(x, W=W),
            lambda: functional.predictor_values(F, W),
        ),
        "MLP": (
            lambda: functional.predictor_values_of_rows(x, y),
            lambda: functional.predictor_values(F, functional.effective_predictor(x, y)),
        ),
    }
    rows = []
    for kind, (ours, dense) in works.items():
        torch.testing.assert_close(ours()["predictor_values"], dense()["predictor_values"][:n], rtol=1e-4, atol=1e-7)
        seconds = race({"ours": ours, "dense": dense}, 1 if tiny else 3)
        rows.append(faster(f"EigenspaceAlignment, {kind}, {n} x {d}", "d x d", *seconds.values(), aim=20))

    def balanced() -> None:
        works["linear"][0]()
        functional.balance_residual(V, W)

    def dense_balanced() -> None:
        works["linear"][1]()
        gram = V @ V.T
        (gram - W.T @ W).norm() / gram.norm()

    seconds = race({"ours": balanced, "dense": dense_balanced}, 1 if tiny else 3)
    rows.append(faster(f"EigenspaceAlignment, linear after a linear layer, {n} x {d}", "d x d", *seconds.values()))
    return rows


def run(tiny: bool = False) -> Section:
    names = ["BYOL"] if tiny else list(METHODS)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, names), nprocs=2)
        collectives = torch.load(f"{folder}/collectives.pt", weights_only=True)
        found = {name: fit(name, 4 if tiny else 24, 1, folder) for name in names}
    rows = []
    for name, (milliseconds, calls, _) in found.items():
        old = BEFORE[name]
        rows += [
            Row(f"{name}, host time", "before", f"{milliseconds:.1f} ms", f"{old[0]} ms", ""),
            Row(f"{name}, operator calls", "before", f"{calls}", f"{old[1]}", f"{calls / old[1]:.2f}"),
            Row(f"{name}, collectives", "before", f"{collectives[name]}", f"{old[2]}", ""),
        ]
    return Section(rows + predictor_rows(tiny))


if __name__ == "__main__":
    main(run, threads=1)
