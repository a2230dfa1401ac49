"""Random sketches of the connections, from whose sums the covariance operators' norms are estimated without bias.

A layer's row K v (as many numbers as the layer has weights) is never built. The layer's input passes through a few
filters of the layer's own geometry, the pre-activation gradient through a few vectors, and the products are summed
over positions and mixed at random to `WIDTH` numbers. Both banks are principal directions, found in a pilot, that are
kept whole, and random ones that stand for the rest. Two independent sketches S_1, S_2 with E[S^T S] = 1 then give
E ||S_1 C S_2^T||^2 = ||C||^2 for any operator C, and S_1 C S_2^T is linear in sums over samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ssl.functional._connection import Tape, fan, layer_input, layer_output

PRINCIPAL = 24  # principal filters and vectors of a layer
REPLICAS = 4  # of each sketch: independent ones, whose scatter tells the error
RANDOM = 2  # random filters and vectors of each replica
WIDTH = 256  # numbers a sketched row has, over all replicas
PILOT = 16  # samples that the pilot looks at
HEAD_COST = 0.5  # forward passes that following all directions through the last layers may cost


def generator(seed: int, name: str = "") -> torch.Generator:
    """Randomness that depends on the seed and the layer's name only: the same on every call, rank and device."""
    return torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))


