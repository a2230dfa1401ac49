"""The covariance operators that drive contrastive learning (DDN-v2 Sec. 4): exact ones, and their norms at scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_ssl.functional.connection import Tape, as_found, check_views, fan, watched_layers
from lightning_ssl.functional.estimate import (
    CovarianceOperatorNorms,
    Operators,
    Sums,
    estimated_norms,
    exact_norms,
    laplacian,
    quadratic_forms,
)
from lightning_ssl.functional.losses import squared_distance
from lightning_ssl.functional.sketch import PILOT, Basis, LayerSketch, make_basis, run_pilot

_EXACT_BUDGET = 2**27  # numbers of exact rows held at a time
_AT_ONCE = 64  # samples followed at a time: more take more memory, whose paging also costs a processor time


class CovarianceOperator(NamedTuple):
    """`inter`, VE, and `intra`, EV: symmetric matrices ``[P, P]``."""

    inter: Tensor
    intra: Tensor


def covariance_operator(jacobians: Tensor, weight: Tensor | None = None, unbiased: bool = False) -> CovarianceOperator:
    r"""The inter- and intra-augmentation covariance operators of a layer, exactly (DDN-v2 Eqs. 5, 9, 10).

    With :math:`K(x)` the transposed Jacobian of the network's output with respect to vec(W),

    .. math:: VE = V_x[E_{x'|x} K(x')], \qquad EV = E_x[V_{x'|x} K(x')],

    and, with pair weights, :math:`VE = \frac12 E_{x,y}[\xi(x, y) (\bar K(x) - \bar K(y))(\bar K(x) - \bar K(y))^T]`.

    By default the rows are the whole population: N equally likely samples with V equally likely augmentations each,
    all of them listed. With `unbiased` they are draws from one: VE is then made of products of different views of
    different samples only, and both are unbiased.

    A loss's gradient is :math:`-OP\,vec(W)` as the theorems count it, through one of the two networks of a pair;
    through both, as autograd has it, it is twice as long.

    Args:
        jacobians: K, ``[N, V, P, n_L]``, V >= 2 with `unbiased`.
        weight: Pair weights, ``[N, N]``, symmetric; `pair_weight` of the un-augmented samples' distances gives those
            of Theorem 4. None: all 1, Theorem 3.
        unbiased: Whether samples and views are draws.

    Example:
        >>> k = torch.tensor([[[1.0], [3.0]], [[-1.0], [-3.0]]]).view(2, 2, 1, 1)
        >>> covariance_operator(k)
        CovarianceOperator(inter=tensor([[4.]]), intra=tensor([[1.]]))
        >>> covariance_operator(k, unbiased=True)
        CovarianceOperator(inter=tensor([[7.]]), intra=tensor([[2.]]))
    """
    if jacobians.dim() != 4:
        raise ValueError(f"`jacobians` must be [N, V, P, n_L], got shape {tuple(jacobians.shape)}")
    n, views = jacobians.shape[:2]
    if n < 2 or views < (2 if unbiased else 1):
        raise ValueError(f"`jacobians` needs at least 2 samples and, with `unbiased`, 2 views, got N={n}, V={views}")
    if weight is not None:
        _check_weight(weight, n)
    k = jacobians - jacobians.mean((0, 1))  # both operators vanish on constants
    lap = laplacian(n, weight, unbiased, k)
    inter, intra = (
        torch.einsum("ivpo,ivqo->pq", torch.einsum("ivjw,jwpo->ivpo", form, k), k)
        for form in quadratic_forms(lap, views, unbiased)
    )
    return CovarianceOperator(inter, intra)


def covariance_operator_norms(
    model: nn.Module,
    views: Sequence[Tensor],
    layers: Sequence[str] | None = None,
    directions: int = 16,
    principal: int | None = None,
    exact: bool = False,
    weight: Callable[[Tensor], Tensor] | Tensor | None = None,
    seed: int = 0,
    unbiased: bool = True,
) -> dict[str, CovarianceOperatorNorms]:
    r"""Trace, Frobenius norm and leading eigenvalue of every layer's covariance operators, for any network.

    One forward pass of each view and one backward pass along each output direction; no Jacobian and no row as long
    as a layer's weight is ever built. The network runs in eval mode, and is left as it was found. Random choices
    depend on `seed` and the layers' names only, so that a curve over training shows the network and not the dice.

    Args:
        model: Maps a batch to outputs ``[N, n_L]``, every sample on its own (in eval mode).
        views: Two or more batches of the same samples, in the same order, each augmented anew.
        layers: Dotted names of Linear or Conv layers; default: all that the model calls.
        directions: Output directions to follow, the cost of the estimate; from n_L on, all are.
        principal: How many of them are the outputs' principal directions, by default five eighths. The others, never
            fewer than 2, are random ones that stand for all the rest.
        exact: Follow all directions and build all rows; for small networks and batches.
        weight: Pair weights of Theorem 4: ``[N, N]``, or a function of the distances r of the samples' mean outputs
            over views, such as ``partial(pair_weight, loss="nce", tau=0.5)``; pass the matrix to take r from
            un-augmented samples.
        seed: Fixes every random choice.
        unbiased: As in `covariance_operator`; False if `views` lists all augmentations there are.

    Returns:
        `CovarianceOperatorNorms` by layer name.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> x = torch.randn(16, 4)
        >>> norms = covariance_operator_norms(model, [x, x + 0.1 * torch.randn(16, 4)])
        >>> list(norms)
        ['0', '2']
        >>> bool(norms["0"].inter_norm < norms["0"].inter_trace)
        True
    """
    principal = check_directions(directions, principal)
    views = check_views(views)
    watched = watched_layers(model, layers)
    device = views[0].device
    with as_found(model, device, seed):
        pilot = run_pilot(model, watched, [view[:PILOT] for view in views], seed)
        check_reached(watched, pilot.layers, layers)
        watched = {name: watched[name] for name in pilot.layers}
        if exact:
            return _exact(model, watched, views, weight, unbiased)
        basis = make_basis(pilot, watched, directions, principal, seed).to(device)
        forms, at_once = None, _AT_ONCE
        if weight is not None:
            with torch.no_grad():
                outputs = torch.stack([model(view) for view in views]).double().mean(0)
            lap = laplacian(len(outputs), _weights(weight, outputs), unbiased, outputs)
            forms, at_once = quadratic_forms(lap, len(views), unbiased), len(outputs)  # forms of all pairs of samples
        found: dict[str, Sums | Operators] = {}
        for name, direction, rows in sketched_rows(model, watched, views, basis, at_once):
            if name not in found:
                shape = (*basis.strata(name), rows.shape[-1], rows.device)
                found[name] = Sums.zeros(*shape) if forms is None else Operators.zeros(*shape)
            part = found[name]
            if isinstance(part, Sums):
                part.add(direction, rows)
            elif forms is not None:
                part.add(direction, rows, forms)
    norms = {}
    for name in watched:
        part = found[name]
        operators = part.operators(len(views), unbiased) if isinstance(part, Sums) else part
        norms[name] = norms_of(operators, name, basis)
    return norms


def norms_of(operators: Operators, name: str, basis: Basis) -> CovarianceOperatorNorms:
    """One layer's norms from its sketched operators."""
    return estimated_norms(operators, len(basis.directions), basis.strata(name)[1], basis.sketches[name].mixes is None)


