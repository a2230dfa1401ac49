"""What goes on beneath a step: random draws, made the same for each row, and collectives, written down."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssl.doctor.isolate import foreign, place

_FACTORIES = {"rand", "randn", "randint"}
_LIKE = {"rand_like", "randn_like", "randint_like"}
_IN_PLACE = {"uniform_", "normal_", "exponential_", "random_", "bernoulli_", "log_normal_", "cauchy_", "geometric_"}
_GATHERS = {"allgather_", "_allgather_base_", "allgather_coalesced_", "alltoall_", "alltoall_base_", "gather_"}
_ROWS = 64


@dataclass
class Collective:
    """One exchange between ranks in the forward pass."""

    name: str
    shape: tuple[int, ...]
    where: str
    graph: bool  # whether what was sent hangs in the graph of the loss
    logging: bool  # whether a logger or a metric asked for it

    @property
    def gathers(self) -> bool:
        return self.name in _GATHERS


@dataclass
class Draw:
    """A random number's origin."""

    name: str
    where: str
    functions: tuple[str, ...]


class Steady(TorchDispatchMode):
    """Draws each random row once for all rows, so that a batch and its parts draw the same; notes collectives.

    Args:
        steady: Whether to touch random draws at all.
        note: Called with each collective before it is entered.
        disturb: Whether to change, on ranks other than the first, what is sent.
    """

    def __init__(
        self, steady: bool = True, note: Callable[[Collective], None] | None = None, disturb: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steady, self.note, self.disturb = steady, note, disturb
        self.collectives: list[Collective] = []
        self.draws: list[Draw] = []
        self.unsteady: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._exchange(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        if not _draws(name, args):
            return func(*args, **kwargs)
        where, functions, _ = _origin()
        self.draws.append(Draw(name, where, functions))
        if not self.steady:
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        if name == "randperm":
            return torch.arange(args[0], dtype=kwargs.get("dtype") or torch.int64)
        before = generator.get_state()
        if name in _FACTORIES:
            at = next(i for i, arg in enumerate(args) if isinstance(arg, (list, tuple, torch.Size)))
            size = list(args[at])
            out = func(*args, **kwargs)
            again = (*args[:at], [_ROWS, *size[1:]], *args[at + 1 :])
        elif name in _LIKE or (name in _IN_PLACE and not any(isinstance(a, Tensor) for a in args[1:])):
            out = func(*args, **kwargs)
            again = (args[0].new_empty([_ROWS, *args[0].shape[1:]]), *args[1:])
        elif name == "bernoulli" and len(args) == 1:
            row = torch.rand([_ROWS, *args[0].shape[1:]], dtype=torch.float64, generator=generator)[:1]
            return (row < args[0]).to(args[0].dtype)
        else:
            self.unsteady.append(f"{name} at {where}")
            return func(*args, **kwargs)
        if not out.ndim:
            return out
        generator.set_state(before)
        row = func(*again, **{key: value for key, value in kwargs.items() if key != "memory_format"})[:1]
        return out.copy_(row.expand_as(out)) if len(out) else out

    def _exchange(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # within a backward pass: DDP's own, or a gather's
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        where, _, logging = _origin()
        sent = _sent(name, args)
        tensors = [x for x in sent if isinstance(x, Tensor)]
        shape = tuple(tensors[0].shape) if tensors else ()
        graph = any(x.requires_grad or x.grad_fn is not None for x in tensors) or _in_function()
        one = Collective(name, shape, where, graph, logging)
        self.collectives.append(one)
        if self.note is not None:
            self.note(one)
        floating = [x for x in tensors if x.is_floating_point() and x.numel()]
        if self.disturb and floating and not logging and torch.distributed.get_rank() > 0:
            changed = {id(x): x * 1.7 + 0.3 * x.abs().mean() for x in floating}
            if name in _GATHERS:
                args = tuple(_swapped(arg, changed) for arg in args)
            else:
                for x in floating:
                    x.copy_(changed[id(x)])
        return func(*args, **kwargs)


def _draws(name: str, args: Any) -> bool:
    """Whether an operator with random variants draws this time: attention, say, only with dropout."""
    known = name in _FACTORIES | _LIKE | _IN_PLACE or name in ("randperm", "bernoulli", "multinomial", "normal")
    return known or ("dropout" in name and "attention" not in name)


def _sent(name: str, args: Any) -> list[Any]:
    """The tensors that an operator of c10d sends."""
    at = 1 if name in _GATHERS or name.startswith(("reduce_scatter", "_reduce_scatter")) else 0
    found = args[at] if len(args) > at else []
    return list(_flat(found))


def _flat(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _swapped(value: Any, changed: dict[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_swapped(item, changed) for item in value]
    return changed.get(id(value), value)


def _in_function() -> bool:
    """Whether an autograd function that was given a tensor of the graph sends a copy of it."""
    frame: Any = inspect.currentframe()
    for _ in range(12):
        if frame is None:
            return False
        if "ctx" in frame.f_locals:
            return any(isinstance(x, Tensor) and x.requires_grad for x in frame.f_locals.values())
        frame = frame.f_back
    return False


def _origin() -> tuple[str, tuple[str, ...], bool]:
    """The innermost line of the examined code, the functions above it, and whether it serves a log."""
    frames = traceback.extract_stack()[:-3]
    logging = any(
        "logger_connector" in f.filename or "torchmetrics" in f.filename or (f.name == "log" and foreign(f.filename))
        for f in frames
    )
    own = [f for f in frames if not foreign(f.filename)]
    last = next((i for i, f in reversed(list(enumerate(frames))) if f.name == "training_step"), 0)
    where = place(own[-1].filename, own[-1].lineno) if own else ""
    return where, tuple(f.name for f in frames[last:]), logging


@dataclass
class OtherDraws:
    """Whether Python's or NumPy's random numbers were drawn."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=lambda: np.random.get_state()[1].copy())  # type: ignore[index] # noqa: NPY002

    def happened(self) -> bool:
        now = np.random.get_state()  # noqa: NPY002
        return self.python != random.getstate() or not np.array_equal(self.numpy, now[1])  # type: ignore[index]
