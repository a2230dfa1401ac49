"""What the ranks must agree on before any of them enters a collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

# Strategies that cut a module's parameters (or its forward) into pieces no single rank sees.
_SHARDING = {"FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy"}


def refuse_sharded(trainer: Trainer, callback: object) -> None:
    """Raise under a strategy that shards parameters."""
    names = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    if names & _SHARDING:
        raise MisconfigurationException(
            f"{type(callback).__name__} reads whole weights and features, which {type(trainer.strategy).__name__} "
            "splits over ranks; use strategy='ddp', or leave this callback out"
        )


def is_distributed(trainer: Trainer) -> bool:
    """Whether several ranks train together (a process group may exist for other reasons)."""
    return trainer.world_size > 1 and dist.is_available() and dist.is_initialized()


def agree(trainer: Trainer, ok: bool, number: int = 0) -> tuple[bool, int]:
    """Collective: whether all ranks are `ok`, and the largest `number`."""
    if not is_distributed(trainer):
        return ok, number
    votes = torch.tensor([0 if ok else 1, number], device=trainer.strategy.root_device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return not bool(votes[0]), int(votes[1])


def gather_rows(trainer: Trainer, rows: Tensor | None) -> Tensor | None:
    """Collective: the rows of all ranks, as many from each as it holds, which may be none.

    They come in the order in which a DistributedSampler deals them: the ranks' first rows, then their second ones; so
    that what depends on the order is the same at any number of ranks.
    Returns None where no rank has any. Floating-point rows travel as they are, so that a gathered bank is exact.
    """
    if not is_distributed(trainer):
        return rows
    device = trainer.strategy.root_device
    world_size = dist.get_world_size()
    shapes: list[tuple[tuple[int, ...], torch.dtype] | None] = [None] * world_size
    dist.all_gather_object(shapes, None if rows is None else (tuple(rows.shape), rows.dtype))
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return None
    tail, dtype = known[0][0][1:], known[0][1]
    if any(shape[1:] != tail or kind != dtype for shape, kind in known):
        raise ValueError(f"ranks hold rows of different shapes or types: {known}")
    counts = [shape[0][0] if shape is not None else 0 for shape in shapes]
    padded = torch.zeros((max(counts), *tail), dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows.to(device)
    pieces = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(pieces, padded)
    held = torch.arange(max(counts), device=device)[:, None] < torch.tensor(counts, device=device)
    return torch.stack(pieces, dim=1)[held]


def total(trainer: Trainer, values: Tensor) -> Tensor:
    """Collective: the sum over ranks."""
    if is_distributed(trainer):
        values = values.to(trainer.strategy.root_device)
        dist.all_reduce(values)
    return values
