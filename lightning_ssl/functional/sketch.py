"""Random sketches of the connections, from whose sums the covariance operators' norms are estimated without bias.

A layer's row K v (as many numbers as the layer has weights) is never built. The layer's input passes through a few
filters of the layer's own geometry, the pre-activation gradient through a few vectors, and the products are summed
over positions and mixed at random to `WIDTH` numbers. Both banks are principal directions, found in a pilot, that are
kept whole, and random ones that stand for the rest. Two independent sketches S_1, S_2 with E[S^T S] = 1 then give
E ||S_1 C S_2^T||^2 = ||C||^2 for any operator C, and S_1 C S_2^T is linear in sums over samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ssl.functional.connection import Tape, fan, layer_input, layer_output

PRINCIPAL = 48, 128  # principal filters and vectors of a layer, at least and at most
LEAST = 24  # if each sample has one position
REPLICAS = 4  # of each sketch: independent ones, whose scatter tells the error
WIDTH = 320  # numbers a sketched row has, over all replicas
PILOT = 16  # samples that the pilot looks at
HEAD_COST = 0.5  # forward passes that following all directions through the last layers may cost


def generator(seed: int, name: str = "") -> torch.Generator:
    """Randomness that depends on the seed and the layer's name only: the same on every call, rank and device."""
    return torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))