def check_directions(directions: int, principal: int | None) -> int:
    """Refuse impossible numbers; return how many directions are principal ones."""
    if directions < 2:
        raise ValueError(f"`directions` must be at least 2, got {directions}")
    principal = directions * 5 // 8 if principal is None else principal
    if not 0 <= principal <= directions:
        raise ValueError(f"`principal` must lie between 0 and `directions`={directions}, got {principal}")
    return principal


def check_reached(watched: Mapping[str, nn.Module], reached: Mapping[str, object], asked: Sequence[str] | None) -> None:
    missing = [name for name in watched if name not in reached]
    if missing and asked is not None:
        raise ValueError(f"`layers`: the output of `model` does not depend on {missing}; drop them from `layers`")


def sketching_tapes(
    model: nn.Module, layers: Mapping[str, nn.Module], views: Sequence[Tensor], basis: Basis
) -> list[Tape]:
    """A forward pass of each view."""
    sketches = basis.sketches
    return [
        Tape(
            model,
            layers,
            view,
            lambda name, x: sketches[name].filter(layers[name], x),
            lambda name, kept, g: sketches[name].contract(layers[name], kept, g),
        )
        for view in views
    ]


def sketched_rows(
    model: nn.Module, layers: Mapping[str, nn.Module], views: Sequence[Tensor], basis: Basis, at_once: int = _AT_ONCE
) -> Iterator[tuple[str, int, Tensor]]:
    """Layer, number of the direction, rows ``[2, V, N, s]`` of the next `at_once` samples.

    The first directions are followed to all layers, the others to the head's.
    """
    for some in zip(*(view.split(at_once) for view in views), strict=True):
        tapes = sketching_tapes(model, layers, some, basis)
        directions = basis.directions.to(tapes[0].output, non_blocking=True)
        for a in [*range(basis.followed, basis.directions.shape[1]), *range(basis.followed)]:
            wanted = list(basis.sketches) if a < basis.followed else basis.head
            if not wanted:
                continue
            last = a == basis.followed - 1
            products = [tape.play(directions[:, a], wanted, last) for tape in tapes]
            for name in wanted:
                yield name, a, torch.stack([basis.sketches[name].mix(part[name]) for part in products], 1)


