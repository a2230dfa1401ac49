"""RAFT: align two views while running away from the mean teacher."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_ssl import functional
from lightning_ssl.methods.base import Method, Schedule, views
from lightning_ssl.nn import (
    PredictorInit,
    TargetNetwork,
    build_backbone,
    build_predictor,
    mlp,
    num_features,
    tangential,
)
from lightning_ssl.quantities import Quantity


class RAFT(Method):
    """Minimise alpha ‖p̂₁ − p̂₂‖² − beta ½(‖p̂₁ − ẑ₁‖² + ‖p̂₂ − ẑ₂‖²) (RAFT Eq. 9).

    p are the predictions of the online network, z the projections of its moving average, on the same view. Defaults
    are the paper's recipe.

    Args:
        backbone: A name (see `build_backbone`) or a module.
        stem: "cifar" or "imagenet", for ResNets.
        projector_hidden: Width of the projector.
        projector_dim: Output dimension d.
        projector_norm: Normalisation in the projector, see `build_norm`.
        predictor: "mlp", "linear" or "none".
        predictor_hidden: Width of an MLP predictor.
        predictor_norm: Normalisation in the predictor; the paper has none.
        predictor_bias: Whether the predictor's last layer has a bias; Theorem 5.1 is exact without.
        predictor_init: "default", "xavier", "identity", "uniform" in ± `predictor_range`, or "positive", up to it.
        predictor_range: The range of `predictor_init`.
        predictor_lr_scale: The predictor's learning rate relative to the rest, alpha_p.
        align_weight: Alpha.
        cross_model_weight: Beta.
        tangential: Keep only the tangential gradient of the predictions (Sec. 5). Both losses are of l2-normalised
            predictions, whose gradient has no other part: the switch changes nothing but rounding.
        momentum: The target's momentum, 1 minus the paper's EMA rate.
        target_init: "copy" of the online network, or "independent".
        optimizer: From parameters to an optimizer.
        scheduler: "constant", "cosine", or from an optimizer to a scheduler.
        warmup_epochs: Linear warmup, for "constant" and "cosine".

    Example:
        >>> model = RAFT(backbone="small_conv", cross_model_weight=0.5)
    """

    sign = -1.0  # of the cross-model loss: RAFT runs away from its teacher

    quantities = (
        Quantity("*/align", "alignment of views in the loss", "The distance of the two views' outputs.", "learning"),
        Quantity("*/cross_model", "distance to the mean teacher", "What RAFT runs away from.", "learning"),
    )

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        stem: Literal["cifar", "imagenet"] = "cifar",
        projector_hidden: int = 512,
        projector_dim: int = 128,
        projector_norm: str = "batch",
        predictor: Literal["mlp", "linear", "none"] = "mlp",
        predictor_hidden: int = 512,
        predictor_norm: str = "none",
        predictor_bias: bool = True,
        predictor_init: PredictorInit = "default",
        predictor_range: float | None = None,
        predictor_lr_scale: float = 1.0,
        align_weight: float = 1.0,
        cross_model_weight: float = 1.0,
        tangential: bool = False,
        momentum: float = 0.996,
        target_init: Literal["copy", "independent"] = "copy",
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=3e-4),
        scheduler: Schedule | LRSchedulerCallable = "constant",
        warmup_epochs: float = 0.0,
    ) -> None:
        super().__init__()
        self.keep_hyperparameters()
        if align_weight < 0 or cross_model_weight < 0:
            raise ValueError(
                "`align_weight` and `cross_model_weight` must not be negative (the sign is the method: RAFT or "
                f"BYOLPrime), got {align_weight} and {cross_model_weight}"
            )
        if not 0 <= momentum <= 1 or predictor_lr_scale < 0:
            raise ValueError(
                "`momentum` must lie in [0, 1] and `predictor_lr_scale` not be negative, got "
                f"{momentum} and {predictor_lr_scale}"
            )
        self.align_weight, self.cross_model_weight = align_weight, cross_model_weight
        self.tangential, self.momentum, self.predictor_lr_scale = tangential, momentum, predictor_lr_scale
        self.backbone = build_backbone(backbone, stem)
        self.projector = mlp([num_features(self.backbone), projector_hidden, projector_dim], projector_norm)
        self.predictor = build_predictor(
            predictor, projector_dim, predictor_hidden, predictor_norm, predictor_bias, predictor_init, predictor_range
        )
        self.target = TargetNetwork(self.backbone, self.projector, target_init)
        self.use_optimizer(optimizer, scheduler, warmup_epochs)

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x1, x2 = views(batch)
        p1, p2 = self.predict(x1), self.predict(x2)
        z1, z2 = self.target(x1).to(p1.dtype), self.target(x2).to(p2.dtype)
        align = functional.cross_model_loss(p1, p2)  # L_align with alpha = 2 is the same ‖p̂₁ − p̂₂‖²
        cross = (functional.cross_model_loss(p1, z1) + functional.cross_model_loss(p2, z2)) / 2
        loss = self.align_weight * align + self.sign * self.cross_model_weight * cross
        return {"loss": loss, "align": align, "cross_model": cross}

    def predict(self, x: Tensor) -> Tensor:
        p = self.from_projection(self.project(x))
        return tangential(p) if self.tangential else p

    def parameter_groups(self) -> list[dict[str, Any]]:
        return self.split_parameters(predictor={"lr_scale": self.predictor_lr_scale})

    def after_optimizer_step(self) -> None:
        self.target.follow(self.backbone, self.projector, self.momentum)
