"""What the covariance operators of all layers of a network cost, in training steps of the same batch.

    python benchmarks/covariance_operator.py [--small] [--repeats 1]

Times are ratios of CPU time within this run, on one thread. Two comparisons: the default estimate for all layers of a
CIFAR ResNet-18 with a projector to 128 outputs against one SimCLR step; and exact and estimated norms against
per-sample Jacobians by torch.func, at a size that those survive. That the numbers agree is asserted.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lightning_ssl.functional import covariance_operator, covariance_operator_norms


def cifar_resnet18(outputs: int = 128) -> nn.Module:
    trunk = torchvision.models.resnet18()
    trunk.conv1, trunk.maxpool, trunk.fc = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity(), nn.Identity()
    head = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, outputs))
    return nn.Sequential(trunk, head)


def small_network(outputs: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, outputs),
    )


def training_step(model: nn.Module, views: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    z = F.normalize(model(torch.cat(views)), dim=1)
    similarity = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    loss = F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z) // 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def seconds(function: Callable[[], object], repeats: int) -> float:
    """The fastest of a few runs, in CPU seconds: what other processes do on a busy machine must not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def against_a_training_step(batch: int, repeats: int) -> None:
    torch.manual_seed(0)
    model = cifar_resnet18()
    x = F.interpolate(torch.randn(batch, 3, 8, 8), size=32)
    views = [x + 0.3 * torch.randn_like(x) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    training_step(model, views, optimizer)
    step = seconds(lambda: training_step(model, views, optimizer), repeats)
    print(f"ResNet-18, {batch} x 2 views of 32 x 32, 128 outputs; a training step takes {step:.2f} s")
    for directions, principal in ((4, 2), (8, 5)):
        found = []
        options = {"directions": directions, "principal": principal}
        cost = seconds(lambda o=options, f=found: f.append(covariance_operator_norms(model, views, **o)), repeats)
        norms = found[-1]
        assert len(norms) == 22
        assert all(torch.isfinite(torch.stack(value)).all() for value in norms.values())
        error = torch.stack([value.relative_error for value in norms.values()]).median()
        print(f"  {directions:3d} directions: {cost / step:.2f} training steps, claimed median error {error:.1%}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  peak memory of the process {peak:.1f} GiB (training included)")


def against_jacobians(batch: int, repeats: int) -> None:
    torch.manual_seed(0)
    model = small_network().eval()
    x = torch.randn(batch, 3, 16, 16)
    views = [x + 0.3 * torch.randn_like(x) for _ in range(2)]
    weights = {f"{i}.weight": model[i].weight.detach() for i in (0, 2, 6)}

    def by_jacobians() -> dict[str, Tensor]:
        def output(w: dict[str, Tensor], sample: Tensor) -> Tensor:
            return functional_call(model, w, (sample[None],))[0]

        found = [vmap(jacrev(output), (None, 0))(weights, view) for view in views]
        norms = {}
        for name in weights:
            k = torch.stack([jacobian[name].flatten(2).mT for jacobian in found], 1).detach()
            norms[name.split(".")[0]] = covariance_operator(k, unbiased=True).inter.double().norm()
        return norms

    expected = by_jacobians()
    exact = covariance_operator_norms(model, views, exact=True)
    estimate = covariance_operator_norms(model, views)
    for name, norm in expected.items():
        assert abs(exact[name].inter_norm / norm - 1) < 1e-4, name
        assert abs(estimate[name].inter_norm / norm - 1) < 0.3, name
    slow = seconds(by_jacobians, repeats)
    print(f"a small network, {batch} x 2 views, 64 outputs; per-sample Jacobians and operators take {slow:.2f} s")
    for label, options in (("exact", {"exact": True}), ("default", {})):
        cost = seconds(lambda o=options: covariance_operator_norms(model, views, **o), repeats)
        print(f"  {label}: {slow / cost:.1f} times as fast")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a quarter of the batch")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    against_jacobians(batch=32, repeats=arguments.repeats)
    against_a_training_step(batch=32 if arguments.small else 128, repeats=arguments.repeats)
