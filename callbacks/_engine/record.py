"""Record: every call of a place in one step, with what entered and what left, copied once for whoever asks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from lightning_ssl.callbacks._engine.layout import Layouts


class Moments(NamedTuple):
    """What a batch normalisation normalised one call by: mean and variance ``[C]``, and of how many rows."""

    mean: Tensor
    variance: Tensor
    rows: int


@dataclass
class Call:
    """One call of a place.

    Attributes:
        args: The positional arguments, tensors detached and copied; empty unless inputs were asked for.
        kwargs: The keyword arguments, likewise.
        output: What left it, likewise.
        grad: Whether gradients were recorded.
        used: Whether a gradient came back to it; None where none could.
        layout: Which axes of the first tensor that left are what, where that is certain.
        moments: By path within the place, what each call of a batch normalisation inside normalised by.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    grad: bool = True
    used: bool | None = None
    layout: str | None = None
    moments: dict[str, list[Moments]] = field(default_factory=dict)

    @property
    def entered(self) -> Tensor | None:
        """The first tensor that entered."""
        return first_tensor((self.args, self.kwargs), floating=False)

    @property
    def left(self) -> Tensor | None:
        """The first floating-point tensor that left."""
        return first_tensor(self.output)


@dataclass
class Place:
    """A submodule that somebody asked for in this step, and its calls so far."""

    module: nn.Module
    inputs: bool = False  # keep what enters
    moments: bool = False  # keep what batch normalisations inside normalise by
    calls: list[Call] = field(default_factory=list)
    again: list[Call] = field(default_factory=list)  # made by a gradient checkpoint during the backward pass
    open: list[Call] = field(default_factory=list)  # entered, not left yet

    def views(self) -> list[Call]:
        """The calls that are views: with gradients, and, where it can be told, with a part in the loss.

        A clean image that passes with gradients but without a part in the loss is not a view. Where one call only has
        a part, another of its shape may be a branch whose gradient was stopped.
        """
        calls = [call for call in self.calls if call.grad] or self._checkpointed()
        used = [call for call in calls if call.used]
        if len(used) == 1 and used[0].left is not None:
            shape = used[0].left.shape
            return [call for call in calls if call.left is not None and call.left.shape == shape]
        return used or calls

    def in_doubt(self) -> bool:
        """Whether some of three or more views may have no part in the loss, and it cannot be told which."""
        calls = self.views()
        return len(calls) > 2 and sum(call.used is True for call in calls) == 1

    def _checkpointed(self) -> list[Call]:
        """Calls without gradients that the backward pass ran again with them: a re-entrant gradient checkpoint."""
        left = [again.left for again in self.again]
        return [
            call
            for call in self.calls
            if call.left is not None and any(x is not None and _same(call.left, x) for x in left)
        ]


_silent = 0


@contextmanager
def silence() -> Iterator[None]:
    """Let no recorder hear what a callback itself runs through the module."""
    global _silent
    _silent += 1
    try:
        yield
    finally:
        _silent -= 1


