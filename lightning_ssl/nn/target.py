"""The target network (mean teacher) of BYOL, DirectPred, RAFT and BYOL'."""

from __future__ import annotations

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_ssl.distributed import to_pieces


class TargetNetwork(nn.Module):
    """A gradient-free backbone and projector that follow the online ones.

    Its batch-norm statistics are its own: only parameters are averaged.

    Args:
        backbone: The online backbone.
        projector: The online projector.
        init: "copy" starts at the online weights, "independent" at a draw of its own.

    Example:
        >>> target = TargetNetwork(nn.Linear(6, 4), nn.Linear(4, 2))
        >>> target(torch.randn(3, 6)).requires_grad
        False
    """

    def __init__(
        self, backbone: nn.Module, projector: nn.Module, init: Literal["copy", "independent"] = "copy"
    ) -> None:
        super().__init__()
        if init not in ("copy", "independent"):
            raise ValueError(f'`target_init` must be "copy" or "independent", got {init!r}')
        self.backbone, self.projector = copy.deepcopy(backbone), copy.deepcopy(projector)
        if init == "independent":
            for module in self.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()  # type: ignore[operator]
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.backbone(x))

    @torch.no_grad()
    def follow(self, backbone: nn.Module, projector: nn.Module, momentum: float) -> None:
        """Move to momentum * target + (1 - momentum) * online."""
        to_pieces(self, backbone, projector)
        targets = [*self.backbone.parameters(), *self.projector.parameters()]
        online = [p.detach() for p in (*backbone.parameters(), *projector.parameters())]
        torch._foreach_lerp_(targets, online, 1 - momentum)  # type: ignore[arg-type]


def ema_momentum(start: float, step: int, total_steps: float, schedule: Literal["constant", "cosine"]) -> float:
    r"""The target's momentum at an optimizer step.

    "cosine" is BYOL's rise to 1, :math:`1 - (1 - m)(\cos(\pi k / K) + 1)/2`, over `total_steps` K.
    """
    if schedule == "constant":
        return start
    return 1 - (1 - start) * (math.cos(math.pi * min(step / total_steps, 1.0)) + 1) / 2
