"""DirectPred: BYOL whose linear predictor is set from the features' second moment."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_ssl.methods.base import Schedule
from lightning_ssl.methods.byol import BYOL
from lightning_ssl.nn import DirectPredictorUpdate, HeadInit, PartitionedLinear


class DirectPred(BYOL):
    """BYOL with W_p = U diag(p) Uᵀ in F's eigenbasis, p_j = √s_j + eps max √s (DirectPred Eqs. 18-19).

    F is the moving average of the second moment of the predictor's inputs, over both views and all ranks. The
    predictor is set after each optimizer step; with `freq` > 1 the optimizer trains it in between. Set
    `predictor_lr_scale` to 0 to keep it fixed there.

    Args:
        backbone: A name (see `build_backbone`) or a module.
        stem: "cifar" or "imagenet", for ResNets.
        zero_init_residual: Start a ResNet's residual branches at zero.
        projector_hidden: Width of the projector; 0 makes it one linear layer.
        projector_dim: Output dimension d.
        projector_norm: Normalisation in the projector, see `build_norm`.
        projector_bias: Whether the projector's last layer has a bias.
        head_init: How the heads' weights start, see `init_head_`.
        norm_affine: Whether the projector's batch norm has an affine part; DirectPred's has none.
        predictor: "linear"; nothing else can be set.
        predictor_bias: Whether the predictor has a bias (trained by the optimizer).
        rho: Weight of the past in F's moving average.
        eps: Boost of the small eigenvalues, relative to the largest.
        freq: Set the predictor every `freq`-th step.
        shift: The constant c_j of Table 7, relative to the largest eigenvalue.
        partitions: Random hyperplanes, each with an F and a map for either side; a sample's prediction uses those of
            the sides it lies on (:class:`lightning_ssl.nn.PartitionedLinear`). 0 is one linear predictor.
        mode: "direct", or "optimal" for the least-squares predictor of Table 1.
        reg: The ridge of "optimal", relative to F's mean eigenvalue.
        predictor_lr_scale: The predictor's learning rate relative to the rest.
        momentum: The target's momentum; 0 is no EMA.
        momentum_schedule: "constant", or "cosine" towards 1.
        target_init: "copy" of the online network, or "independent".
        normalize: L2-normalise both sides of the loss.
        seed: Seed of the hyperplanes.
        optimizer: From parameter groups to an optimizer.
        scheduler: "constant", "cosine", or from an optimizer to a scheduler.
        warmup_epochs: Linear warmup, for "constant" and "cosine".

    Example:
        >>> model = DirectPred(backbone="small_conv", rho=0.3, eps=0.1)
    """

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        stem: Literal["cifar", "imagenet"] = "cifar",
        projector_hidden: int = 512,
        projector_dim: int = 128,
        projector_norm: str = "batch",
        predictor: str = "linear",
        predictor_bias: bool = False,
        rho: float = 0.3,
        eps: float = 0.1,
        freq: int = 1,
        shift: float = 0.0,
        partitions: int = 0,
        mode: Literal["direct", "optimal"] = "direct",
        reg: float = 1e-3,
        predictor_lr_scale: float = 1.0,
        momentum: float = 0.996,
        momentum_schedule: Literal["constant", "cosine"] = "constant",
        target_init: Literal["copy", "independent"] = "copy",
        normalize: bool = True,
        seed: int = 0,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=4e-4),
        scheduler: Schedule | LRSchedulerCallable = "constant",
        warmup_epochs: float = 0.0,
        zero_init_residual: bool = False,
        projector_bias: bool = True,
        norm_affine: bool = False,
        head_init: HeadInit = "default",
    ) -> None:
        if predictor != "linear":
            raise ValueError(
                f'DirectPred sets the weight of a linear predictor, got predictor={predictor!r}; use predictor="linear"'
                " or the method BYOL"
            )
        super().__init__(
            backbone,
            stem,
            projector_hidden,
            projector_dim,
            projector_norm,
            predictor="linear",
            predictor_bias=predictor_bias,
            predictor_lr_scale=predictor_lr_scale,
            momentum=momentum,
            momentum_schedule=momentum_schedule,
            target_init=target_init,
            normalize=normalize,
            seed=seed,
            optimizer=optimizer,
            scheduler=scheduler,
            warmup_epochs=warmup_epochs,
            zero_init_residual=zero_init_residual,
            projector_bias=projector_bias,
            norm_affine=norm_affine,
            head_init=head_init,
        )
        self.direct = DirectPredictorUpdate(rho, eps, freq, shift, partitions, mode, reg)
        if partitions:
            assert isinstance(self.predictor, nn.Linear)
            self.predictor = PartitionedLinear(self.predictor, partitions, seed)
        self._sides: list[Tensor | None] = []  # of the step's two views

    def losses(self, batch: Any) -> dict[str, Tensor]:
        self._sides.clear()
        return super().losses(batch)

    def apply_predictor(self, z: Tensor) -> Tensor:
        if not (self.training and isinstance(self.predictor, PartitionedLinear)):
            self._sides.append(None)
            return self.predictor(z)
        sides = self.predictor.sides(z, self.predictor.thresholds_of(z))
        self._sides.append(sides)
        return self.predictor(z, sides)

    def watch(self, z1: Tensor, z2: Tensor, t1: Tensor, t2: Tensor) -> None:
        if self.training:
            first, second = self._sides
            self.direct.update(z1, t2, first)
            self.direct.update(z2, t1, second)

    def after_optimizer_step(self) -> None:
        self.direct.step(self.predictor)
        super().after_optimizer_step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["direct_predictor"] = self.direct.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "direct_predictor" in checkpoint:
            self.direct.load_state_dict(checkpoint["direct_predictor"])