class Recorder:
    """One pair of hooks a place, attached around the steps that somebody wants to see.

    Copies, because the next layer may work in place; made when the call happens, because the weights (and with them
    what the features mean) change before the step is over.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.layouts = Layouts()
        self._handles: list[RemovableHandle] = []
        self._backward = False
        self._eager: Any = None

    @property
    def attached(self) -> int:
        """How many hooks there are at the moment."""
        return len(self._handles)

    def want(self, path: str, module: nn.Module, inputs: bool = False, moments: bool = False) -> None:
        """Record a place in the step about to run; asked for twice, it is recorded once with all that was asked."""
        if path not in self.places:
            if not self._handles and "torch._dynamo" in sys.modules:
                # A compiled module would break its graph at each hook, or not call it: this step runs without.
                self._eager = torch.compiler.set_stance("force_eager")
            self.places[path] = Place(module)
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(path)))
        place = self.places[path]
        place.inputs |= inputs
        if moments and not place.moments:
            place.moments = True
            for name, part in module.named_modules():
                if normalises_by_batch(part):
                    self._handles.append(part.register_forward_pre_hook(self._normalising(place, name)))

    def scout(self, root: nn.Module) -> None:
        """For this step, follow the layout of what flows through all of a module."""
        self._handles += self.layouts.follow(root)

    def backward(self, begins: bool) -> None:
        """Between these, calls are made by gradient checkpoints, and are not views."""
        self._backward = begins

    def stop(self) -> dict[str, Place]:
        """Take the hooks off; return what they saw."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._eager is not None:
            torch.compiler.set_stance("default")
            self._eager = None
        places, self.places, self._backward = self.places, {}, False
        return places

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _silent:
                return
            place, call = self.places[path], Call(grad=torch.is_grad_enabled())
            if place.inputs and not self._backward:
                call.args, call.kwargs = copied(args), copied(kwargs)
            place.open.append(call)

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            place = self.places[path]
            if _silent or not place.open:
                return
            call = place.open.pop()
            if self._backward:
                if call.grad and not any(known.grad for known in place.calls):
                    call.output = copied(output)
                    place.again.append(call)
                return
            call.output = copied(output)
            first = first_tensor(output)
            if first is not None:
                call.layout = self.layouts.of(first, module, args)
            if call.grad:
                call.used = _watch_gradient(output, weakref.ref(call))
            place.calls.append(call)

        return hook

    def _normalising(self, place: Place, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not _silent and not self._backward and place.open and args and isinstance(args[0], Tensor):
                place.open[-1].moments.setdefault(name, []).append(moments_of(module, args[0].detach()))

        return hook


def normalises_by_batch(module: nn.Module) -> bool:
    """Whether a module normalises each sample by statistics of the batch: batch normalisations of any kind."""
    return isinstance(module, _BatchNorm) or hasattr(module, "normalise")


def moments_of(module: nn.Module, x: Tensor) -> Moments:
    """What a batch normalisation is about to normalise x by."""
    known = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if not module.training and known[0] is not None and known[1] is not None:
        return Moments(known[0].clone(), known[1].clone(), 0)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(x, dim=[axis for axis in range(x.ndim) if axis != 1], correction=0)
    return Moments(mean, variance, x.numel() // max(1, x.shape[1]))


def _watch_gradient(output: Any, call: weakref.ref[Call]) -> bool | None:
    """Have a call told when a gradient comes back to what left it; None where none can."""

    def came(_: Tensor) -> None:
        found = call()
        if found is not None:
            found.used = True

    able = [x for x in tensors_in(output) if x.requires_grad]
    for x in able:
        x.register_hook(came)
    return False if able else None


def copied(value: Any) -> Any:
    """The same nested containers with tensors detached and copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    items = list(_items(value))
    return [copied(item) for item in items] if items else value  # a dataclass or a model's own output


def _items(value: Any) -> Iterable[Any]:
    """What a tuple, list, dict, dataclass or model output holds; nothing for anything else."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, item.name) for item in fields(value)]
    return ()


def tensors_in(value: Any, floating: bool = True) -> Iterator[Tensor]:
    """The (floating-point) tensors in nested containers, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or not floating:
            yield value
        return
    for item in _items(value):
        yield from tensors_in(item, floating)


def first_tensor(value: Any, floating: bool = True) -> Tensor | None:
    return next(tensors_in(value, floating), None)


def leading_sizes(batch: Any) -> set[int]:
    """How many rows the tensors of a batch have: one of these numbers is that of its samples."""
    if isinstance(batch, Tensor):
        return {len(batch)} if batch.ndim else set()
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(item, (str, bytes)) for item in batch):
        return {len(batch)}  # file names
    return set().union(*(leading_sizes(item) for item in _items(batch)))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=1e-4, atol=1e-6)
