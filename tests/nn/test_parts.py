"""Backbones, heads, target, gradients, optimizer, schedule, collectives."""

import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lightning_ssl.nn import (
    LARS,
    LinearBackbone,
    MLPBackbone,
    SmallConv,
    TargetNetwork,
    add_gradient_noise_,
    build_backbone,
    build_norm,
    build_predictor,
    ema_momentum,
    gather_rows,
    init_head_,
    mix_weights_,
    mlp,
    num_features,
    rank_weight,
    reset_parameters_,
    tangential,
    warmup_cosine,
)
from tests.ddp import run_ranks


@pytest.mark.parametrize("name", ["small_conv", "linear", "mlp", "resnet18", "mobilenet_v3_small"])
def test_backbones_give_the_features_they_promise(name):
    backbone = build_backbone(name)
    assert backbone(torch.randn(2, 3, 32, 32)).shape == (2, num_features(backbone))


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnet_weights_load_in_torchvision(name):
    torch.manual_seed(0)
    ours, theirs = build_backbone(name, stem="imagenet"), torchvision.models.get_model(name, weights=None)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert missing == ["fc.weight", "fc.bias"] and not unexpected
    theirs.fc = nn.Identity()
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_cifar_stem_differs_only_in_the_first_convolution_and_keeps_resolution():
    cifar, imagenet = (build_backbone("resnet18", stem=stem).state_dict() for stem in ("cifar", "imagenet"))
    assert cifar.keys() == imagenet.keys()
    assert [k for k in cifar if cifar[k].shape != imagenet[k].shape] == ["conv1.weight"]
    model = build_backbone("resnet18", stem="cifar")
    shapes = []
    model.layer1.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    model.eval()(torch.zeros(1, 3, 32, 32))
    assert shapes == [(1, 64, 32, 32)]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_small_conv_without_batch_norm_treats_samples_alone(norm):
    model, x = SmallConv(norm=norm), torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(model(x)[:2], model(x[:2]))


def test_theory_backbones():
    x = torch.randn(5, 7)
    linear = LinearBackbone(7, 3)
    torch.testing.assert_close(linear(x), x @ linear.linear.weight.T)
    assert MLPBackbone(7, 16, 3, depth=4)(x).shape == (5, 3)
    assert sum(isinstance(m, nn.Linear) for m in MLPBackbone(7, 16, 3, depth=4).modules()) == 4


def test_bad_backbones_are_refused():
    with pytest.raises(ValueError, match="resnet19"):
        build_backbone("resnet19")
    with pytest.raises(ValueError, match="stem"):
        build_backbone("resnet18", stem="small")
    with pytest.raises(ValueError, match="num_features"):
        num_features(nn.Conv2d(3, 4, 3))
    assert num_features(nn.Sequential(nn.Flatten(), nn.Linear(3072, 11))) == 11


def test_mlp_layout():
    head = mlp([8, 16, 4], "batch", last_norm="batch")
    assert [type(m) for m in head] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d]
    assert head[1].affine and not head[-1].affine
    assert [type(m) for m in mlp([8, 16, 4], "none", last_bias=False)] == [nn.Linear, nn.ReLU, nn.Linear]


def test_predictors():
    assert isinstance(build_predictor("none", 4), nn.Identity)
    assert torch.equal(build_predictor("linear", 4, init="identity").weight, torch.eye(4))
    assert build_predictor("linear", 4, bias=False).bias is None
    assert [type(m) for m in build_predictor("mlp", 4, 8)] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    before = build_predictor("linear", 4, norm="batch", affine=False)
    assert [type(m) for m in before] == [nn.BatchNorm1d, nn.Linear] and before[0].weight is None
    after = build_predictor("linear", 4, norm="batch", norm_place="after")
    assert [type(m) for m in after] == [nn.Linear, nn.BatchNorm1d]
    with pytest.raises(ValueError, match="norm_place"):
        build_predictor("linear", 4, norm="batch", norm_place="inside")
    positive = build_predictor("mlp", 4, 8, init="positive", init_range=0.01)
    assert positive[0].weight.min() >= 0 and positive[0].weight.max() <= 0.01
    with pytest.raises(ValueError, match="none"):
        build_predictor("none", 4, init="identity")
    with pytest.raises(ValueError, match="predictor"):
        build_predictor("quadratic", 4)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_norm_after_a_linear_predictor_undoes_the_range_of_its_weights(place):
    """DDN-v1 Tables 7-9 sweep that range, from 0.003 to 0.05: their BatchNorm comes before."""
    x = torch.randn(64, 16)
    outputs = [
        build_predictor("linear", 16, norm="batch", init="positive", init_range=r, seed=0, norm_place=place)(x)
        for r in (0.003, 0.05)
    ]
    ratio = float(outputs[1].norm() / outputs[0].norm())
    assert ratio == pytest.approx(0.05 / 0.003, rel=1e-4) if place == "before" else ratio < 1.2


