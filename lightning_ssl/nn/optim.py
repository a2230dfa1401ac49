"""LARS, and the warmup-cosine schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class LARS(Optimizer):
    r"""SGD whose step for each weight matrix is scaled to the weight's norm (layer-wise adaptive rate scaling).

    :math:`g' = \lambda \frac{\|w\|}{\|g + \eta w\|} (g + \eta w)`, then momentum. Vectors (biases, norms) take
    plain momentum steps without weight decay, at `vector_lr_scale` times the rate.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay :math:`\eta` of weight matrices.
        trust: The coefficient :math:`\lambda`.
        vector_lr_scale: Relative learning rate of biases and norm parameters (Barlow Twins: 0.0048/0.2).

    Example:
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = LARS(layer.parameters(), lr=0.1)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.2,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        trust: float = 1e-3,
        vector_lr_scale: float = 1.0,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay), ("trust", trust)):
            if not value >= 0:
                raise ValueError(f"`{name}` must not be negative, got {value}")
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust": trust,
                "vector_lr_scale": vector_lr_scale,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            self._move([p for p in given if p.ndim > 1], group, group["lr"], True)
            self._move([p for p in given if p.ndim <= 1], group, group["lr"] * group["vector_lr_scale"], False)
        return loss

    def _move(self, params: list[torch.Tensor], group: dict[str, Any], lr: float, adapt: bool) -> None:
        """All parameters at once: a few operator calls whatever their number."""
        if not params:
            return
        updates: Any = [p.grad for p in params]
        if adapt:
            updates = torch._foreach_add(updates, params, alpha=group["weight_decay"])
            w, u = torch.stack(torch._foreach_norm(params)), torch.stack(torch._foreach_norm(updates))
            scale = torch.where((w > 0) & (u > 0), group["trust"] * w / u, 1.0)
            updates = torch._foreach_mul(updates, list(scale.unbind()))
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, updates)
        torch._foreach_add_(params, momenta, alpha=-lr)


def warmup_cosine(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, cosine: bool = True, floor: float = 0.0
) -> LambdaLR:
    """A linear warmup, then a cosine to `floor` times the rate at `total_steps` (or a constant rate).

    Parameter groups with a true `fixed_lr` keep their rate throughout (SimSiam's predictor).
    """
    if warmup_steps >= total_steps and warmup_steps > 0:
        raise ValueError(
            f"`warmup_epochs` makes {warmup_steps} warmup steps, but the run has only {total_steps}; lower it, or "
            "raise max_epochs"
        )

    def scale(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if not cosine:
            return 1.0
        done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        return floor + (1 - floor) * (math.cos(math.pi * min(done, 1.0)) + 1) / 2

    return LambdaLR(optimizer, [(lambda _: 1.0) if g.get("fixed_lr") else scale for g in optimizer.param_groups])
