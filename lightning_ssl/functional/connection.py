"""The connection K_l(x): products of the transposed Jacobian with output directions, for the layers of any network."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_ssl.functional.checks import trusted

WATCHABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


def watched_layers(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """The layers called `names` (default: every Linear and Conv layer), or a ValueError that lists the names."""
    modules = dict(model.named_modules())
    known = [name for name, module in modules.items() if isinstance(module, WATCHABLE)]
    if names is None:
        if not known:
            raise ValueError("`model` has no Linear or Conv layer to watch")
        return {name: modules[name] for name in known}
    if isinstance(names, str) or not names:
        raise ValueError(f"`layers` must be a non-empty list of layer names, got {names!r}; there are {known}")
    for name in names:
        if name not in modules:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ValueError(f"`layers`: no layer {name!r}; {hint}There are {known}")
        if not isinstance(modules[name], WATCHABLE):
            kind = type(modules[name]).__name__
            raise ValueError(f"`layers`: {name!r} is a {kind}, not a Linear or Conv layer; choose among {known}")
    return {name: modules[name] for name in dict.fromkeys(names)}


def check_views(views: Sequence[Tensor], min_samples: int = 2) -> list[Tensor]:
    """At least two views of one shape with at least `min_samples` samples."""
    if isinstance(views, Tensor) or len(views) < 2:
        count = "a tensor" if isinstance(views, Tensor) else len(views)
        raise ValueError(f"`views` must be a list of at least 2 batches of the same samples, got {count}")
    shapes = [tuple(view.shape) for view in views]
    if len(set(shapes)) > 1:
        raise ValueError(f"`views` must have equal shapes (the same samples, augmented anew), got {shapes}")
    if not shapes[0] or shapes[0][0] < min_samples:
        raise ValueError(f"`views` must hold at least {min_samples} samples each, got shape {shapes[0]}")
    return list(views)


def fan(layer: nn.Module) -> tuple[int, int]:
    """Size of one unit's weight and number of units, of one group."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel(), weight.shape[0] // getattr(layer, "groups", 1)


def layer_input(layer: nn.Module, x: Tensor, filters: Tensor) -> Tensor:
    """Apply `filters` ``[R, fan_in]`` as the layer would apply its weight: ``[n, groups, R, positions]``."""
    if isinstance(layer, nn.Linear):
        return (x.flatten(1, -2) @ filters.T).mT.unsqueeze(1) if x.dim() > 2 else (x @ filters.T)[:, None, :, None]
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    weight = filters.unflatten(1, layer.weight.shape[1:]).repeat(layer.groups, *[1] * (layer.weight.dim() - 1))
    convolve = next(function for kind, function in _CONV.items() if isinstance(layer, kind))
    y = convolve(x, weight, None, layer.stride, padding, layer.dilation, layer.groups)
    return y.flatten(2).unflatten(1, (layer.groups, -1))


def layer_output(layer: nn.Module, g: Tensor) -> Tensor:
    """Bring a pre-activation gradient to ``[n, groups, units, positions]``."""
    if isinstance(layer, nn.Linear):
        return g.flatten(1, -2).mT.unsqueeze(1) if g.dim() > 2 else g[:, None, :, None]
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return g.flatten(2).unflatten(1, (layer.groups, -1))


def widen(x: Tensor) -> Tensor:
    """Half precision is for the network; sums over positions and samples are taken in float32 or better."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@contextmanager
def as_found(model: nn.Module, device: torch.device, seed: int) -> Iterator[None]:
    """Inside: eval mode, frozen parameters, gradients recorded, own random numbers. Afterwards: all as it was."""
    modes = [(module, module.training) for module in model.modules()]
    trainable = [p for p in model.parameters() if p.requires_grad]
    devices = [device] if device.type == "cuda" else []
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        try:
            for module, _ in modes:
                module.training = False  # not .eval(): some modules override it
            for p in trainable:
                p.requires_grad_(False)
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for p in trainable:
                p.requires_grad_(True)


class Tape:
    """One forward pass of a batch that can be played back along any output direction.

    Args:
        model: Maps the batch to ``[n, n_L]``; to be called inside `as_found`.
        layers: The watched layers by name.
        batch: ``[n, ...]``.
        filters: Given a layer's name and input, what to keep of the input.
        contract: Given a name, what was kept and the pre-activation gradient of one call, the layer's rows; a layer
            called several times (shared weights) adds up.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        batch: Tensor,
        filters: Callable[[str, Tensor], Any],
        contract: Callable[[str, Any, Tensor], Any],
    ) -> None:
        self._filters, self._contract = filters, contract
        self._rows: dict[str, Any] = {}
        self._wanted: Collection[str] = ()
        self._size = batch.shape[0]
        self._edges: list[tuple[str, Any]] = []
        self.calls: list[tuple[str, int]] = []  # in order: name, multiplications for one sample
        handles = [layer.register_forward_hook(self._tap(name), with_kwargs=True) for name, layer in layers.items()]
        try:
            # A tensor made in inference mode cannot be saved for a backward pass; its copy can.
            output = model(batch.clone() if batch.is_inference() else batch.detach())
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != self._size:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"`model` must map a batch of {self._size} to a tensor [{self._size}, n_L], got {got}")
        if not trusted() and not torch.isfinite(output).all():
            raise ValueError("`model` returned non-finite outputs: check its weights and the views")
        if not output.requires_grad:
            raise ValueError("no watched layer leads to the output of `model`: check `layers` and detach() calls")
        self.output = output

    def _tap(self, name: str) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
            x = (args[0] if args else kwargs["input"]).detach()
            if x.shape[0] != self._size or x.dim() < 2 or y.dim() < 2:
                raise ValueError(
                    f"layer {name!r} was called on {tuple(x.shape)}, but samples must come first ({self._size} of them)"
                )
            with torch.autocast(x.device.type, enabled=False):
                kept = self._filters(name, widen(x))
            if not y.requires_grad:
                y = y.detach().requires_grad_().clone()  # a leaf could not be changed in place by what follows
            # The graph must not hold the tape that holds it: through autograd no collector sees the circle.
            tape = weakref.proxy(self)
            y.register_hook(lambda g: tape._collect(name, kept, g))
            self._edges.append((name, get_gradient_edge(y)))
            self.calls.append((name, fan(layer)[0] * y[0].numel()))
            return y

        return hook

    def _collect(self, name: str, kept: Any, g: Tensor) -> None:
        if name not in self._wanted:
            return
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            rows = self._contract(name, kept, widen(g.detach()))
        self._rows[name] = self._rows[name] + rows if name in self._rows else rows

    def play(self, direction: Tensor, wanted: Collection[str], last: bool = False) -> dict[str, Any]:
        """Rows of the `wanted` layers along `direction` (``[n_L]``, or ``[n, n_L]`` for one each sample).

        The pass goes no deeper than it must: not beyond the first of the wanted layers.
        """
        self._rows, self._wanted = {}, wanted
        goals = [edge for name, edge in self._edges if name in wanted]
        v = direction.to(self.output, non_blocking=True).expand_as(self.output)
        torch.autograd.grad(self.output, goals, v, retain_graph=not last, allow_unused=True)
        return self._rows
