"""A pretend accelerator: tensors that say they are on ``pretend:0`` and hold real numbers on the CPU.

What would fail or stall on a GPU shows here: operations that mix devices, generators of the wrong one and `numpy()` on
the device raise; every wait of the host for the device and every blocking copy to it is an :class:`Event` with its
place in the code. Importing this file registers the device for the whole process, so that tests use it in a process of
their own (`tests.pretend.run`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import lightning_ssl

CPU = torch.device("cpu")
_PACKAGE = str(Path(lightning_ssl.__file__).parent)
_CALLBACKS = str(Path(__file__).parents[2] / "callbacks")  # installed as lightning_ssl.callbacks
_INNER = (__file__, torch.__path__[0])


class Event(NamedTuple):
    """Something the host waits for.

    Attributes:
        kind: "sync" (the host needs a number, or a shape, from the device), "down" (a copy to the host), "up" (a
            blocking copy to the device) or "up-nb" (one that nobody waits for).
        op: The operation.
        size: Bytes copied.
        ours: The innermost line of this package on the stack, or "" where there is none: Lightning's or torch's own.
        place: The innermost line outside of torch.
    """

    kind: str
    op: str
    size: int
    ours: str
    place: str


events: list[Event] = []


def stalls(found: list[Event]) -> list[Event]:
    """Those that make the host wait."""
    return [event for event in found if event.kind != "up-nb"]


def told(found: list[Event]) -> str:
    """Events for people, the most frequent first."""
    counts = Counter((e.kind, e.op, e.ours or e.place) for e in found)
    return "\n".join(f"{n} x {kind} {op} at {place}" for (kind, op, place), n in counts.most_common())


def _note(kind: str, op: str, size: int = 0) -> None:
    ours = place = ""
    frame = sys._getframe(2)
    while frame is not None and not ours:
        file = frame.f_code.co_filename
        line = f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
        if file.startswith((_PACKAGE, _CALLBACKS)):
            ours = line
        if not place and not file.startswith(_INNER):
            place = line
        frame = frame.f_back  # type: ignore[assignment]
    events.append(Event(kind, op, size, ours, place))


class _Module:
    """What torch asks of a device's module."""

    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.zeros(4, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


_setup_privateuseone_for_python_backend("pretend", backend_module=_Module())
DEVICE = torch.device("pretend:0")


class DeviceTensor(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> DeviceTensor:
        with torch.inference_mode(False):  # or views of what was made outside of it cannot be made inside
            outer = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=DEVICE,
                requires_grad=requires_grad,
            )
        outer.inner = inner
        return outer

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.inner!r})"

    def tolist(self) -> Any:
        _note("sync", "tolist")
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a pretend:0 tensor to numpy: copy it to the host first")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a pretend:0 tensor to numpy: copy it to the host first")


# The host waits for the result, or for its shape.
_SYNC = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "allclose"),
    *("_unique2", "unique_dim", "unique_consecutive", "_unique"),
    # Solvers whose failure the host checks, or whose work it does in part.
    *(
        "_linalg_eigh",
        "_linalg_svd",
        "linalg_eig",
        "linalg_eigvals",
        "linalg_lstsq",
        "linalg_qr",
        "_linalg_check_errors",
    ),
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_COPIES = {"_to_copy", "copy_", "_copy_from"}


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, DeviceTensor) else x


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.__name__.split(".")[0]
    if name == "_to_copy":
        device = kwargs.pop("device", None)
        to_device = isinstance(args[0], DeviceTensor) if device is None else torch.device(device).type == DEVICE.type
        _note_copy(args[0], to_device, kwargs.pop("non_blocking", False), name)
        # Somewhere else is always a copy, also where both are this machine's memory.
        out = func(_inner(args[0]), **kwargs)
        return DeviceTensor(out) if to_device else out
    if name == "copy_":
        _note_copy(args[1], isinstance(args[0], DeviceTensor), bool((args[2:] or [False])[0]), name)
        func(*map(_inner, args), **kwargs)
        return args[0]
    if func.namespace == "c10d":  # collectives write into what they are given, and no host waits for them
        _, work = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return args[0], work
    flat, spec = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    on_device = any(isinstance(x, DeviceTensor) for x in tensors)
    wanted = next((x for x in flat if isinstance(x, torch.device)), None)
    if on_device:
        _check_devices(name, func, args, [x for x in tensors if not isinstance(x, DeviceTensor)])
        _note_sync(name, args, kwargs)
    is_ours = on_device if wanted is None else wanted.type == DEVICE.type
    _check_generator(func, flat if is_ours else [])
    flat = [CPU if isinstance(x, torch.device) else _inner(x) for x in flat]
    inner_args, inner_kwargs = tree_unflatten(flat, spec)
    out = func(*inner_args, **inner_kwargs)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():  # the wrapper's own shape
            func(*args, **kwargs)
        return args[0]
    # What was written into is returned as the tensor that came in.
    schema = func._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.returns]
    if not any(written):
        return tree_map(lambda x: DeviceTensor(x) if is_ours and isinstance(x, torch.Tensor) else x, out)
    given = [
        *zip(schema.arguments, args, strict=False),
        *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
    ]
    targets = iter([value for a, value in given if a.alias_info is not None and a.alias_info.is_write])
    outs = out if len(written) > 1 else [out]
    found = [next(targets) if w else DeviceTensor(x) for w, x in zip(written, outs, strict=True)]
    return tuple(found) if len(written) > 1 else found[0]


