"""Two ranks with a pretend accelerator each; they talk through gloo, and as with NCCL no collective waits for one."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

RANKS = 2


def strategy() -> DDPStrategy:
    """DDP whose gradients are averaged here: the reducer of torch's own reads memory that pretend tensors lack."""
    from tests.pretend import device

    class PretendDDP(DDPStrategy):
        def configure_ddp(self) -> None: ...

        def post_backward(self, closure_loss: Tensor) -> None:
            assert self.model is not None
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(RANKS)

    return PretendDDP(
        parallel_devices=[device.DEVICE] * RANKS,
        cluster_environment=LightningEnvironment(),
        process_group_backend="gloo",
    )


def _work(rank: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(RANKS), PRETEND_RANKS=str(RANKS))
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    torch.save(function(*args, **kwargs), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(folder: Path, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What a function of `tests.pretend.cases` returns on each of two ranks."""
    mp.spawn(_work, (str(folder), function, args, kwargs), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
