"""Finding where non-finite numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def first_non_finite(model: nn.Module, inputs: Iterable[tuple[str, Tensor | None]], run: Callable[[], Any]) -> str:
    """Name the first non-finite quantity of a computation: an input, a weight, or a layer's output.

    Args:
        model: The model that computed it.
        inputs: Named inputs.
        run: Repeats the computation; must hold no collective, as ranks may find their answer before it.
    """
    for name, tensor in inputs:
        if tensor is not None and not tensor.isfinite().all():
            return f"the input {name}"
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter {name}"
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def check(module: nn.Module, args: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not output.isfinite().all():
                found.append(f"the output of {name} ({type(module).__name__})")

        return check

    # Inner modules return before the ones around them, so the first to report is the innermost.
    handles = [m.register_forward_hook(hook(name)) for name, m in model.named_modules() if name]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss itself, or something on another rank"