def _note_copy(source: torch.Tensor, to_device: bool, nonblocking: bool, name: str) -> None:
    size = source.numel() * source.element_size()
    if isinstance(source, DeviceTensor) and not to_device:
        _note("down", name, size)
    elif to_device and not isinstance(source, DeviceTensor):
        _note("up-nb" if nonblocking else "up", name, size)


def _note_sync(name: str, args: Any, kwargs: Any) -> None:
    if name in _SYNC or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        _note("sync", name)
    elif name in _INDEXING and {torch.bool, torch.uint8} & {i.dtype for i in args[1] if i is not None}:
        _note("sync", f"{name} by a mask")


def _check_devices(name: str, func: Any, args: Any, on_cpu: list[torch.Tensor]) -> None:
    """Refuse what a GPU refuses: tensors of both devices, unless a scalar or an index (which is copied)."""
    if name in _INDEXING and isinstance(args[0], DeviceTensor):
        for x in on_cpu:
            _note("up", f"{name} by the host's index", x.numel() * x.element_size())
    elif wrong := [tuple(x.shape) for x in on_cpu if x.dim()]:
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} got {wrong} on the CPU")


def _check_generator(func: Any, values: list[Any]) -> None:
    if any(isinstance(x, torch.Generator) and x.device == CPU for x in values):
        raise RuntimeError(f"Expected a 'pretend' device type for generator but found 'cpu': {func}")


# Operations without a tensor to start from ----------------------------------------------------------------------------

_aten = torch.library.Library("aten", "IMPL")
_rest = torch.library.Library("_", "IMPL")
_rest.fallback(lambda func, *args, **kwargs: _dispatch(func, args, kwargs), "PrivateUse1")


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    return DeviceTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _note_copy(source, isinstance(target, DeviceTensor), non_blocking, "copy")
    _inner(target).copy_(_inner(source))
    return target


def _factory(name: str) -> None:
    op, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, op), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Any:
        _check_generator(func, list(kwargs.values()))
        kept = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
        return DeviceTensor(func(*args, device=CPU, **kept))

    _aten.impl(name, make, "PrivateUse1")


_aten.impl("empty.memory_format", _empty, "PrivateUse1")
_aten.impl("empty_strided", _empty_strided, "PrivateUse1")
_aten.impl("_copy_from", _copy_from, "PrivateUse1")
for _name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm"):
    _factory(_name)
for _name in ("randperm.generator", "tril_indices", "triu_indices"):
    _factory(_name)


# Lightning on it ------------------------------------------------------------------------------------------------------


class PretendAccelerator(Accelerator):
    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    parse_devices = staticmethod(lambda devices: list(range(devices)))
    get_parallel_devices = staticmethod(lambda devices: [DEVICE] * len(devices))
    auto_device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    name = staticmethod(lambda: "pretend")


def trainer(**kwargs: Any) -> L.Trainer:
    settings: dict[str, Any] = dict(
        max_steps=8,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=tempfile.mkdtemp(),  # not the working folder: callbacks write files
    )
    strategy: Any = SingleDeviceStrategy(device=DEVICE)
    if ranks := int(os.environ.get("PRETEND_RANKS", 0)):
        from tests.pretend.ranks import strategy as of_ranks

        strategy = of_ranks()
    settings |= kwargs
    return L.Trainer(accelerator=PretendAccelerator(), devices=ranks or 1, strategy=strategy, **settings)


class Steps(L.Callback):
    """Splits the events at the batches' ends; `steps[k]` are those of the k-th step."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def on_train_start(self, *args: Any) -> None:
        self._marks.append(len(events))

    def on_train_batch_end(self, *args: Any) -> None:
        self._marks.append(len(events))

    @property
    def steps(self) -> list[list[Event]]:
        return [events[a:b] for a, b in pairwise(self._marks)]
