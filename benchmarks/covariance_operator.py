"""The covariance operators of all layers: against per-sample Jacobians, and in training steps.

The peers at sizes they survive, on a five-layer network: each builds its Jacobians (torch.func by `vmap(jacrev)`,
BackPACK by `BatchGrad` along each output) or their Gram matrix (nngeometry), from which the norms follow in the same
way as ours with `exact=True`; all must agree. Ours are the estimates along 16 (the default), 8 and 7 output directions,
with their errors. The training step is SimCLR's on a CIFAR ResNet-18 with 128 outputs, batch 128 in two views, where a
layer's Jacobians alone would take hundreds of gigabytes; errors there are from estimates along all 128 outputs.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks._bench import Row, Section, costs, faster, main, peak_memory, race
from lightning_ssl.functional import covariance_operator_norms
from lightning_ssl.functional.estimate import exact_norms, laplacian, quadratic_forms

VIEWS = 2
SETTINGS = {"16 directions": {}, "8 directions": {"directions": 8}, "7 directions": {"directions": 7, "principal": 5}}
SHORTFALL = """\
Short of three training steps at 5%: each direction is a backward pass through all activations, about a third of a step,
and the error leaves no direction to spare. What comes on top, about a step in all, is the forward pass with its
filters, the pilot, and the other outputs followed through the head."""
Peer = Callable[[nn.Sequential, list[Tensor]], dict[str, float]]


def small_network(outputs: int = 64) -> nn.Sequential:
    """Without biases: nngeometry counts them with the weights."""
    layers: list[nn.Module] = []
    for i, o, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2), (64, 64, 2)):
        layers += [nn.Conv2d(i, o, 3, stride, padding=1, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, outputs, bias=False))


def cifar_resnet18(outputs: int = 128) -> nn.Module:
    trunk = torchvision.models.resnet18()
    trunk.conv1, trunk.maxpool, trunk.fc = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity(), nn.Identity()
    head = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, outputs))
    return nn.Sequential(trunk, head)


def two_views(batch: int) -> list[Tensor]:
    x = F.interpolate(torch.randn(batch, 3, 8, 8), size=32, mode="bilinear")
    return [x + 0.3 * F.interpolate(torch.randn(batch, 3, 8, 8), size=32, mode="bilinear") for _ in range(VIEWS)]


def training_step(model: nn.Module, views: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    z = F.normalize(model(torch.cat(views)), dim=1)
    similarity = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    loss = F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z) // 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def by_torch_func(model: nn.Sequential, views: list[Tensor]) -> dict[str, float]:
    from torch.func import functional_call, jacrev, vmap

    norms = {}
    for name, layer in model.named_children():
        if not hasattr(layer, "weight"):
            continue

        def output(w: Tensor, sample: Tensor, name: str = name) -> Tensor:
            return functional_call(model, {f"{name}.weight": w}, (sample[None],))[0]

        weight = layer.weight.detach()
        with torch.no_grad():
            rows = [vmap(jacrev(output), (None, 0))(weight, view).flatten(2) for view in views]  # N x n_L x P
        norms[name] = norm_of_rows(torch.stack(rows).transpose(1, 2))
    return norms


def by_backpack(model: nn.Sequential, views: list[Tensor]) -> dict[str, float]:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    warnings.filterwarnings("ignore", "Full backward hook is firing")
    model = extend(copy.deepcopy(model))
    rows: dict[str, list[list[Tensor]]] = {}
    for view in views:
        found: dict[str, list[Tensor]] = {}
        outputs = model(view)
        for a in range(outputs.shape[1]):
            model.zero_grad()
            with backpack(BatchGrad(), retain_graph=True):
                outputs[:, a].sum().backward(retain_graph=True)
            for name, p in model.named_parameters():
                if name.endswith("weight"):
                    found.setdefault(name.split(".")[0], []).append(p.grad_batch.flatten(1))
        for name, parts in found.items():
            rows.setdefault(name, []).append(torch.stack(parts))
    return {name: norm_of_rows(torch.stack(parts)) for name, parts in rows.items()}


def by_nngeometry(model: nn.Sequential, views: list[Tensor]) -> dict[str, float]:
    from nngeometry.gram import GramMatrix
    from nngeometry.layercollection import LayerCollection
    from torch.utils.data import DataLoader, TensorDataset

    both = torch.stack(views, 1).flatten(0, 1)  # N V: views of a sample together
    loader = DataLoader(TensorDataset(both, torch.zeros(len(both))), batch_size=len(both))
    norms = {}
    for name, layer in model.named_children():
        if hasattr(layer, "weight"):
            layers = LayerCollection()
            layers.add_layer_from_model(model, layer)
            gram = GramMatrix(model, loader, function=lambda x, _: model(x), layer_collection=layers).data
            norms[name] = norm_of_gram(gram.detach())
    return norms


def norm_of_rows(rows: Tensor) -> float:
    """Norm of VE from rows ``[V, n_L, N, P]``."""
    lap = laplacian(rows.shape[2], None, True, rows)
    return float(exact_norms(rows, lap, unbiased=True).inter_norm)


def norm_of_gram(gram: Tensor) -> float:
    """Norm of VE from the rows' products ``[n_L, N V, n_L, N V]``."""
    n_out, n = gram.shape[0], gram.shape[1] // VIEWS
    form = quadratic_forms(laplacian(n, None, True, gram.double()), VIEWS, True)[0].reshape(n * VIEWS, -1)
    centre = torch.eye(n * VIEWS, dtype=torch.float64) - 1 / (n * VIEWS)
    gram = centre @ gram.double().reshape(n_out, n * VIEWS, -1)
    h = (form @ gram).view(n_out * n * VIEWS, -1)
    return float((h * h.T).sum().sqrt())


