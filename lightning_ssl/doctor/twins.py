"""Target networks: parts of a module that are made like another part and follow it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl.doctor.trial import sampled

_TARGET = re.compile(
    r"(^|[._])(target|teacher|momentum|ema|shadow|slow|averaged)([._]|$)|(encoder|net|model|head)_k([._]|$)"
)


@dataclass(frozen=True)
class Twin:
    """A part that learns, and one of the same make that follows it."""

    online: str
    target: str
    copied: bool  # whether they began with equal weights

    def pairs(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        a, b = (dict(module.get_submodule(path).named_parameters()) for path in (self.online, self.target))
        return [(a[name].detach(), b[name].detach()) for name in a]

    def read(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Some weights of both."""
        both = self.pairs(module)
        return torch.cat([sampled(a, 256) for a, _ in both]), torch.cat([sampled(b, 256) for _, b in both])


def called_target(path: str) -> bool:
    return bool(_TARGET.search(path))


def find_twins(module: nn.Module, learning: set[str]) -> list[Twin]:
    """Pairs of parts of which the one learns and the other, of the same make, does not.

    Args:
        module: The module, before training.
        learning: Names of the parameters that get gradients.
    """
    return [twin for twin, learns in _alike(module, learning) if not learns]


def learning_targets(module: nn.Module, learning: set[str]) -> list[Twin]:
    """Copies that are called target, teacher and the like, and yet get gradients."""
    return [twin for twin, learns in _alike(module, learning) if learns]


def _alike(module: nn.Module, learning: set[str]) -> list[tuple[Twin, bool]]:
    groups: dict[Any, list[str]] = {}
    for path, part in module.named_modules():
        made = tuple((name, tuple(p.shape)) for name, p in part.named_parameters())
        if path and made:
            groups.setdefault(made, []).append(path)
    found: list[tuple[Twin, bool]] = []
    for paths in groups.values():
        for pair in combinations(paths, 2):
            if any(inner.startswith(f"{outer}.") for inner, outer in (pair, pair[::-1])):
                continue
            made_alike = _as_twin(module, *pair, learning)
            if made_alike is not None:
                found.append(made_alike)
    # The largest ones: not also the parts of a pair, and each target once, with the part it began equal to.
    found.sort(key=lambda item: (not item[0].copied, item[0].target.count("."), item[0].online.count(".")))
    kept: list[tuple[Twin, bool]] = []
    for twin, learns in found:
        if not any(twin.target == k.target or twin.target.startswith(f"{k.target}.") for k, _ in kept):
            kept.append((twin, learns))
    return kept


def _as_twin(module: nn.Module, a: str, b: str, learning: set[str]) -> tuple[Twin, bool] | None:
    learns = {path: any(name.startswith(f"{path}.") for name in learning) for path in (a, b)}
    both = Twin(a, b, False).pairs(module)
    if any(x is y or x.data_ptr() == y.data_ptr() for x, y in both):
        return None  # shared weights
    # Norms begin alike everywhere: only numbers that were drawn tell a copy.
    copied = all(torch.equal(x, y) for x, y in both) and any(bool((x != x.flatten()[0]).any()) for x, _ in both)
    named = {path: called_target(path) for path in (a, b)}
    if learns[a] and learns[b]:
        if not copied or named[a] == named[b]:
            return None
        online, target = (b, a) if named[a] else (a, b)
        return Twin(online, target, copied), True
    if not learns[a] and not learns[b]:
        return None
    online, target = (a, b) if learns[a] else (b, a)
    if copied or (named[target] and not named[online]):
        return Twin(online, target, copied), False
    return None
