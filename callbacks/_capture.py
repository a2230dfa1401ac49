"""Reading a module while it trains: forward hooks that record only when asked, and the views in what they saw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Call(NamedTuple):
    """One call of a watched module: the first tensor that entered, and the first ones that left."""

    input: Tensor | None
    outputs: tuple[Tensor, ...]

    @property
    def output(self) -> Tensor | None:
        return self.outputs[0] if self.outputs else None


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
    """Forward hooks on some submodules; between `start` and `stop` they keep detached copies.

    A copy, because the next layer may work in place; made when the call happens, because the weights (and with them
    what the features mean) change before the step is over.

    Args:
        inputs: keep the first tensor that enters a call.
        outputs: how many of the tensors that leave it are kept.
    """

    def __init__(self, inputs: bool = False, outputs: int = 1) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._handles: list[RemovableHandle] = []
        self._calls: dict[str, list[Call]] = {}
        self._entered: dict[str, list[Tensor | None]] = {}
        self._on = False
        self._paused = False
        self._grad_only = True

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Register the hooks, once."""
        self.detach()
        for path, module in modules.items():
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(path)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stop()

    def start(self, grad_only: bool) -> None:
        """Record calls from now on; with `grad_only` those made without gradients (a target's) are left out."""
        self._calls, self._entered = {}, {}
        self._on, self._paused, self._grad_only = True, False, grad_only

    def pause(self) -> None:
        """Checkpointed layers are run again during the backward pass: those are not views."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self) -> dict[str, list[Call]]:
        """Stop recording; return the calls of each path in their order."""
        calls, self._calls, self._entered, self._on = self._calls, {}, {}, False
        return calls

    def _listening(self) -> bool:
        return self._on and not self._paused and not _silent and (not self._grad_only or torch.is_grad_enabled())

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._listening():
                entered = first_tensor((args, kwargs)) if self._inputs else None
                self._entered.setdefault(path, []).append(None if entered is None else entered.detach().clone())

        return _eager(hook)

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._listening() and self._entered.get(path):
                left = tuple(x.detach().clone() for x in islice(tensors_in(output), self._outputs))
                self._calls.setdefault(path, []).append(Call(self._entered[path].pop(), left))

        return _eager(hook)


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    # Inside a compiled module a hook must not be traced. Importing dynamo costs seconds: only if it is there already.
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def _items(value: Any) -> Iterable[Any]:
    """What a tuple, list, dict, dataclass or model output holds; nothing for anything else."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in nested containers, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    for item in _items(value):
        yield from tensors_in(item)


def first_tensor(value: Any) -> Tensor | None:
    return next(tensors_in(value), None)


def pooled(x: Tensor) -> Tensor:
    """Features [N, d]: positions of a map [N, d, positions...] and tokens of a sequence [N, tokens, d] are averaged."""
    if x.ndim > 2:
        x = x.mean(dim=1) if x.ndim == 3 else x.flatten(2).mean(dim=2)
    return x.reshape(len(x), -1)


def as_rows(x: Tensor) -> Tensor:
    """`pooled`, in double precision: the logarithm of a mean near 1 (a collapse) keeps few of a float's digits."""
    return pooled(x.float() if x.device.type == "mps" else x.double())


def split_views(tensors: list[Tensor], batch: Any, views: int | None) -> list[Tensor]:
    """Cut what a module saw in one step into views of the same samples, in the order they came.

    Two calls of N rows are two views; so is one call of 2 N rows when the batch has N samples. `views` settles doubt:
    that many, from as many calls or from equal parts of them. Without it, a single call of N rows is one view.
    """
    tensors = [x for x in tensors if x.ndim > 0 and len(x)]
    if not tensors:
        return []
    if views is not None:
        parts = max(1, views // len(tensors))
        pieces = _chunks(tensors, [parts] * len(tensors))[:views]
        if len(pieces) < views:
            raise ValueError(f"`views={views}`, but the module was called {len(tensors)} times; pass the right number")
    else:
        sizes = _leading_sizes(batch)
        pieces = _chunks(tensors, [_parts(len(x), sizes, alone=len(tensors) == 1) for x in tensors])
    rows = len(pieces[0])
    if any(len(piece) != rows for piece in pieces):
        found = [len(x) for x in tensors]
        raise ValueError(f"cannot tell the views apart in calls of {found} rows; pass `views=`")
    return pieces


def _chunks(tensors: list[Tensor], parts: list[int]) -> list[Tensor]:
    for x, count in zip(tensors, parts, strict=True):
        if len(x) % count:
            raise ValueError(f"a call of {len(x)} rows does not hold {count} views; pass the right `views=`")
    return [piece for x, count in zip(tensors, parts, strict=True) for piece in x.chunk(count)]


def _parts(rows: int, sizes: set[int], alone: bool) -> int:
    """How many views a call of `rows` rows holds, given the leading sizes of the tensors in the batch."""
    ratios = {rows // size for size in sizes if size and rows % size == 0 and rows // size <= 16}
    if alone and 2 in ratios:
        return 2
    if not ratios or 1 in ratios:
        return 1
    return min(ratios)


def _leading_sizes(batch: Any) -> set[int]:
    if isinstance(batch, Tensor):
        return {len(batch)} if batch.ndim else set()
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(item, (str, bytes)) for item in batch):
        return {len(batch)}  # file names
    return set().union(*(_leading_sizes(item) for item in _items(batch)))