def against_jacobians(batch: int, outputs: int, peers: dict[str, Peer]) -> list[Row]:
    torch.manual_seed(0)
    model, views = small_network(outputs).eval(), two_views(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):  # a network that has learned something: its operators are not those of noise
        training_step(model, views, optimizer)
    found: dict[str, dict[str, float]] = {}

    def ours(name: str, **options: Any) -> None:
        norms = covariance_operator_norms(model, views, **options)
        found[name] = {layer: float(norm.inter_norm) for layer, norm in norms.items()}

    # One turn of what takes minutes; answers are compared before a time is given.
    turns = {name: lambda name=name: found.update({name: peers[name](model, views)}) for name in peers}
    seconds = race({"exact": lambda: ours("exact", exact=True), **turns}, 1, warm_up=0)
    seconds |= race({name: lambda n=name, o=options: ours(n, **o) for name, options in SETTINGS.items()}, 3)
    exact = found["exact"]
    for peer in peers:
        assert found[peer].keys() == exact.keys(), (peer, found[peer])
        for layer, norm in exact.items():
            assert abs(found[peer][layer] / norm - 1) < 1e-3, (peer, layer, found[peer][layer], norm)
    rows = []
    work = f"{len(exact)} layers, {batch} x 2 views, {outputs} outputs"
    for name, options in SETTINGS.items():
        errors = []
        for seed in range(5):
            ours(name, seed=seed, **options)
            errors.append(statistics.median(abs(found[name][layer] / exact[layer] - 1) for layer in exact))
        rows.append(error_row(f"{work}, {name}", "exact", errors))
        rows += [faster(f"{work}, {name}", peer, seconds[name], seconds[peer], 50) for peer in peers]
    return rows + [faster(f"{work}, exact", peer, seconds["exact"], seconds[peer]) for peer in peers]


def error_row(work: str, against: str, errors: list[float]) -> Row:
    error = statistics.median(errors)
    assert error < 0.2, errors
    spread = f"{error:.1%} ({min(errors):.1%}-{max(errors):.1%})"
    return Row(f"median error, {work}", against, spread, "", "", "<= 5%", error <= 0.05)


def in_training_steps(model: nn.Module, outputs: int, batch: int, steps: int, seeds: int) -> list[Row]:
    """Error and cost of a few directions, for a network after some steps on fresh data.

    Its Jacobians do not fit anywhere: the errors are from the root mean square of three estimates along all outputs.
    """
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for _ in range(steps):
        training_step(model, two_views(max(8, batch // 4)), optimizer)
    views = two_views(max(8, batch // 8))

    def norms(seed: int, **options: int) -> Tensor:
        found = covariance_operator_norms(model, views, seed=seed, **options)
        return torch.stack([norm.inter_norm for norm in found.values()])

    truth = torch.stack([norms(100 + i, directions=outputs) for i in range(3)]).square().mean(0).sqrt()
    rows = []
    for name, options in SETTINGS.items():
        errors = [float((norms(seed, **options) / truth - 1).abs().median()) for seed in range(seeds)]
        rows.append(error_row(f"{len(truth)} layers, {name}", "all outputs", errors))

    views = two_views(batch)
    contenders = {"step": lambda: training_step(model, views, optimizer)}
    contenders |= {
        name: lambda o=options: covariance_operator_norms(model, views, **o) for name, options in SETTINGS.items()
    }
    seconds = race(contenders, 1, warm_up=0)
    seconds["step"] += race({"step": contenders["step"]}, 2, warm_up=0)["step"]
    for name in SETTINGS:
        rows.append(costs(f"{len(truth)} layers, {name}", "a training step", seconds[name], seconds["step"], 3))
    size = max(p.numel() for p in model.parameters())
    some = {"directions": 2, "principal": 0}  # the directions come one after the other
    memory = peak_memory(lambda: covariance_operator_norms(model, views, **some))
    step = peak_memory(contenders["step"])
    jacobians = size * VIEWS * batch * outputs * 4 / 1e9
    rows.append(Row("peak memory", "a training step", f"{memory:.2f} GB", f"{step:.2f} GB", ""))
    rows.append(Row("peak memory", "largest layer's Jacobians", f"{memory:.2f} GB", f"{jacobians:,.0f} GB", ""))
    return rows


def run(tiny: bool = False) -> Section:
    rows = against_jacobians(*((4, 4) if tiny else (32, 128)), {"torch.func": by_torch_func, "BackPACK": by_backpack})
    rows += against_jacobians(*((4, 4) if tiny else (8, 32)), {"nngeometry": by_nngeometry})
    rows += in_training_steps(*((small_network(8), 8, 8, 2, 1) if tiny else (cifar_resnet18(), 128, 128, 20, 3)))
    return Section(
        rows,
        [] if tiny or all(row.reached is not False for row in rows) else [SHORTFALL],
        ["torchvision", "backpack-for-pytorch", "nngeometry"],
    )


if __name__ == "__main__":
    main(run, threads=1)
