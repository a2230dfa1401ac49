"""Barlow Twins."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_ssl import functional
from lightning_ssl.distributed import sum_over_ranks
from lightning_ssl.functional.losses import redundancy
from lightning_ssl.methods.base import Method, Schedule, views
from lightning_ssl.nn import LARS, build_backbone, gather_rows, mlp, num_features


class BarlowTwins(Method):
    """Make the cross-correlation matrix of two views' features the identity (Bound Eq. 2).

    The matrix is that of all ranks' rows. Defaults are Barlow Twins' own recipe (LARS, warmup and cosine; the rate is
    for a batch of 256, scale it linearly) with a 2048-dimensional projector.

    Args:
        backbone: A name (see `build_backbone`) or a module.
        stem: "cifar" or "imagenet", for ResNets.
        zero_init_residual: Start a ResNet's residual branches at zero.
        projector_hidden: Width of the projector's two hidden layers.
        dim: Output dimension d (Bound: 4 to 2048).
        lambd: Weight of the off-diagonal terms.
        projector_norm: Normalisation in the projector, see `build_norm`.
        projector_bias: Whether the projector's hidden layers have biases.
        lr_floor: What a cosine schedule ends at, relative to the peak.
        optimizer: From parameters to an optimizer.
        scheduler: "constant", "cosine", or from an optimizer to a scheduler.
        warmup_epochs: Linear warmup, for "constant" and "cosine".

    Example:
        >>> model = BarlowTwins(backbone="small_conv", projector_hidden=512, dim=128)
    """

    loss_is_global = True

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        stem: Literal["cifar", "imagenet"] = "cifar",
        projector_hidden: int = 2048,
        dim: int = 2048,
        lambd: float = 0.0051,
        projector_norm: str = "batch",
        optimizer: OptimizerCallable = lambda p: LARS(p, lr=0.2, weight_decay=1e-6, vector_lr_scale=0.024),
        scheduler: Schedule | LRSchedulerCallable = "cosine",
        warmup_epochs: float = 10.0,
        zero_init_residual: bool = True,
        projector_bias: bool = False,
        lr_floor: float = 1e-3,
    ) -> None:
        super().__init__()
        self.keep_hyperparameters()
        if dim < 2 or lambd < 0:
            raise ValueError(f"`dim` must be at least 2 and `lambd` not negative, got {dim} and {lambd}")
        self.lambd, self.lr_floor = lambd, lr_floor
        self.backbone = build_backbone(backbone, stem, zero_init_residual)
        sizes = [num_features(self.backbone), projector_hidden, projector_hidden, dim]
        self.projector = mlp(sizes, projector_norm, last_bias=False, bias=projector_bias)
        self.use_optimizer(optimizer, scheduler, warmup_epochs)

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x1, x2 = views(batch)
        z1, z2 = self.project(x1), self.project(x2)
        counts = self.counts(z1)
        # Over the ranks goes the matrix, or go the rows (and back their gradients): whichever is less. The matrix also
        # takes each rank its own rows' share of the products instead of all.
        of_matrix = len(counts) > 1 and z1.shape[1] <= 3 * sum(counts)
        with torch.autocast(z1.device.type, enabled=False):
            if of_matrix:
                return {"loss": _loss_of_own_rows(torch.stack([z1, z2]), sum(counts), self.lambd)}
            every = gather_rows(torch.stack([z1, z2], dim=1), counts)
            return {"loss": functional.barlow_twins_loss(every[:, 0], every[:, 1], self.lambd)}


def _loss_of_own_rows(z: Tensor, total: int, lambd: float) -> Tensor:
    """Barlow Twins' loss of all ranks' rows from this rank's, [2, n, d], and three sums over the ranks."""
    if total < 2:
        raise ValueError(f"the batch needs at least 2 rows over all ranks to standardise over, got {total}")
    centred = z - sum_over_ranks(z.sum(dim=1, keepdim=True)) / total
    variance = sum_over_ranks(centred.square().sum(dim=1, keepdim=True)) / total
    first, second = centred * torch.rsqrt(variance + 1e-5)
    return redundancy(sum_over_ranks(first.T @ second, same_after=True) / total, lambd)
