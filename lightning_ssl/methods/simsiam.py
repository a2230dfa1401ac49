"""SimSiam, and the linear form in which the bound's paper studies it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_ssl import functional
from lightning_ssl.methods.base import Method, Schedule, views
from lightning_ssl.nn import build_backbone, build_predictor, mlp, num_features


class SimSiam(Method):
    """Predict one view's projection, held fixed, from the other's: no negatives and no second network.

    The loss is −½ cos(p₁, sg z₂) − ½ cos(p₂, sg z₁) (Bound Eq. 3). Defaults are SimSiam's own networks, with its
    optimizer for CIFAR-10 at batch 512: cosine learning rate for the encoder, a constant one for the predictor. (On
    CIFAR-10 its projector has two layers.)

    Args:
        backbone: A name (see `build_backbone`) or a module.
        stem: "cifar" or "imagenet", for ResNets.
        zero_init_residual: Start a ResNet's residual branches at zero.
        projector: "mlp" (batch norm after each layer, the last without affine part), or "linear", Bound's
            simplification.
        projector_layers: Linear layers of an MLP projector.
        projector_hidden: Width of an MLP projector.
        dim: Output dimension d (Bound: 4 to 2048).
        predictor: "mlp" (a bottleneck), "linear", or "none".
        predictor_hidden: Width of the bottleneck; None is a quarter of `dim`.
        predictor_bias: Whether the predictor's last layer has a bias.
        fixed_predictor_lr: Keep the predictor's learning rate out of the schedule.
        stop_gradient: False lets the gradient into both sides.
        optimizer: From parameter groups to an optimizer.
        scheduler: "constant", "cosine", or from an optimizer to a scheduler.
        warmup_epochs: Linear warmup, for "constant" and "cosine".

    Example:
        >>> model = SimSiam(backbone="small_conv", dim=256)
    """

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        stem: Literal["cifar", "imagenet"] = "cifar",
        projector: Literal["mlp", "linear"] = "mlp",
        projector_hidden: int = 2048,
        dim: int = 2048,
        predictor: Literal["mlp", "linear", "none"] = "mlp",
        predictor_hidden: int | None = None,
        predictor_bias: bool = True,
        fixed_predictor_lr: bool = True,
        stop_gradient: bool = True,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.06, momentum=0.9, weight_decay=5e-4),
        scheduler: Schedule | LRSchedulerCallable = "cosine",
        warmup_epochs: float = 0.0,
        zero_init_residual: bool = True,
        projector_layers: int = 3,
    ) -> None:
        super().__init__()
        self.keep_hyperparameters()
        if dim < 2 or projector_layers < 1:
            raise ValueError(
                f"`dim` must be at least 2 and `projector_layers` at least 1, got {dim} and {projector_layers}"
            )
        self.fixed_predictor_lr, self.stop_gradient = fixed_predictor_lr, stop_gradient
        self.backbone = build_backbone(backbone, stem, zero_init_residual)
        features = num_features(self.backbone)
        if projector == "mlp":
            # No biases, as a norm follows each layer.
            sizes = [features, *[projector_hidden] * (projector_layers - 1), dim]
            self.projector: nn.Module = mlp(sizes, last_norm="batch", last_bias=False, bias=False)
        elif projector == "linear":
            self.projector = nn.Linear(features, dim)
        else:
            raise ValueError(f'`projector` must be "mlp" or "linear", got {projector!r}')
        width = predictor_hidden or max(dim // 4, 1)
        self.predictor = build_predictor(predictor, dim, width, bias=predictor_bias, hidden_bias=False)
        self.use_optimizer(optimizer, scheduler, warmup_epochs)

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x1, x2 = views(batch)
        z1, z2 = self.project(x1), self.project(x2)
        p1, p2 = self.from_projection(z1), self.from_projection(z2)
        if self.stop_gradient:
            z1, z2 = z1.detach(), z2.detach()
        # ‖p̂ − ẑ‖² = 2 − 2 cos, so this is −½ (cos + cos).
        return {"loss": (functional.cross_model_loss(p1, z2) + functional.cross_model_loss(p2, z1)) / 4 - 1}

    def parameter_groups(self) -> list[dict[str, Any]]:
        return self.split_parameters(predictor={"fixed_lr": self.fixed_predictor_lr})