def _exact(
    model: nn.Module,
    watched: dict[str, nn.Module],
    views: Sequence[Tensor],
    weight: Callable[[Tensor], Tensor] | Tensor | None,
    unbiased: bool,
) -> dict[str, CovarianceOperatorNorms]:
    """All output directions and whole rows, a few layers at a time; the sketches are then identities."""
    sketches = {}
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in watched.items()}
    for name, layer in watched.items():
        fan_in, units = fan(layer)
        sketches[name] = LayerSketch(sizes[name], torch.eye(fan_in), torch.eye(units), None)
    norms: dict[str, CovarianceOperatorNorms] = {}
    tapes = sketching_tapes(model, watched, views, Basis(torch.eye(0), 0, 0, [], sketches))
    outputs = torch.stack([tape.output.detach() for tape in tapes])
    _, n, n_out = outputs.shape
    lap = laplacian(n, _weights(weight, outputs.mean(0)), unbiased, outputs)
    todo = list(watched)
    while todo:
        budget = _EXACT_BUDGET // (len(views) * n * n_out)
        chosen: list[str] = []
        while todo and (not chosen or budget >= sizes[todo[0]]):
            chosen.append(todo.pop(0))
            budget -= sizes[chosen[-1]]
        rows: dict[str, Tensor] = {}
        for number, tape in enumerate(tapes):
            for a, direction in enumerate(torch.eye(n_out)):
                for name, row in tape.play(direction, chosen).items():
                    rows.setdefault(name, row.new_empty(len(views), n_out, *row.shape))[number, a] = row
        norms |= {name: exact_norms(rows.pop(name), lap, unbiased) for name in chosen}
    return norms


def _weights(weight: Callable[[Tensor], Tensor] | Tensor | None, outputs: Tensor) -> Tensor | None:
    if weight is None:
        return None
    if callable(weight):
        weight = weight(squared_distance(outputs.double()[:, None], outputs.double()[None]))
    _check_weight(weight, len(outputs))
    return weight


def _check_weight(weight: Tensor, n: int) -> None:
    if weight.shape != (n, n) or not torch.isfinite(weight).all() or not torch.allclose(weight, weight.T):
        raise ValueError(f"`weight` must be a finite symmetric [{n}, {n}] matrix of pairs, got {tuple(weight.shape)}")
