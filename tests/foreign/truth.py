"""What the callbacks should say, computed another way: from tensors caught by wrapping `forward`, in double precision.

Nothing of `lightning_ssl.callbacks` is used here. The network of a step is had again by running the step itself on a
twin of the module; which rows are which samples is written down by hand for each case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ssl import functional

NUM_CLASSES = 4


# Catching ------------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of a submodule: with gradients or not, the tensors that entered and those that left, in order."""

    grad: bool
    entered: list[Tensor]
    left: list[Tensor]


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of a nested structure, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors(getattr(value, each.name))


class Tape:
    """Wraps the `forward` of some submodules; puts their calls into `current`, while there is one and it is `on`.

    Args:
        module: the module.
        paths: dotted paths of the submodules.
        graph: keep outputs as they are, with their graph.
    """

    def __init__(self, module: nn.Module, paths: Sequence[str], graph: bool = False) -> None:
        self.on = True
        self.current: dict[str, list[Call]] | None = None
        self._graph = graph
        for path in dict.fromkeys(paths):
            self._wrap(module.get_submodule(path), path)

    def _wrap(self, part: nn.Module, path: str) -> None:
        forward = part.forward

        def taped(*args: Any, **kwargs: Any) -> Any:
            if not self.on or self.current is None:
                return forward(*args, **kwargs)
            entered = [x.detach().clone() for x in tensors((args, kwargs))]
            output = forward(*args, **kwargs)
            keep = (lambda x: x) if self._graph else (lambda x: x.detach().clone())
            left = [keep(x) for x in tensors(output) if x.is_floating_point()]
            self.current.setdefault(path, []).append(Call(torch.is_grad_enabled(), entered, left))
            return output

        part.forward = taped  # type: ignore[method-assign]


@dataclass
class Snapshot:
    """What a step starts from."""

    state: dict[str, Tensor]
    rng: Tensor
    batch: Any
    batch_idx: int


