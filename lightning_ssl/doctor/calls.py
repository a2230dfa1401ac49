"""The calls that a step makes of its networks, and the same step again on other inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl.doctor.isolate import SEED, seed_all
from lightning_ssl.doctor.steady import Steady
from lightning_ssl.doctor.trial import Fit, Patient, still_dropout


@dataclass
class Call:
    """One outermost call of a part: what went in, what came out."""

    path: str
    entered: Tensor | None
    left: Tensor | None
    entry: bool  # whether nothing that learns has touched what went in
    grad: bool


class Calls:
    """Writes down the outermost calls of a module's parts; those of a backward pass are no calls of the step."""

    def __init__(self, module: nn.Module) -> None:
        self.made: list[Call] = []
        self.first: list[tuple[str, Tensor]] = []  # what enters the first layer with weights, of each entry
        self._depth = 0
        self._waiting = False
        self.change: Callable[[int, Tensor], Tensor] | None = None  # number of the entry call, its input
        self._entries = 0
        for path, part in module.named_modules():
            if path:
                part.register_forward_pre_hook(self._before(path))
                part.register_forward_hook(self._after(path), always_call=True)

    def clear(self) -> None:
        self.made, self.first, self._entries, self._depth = [], [], 0, 0

    def _before(self, path: str) -> Callable[..., Any]:
        def hook(part: nn.Module, args: Any) -> Any:
            if _backward():
                return None
            self._depth += 1
            x = first_tensor(args)
            outermost = self._depth == 1
            if outermost:
                self._waiting = x is not None and not x.requires_grad
            if self._waiting and x is not None and next(part.parameters(recurse=False), None) is not None:
                self.first.append((f"{path} ({type(part).__name__})", x.detach()))
                self._waiting = False
            if not outermost:
                return None
            entry = x is not None and not x.requires_grad and any(True for _ in part.parameters())
            result = None
            if entry and self.change is not None and args and args[0] is x:
                x = self.change(self._entries, x)  # type: ignore[arg-type]
                result = (x, *args[1:])
            self._entries += entry
            self.made.append(Call(path, None if x is None else x.detach(), None, entry, torch.is_grad_enabled()))
            return result

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, output: Any) -> None:
            if _backward() or not self._depth:
                return
            self._depth -= 1
            if not self._depth and self.made and self.made[-1].path == path:
                left = first_tensor(output)
                self.made[-1].left = None if left is None else left.detach()

        return hook


def _backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in nested arguments or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((x for x in map(first_tensor, value) if x is not None), None)
    return None


class Held:
    """All tensors of a module as they are now: parameters, buffers and plain attributes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.state = {id(x): x.detach().clone() for x in (*module.parameters(), *module.buffers())}
        self.plain = [
            (part, name, value.clone())
            for part in module.modules()
            for name, value in vars(part).items()
            if isinstance(value, Tensor) and not value.requires_grad
        ]
        self.modes = [(part, part.training) for part in module.modules()]

    @torch.no_grad()
    def restore(self) -> None:
        for x in (*self.module.parameters(), *self.module.buffers()):
            if id(x) in self.state and x.shape == self.state[id(x)].shape:
                x.copy_(self.state[id(x)])
        for part, name, value in self.plain:
            setattr(part, name, value.clone())
        for part, mode in self.modes:
            part.training = mode


def losses_of(
    patient: Patient,
    batches: list[Any],
    precision: str,
    prepare: list[Callable[[nn.Module], None] | None] | None = None,
    change: Callable[[int, int, Tensor], Tensor] | None = None,
    steady: bool = True,
    until: Callable[[list[float]], bool] | None = None,
) -> list[float]:
    """The loss of a training step on each of some batches, from the same weights and random numbers.

    Args:
        patient: What is examined; in a process of its own.
        batches: What `training_step` gets.
        precision: The Trainer's.
        prepare: Changes the module before each batch.
        change: Given the number of the batch and of the call, changes what enters a network.
        steady: Whether dropout is off and each row draws the same.
        until: Given the losses so far, whether they are enough.
    """
    module: Any = patient.module
    if steady:
        still_dropout(module)
    calls = Calls(module) if change is not None else None
    found: list[float] = []

    def instead(step: Callable[..., Any], batch: Any, args: Any, kwargs: Any) -> Any:
        held = Held(module)
        for number, other in enumerate(batches):
            if prepare is not None and prepare[number] is not None:
                prepare[number](module)  # type: ignore[misc]
            if calls is not None and change is not None:
                calls.clear()
                calls.change = lambda k, x, number=number: change(number, k, x)
            seed_all(SEED)
            before = len(fit.losses)
            mode = Steady(steady=steady)
            with mode:
                value = step(fit.cast(other), *args, **kwargs)
            if isinstance(value, dict):
                value = value.get("loss")
            found.append(float(value.detach()) if value is not None else sum(fit.losses[before:]))
            held.restore()
            if until is not None and until(found):
                break
        if calls is not None:
            calls.change = None
        return step(batch, *args, **kwargs)

    fit = Fit(patient, steps=1, feed=batches[:1], instead=instead, settings={"precision": precision})
    fit.run()
    return found
