"""Layout: which axis of what leaves a module is the sample's, the feature's and a position's.

Said by ``N`` (sample), ``C`` (feature) and any other letters (positions): NC, NCL, NCHW, NLC, NHWC, LNC.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

LAYOUTS = ("NC", "NCL", "NCHW", "NCDHW", "NLC", "NHWC", "LNC")
Layout = str | Callable[[Any], Tensor]

# Modules whose outputs have the features on axis 1.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FIRST_KINDS = (*_CONVOLUTIONS, _BatchNorm, nn.GroupNorm)
_POOLS = ("AvgPool", "MaxPool", "LPPool", "FractionalMaxPool", "Upsample", "PixelShuffle", "InstanceNorm")


def check_layout(layout: Any) -> None:
    if layout is not None and layout not in LAYOUTS and not callable(layout):
        raise ValueError(f"`layout` must be one of {', '.join(LAYOUTS)}, a function or None, got {layout!r}")


def rows_of(x: Tensor, layout: str) -> Tensor:
    """Features ``[N, d]`` in a known layout, in double precision where positions are averaged."""
    if x.ndim <= 2:
        return x.reshape(len(x), -1)
    sample, feature = layout.index("N"), layout.index("C")
    x = x.movedim((sample, feature), (0, 1)).flatten(2)
    return (x if x.device.type == "mps" else x.double()).mean(dim=2)


def settle(
    x: Tensor, seen: str | None, sizes: Collection[int], sequence_first: bool, entered: Tensor | None = None
) -> str:
    """The layout of what left a place; a ValueError that names the argument where it is not certain.

    Args:
        x: What left it.
        seen: What the modules that made it say: a layout, or ``**C`` where only the last axis is known.
        sizes: Numbers of rows in the batch: multiples of one of them are samples.
        sequence_first: Whether some part of the module puts sequences first, as torch's own do by default.
        entered: What entered it; an image has its samples first.
    """
    if x.ndim <= 2:
        return "NC"
    if seen is None:
        raise ValueError(
            f"features of shape {tuple(x.shape)} left it, and it cannot be told which axis is the features'; pass "
            f"`layout=`, one of {', '.join(name for name in LAYOUTS if len(name) == x.ndim)}, or a function"
        )
    if "N" in seen:
        return seen
    names = {3: ("NLC", "LNC"), 4: ("NHWC",), 5: ("NDHWC",)}[x.ndim]
    if len(names) == 1:
        return names[0]
    known = [size for size in sizes if size > 1]
    possible = [name for name in names if any(x.shape[name.index("N")] % size == 0 for size in known)]
    if len(possible) == 1:
        return possible[0]
    if not sequence_first and (not known or (entered is not None and entered.ndim > 3 and len(entered) == len(x))):
        return "NLC"
    raise ValueError(
        f"features of shape {tuple(x.shape)} left it, and it cannot be told which axis is the samples'; pass "
        '`layout="NLC"` or `layout="LNC"`'
    )


class Layouts:
    """Follows the layout of tensors through a module's parts, for one step."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._shapes: dict[tuple[int, ...], set[str]] = {}
        self._called: list[str] = []

    def called(self, path: str) -> list[str]:
        """The outermost parts of a place that were called in the step that was followed, a few of them."""
        inside = [name for name in dict.fromkeys(self._called) if name.startswith(f"{path}.")]
        return [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)][:4]

    def follow(self, root: nn.Module) -> list[RemovableHandle]:
        """Hooks on all parts; to be removed after the step."""
        self._made, self._shapes, self._called = {}, {}, []
        return [
            part.register_forward_hook(partial(self._after, name))
            for name, part in root.named_modules()
            if part is not root and not isinstance(part, torch.jit.ScriptModule)
        ]

    def of(self, x: Tensor, module: nn.Module, args: Any) -> str | None:
        """The layout of what just left a place, as far as its makers tell."""
        if x.ndim <= 2:
            return "NC"
        said = self._told(module, args, x)
        if said is None or "N" not in said:
            said = self._known(x) or said
        if said is None:
            # What is made outside of modules (a sum with a shortcut) has the layout of the parts of its shape.
            known = self._shapes.get(tuple(x.shape), set())
            said = next(iter(known)) if len(known) == 1 else None
        return said

    def _known(self, x: Tensor | None) -> str | None:
        found = self._made.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _told(self, module: nn.Module, args: Any, x: Tensor) -> str | None:
        """What a part's type and what entered it say of what left it."""
        said = _said(module, x)
        entered = next((arg for arg in args if isinstance(arg, Tensor)), None)
        before = self._known(entered)
        if before is not None and entered is not None and entered.ndim == x.ndim:
            if said == "**C" and before.endswith("C"):
                return before  # a linear layer keeps the order of the axes before the last
            if said is None and entered.shape == x.shape and not any(True for _ in module.children()):
                return before  # activations, dropout, identities
        return said

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._called.append(name)
        x = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(x, Tensor) or x.ndim <= 2:
            return
        said = self._told(module, args, x)
        if said is None:
            return
        self._made[id(x)] = weakref.ref(x), said
        known = self._shapes.setdefault(tuple(x.shape), set())
        if said != "**C":
            known.discard("**C")
        if said != "**C" or not any(other.endswith("C") for other in known):
            known.add(said)


def _said(module: nn.Module, x: Tensor) -> str | None:
    """What a module's type says of its output: a layout, ``**C`` for features last, or nothing."""
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return "NLC" if module.batch_first else "LNC"
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return "NLC" if module.self_attn.batch_first else "LNC"
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return _said(module.layers[0], x)
    if isinstance(module, nn.Linear):
        return "**C" if x.shape[-1] == module.out_features else None
    if isinstance(module, nn.Embedding):
        return "**C"
    if isinstance(module, nn.LayerNorm):
        width = module.normalized_shape[-1]
        if x.shape[-1] == width and (type(module) is nn.LayerNorm or x.shape[1] != width):
            return "**C"
        return _first(x) if x.shape[1] == width else None
    name = type(module).__name__
    if isinstance(module, _FIRST_KINDS) or name.removeprefix("Adaptive").startswith(_POOLS):
        return _first(x)
    return None


def _first(x: Tensor) -> str | None:
    return {3: "NCL", 4: "NCHW", 5: "NCDHW"}.get(x.ndim)


def puts_sequences_first(root: nn.Module) -> bool:
    """Whether some part of a module takes sequences before samples."""
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    return any(isinstance(part, kinds) and not part.batch_first for part in root.modules())
