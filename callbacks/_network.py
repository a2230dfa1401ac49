"""From images to an output through two parts of somebody's module, as its own training step goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl.callbacks._capture import Call, as_rows, first_tensor, pooled, tensors_in
from lightning_ssl.callbacks._places import find_module

WATCHABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

KEPT = 4  # tensors of an encoder's output that a head may take
# What steps do to an encoder's output before a head gets it, and the numbers of dimensions to which that applies.
_GLUE: list[tuple[Callable[[Tensor], Tensor], range]] = [
    (lambda x: x, range(1, 6)),
    (lambda x: x.flatten(1), range(3, 6)),
    (pooled, range(3, 6)),
    (lambda x: x[:, 0], range(3, 4)),  # the first token of [N, tokens, d]
    (lambda x: x[:, 1:].mean(dim=1), range(3, 4)),  # the mean of the others
]


def find_glue(encoder: Sequence[Call], head: Sequence[Call]) -> int | None:
    """How the head's inputs come from the encoder's outputs, seen in one step: a number for `Network`, or None."""
    entered = [call.input for call in head if call.input is not None]
    if not encoder or not entered:
        return None
    for number in range(len(_GLUE) * min(len(call.outputs) for call in encoder)):
        pieces = [_apply(number, call.outputs) for call in encoder]
        # Calls one by one, or gathered into one call of the head; a head may see fewer of them.
        if any(_same(a, b) for a, b in ((pieces, entered), (pieces[:1], entered[:1]))):
            return number
    return None


def _apply(number: int, outputs: Sequence[Tensor]) -> Tensor | None:
    which, how = divmod(number, len(_GLUE))
    glue, dims = _GLUE[how]
    return glue(outputs[which]) if outputs[which].ndim in dims else None


def _same(pieces: Sequence[Tensor | None], entered: Sequence[Tensor]) -> bool:
    found = [piece for piece in pieces if piece is not None]
    if len(found) < len(pieces) or len({x.shape[1:] for x in (*found, *entered)}) > 1:
        return False
    one, other = (torch.cat([x.float() for x in rows]) for rows in (found, entered))
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-6)


class Network(nn.Module):
    """Images to output through two parts of a module, under their own dotted names.

    Args:
        pl_module: the module.
        encoder: dotted path of the part the images enter.
        output: dotted path of the part whose output counts.
        context: the precision's forward context.
        glue: what `find_glue` found; below 0, the head gets what it accepts: the encoder's output as it is,
            flattened or pooled.
    """

    def __init__(self, pl_module: nn.Module, encoder: str, output: str, context: Any, glue: int = -1) -> None:
        super().__init__()
        # Private names, so that any name is left to the parts.
        self.__encoder = [find_module(pl_module, encoder, "encoder")]  # in a list: not registered twice
        self.__output = [find_module(pl_module, output, "output")]
        self.__is_encoder, self.__inside = output == encoder, f"{output}.".startswith(f"{encoder}.")
        self.__context, self.__glue = context, glue
        for path, part in ((encoder, self.__encoder[0]), (output, self.__output[0])):
            if path == output and self.__inside and not self.__is_encoder:
                continue
            *parents, last = path.split(".")
            node: nn.Module = self
            for parent in parents:
                if parent not in node._modules:
                    setattr(node, parent, nn.Module())
                node = node.get_submodule(parent)
            setattr(node, last, part)

    @property
    def inside(self) -> bool:
        """Whether the output is the encoder's own or that of a part of it."""
        return self.__inside

    def forward(self, images: Tensor) -> Tensor:
        context: AbstractContextManager[Any] = self.__context()
        with context, self._inner_output() as inner:
            outputs = list(islice(tensors_in(self.__encoder[0](images)), KEPT))
            if not outputs:
                raise ValueError("the encoder returned no features")
            if self.__inside:
                features: Tensor | None = inner[-1] if inner else outputs[0]
            else:
                head = self.__output[0]
                features = first_tensor(head(self._glued(outputs, head)))
        if features is None:
            raise ValueError("the output's module returned no features")
        # The network's own precision or single: the graph's gradients need no more.
        return as_rows(features).to(torch.promote_types(features.dtype, torch.float32))

    def _glued(self, outputs: list[Tensor], head: nn.Module) -> Tensor:
        glued = _apply(self.__glue, outputs) if self.__glue >= 0 else None
        if glued is not None:
            return glued
        first = next((part for part in head.modules() if isinstance(part, WATCHABLE)), None)
        x = outputs[0]
        if x.ndim > 2 and isinstance(first, nn.Linear):
            return x.flatten(1) if x[0].numel() == first.in_features else pooled(x)
        return x

    @contextmanager
    def _inner_output(self) -> Iterator[list[Tensor]]:
        """What leaves a submodule inside the encoder, with its graph."""
        seen: list[Tensor] = []
        if not self.__inside or self.__is_encoder:
            yield seen
            return

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            left = first_tensor(output)
            if left is not None:
                seen.append(left.clone())  # the next layer may work in place

        handle = self.__output[0].register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()
