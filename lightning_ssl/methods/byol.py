"""BYOL, with every ablation of DDN-v1 and DirectPred."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_ssl import functional
from lightning_ssl.methods.base import Method, Schedule, views
from lightning_ssl.nn import (
    HeadInit,
    PredictorInit,
    TargetNetwork,
    build_backbone,
    build_predictor,
    ema_momentum,
    init_head_,
    mlp,
    num_features,
    reset_parameters_,
    symmetrize_,
    symmetrize_two_layers_,
    tangential,
)


class BYOL(Method):
    """Predict the target network's projection of one view from the online network's of the other.

    The loss of both orders is ‖p̂₁ − ẑ₂‖² + ‖p̂₂ − ẑ₁‖², or without `normalize` the linear theory's
    ½‖p − z‖², averaged over the orders. Defaults are DirectPred's reference recipe.

    Args:
        backbone: A name (see `build_backbone`) or a module.
        stem: "cifar" or "imagenet", for ResNets.
        zero_init_residual: Start a ResNet's residual branches at zero.
        projector_hidden: Width of the projector; 0 makes it one linear layer.
        projector_dim: Output dimension d.
        projector_norm: "batch", "none", or parts of batch normalisation such as "mean,detached_std" (`build_norm`).
        projector_bias: Whether the projector's last layer has a bias.
        predictor: "mlp", "linear" or "none".
        predictor_hidden: Width of an MLP predictor.
        predictor_norm: As `projector_norm`; by default "batch" in an MLP and none with a linear predictor.
        predictor_norm_place: With a linear predictor, its norm comes "before" the linear map (DDN-v1 Tables 7-9), or
            "after" it.
        predictor_bias: Whether the predictor's last layer has a bias.
        predictor_init: "default", "xavier", "identity", "uniform" in ± `predictor_range`, or "positive", up to it.
        predictor_range: The range of `predictor_init`, also after resets.
        predictor_reset_every: Start the predictor anew every so many epochs (DDN-v1 Table 5); 0 is never.
        predictor_reset_init: How resets draw where `predictor_init` is "default": "xavier" (DDN-v1) or "default".
        symmetric_predictor: After each step W ← (W + Wᵀ)/2 of a linear predictor; of an MLP, W₁ ← (W₁ + W₂ᵀ)/2 and
            W₂ ← W₁ᵀ (DirectPred Table 3).
        head_init: How the heads' weights start, but for a `predictor_init`: "default", or "lecun", BYOL's own
            (`init_head_`).
        norm_affine: Whether the heads' batch norms have an affine part; DDN-v1's and DirectPred's have none.
        predictor_lr_scale: The predictor's learning rate relative to the rest, alpha_p.
        weight_decay: Weight decay of backbone and projector; None leaves the optimizer's.
        predictor_weight_decay: Weight decay of the predictor; None leaves the optimizer's.
        momentum: The target's momentum; 0 keeps it equal to the online network (no EMA).
        momentum_schedule: "constant", or "cosine" towards 1.
        target_init: "copy" of the online network, or "independent".
        stop_gradient: False lets the gradient through the target branch; needs momentum 0.
        normalize: L2-normalise both sides.
        tangential: Keep only the tangential gradient of the predictions (RAFT Sec. 5).
        seed: Seed of predictor resets.
        optimizer: From parameter groups to an optimizer.
        scheduler: "constant", "cosine", or from an optimizer to a scheduler.
        warmup_epochs: Linear warmup, for "constant" and "cosine".

    Example:
        >>> model = BYOL(backbone="small_conv", predictor="linear", momentum=0.99)
        >>> ablated = BYOL(backbone="small_conv", predictor="none")  # collapses
    """

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        stem: Literal["cifar", "imagenet"] = "cifar",
        projector_hidden: int = 512,
        projector_dim: int = 128,
        projector_norm: str = "batch",
        predictor: Literal["mlp", "linear", "none"] = "mlp",
        predictor_hidden: int = 512,
        predictor_norm: str | None = None,
        predictor_bias: bool = True,
        predictor_init: PredictorInit = "default",
        predictor_range: float | None = None,
        predictor_reset_every: int = 0,
        symmetric_predictor: bool = False,
        predictor_lr_scale: float = 1.0,
        weight_decay: float | None = None,
        predictor_weight_decay: float | None = None,
        momentum: float = 0.996,
        momentum_schedule: Literal["constant", "cosine"] = "constant",
        target_init: Literal["copy", "independent"] = "copy",
        stop_gradient: bool = True,
        normalize: bool = True,
        tangential: bool = False,
        seed: int = 0,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=4e-4),
        scheduler: Schedule | LRSchedulerCallable = "constant",
        warmup_epochs: float = 0.0,
        zero_init_residual: bool = False,
        projector_bias: bool = True,
        norm_affine: bool = False,
        predictor_norm_place: Literal["before", "after"] = "before",
        predictor_reset_init: Literal["xavier", "default"] = "xavier",
        head_init: HeadInit = "default",
    ) -> None:
        super().__init__()
        self.keep_hyperparameters()
        if not 0 <= momentum <= 1:
            raise ValueError(f"`momentum` must lie in [0, 1], got {momentum}")
        if momentum_schedule not in ("constant", "cosine"):
            raise ValueError(f'`momentum_schedule` must be "constant" or "cosine", got {momentum_schedule!r}')
        if not stop_gradient and (momentum != 0 or target_init != "copy"):
            raise ValueError(
                "stop_gradient=False sends the gradient through the target branch, so the target must be the online "
                f'network: set momentum=0 and target_init="copy"; got momentum={momentum}, target_init={target_init!r}'
            )
        if predictor == "none" and (predictor_reset_every or symmetric_predictor or predictor_lr_scale != 1):
            raise ValueError(
                'predictor="none" leaves nothing to reset, symmetrise or train faster: drop predictor_reset_every, '
                'symmetric_predictor and predictor_lr_scale, or set predictor="linear"'
            )
        if predictor_lr_scale < 0 or predictor_reset_every < 0:
            raise ValueError(
                "`predictor_lr_scale` and `predictor_reset_every` must not be negative, got "
                f"{predictor_lr_scale} and {predictor_reset_every}"
            )
        if predictor_reset_init not in ("xavier", "default"):
            raise ValueError(f'`predictor_reset_init` must be "xavier" or "default", got {predictor_reset_init!r}')
        self.reset_init: PredictorInit = predictor_reset_init if predictor_init == "default" else predictor_init
        self.predictor_range = predictor_range
        self.predictor_reset_every, self.symmetric_predictor = predictor_reset_every, symmetric_predictor
        self.predictor_lr_scale = predictor_lr_scale
        self.weight_decay, self.predictor_weight_decay = weight_decay, predictor_weight_decay
        self.momentum, self.momentum_schedule, self.stop_gradient = momentum, momentum_schedule, stop_gradient
        self.normalize, self.tangential, self.seed = normalize, tangential, seed

        self.backbone = build_backbone(backbone, stem, zero_init_residual)
        hidden = [projector_hidden] if projector_hidden else []
        sizes = [num_features(self.backbone), *hidden, projector_dim]
        self.projector = mlp(sizes, projector_norm, last_bias=projector_bias, affine=norm_affine)
        self.predictor = build_predictor(
            predictor,
            projector_dim,
            predictor_hidden,
            predictor_norm,
            predictor_bias,
            predictor_init,
            predictor_range,
            affine=norm_affine,
            norm_place=predictor_norm_place,
        )
        init_head_(self.projector, head_init)
        if predictor_init == "default":
            init_head_(self.predictor, head_init)
        self._symmetrize = symmetrize_two_layers_ if predictor == "mlp" else symmetrize_
        if symmetric_predictor:
            self._symmetrize(self.predictor)
        self.target = TargetNetwork(self.backbone, self.projector, target_init)
        self.use_optimizer(optimizer, scheduler, warmup_epochs)

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x1, x2 = views(batch)
        z1, z2 = self.project(x1), self.project(x2)
        p1, p2 = self.predict(z1), self.predict(z2)
        t1, t2 = (self.target(x1), self.target(x2)) if self.stop_gradient else (z1, z2)
        self.watch(z1, z2, t1, t2)
        return {"loss": self.regress(p1, t2) + self.regress(p2, t1)}

    def predict(self, z: Tensor) -> Tensor:
        p = self.from_projection(z)
        return tangential(p) if self.tangential else p

    def regress(self, p: Tensor, t: Tensor) -> Tensor:
        t = t.to(p.dtype)
        return functional.cross_model_loss(p, t) if self.normalize else functional.squared_distance(p, t).mean() / 2

    def watch(self, z1: Tensor, z2: Tensor, t1: Tensor, t2: Tensor) -> None:
        """A place for DirectPred to see the projections and targets of a step."""

    def after_optimizer_step(self) -> None:
        if self.symmetric_predictor:
            self._symmetrize(self.predictor)
        momentum = self.momentum
        if self.momentum_schedule == "cosine":
            total = self.trainer.estimated_stepping_batches
            momentum = ema_momentum(self.momentum, self.global_step, total, "cosine")
        self.target.follow(self.backbone, self.projector, momentum)

    def on_train_epoch_start(self) -> None:
        if self.predictor_reset_every and self.current_epoch and self.current_epoch % self.predictor_reset_every == 0:
            seed = self.seed * 1_000_003 + self.current_epoch
            reset_parameters_(self.predictor, self.reset_init, self.predictor_range, seed)
            if self.symmetric_predictor:
                self._symmetrize(self.predictor)

    def parameter_groups(self) -> list[dict[str, Any]]:
        encoder = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        predictor = {"lr_scale": self.predictor_lr_scale}
        if self.predictor_weight_decay is not None:
            predictor["weight_decay"] = self.predictor_weight_decay
        return self.split_parameters(encoder, predictor)