@dataclass
class Caught:
    """A whole run without any callback of ours."""

    steps: list[dict[str, list[Call]]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    held_out: list[dict[str, list[Call]]] = field(default_factory=list)
    trainer: Any = None
    module: Any = None


# From a tensor to rows -----------------------------------------------------------------------------------------------

_POSITIONS = {"NC": (), "NCHW": (2, 3), "NHWC": (1, 2), "NLC": (1,), "NCL": (2,), "LNC": (0,)}


def rows_of(x: Tensor, layout: str | Callable[[Tensor], Tensor]) -> Tensor:
    """[N, d]: the mean over positions."""
    if callable(layout):
        return layout(x)
    dims = _POSITIONS[layout]
    return x.mean(dims) if dims else x


def interleaved(rows: Tensor, views: int = 2) -> list[Tensor]:
    """Rows 0, 1 are the views of sample 0."""
    return [rows[k::views] for k in range(views)]


def blocked(rows: Tensor, views: int = 2) -> list[Tensor]:
    """The first view of all samples, then the second."""
    return list(rows.chunk(views))


# Quantities of features ----------------------------------------------------------------------------------------------


def uniformity(rows: Tensor, t: float = 2.0) -> float:
    unit = F.normalize(rows.double(), dim=1)
    return float(torch.exp(-t * torch.pdist(unit).square()).mean().log())


def alignment(first: Tensor, second: Tensor) -> float:
    difference = F.normalize(first.double(), dim=1) - F.normalize(second.double(), dim=1)
    return float(difference.square().sum(dim=1).mean())


def effective_rank(rows: Tensor) -> float:
    s = torch.linalg.svdvals(rows.double())
    p = s / s.sum()
    return float(torch.special.entr(p).sum().exp())


def l_cor(rows: Tensor, unbiased: bool = True) -> float:
    """||Lambda - I||^2 = ||Lambda||^2 - 2 tr Lambda + d, through the Gram matrix of the rows: any width will do."""
    n, dim = rows.shape
    unit = F.normalize(rows.double(), dim=1)
    squared = float((unit @ unit.T).square().sum()) * dim**2 / n**2
    if unbiased:
        squared = (n * squared - dim**2) / (n - 1)
    return squared - dim


def spread(rows: Tensor) -> tuple[float, float, float]:
    """Mean deviation and share of living dimensions of the normalised rows, participation ratio."""
    unit = F.normalize(rows.double(), dim=1)
    centred = unit - unit.mean(dim=0)
    deviations = centred.square().mean(dim=0).sqrt() * rows.shape[1] ** 0.5
    variances = torch.linalg.svdvals(centred).square()
    return (
        float(deviations.mean()),
        float((deviations > 0.01).double().mean()),
        float(variances.sum().square() / variances.square().sum()),
    )


def explained_variance(rows: Tensor) -> float:
    """The share of the plane of a picture about the origin."""
    squares = torch.linalg.svdvals(F.normalize(rows.double(), dim=1)).square()
    return float(squares[:2].sum() / squares.sum())


def feature_values(views: Sequence[Tensor], stage: str = "train") -> dict[str, float]:
    """What the watchers of features should log for views [N, d] of the same samples."""
    rows = torch.cat([view.double() for view in views])
    deviation, alive, participation = spread(rows)
    correlation = l_cor(rows)
    dim = rows.shape[1]
    values = {
        f"{stage}/uniformity": sum(uniformity(view) for view in views) / len(views),
        f"{stage}/effective_rank": effective_rank(rows),
        f"{stage}/feature_std": deviation,
        f"{stage}/alive_dimensions": alive,
        f"{stage}/l_cor": correlation,
        f"{stage}/l_bound": 2 / dim**2 * correlation + (NUM_CLASSES - dim) / dim**2,
    }
    if len(views) > 1:
        pairs = [alignment(first, second) for first, second in combinations(views, 2)]
        values[f"{stage}/alignment"] = sum(pairs) / len(pairs)
    if stage == "train":
        values |= {"collapse/std": deviation, "collapse/rank": participation}
        values["circle/explained_variance"] = explained_variance(rows)
    return values


# What needs the views to be told apart; the others are the same in any order of the rows.
PAIRED = {"uniformity", "alignment"}


def predictor_values(inputs: Tensor, outputs: Tensor, weight: Tensor | None) -> dict[str, float]:
    """DirectPred's quantities of a predictor, from the rows that entered and left it."""
    inputs, outputs = inputs.double(), outputs.double()
    moment = inputs.T @ inputs / len(inputs)
    W = weight.double() if weight is not None else functional.effective_predictor(inputs, outputs)
    s, u = torch.linalg.eigh(moment)
    image = W @ u
    cosines = (u * image).sum(dim=0) / image.norm(dim=0)
    s = s.clamp_min(0)
    commutator = moment @ W - W @ moment
    return {
        "predictor/alignment_mean": float(cosines.mean()),
        "predictor/alignment_weighted": float((cosines * s).sum() / s.sum()),
        "predictor/commutator_norm": float(commutator.norm() / (moment.norm() * W.norm())),
        "predictor/asymmetry": float((W - W.T).norm() / W.norm()),
        "predictor/smallest_symmetric_value": float(torch.linalg.eigvalsh((W + W.T) / 2)[0]),
        "predictor/eigenvalue_max": float(s[-1]),
    }


# The covariance operator ---------------------------------------------------------------------------------------------


def hold_statistics(module: nn.Module) -> None:
    """The step's network, as a map of each sample alone: eval mode, batch statistics of the call held constant."""
    module.eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            _hold(part)


def _hold(norm: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        mean = x.detach().mean(dims).view(shape)
        variance = x.detach().var(dims, unbiased=False).view(shape)
        y = (x - mean) / (variance + norm.eps).sqrt()
        if norm.affine:
            y = y * norm.weight.view(shape) + norm.bias.view(shape)
        # timm's norms hold their activation.
        return norm.act(norm.drop(y)) if hasattr(norm, "act") and hasattr(norm, "drop") else y

    norm.forward = forward


def jacobians(views: Sequence[Tensor], weight: Tensor, samples: int) -> Tensor:
    """K of each sample and view, [N, V, P, n_L]: the outputs' gradients with respect to `weight`, one by one."""
    n, dim = min(samples, len(views[0])), views[0].shape[1]
    k = weight.new_zeros(n, len(views), weight.numel(), dim)
    for v, view in enumerate(views):
        for i in range(n):
            for o in range(dim):
                (gradient,) = torch.autograd.grad(view[i, o], weight, retain_graph=True, allow_unused=True)
                if gradient is not None:
                    k[i, v, :, o] = gradient.flatten()
    return k.double()


def operator_values(views: Sequence[Tensor], weights: Mapping[str, Tensor], samples: int) -> dict[str, float]:
    """Norms of both operators of each layer; `views` are rows of the output, with their graph."""
    values = {}
    for layer, weight in weights.items():
        inter, intra = functional.covariance_operator(jacobians(views, weight, samples), unbiased=True)
        values[f"cov_op/{layer}"] = float(inter.norm())
        values[f"cov_op_trace/{layer}"] = float(inter.trace())
        values[f"cov_op_intra/{layer}"] = float(intra.norm())
    return values


class _NoOptimizer:
    def zero_grad(self, *args: Any, **kwargs: Any) -> None: ...

    def step(self, *args: Any, **kwargs: Any) -> None: ...


def run_again(twin: Any, snapshot: Snapshot, trainer: Any, paths: Sequence[str]) -> dict[str, list[Call]]:
    """The calls of one step, run once more on a twin with the step's statistics and no randomness of layers."""
    twin.load_state_dict(snapshot.state)
    hold_statistics(twin)
    tape = Tape(twin, paths, graph=True)
    tape.current = {}
    twin.log = twin.log_dict = lambda *args, **kwargs: None
    twin.manual_backward = lambda *args, **kwargs: None
    pretended = [_NoOptimizer() for _ in trainer.optimizers]
    twin.optimizers = lambda *args, **kwargs: pretended if len(pretended) > 1 else pretended[0]
    twin.trainer = trainer
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(snapshot.rng)
        twin.training_step(snapshot.batch, snapshot.batch_idx)
    return tape.current


# Probes --------------------------------------------------------------------------------------------------------------


def probe_values(
    bank: Tensor, bank_labels: Tensor, rows: Tensor, labels: Tensor, k: int, l2: float
) -> dict[str, float]:
    """Accuracies on rows [N, d] of the features that the probe should see."""
    bank, rows = bank.float(), rows.float()
    ranked = functional.knn_predict(rows, bank, bank_labels, NUM_CLASSES, k, 0.1)
    weight, bias = functional.fit_linear_probe(bank, bank_labels, NUM_CLASSES, l2)
    linear = (rows @ weight.T + bias).argmax(dim=1)
    return {
        "val/knn_top1": float((ranked[:, 0] == labels).double().mean()),
        "val/linear_top1": float((linear == labels).double().mean()),
    }