class LayerSketch(NamedTuple):
    """Two sketches of one layer's rows.

    Attributes:
        filters: ``[R_in, fan_in]``, principal ones, then each sketch's random ones.
        vectors: ``[R_out, units]``, likewise.
        mixes: for each sketch, which products fall into which of its numbers, ``[WIDTH * c]``, and their signs; None
            where the products are few enough to be kept.
    """

    filters: Tensor
    vectors: Tensor
    mixes: list[tuple[Tensor, Tensor]] | None

    def filter(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer_input(layer, x, self.filters.to(x))

    def contract(self, layer: nn.Module, filtered: Tensor, g: Tensor) -> Tensor:
        """One call's products, ``[n, groups * R_in * R_out]``."""
        g = self.vectors.to(g) @ layer_output(layer, g)
        return (filtered @ g.mT).flatten(1)

    def mix(self, products: Tensor) -> Tensor:
        """Both sketches of the rows, ``[2, n, width]``."""
        if self.mixes is None:
            return products.expand(2, *products.shape)
        return torch.stack(
            [
                (products[:, index.to(products.device)] * sign.to(products)).unflatten(1, (WIDTH, -1)).sum(-1)
                for index, sign in self.mixes
            ]
        )


class Basis(NamedTuple):
    """What is fixed before samples are summed.

    Attributes:
        directions: output directions, ``[n_L, n_L]``, orthonormal: principal ones, then random ones.
        followed: how many of them are followed through the whole network.
        principal: how many of those are principal.
        head: the last layers, through which all directions are followed, being cheap there.
        sketches: those of each layer.
    """

    directions: Tensor
    followed: int
    principal: int
    head: list[str]
    sketches: dict[str, LayerSketch]

    def strata(self, name: str) -> tuple[int, int]:
        """How many directions are followed to the layer `name`, and how many count once."""
        whole = len(self.directions)
        return (whole, whole) if name in self.head else (self.followed, self.principal)


class Pilot(NamedTuple):
    """Sums over a few samples, from which a `Basis` is made; pilots of several ranks add up."""

    outputs: Tensor  # [n_L + 1, n_L + 1]: sum of (1, f)(1, f)^T
    layers: dict[str, tuple[Tensor, Tensor]]  # range finders of the inputs and of the gradients
    calls: list[tuple[str, int]]  # layers in the order of their calls, and the calls' multiplications

    @classmethod
    def total(cls, pilots: list[Pilot]) -> Pilot:
        layers = {
            name: (_sum([p.layers[name][0] for p in pilots]), _sum([p.layers[name][1] for p in pilots]))
            for name in pilots[0].layers
        }
        return cls(_sum([p.outputs for p in pilots]), layers, pilots[0].calls)


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def run_pilot(model: nn.Module, layers: Mapping[str, nn.Module], views: list[Tensor], first: int, seed: int) -> Pilot:
    """Look for the principal filters and vectors on `views`, whose first sample is number `first` of all.

    With random probes O, sum_t a_t a_t^T O spans what the inputs a span; likewise for the gradients along random
    output directions. Both are sums over samples.
    """

    def probe_input(name: str, x: Tensor) -> Tensor:
        probes = torch.randn(PRINCIPAL, fan(layers[name])[0], generator=generator(seed, name + ".in"))
        probes = probes.to(x).requires_grad_()
        with torch.enable_grad():
            y = layer_input(layers[name], x, probes)
        return torch.autograd.grad(y, probes, y.detach())[0].double().cpu()

    def probe_gradient(name: str, inputs: Tensor, g: Tensor) -> Any:
        g = layer_output(layers[name], g)
        probes = torch.randn(PRINCIPAL, fan(layers[name])[1], generator=generator(seed, name + ".out")).to(g)
        return _Pair(inputs, torch.einsum("ngut,ngrt->ru", g, probes @ g).double().cpu())

    outputs: list[Tensor] = []
    found: list[dict[str, Any]] = []
    for number, view in enumerate(views):
        tape = Tape(model, layers, view, probe_input, probe_gradient)
        f = tape.output.detach().double().cpu()
        # Each sample has its own direction, whatever rank it is on.
        random = torch.randn(PILOT, f.shape[1], generator=generator(seed, f"view {number}"), dtype=f.dtype)
        found.append(tape.play(random[first : first + len(f)], list(layers), last=True))
        outputs.append(torch.cat([torch.ones_like(f[:, :1]), f], 1))
    stacked = torch.cat(outputs)
    names = [name for name in layers if all(name in part for part in found)]
    ranges = {name: (_sum([p[name].inputs for p in found]), _sum([p[name].gradients for p in found])) for name in names}
    return Pilot(stacked.T @ stacked, ranges, [call for call in tape.calls if call[0] in ranges])


class _Pair(NamedTuple):
    inputs: Tensor
    gradients: Tensor

    def __add__(self, other: Any) -> _Pair:  # type: ignore[override]
        return _Pair(self.inputs + other.inputs, self.gradients + other.gradients)


def make_basis(pilot: Pilot, layers: Mapping[str, nn.Module], directions: int, principal: int, seed: int) -> Basis:
    """Output directions: the leading principal ones of the pilot's outputs, then random ones from the complement."""
    count, total, second = pilot.outputs[0, 0], pilot.outputs[0, 1:], pilot.outputs[1:, 1:]
    n_out = len(total)
    if directions >= n_out:
        directions = principal = n_out
    axes = torch.linalg.eigh(second - torch.outer(total, total) / count)[1].flip(1)
    random = torch.randn(n_out - principal, n_out - principal, generator=generator(seed), dtype=axes.dtype)
    rotated = axes[:, principal:] @ torch.linalg.qr(random)[0]
    head = _head(pilot.calls, n_out)
    return Basis(
        torch.cat([axes[:, :principal], rotated], 1), directions, principal, head, _sketches(pilot, layers, seed)
    )


def _head(calls: list[tuple[str, int]], n_out: int) -> list[str]:
    """The last layers, as many as it is cheap to follow all output directions to."""
    budget = HEAD_COST * sum(cost for _, cost in calls)
    spent, first = 0, len(calls)
    while first and (spent := spent + n_out * calls[first - 1][1]) <= budget:
        first -= 1
    early = {name for name, _ in calls[:first]}
    return [name for name in dict.fromkeys(name for name, _ in calls[first:]) if name not in early]


def _sketches(pilot: Pilot, layers: Mapping[str, nn.Module], seed: int) -> dict[str, LayerSketch]:
    sketches = {}
    for name, (inputs, gradients) in pilot.layers.items():
        dice = generator(seed, name)
        filters, vectors = _bank(inputs, dice), _bank(gradients, dice)
        groups = getattr(layers[name], "groups", 1)
        exact = _whole(filters) and _whole(vectors) and groups * len(filters) * len(vectors) <= WIDTH
        mixes = None if exact else [_mix(groups, filters, vectors, which, dice) for which in (0, 1)]
        sketches[name] = LayerSketch(filters, vectors, mixes)
    return sketches


def _bank(found: Tensor, dice: torch.Generator) -> Tensor:
    """Principal rows, then for each replica of each sketch random rows of the complement, so that E[S^T S] = 1."""
    size = found.shape[1]
    if size <= PRINCIPAL + 2 * REPLICAS * RANDOM:  # no more than the bank would have
        return torch.eye(size, dtype=found.dtype)
    principal = torch.linalg.qr(found.T)[0]  # [size, PRINCIPAL]
    banks = [principal.T]
    for _ in range(2 * REPLICAS):
        random = torch.randn(size, RANDOM, generator=dice, dtype=found.dtype)
        for _ in range(2):  # twice is enough to be orthogonal to the last digit
            random = torch.linalg.qr(random - principal @ (principal.T @ random))[0]
        banks.append(random.T * ((size - PRINCIPAL) / RANDOM) ** 0.5)
    return torch.cat(banks)


def _whole(bank: Tensor) -> bool:
    return len(bank) == bank.shape[1]


def _members(bank: Tensor, replica: int) -> Tensor:
    """Which rows of a bank belong to a replica."""
    if _whole(bank):
        return torch.arange(len(bank))
    return torch.cat([torch.arange(PRINCIPAL), torch.arange(RANDOM) + PRINCIPAL + replica * RANDOM])


def _mix(groups: int, filters: Tensor, vectors: Tensor, sketch: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Throw each replica's products into its share of the bins, equally full, with random signs."""
    group = torch.arange(groups)[:, None, None] * (len(filters) * len(vectors))
    parts = []
    for replica in range(sketch * REPLICAS, (sketch + 1) * REPLICAS):
        rows, columns = _members(filters, replica), _members(vectors, replica)
        index = (group + rows[:, None] * len(vectors) + columns).flatten()
        index = index[torch.randperm(len(index), generator=dice)]
        sign = (torch.randint(0, 2, (len(index),), generator=dice) * 2.0 - 1) / REPLICAS**0.5
        spare = index.new_zeros(-len(index) % (WIDTH // REPLICAS))  # bins must be equally full: add nothing, 0 times
        parts.append([torch.cat([t, spare.to(t)]).view(-1, WIDTH // REPLICAS).T for t in (index, sign)])
    indices, signs = zip(*parts, strict=True)
    return torch.cat(indices).flatten(), torch.cat(signs).flatten()