def test_xavier_resets_have_xaviers_range():
    layer = nn.Linear(128, 128)
    reset_parameters_(layer, "xavier", seed=1)
    bound = (6 / 256) ** 0.5  # 0.153; PyTorch's default would end at 0.088
    assert 0.99 * bound < layer.weight.abs().max() <= bound and layer.bias.abs().max() == 0


@pytest.mark.parametrize(("init", "deviation", "largest"), [("normal", 0.01, 0.06), ("lecun", 0.88 / 16, 2 / 16)])
def test_head_inits(init, deviation, largest):
    head = mlp([256, 256, 256])
    init_head_(head, init)
    assert head[0].weight.std().item() == pytest.approx(deviation, rel=0.05)
    assert head[0].weight.abs().max() <= largest and head[3].bias.abs().max() == 0
    before = head[0].weight.clone()
    init_head_(head, "default")
    assert torch.equal(before, head[0].weight)
    with pytest.raises(ValueError, match="head_init"):
        init_head_(head, "orthogonal")


@pytest.mark.parametrize(("name", "last"), [("resnet18", "bn2"), ("resnet50", "bn3")])
def test_zero_initialised_residuals_start_as_the_identity(name, last):
    plain, zero = build_backbone(name), build_backbone(name, zero_init_residual=True)
    assert float(getattr(plain.layer2[1], last).weight.abs().min()) == 1
    assert all(float(getattr(b, last).weight.abs().max()) == 0 for layer in (zero.layer1, zero.layer4) for b in layer)
    x = torch.randn(2, zero.layer2[1].conv1.in_channels, 4, 4).relu()
    assert torch.equal(zero.eval().layer2[1](x), x)


def test_a_scale_without_a_shift():
    norm = build_norm("batch", 4, affine="scale")
    assert norm.weight.requires_grad and not norm.bias.requires_grad and norm.bias.abs().max() == 0
    with pytest.raises(ValueError, match="affine"):
        build_norm("batch", 4, affine="shift")


def test_target_follows_and_takes_no_gradient():
    backbone, projector = SmallConv(width=8), mlp([32, 16, 8])
    target = TargetNetwork(backbone, projector)
    start = [p.clone() for p in target.parameters()]
    with torch.no_grad():
        for p in (*backbone.parameters(), *projector.parameters()):
            p.add_(torch.randn_like(p))
    target.follow(backbone, projector, 0.9)
    online = [*backbone.parameters(), *projector.parameters()]
    for now, before, new in zip(target.parameters(), start, online, strict=True):
        torch.testing.assert_close(now, 0.9 * before + 0.1 * new)
    assert not target(torch.randn(4, 3, 32, 32)).requires_grad
    target.follow(backbone, projector, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), online, strict=True))


def test_independent_target_differs():
    backbone, projector = SmallConv(width=8), mlp([32, 16, 8])
    target = TargetNetwork(backbone, projector, "independent")
    assert not torch.equal(target.projector[0].weight, projector[0].weight)
    with pytest.raises(ValueError, match="target_init"):
        TargetNetwork(backbone, projector, "zeros")


def test_momentum_schedule():
    assert ema_momentum(0.99, 50, 100, "constant") == 0.99
    assert ema_momentum(0.99, 0, 100, "cosine") == pytest.approx(0.99)
    assert ema_momentum(0.99, 50, 100, "cosine") == pytest.approx(0.995)
    assert ema_momentum(0.99, 100, 100, "cosine") == pytest.approx(1.0)


