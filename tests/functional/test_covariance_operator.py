"""The norms of real networks' covariance operators against Jacobians by brute force."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssl.functional import covariance_operator, covariance_operator_norms, pair_weight, squared_distance


class Shared(nn.Module):
    """One layer called twice, another on several positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.out = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.embed(x))  # [n, 5, 6]
        return self.out(torch.tanh(self.mix(torch.tanh(self.mix(x)))).mean(1))


def stack(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(5))


NETWORKS = {
    "linear": (lambda: stack(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh()), (6,)),
    "conv1d": (lambda: stack(nn.Conv1d(3, 4, 3, padding="same"), nn.ReLU(), nn.Conv1d(4, 6, 2, stride=2)), (3, 8)),
    "conv2d": (lambda: stack(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1, bias=False)), (2, 6, 6)),
    "grouped": (lambda: stack(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)), (4, 6, 6)),
    "strided": (lambda: stack(nn.Conv2d(2, 3, 3, stride=(2, 1), padding=(0, 2)), nn.ReLU()), (2, 7, 5)),
    "dilated": (lambda: stack(nn.Conv2d(2, 3, (3, 2), dilation=2, padding=1), nn.ReLU()), (2, 7, 6)),
    "circular": (lambda: stack(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.ReLU()), (2, 5, 5)),
    "conv3d": (lambda: stack(nn.Conv3d(1, 2, 2), nn.ReLU()), (1, 3, 3, 3)),
    "shared": (Shared, (5, 4)),
    "batchnorm": (lambda: stack(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), (2, 6, 6)),
}


def build(kind, n=5, views=3):
    factory, shape = NETWORKS[kind]
    model = factory().double()
    x = torch.randn(n, *shape, dtype=torch.float64)
    batches = [x + 0.4 * torch.randn_like(x) for _ in range(views)]
    model(batches[0])  # lazy shapes, running statistics
    return model, batches


