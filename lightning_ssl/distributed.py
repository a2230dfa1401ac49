"""Differentiable collectives, in the convention DDP expects; all are the identity in a single process.

Backward sums the gradient over ranks: what arrives is the derivative of the sum of all ranks' losses. As DDP then
averages parameter gradients, training follows the mean of the ranks' losses. So each rank returns either the loss of
the whole batch (computed from gathered rows), or its own rows' mean times :func:`rank_weight`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum over ranks, outside the graph; `x` is left as it was."""
    if world_size() == 1:
        return x
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def broadcast(x: Tensor) -> Tensor:
    """Rank 0's tensor."""
    if world_size() > 1:
        x = x.contiguous()
        dist.broadcast(x, src=0)
    return x


def row_counts(rows: int, device: torch.device) -> list[int]:
    """How many rows each rank holds."""
    if world_size() == 1:
        return [rows]
    counts = torch.zeros(world_size(), dtype=torch.long, device=device)
    counts[rank()] = rows
    dist.all_reduce(counts)
    return counts.tolist()


def rank_weight(rows: int, device: torch.device) -> Tensor | float:
    """What a rank's mean over its rows is multiplied by, for the ranks' mean to be the mean over all rows."""
    if world_size() == 1:
        return 1.0
    total = all_reduce_sum(torch.tensor(float(rows), device=device))
    return rows * world_size() / total.clamp_min(1)


def gather_rows(x: Tensor, counts: list[int] | None = None) -> Tensor:
    """Concatenate the rows of all ranks, in rank order; ranks may hold different numbers of rows, also none.

    Args:
        x: This rank's rows, [n, ...].
        counts: The ranks' row counts, if known (:func:`row_counts`); saves a collective.

    Returns:
        All rows, [sum n, ...], differentiable.
    """
    if world_size() == 1:
        return x
    return _GatherRows.apply(x, counts or row_counts(len(x), x.device))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        ctx.start, ctx.rows = sum(counts[: rank()]), counts[rank()]
        padded = x.new_zeros(max(counts), *x.shape[1:])  # all_gather needs equal shapes
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad.contiguous())[ctx.start : ctx.start + ctx.rows], None