def principal_rows(layer: nn.Module, x: Tensor) -> int:
    """How many principal filters a layer with input x gets, and as many vectors.

    A filter costs one unit's share of the layer's own work, so wide layers, which have more to cover, can have more.
    With one position it is not the filters that cost but their products with the vectors, of each sample.
    """
    return LEAST if x.dim() == 2 else min(max(PRINCIPAL[0], fan(layer)[1] // 2), PRINCIPAL[1])


def random_rows(principal: int) -> int:
    """How many random filters and vectors each replica gets beside the principal ones."""
    return max(2, principal // 16)


class LayerSketch(NamedTuple):
    """Two sketches of one layer's rows.

    Attributes:
        width: Numbers a sketched row has.
        filters: ``[R_in, fan_in]``, principal ones, then each sketch's random ones.
        vectors: ``[R_out, units]``, likewise.
        mixes: For each sketch, which products fall into each of its numbers, ``[WIDTH, c]``, and their signs; None
            where the products are few enough to be kept.
    """

    width: int
    filters: Tensor
    vectors: Tensor
    mixes: list[tuple[Tensor, Tensor]] | None

    def filter(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer_input(layer, x, self.filters.to(x))

    def contract(self, layer: nn.Module, filtered: Tensor, g: Tensor) -> Tensor:
        """One call's products, ``[n, groups * R_in * R_out]``."""
        g = layer_output(layer, g)  # n x groups x units x positions
        vectors = self.vectors.to(g)
        # Whichever is shorter goes first: half the work in early layers, which have many positions and few units.
        if g.shape[2] < g.shape[3]:
            return (filtered @ g.mT @ vectors.T).flatten(1)
        return (filtered @ (vectors @ g).mT).flatten(1)

    def to(self, device: torch.device) -> LayerSketch:
        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        mixes = self.mixes and [(moved(index), moved(sign)) for index, sign in self.mixes]
        return LayerSketch(self.width, moved(self.filters), moved(self.vectors), mixes)

    def mix(self, products: Tensor) -> Tensor:
        """Both sketches of the rows, ``[2, n, width]``."""
        if self.mixes is None:
            return products.expand(2, *products.shape)
        # Products first: then each is a line of memory to be added to its number's, for all samples at once.
        lines = products.T.contiguous()
        return torch.stack(
            [
                F.embedding_bag(index, lines, mode="sum", per_sample_weights=sign.to(lines)).T
                for index, sign in self.mixes
            ]
        )


class Basis(NamedTuple):
    """What is fixed before samples are summed.

    Attributes:
        directions: Output directions, ``[n_L, m]``, orthonormal: principal ones, then random ones; m = n_L if there
            is a head.
        followed: How many of them are followed through the whole network.
        principal: How many of those are principal.
        head: The last layers, through which all directions are followed, being cheap there.
        sketches: Those of each layer.
    """

    directions: Tensor
    followed: int
    principal: int
    head: list[str]
    sketches: dict[str, LayerSketch]

    def to(self, device: torch.device) -> Basis:
        return self._replace(sketches={name: sketch.to(device) for name, sketch in self.sketches.items()})

    def strata(self, name: str) -> tuple[int, int]:
        """How many directions are followed to the layer `name`, and how many count once."""
        whole = len(self.directions)
        return (whole, whole) if name in self.head else (self.followed, self.principal)


class Pilot(NamedTuple):
    """What a few samples say, from which a `Basis` is made."""

    outputs: Tensor  # [n, n_L]
    layers: dict[str, tuple[Tensor, Tensor]]  # range finders of the inputs and of the gradients
    calls: list[tuple[str, int]]  # layers in the order of their calls, and the calls' multiplications


def run_pilot(model: nn.Module, layers: Mapping[str, nn.Module], views: Sequence[Tensor], seed: int) -> Pilot:
    """Look for the principal filters and vectors on `views`.

    With random probes O, sum_t a_t a_t^T O spans what the inputs a span; likewise for the gradients along random
    output directions.
    """

    def probe_input(name: str, x: Tensor) -> Tensor:
        shape = principal_rows(layers[name], x), fan(layers[name])[0]
        probes = torch.randn(shape, generator=generator(seed, name + ".in")).to(x, non_blocking=True).requires_grad_()
        with torch.enable_grad():
            y = layer_input(layers[name], x, probes)
        return torch.autograd.grad(y, probes, y.detach())[0].double()

    def probe_both(name: str, found: Tensor, g: Tensor) -> Tensor:
        g = layer_output(layers[name], g).movedim(2, 0).flatten(1)  # units x all else
        probes = torch.randn(len(found), len(g), generator=generator(seed, name + ".out")).to(g, non_blocking=True)
        return torch.cat([found, (probes @ g @ g.T).double()], 1)

    tape = Tape(model, layers, torch.cat(list(views)), probe_input, probe_both)
    outputs = tape.output.detach().double()
    directions = torch.randn(outputs.shape, generator=generator(seed, "pilot"), dtype=outputs.dtype)
    found = tape.play(directions, list(layers), last=True)
    outputs, *rows = to_host([outputs, *found.values()])
    found = dict(zip(found, rows, strict=True))
    ranges = {name: found[name].split(fan(layer), 1) for name, layer in layers.items() if name in found}
    return Pilot(outputs, ranges, [call for call in tape.calls if call[0] in ranges])


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bring tensors of one type to the host in one copy."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    flat = torch.cat([x.flatten() for x in tensors]).cpu().split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(flat, tensors, strict=True)]


def make_basis(pilot: Pilot, layers: Mapping[str, nn.Module], directions: int, principal: int, seed: int) -> Basis:
    """Output directions: the leading principal ones of the pilot's outputs, then random ones from the complement."""
    n_out = pilot.outputs.shape[1]
    head = _head(pilot.calls, n_out)
    principal = min(principal, directions - 2)  # it takes two random directions to tell pairs of them from one
    axes = torch.linalg.svd(pilot.outputs - pilot.outputs.mean(0), full_matrices=False)[2][:principal].T
    count = n_out if head or directions >= n_out else directions
    random = torch.randn(n_out, count - axes.shape[1], generator=generator(seed), dtype=axes.dtype)
    chosen = torch.cat([axes, _complement(random, axes)], 1)
    followed, once = (n_out, n_out) if directions >= n_out else (directions, axes.shape[1])
    return Basis(chosen, followed, once, head, _sketches(pilot, layers, seed))


def _complement(random: Tensor, axes: Tensor) -> Tensor:
    """An orthonormal basis of the columns of `random`, orthogonal to `axes` to the last digit."""
    for _ in range(2):  # once would leave rounding errors
        random = torch.linalg.qr(random - axes @ (axes.T @ random))[0]
    return random


def _head(calls: list[tuple[str, int]], n_out: int) -> list[str]:
    """The last layers, as many as it is cheap to follow all output directions to."""
    total = sum(cost for _, cost in calls)
    budget = HEAD_COST * total
    # The last layer has hardly any overlap between directions to extrapolate from: worth more.
    if budget < n_out * calls[-1][1] <= 4 * HEAD_COST * total:
        budget = n_out * calls[-1][1]
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
        size = groups * len(filters) * len(vectors)
        if _whole(filters) and _whole(vectors) and size <= WIDTH:
            sketches[name] = LayerSketch(size, filters, vectors, None)
        else:
            mixes = [_mix(groups, filters, vectors, len(inputs), which, dice) for which in (0, 1)]
            sketches[name] = LayerSketch(WIDTH, filters, vectors, mixes)
    return sketches


def _bank(found: Tensor, dice: torch.Generator) -> Tensor:
    """Principal rows, then for each replica of each sketch random rows of the complement, so that E[S^T S] = 1."""
    principal, size = found.shape
    random = random_rows(principal)
    if size <= principal + 2 * REPLICAS * random:  # no more than the bank would have
        return torch.eye(size, dtype=found.dtype)
    axes = torch.linalg.qr(found.T)[0]  # [size, principal]
    banks = [axes.T]
    for _ in range(2 * REPLICAS):
        rest = _complement(torch.randn(size, random, generator=dice, dtype=found.dtype), axes)
        banks.append(rest.T * ((size - principal) / random) ** 0.5)
    return torch.cat(banks)


def _whole(bank: Tensor) -> bool:
    return len(bank) == bank.shape[1]


def _members(bank: Tensor, principal: int, replica: int) -> Tensor:
    """Which rows of a bank belong to a replica."""
    if _whole(bank):
        return torch.arange(len(bank))
    random = random_rows(principal)
    return torch.cat([torch.arange(principal), torch.arange(random) + principal + replica * random])


def _mix(
    groups: int, filters: Tensor, vectors: Tensor, principal: int, sketch: int, dice: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Throw each replica's products into its share of the bins, equally full, with random signs."""
    group = torch.arange(groups)[:, None, None] * (len(filters) * len(vectors))
    parts = []
    for replica in range(sketch * REPLICAS, (sketch + 1) * REPLICAS):
        rows, columns = _members(filters, principal, replica), _members(vectors, principal, replica)
        index = (group + rows[:, None] * len(vectors) + columns).flatten()
        index = index[torch.randperm(len(index), generator=dice)]
        sign = (torch.randint(0, 2, (len(index),), generator=dice) * 2.0 - 1) / REPLICAS**0.5
        spare = index.new_zeros(-len(index) % (WIDTH // REPLICAS))  # bins must be equally full: add nothing, 0 times
        parts.append([torch.cat([t, spare.to(t)]).view(-1, WIDTH // REPLICAS).T for t in (index, sign)])
    indices, signs = zip(*parts, strict=True)
    return torch.cat(indices).contiguous(), torch.cat(signs).contiguous()