def test_tangential_gradient():
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(6, 4, dtype=torch.float64)
    (plain,) = torch.autograd.grad((x - target).square().sum(), x)
    (kept,) = torch.autograd.grad((tangential(x) - target).square().sum(), x)
    unit = F.normalize(x.detach(), dim=1)
    torch.testing.assert_close((kept * unit).sum(1), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(plain - kept, (plain * unit).sum(1, keepdim=True) * unit)


def test_tangential_gradient_is_the_papers_modified_loss_on_unit_vectors():
    z = F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1).requires_grad_()
    teacher = F.normalize(z.detach() + 0.3 * torch.randn(6, 4, dtype=torch.float64), dim=1)
    inner = (z * teacher).sum(1, keepdim=True).detach()
    (paper,) = torch.autograd.grad(((teacher - inner * z).square() / inner).sum(), z)
    (ours,) = torch.autograd.grad((teacher - tangential(z)).square().sum(), z)
    torch.testing.assert_close(ours, paper)


def test_gradient_noise_is_scaled_xavier_on_weight_matrices_only():
    layer = nn.Linear(300, 200)
    layer(torch.randn(4, 300)).sum().backward()
    before = [p.grad.clone() for p in layer.parameters()]
    add_gradient_noise_(layer.parameters(), 0.5, seed=3)
    noise = (layer.weight.grad - before[0]) / 0.5
    assert torch.equal(layer.bias.grad, before[1])
    bound = math.sqrt(6 / 500)
    assert 0.99 * bound < noise.abs().max() <= 1.001 * bound
    assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_weight_mixing():
    layer = nn.Linear(30, 20)
    before = layer.weight.detach().clone()
    mix_weights_(layer.parameters(), 1.0, seed=3)
    drawn = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.copy_(before)
    mix_weights_(layer.parameters(), 0.1, seed=3)
    torch.testing.assert_close(layer.weight.detach(), 0.9 * before + 0.1 * drawn)


def test_lars_step_by_hand():
    w = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    b = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = LARS([w, b], lr=0.1, momentum=0.9, weight_decay=0.5, trust=0.01, vector_lr_scale=0.5)
    w.grad, b.grad = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([2.0]).double()
    optimizer.step()
    update = torch.tensor([[1 + 1.5, 2.0]], dtype=torch.float64)
    update = 0.01 * 5 / update.norm() * update
    torch.testing.assert_close(w.detach(), torch.tensor([[3.0, 4.0]]).double() - 0.1 * update)
    torch.testing.assert_close(b.detach(), torch.tensor([1.0 - 0.1 * 0.5 * 2]).double())
    optimizer.step()  # the bias: momentum 0.9 * 2 + 2
    torch.testing.assert_close(b.detach(), torch.tensor([0.9 - 0.05 * 3.8]).double())


def test_warmup_cosine_is_torchs_and_spares_fixed_groups():
    def optimizer():
        return torch.optim.SGD([{"params": nn.Linear(2, 2).parameters()}], lr=2.0)

    ours = optimizer()
    ours.add_param_group({"params": list(nn.Linear(2, 2).parameters()), "fixed_lr": True, "lr": 0.7})
    schedule = warmup_cosine(ours, total_steps=30, warmup_steps=4)
    theirs = optimizer()
    linear = torch.optim.lr_scheduler.LinearLR(theirs, start_factor=1 / 5, total_iters=4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=26)
    expected = torch.optim.lr_scheduler.SequentialLR(theirs, [linear, cosine], milestones=[4])
    for _ in range(30):
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9)
        assert ours.param_groups[1]["lr"] == 0.7
        for o, s in ((ours, schedule), (theirs, expected)):
            o.step()
            s.step()
    with pytest.raises(ValueError, match="warmup_epochs"):
        warmup_cosine(optimizer(), total_steps=4, warmup_steps=4)


def gather_on_rank(rank, world_size):
    rows = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)
    own = (rows[:1] if rank == 0 else rows[1:]).clone().requires_grad_()
    everything = gather_rows(own)
    # Each rank has another loss: the gradient must be that of their sum.
    (everything.square().sum() * (rank + 1)).backward()
    return everything.detach(), own.grad, rank_weight(len(own), own.device)


def test_gather_rows_over_unequal_ranks():
    rows = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)
    results = run_ranks(2, gather_on_rank)
    for (everything, grad, weight), own in zip(results, (rows[:1], rows[1:]), strict=True):
        assert torch.equal(everything, rows)
        torch.testing.assert_close(grad, 2 * own * 3)
        assert weight == pytest.approx(len(own) * 2 / 5)