def oracle(model, views, name, weight=None, unbiased=True):
    """From every sample's Jacobian by torch.func."""
    model.eval()
    key = f"{name}.weight"

    def output(w, sample):
        return functional_call(model, {key: w}, (sample[None],))[0]

    weight_now = model.get_parameter(key).detach()
    k = torch.stack([vmap(jacrev(output), (None, 0))(weight_now, view).flatten(2).mT for view in views], 1)
    inter, intra = covariance_operator(k.detach(), weight=weight, unbiased=unbiased)
    top = torch.linalg.eigvalsh(inter).max()
    return torch.stack([inter.norm(), inter.trace(), top, intra.norm(), intra.trace()])


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("kind", NETWORKS)
def test_exact_mode_equals_brute_force(kind, unbiased):
    model, views = build(kind)
    norms = covariance_operator_norms(model, views, exact=True, unbiased=unbiased)
    assert len(norms) >= 2
    for name, value in norms.items():
        expected = oracle(model, views, name, unbiased=unbiased)
        torch.testing.assert_close(torch.stack(value[:5]), expected, rtol=1e-9, atol=1e-12)
        assert value.relative_error == 0


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("kind", ["grouped", "shared", "batchnorm"])
def test_estimate_is_exact_where_nothing_is_left_out(kind, unbiased):
    """All output directions, layers small enough not to be sketched."""
    model, views = build(kind)
    for name, value in covariance_operator_norms(model, views, directions=5, unbiased=unbiased).items():
        if (
            model.get_submodule(name).weight.numel() <= 256
            and max(model.get_submodule(name).weight[0].numel(), 1) <= 32
        ):
            expected = oracle(model, views, name, unbiased=unbiased)
            torch.testing.assert_close(torch.stack(value[:5]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", ["triplet", "nce"])
def test_pair_weights(loss):
    model, views = build("conv2d")
    xi = partial(pair_weight, loss=loss, tau=0.3, margin=0.1)
    model.eval()
    mean = torch.stack([model(view) for view in views]).mean(0).detach()
    matrix = xi(squared_distance(mean[:, None], mean[None]))
    exact = covariance_operator_norms(model, views, exact=True, weight=xi)
    given = covariance_operator_norms(model, views, exact=True, weight=matrix)
    estimate = covariance_operator_norms(model, views, directions=5, weight=xi)
    for name in exact:
        expected = oracle(model, views, name, weight=matrix)
        torch.testing.assert_close(torch.stack(exact[name][:5]), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(torch.stack(given[name][:5]), expected, rtol=1e-9, atol=1e-12)
    first = torch.stack(estimate["0"][:5])  # 4 units of 18 weights: nothing is sketched
    torch.testing.assert_close(first, torch.stack(exact["0"][:5]), rtol=1e-9, atol=1e-12)
    ones = covariance_operator_norms(model, views, weight=torch.ones(5, 5))
    plain = covariance_operator_norms(model, views)
    for name in ones:
        torch.testing.assert_close(torch.stack(ones[name][:5]), torch.stack(plain[name][:5]), rtol=1e-8, atol=1e-12)


class Block(nn.Module):
    def __init__(self, inputs, units, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, units, 3, stride, 1, bias=False), nn.BatchNorm2d(units)
        self.conv2, self.bn2 = nn.Conv2d(units, units, 3, 1, 1, bias=False), nn.BatchNorm2d(units)
        self.shortcut = nn.Conv2d(inputs, units, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def small_resnet(steps=25):
    """A CIFAR-like ResNet with 64 outputs after a few steps of SimCLR on coloured blobs, and two views of a batch."""
    dice = torch.Generator().manual_seed(0)

    def images(n):
        coarse = torch.randn(n, 3, 4, 4, generator=dice)
        return F.interpolate(coarse, size=12, mode="bilinear")

    def augment(x):
        scale = 0.5 + torch.rand(len(x), 3, 1, 1, generator=dice)
        x = torch.roll(x, torch.randint(-2, 3, (2,), generator=dice).tolist(), (2, 3))
        return x * scale + 0.2 * torch.randn(x.shape, generator=dice)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        x = images(48)
        z = F.normalize(model(torch.cat([augment(x), augment(x)])), dim=1)
        similarity = (z @ z.T / 0.5).fill_diagonal_(-1e9)
        loss = F.cross_entropy(similarity, torch.arange(96).roll(48))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = images(10)
    return model, [augment(x), augment(x)]


@pytest.mark.slow
def test_default_estimate_is_within_5_percent_and_knows_its_error():
    model, views = small_resnet()
    exact = covariance_operator_norms(model, views, exact=True)
    errors, claimed = [], []
    for seed in range(6):
        norms = covariance_operator_norms(model, views, seed=seed)
        errors.append([[float(a / b - 1) for a, b in zip(norms[n][:5], exact[n][:5], strict=True)] for n in exact])
        claimed.append([float(norms[n].relative_error) for n in exact])
    errors, claimed = torch.tensor(errors), torch.tensor(claimed)
    median = errors.abs().median(1).values.mean(0)  # over layers, then the mean over seeds
    print("median error over layers of inter norm, trace, top, intra norm, trace:", median.tolist())
    assert (median[[0, 1, 3, 4]] < 0.05).all()
    assert median[2] < 0.08  # the leading eigenvalue
    ratio = claimed.square().mean().sqrt() / errors[..., 0].square().mean().sqrt()
    print("claimed over true error:", float(ratio))
    assert 0.4 < ratio < 2.5


def test_more_directions_come_closer_and_all_are_best():
    """The sampled strata must add up: averaged over seeds the squared norm is right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 12)).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    views = [x + 0.3 * torch.randn_like(x) for _ in range(2)]
    exact = covariance_operator_norms(model, views, exact=True)["0"]
    found = [covariance_operator_norms(model, views, ["0"], 4, 1, seed=seed)["0"] for seed in range(60)]
    square = torch.stack([f.inter_norm.square() for f in found])
    trace = torch.stack([f.inter_trace for f in found])
    for sample, truth in ((square, exact.inter_norm.square()), (trace, exact.inter_trace)):
        standard_error = sample.std() / 60**0.5
        assert (sample.mean() - truth).abs() < 4 * standard_error
        assert standard_error < 0.1 * truth
    all_of_them = covariance_operator_norms(model, views, ["0"], 12, 1)["0"]
    torch.testing.assert_close(torch.stack(all_of_them[:5]), torch.stack(exact[:5]), rtol=1e-9, atol=1e-12)


def test_sketches_are_unbiased():
    """A layer too large to be kept whole: the squared norm is right on average over seeds, with all directions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 40, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 4, 3)).double()
    x = torch.randn(24, 8, 4, 4, dtype=torch.float64)
    views = [x + 0.5 * torch.randn_like(x) for _ in range(2)]
    exact = covariance_operator_norms(model, views, ["0"], exact=True)["0"]
    found = [covariance_operator_norms(model, views, ["0"], seed=seed)["0"] for seed in range(40)]
    for field, power in (("inter_norm", 2), ("inter_trace", 1), ("intra_norm", 2), ("intra_trace", 1)):
        sample = torch.stack([getattr(f, field) ** power for f in found])
        truth = getattr(exact, field) ** power
        assert (sample.mean() - truth).abs() < 4 * sample.std() / 40**0.5, field
        assert sample.std() > 1e-6 * truth  # it is a sketch
        assert sample.std() < 0.5 * truth


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that is made, views of the weights apart."""

    def __init__(self, model):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.weights:
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("convolution", [False, True])
def test_memory_does_not_depend_on_the_number_of_weights(convolution):
    """Nothing as large as one row of the wide layer, of which there are N x V x directions, is ever made."""
    width = 1000
    if convolution:
        model = nn.Sequential(nn.Conv2d(2, width, 1), nn.Conv2d(width, width, 3, padding=1), nn.AdaptiveAvgPool2d(1))
        x = torch.randn(4, 2, 3, 3)
    else:
        model = nn.Sequential(nn.Linear(2, 3 * width), nn.Linear(3 * width, 3 * width))
        x = torch.randn(4, 2)
    model.append(nn.Flatten()).append(nn.Linear(width if convolution else 3 * width, 12))
    with LargestTensor(model) as largest:
        covariance_operator_norms(model, [x, x + 0.1 * torch.randn_like(x)])
    assert largest.size < model[1].weight.numel() / 4


def snapshot(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return (
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        {k: v.clone() for k, v in model.state_dict().items()},
        grads,
        hooks,
        torch.get_rng_state(),
        torch.is_grad_enabled(),
    )


def test_many_samples_come_in_parts_that_add_up():
    model, views = build("batchnorm", n=150)
    parts = covariance_operator_norms(model, views, directions=3)
    whole = covariance_operator_norms(model, views, directions=3, weight=torch.ones(150, 150))  # takes all at once
    for name, norms in parts.items():
        torch.testing.assert_close(torch.stack(norms), torch.stack(whole[name]), rtol=1e-9, atol=1e-12)


def test_leaves_everything_as_found():
    model, views = build("batchnorm")
    model.train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model(views[0]).sum().backward()
    before = snapshot(model)
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    covariance_operator_norms(model, views)
    with pytest.raises(ValueError, match="non-finite"):
        covariance_operator_norms(model, [v * float("nan") for v in views])
    after = snapshot(model)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002
    assert before[:2] == after[:2]
    assert before[4] == after[4]
    assert before[6] == after[6]
    torch.testing.assert_close(before[2], after[2], rtol=0, atol=0)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(before[3], after[3], strict=True))
    assert torch.equal(before[5], after[5])


def test_frozen_no_grad_inference_and_repeated_calls_agree():
    model, views = build("batchnorm")
    expected = covariance_operator_norms(model, views)
    frozen = covariance_operator_norms(model.requires_grad_(False), views)
    with torch.no_grad():
        silent = covariance_operator_norms(model, views)
    with torch.inference_mode():
        inference = covariance_operator_norms(model, [view * 1 for view in views])
    torch.manual_seed(123)
    again = covariance_operator_norms(model, views)
    for other in (frozen, silent, inference, again):
        for name in expected:
            assert torch.equal(torch.stack(expected[name]), torch.stack(other[name]))
    alone = covariance_operator_norms(model, views, ["0"])  # the dice of a layer do not depend on the others'
    torch.testing.assert_close(torch.stack(alone["0"][:5]), torch.stack(expected["0"][:5]))


def test_layers_that_are_not_called_are_left_out_unless_asked_for():
    model, views = build("linear")
    model.spare = nn.Linear(3, 3)
    model.forward = lambda x: nn.Sequential(*list(model.children())[:-1])(x)
    assert "spare" not in covariance_operator_norms(model, views)
    with pytest.raises(ValueError, match="does not depend on"):
        covariance_operator_norms(model, views, ["0", "spare"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ["00"]}, "no layer '00'; did you mean '0'"),
        ({"layers": ["1"]}, "ReLU, not a Linear"),
        ({"layers": []}, "non-empty list"),
        ({"layers": "0"}, "non-empty list"),
        ({"views": [torch.zeros(4, 6)]}, "at least 2 batches"),
        ({"views": [torch.zeros(4, 6), torch.zeros(3, 6)]}, "equal shapes"),
        ({"views": [torch.zeros(1, 6)] * 2}, "at least 2 samples"),
        ({"directions": 3, "principal": 4}, "principal"),
        ({"directions": 1, "principal": 0}, "directions"),
        ({"weight": torch.ones(2, 2)}, "symmetric"),
    ],
)
def test_bad_input(change, message):
    model, views = build("linear")
    views = [view.float() for view in views]
    with pytest.raises(ValueError, match=message):
        covariance_operator_norms(model.float(), **{"views": views, **change})


def test_outputs_must_be_rows():
    model = nn.Conv2d(3, 4, 3)
    x = torch.randn(4, 3, 5, 5)
    with pytest.raises(ValueError, match="must map a batch"):
        covariance_operator_norms(model, [x, x])
    with pytest.raises(ValueError, match="no Linear or Conv"):
        covariance_operator_norms(nn.Flatten(), [x, x])


def test_a_collapsed_network_has_no_operator():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
    nn.init.zeros_(model[2].weight)
    views = [torch.randn(8, 6) for _ in range(2)]
    value = covariance_operator_norms(model, views)["0"]
    assert torch.equal(torch.stack(value), torch.zeros(6, dtype=torch.float64))


def test_half_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
    views = [torch.randn(8, 6) for _ in range(2)]
    expected = covariance_operator_norms(model, views)
    half = covariance_operator_norms(model.bfloat16(), [view.bfloat16() for view in views])
    for name in expected:
        torch.testing.assert_close(half[name].intra_trace, expected[name].intra_trace, rtol=0.05, atol=0)
