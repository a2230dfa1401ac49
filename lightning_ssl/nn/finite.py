"""Finding where non-finite numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

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


class Finding(NamedTuple):
    """The first non-finite loss: its step and epoch, and the first non-finite quantity of that step."""

    step: int
    epoch: int
    culprit: str


class FiniteWatch:
    """Notes on the device which step's losses were the first to be non-finite, for the host to ask now and then.

    Nobody waits for a device in :meth:`note`; :meth:`read` does, once for all steps since the last time.

    Example:
        >>> watch = FiniteWatch()
        >>> watch.note(7, 0, torch.tensor([float("inf")]), {"the loss": torch.tensor([float("inf")])})
        >>> watch.read()
        Finding(step=7, epoch=0, culprit='the loss')
    """

    def __init__(self) -> None:
        self._found: Finding | None = None
        self._clear()

    def _clear(self) -> None:
        self._steps: list[tuple[int, int]] = []  # step and epoch of what was noted since the last reading
        self._names: list[str] = []
        self._first: Tensor | None = None  # number in `_steps` of the first non-finite step; -1: none
        self._bad: Tensor | None = None  # which of its quantities were non-finite

    @property
    def pending(self) -> int:
        """How many steps have not been read yet."""
        return len(self._steps)

    @torch.no_grad()
    def note(self, step: int, epoch: int, losses: Tensor, quantities: Mapping[str, Tensor]) -> None:
        """Look at a step.

        Args:
            step: Its number.
            epoch: Its epoch.
            losses: What must be finite, the same on all ranks.
            quantities: Named floating-point tensors in the order in which the step got or made them.
        """
        held = {name: x.detach() for name, x in quantities.items() if x.numel()}
        held = {name: x.to_local() if hasattr(x, "to_local") else x for name, x in held.items()}
        if list(held) != self._names:
            self._found = self._found or self.read()
            self._clear()
        if self._first is None or self._bad is None:
            self._names = list(held)
            self._first = torch.full((), -1, dtype=torch.long, device=losses.device)
            self._bad = torch.zeros(len(held), dtype=torch.bool, device=losses.device)
        # The largest magnitude of a tensor is finite if and only if all of it is.
        largest = torch._foreach_norm(list(held.values()), float("inf"))
        bad = ~torch.stack([x.float() for x in largest]).isfinite()
        now = ~losses.isfinite().all() & (self._first < 0)
        self._bad = torch.where(now, bad, self._bad)
        self._first = self._first.masked_fill(now, len(self._steps))
        self._steps.append((step, epoch))

    def read(self) -> Finding | None:
        """The first non-finite step of those noted; waits for the device."""
        if self._found is None and self._steps and self._first is not None and self._bad is not None:
            first, *bad = torch.cat([self._first[None], self._bad.long()]).tolist()
            if first >= 0:
                culprit = next((name for name, wrong in zip(self._names, bad, strict=True) if wrong), None)
                step, epoch = self._steps[first]
                self._found = Finding(step, epoch, culprit or "the loss itself, or something on another rank")
        self._steps = []
        return self._found
