"""Each ablation switch changes exactly what it says."""

import copy

import pytest
import torch

from lightning_ssl.functional import asymmetry, direct_predictor
from lightning_ssl.methods import BYOL, RAFT, DirectPred, SimCLR, SimSiam
from lightning_ssl.nn import add_gradient_noise_
from tests.methods.helpers import fit, make_batch, norm_free, small


def sgd(lr=0.1, **options):
    return lambda params: torch.optim.SGD(params, lr=lr, **options)


def gradients(model, batch):
    model.zero_grad()
    model.losses(batch)["loss"].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def step(model, batch):
    """One optimizer step outside a Trainer."""
    model.zero_grad()
    model.losses(batch)["loss"].backward()
    optimizer = model.optimizer(model.parameter_groups())
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
    optimizer.step()
    model.after_optimizer_step()


@pytest.mark.parametrize("place", ["projector_norm", "predictor_norm"])
@pytest.mark.parametrize("kept,detached", [("mean", "detached_mean"), ("mean,std", "mean,detached_std")])
def test_detached_norm_parts_change_gradients_only(place, kept, detached):
    batch = make_batch(dtype=torch.float64)
    models = [small(BYOL, **{place: norm}).double() for norm in (kept, detached)]
    losses = [m.losses(batch)["loss"].detach() for m in models]
    torch.testing.assert_close(*losses)
    first, second = (gradients(m, batch) for m in models)
    assert not torch.allclose(first["projector.0.weight"], second["projector.0.weight"])


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("method", [BYOL, RAFT, DirectPred])
def test_momentum(method, momentum):
    model = small(method, momentum=momentum, optimizer=sgd())
    before = weights(model.target)
    step(model, make_batch())
    online = [*weights(model.backbone), *weights(model.projector)]
    assert not torch.equal(online[0], before[0])
    for now, old, new in zip(weights(model.target), before, online, strict=True):
        torch.testing.assert_close(now, momentum * old + (1 - momentum) * new)


def test_cosine_momentum_rises_to_one():
    seen = []
    model = small(BYOL, momentum=0.9, momentum_schedule="cosine", optimizer=sgd())
    follow = model.target.follow
    model.target.follow = lambda *args: (seen.append(args[-1]), follow(*args))
    fit(model, batches=4)
    expected = [1 - 0.1 * (torch.cos(torch.tensor(torch.pi * k / 4)).item() + 1) / 2 for k in range(4)]
    assert seen == pytest.approx(expected)


def test_without_stop_gradient_both_sides_take_the_gradient():
    batch = make_batch(dtype=torch.float64)
    options = {"predictor": "linear", "momentum": 0.0}
    stopped, free = (norm_free(BYOL, stop_gradient=s, **options).double() for s in (True, False))
    torch.testing.assert_close(stopped.losses(batch)["loss"], free.losses(batch)["loss"])
    z1, z2 = (free.project(x) for x in batch.views)
    loss = -2 * (torch.cosine_similarity(free.predictor(z1), z2) + torch.cosine_similarity(free.predictor(z2), z1))
    names = [name for name, p in free.named_parameters() if p.requires_grad]
    expected = torch.autograd.grad(loss.mean(), [p for p in free.parameters() if p.requires_grad])
    actual = gradients(free, batch)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(actual[name], gradient)
    assert not torch.allclose(actual["projector.0.weight"], gradients(stopped, batch)["projector.0.weight"])


def test_symmetric_predictor_stays_symmetric_where_the_regular_one_does_not():
    for symmetric in (True, False):
        model = small(BYOL, predictor="linear", symmetric_predictor=symmetric, optimizer=sgd())
        assert (asymmetry(model.predictor.weight) == 0) == symmetric
        step(model, make_batch())
        assert (asymmetry(model.predictor.weight) == 0) == symmetric


def test_predictor_lr_scale_scales_just_the_predictors_step():
    batch, moves = make_batch(), {}
    for scale in (1.0, 5.0):
        model = small(BYOL, predictor="linear", predictor_lr_scale=scale, optimizer=sgd(0.01))
        before = copy.deepcopy(model)
        step(model, batch)
        moves[scale] = [
            [b - a for a, b in zip(weights(getattr(before, part)), weights(getattr(model, part)), strict=True)]
            for part in ("predictor", "backbone")
        ]
    for slow, fast in zip(moves[1.0][0], moves[5.0][0], strict=True):
        torch.testing.assert_close(5 * slow, fast, rtol=1e-3, atol=1e-7)
    for slow, fast in zip(moves[1.0][1], moves[5.0][1], strict=True):
        torch.testing.assert_close(slow, fast)


@pytest.mark.parametrize("encoder,predictor", [(None, None), (0.3, None), (None, 0.2), (0.0, 0.1)])
def test_separate_weight_decays(encoder, predictor):
    model = small(BYOL, weight_decay=encoder, predictor_weight_decay=predictor, optimizer=sgd(weight_decay=0.05))
    groups = model.optimizer(model.parameter_groups()).param_groups
    assert [g["weight_decay"] for g in groups] == [0.05 if x is None else x for x in (encoder, predictor)]
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in model.predictor.parameters()}


def test_predictor_reset_every_t_epochs():
    model = small(
        BYOL, predictor_reset_every=2, predictor_init="positive", predictor_range=0.01, optimizer=sgd(1e-6), seed=3
    )
    seen = []
    start = model.on_train_epoch_start
    model.on_train_epoch_start = lambda: (start(), seen.append(weights(model.predictor)[0]))
    fit(model, batches=2, max_epochs=5)
    for k, w in enumerate(seen):
        assert w.min() >= -1e-3 and w.max() <= 0.011
        assert k == 0 or torch.allclose(w, seen[k - 1], atol=1e-4) == (k % 2 == 1)


def test_predictor_options():
    identity = small(BYOL, predictor="linear", predictor_init="identity", predictor_bias=False)
    assert torch.equal(identity.predictor.weight, torch.eye(8)) and identity.predictor.bias is None
    assert not list(small(BYOL, predictor="none").predictor.parameters())
    ranged = small(BYOL, predictor_init="uniform", predictor_range=0.03)
    assert ranged.predictor[0].weight.abs().max() <= 0.03


def test_tangential_gradients_are_orthogonal_to_the_predictions():
    batch = make_batch(dtype=torch.float64)
    for tangential in (True, False):
        model = norm_free(BYOL, predictor="linear", normalize=False, tangential=tangential).double()
        outputs = []
        model.predictor.register_forward_hook(lambda module, args, out, outputs=outputs: outputs.append(out))
        loss = model.losses(batch)["loss"]
        for p, g in zip(outputs, torch.autograd.grad(loss, outputs), strict=True):
            assert ((p * g).sum(1).abs().max() < 1e-12) == tangential


def test_independent_target_starts_elsewhere():
    for init in ("copy", "independent"):
        model = small(BYOL, target_init=init)
        assert torch.equal(model.target.projector[0].weight, model.projector[0].weight) == (init == "copy")


@pytest.mark.parametrize("freq", [1, 2])
def test_direct_pred_sets_its_predictor(freq):
    model = small(DirectPred, rho=0.0, freq=freq, optimizer=sgd())
    for k in range(1, 4):
        batch = make_batch(seed=k)
        with torch.no_grad():
            f = torch.cat([copy.deepcopy(model).project(x) for x in batch.views]).double()
        step(model, batch)
        expected = direct_predictor(f.T @ f / len(f)).float()
        assert torch.allclose(model.predictor.weight, expected, atol=1e-5) == (k % freq == 0)


def test_direct_pred_does_not_watch_validation():
    model = small(DirectPred, optimizer=sgd())
    fit(model, batches=2, val=2)
    assert model.direct.steps == 2 and model.direct._sums is None


def test_gradient_noise_is_added_at_each_step():
    quiet, noisy = (small(SimCLR, gradient_noise=eta, optimizer=sgd(0.5)) for eta in (0.0, 0.1))
    for model in (quiet, noisy):
        fit(model, batches=1)
    expected = small(SimCLR, optimizer=sgd(0.5))
    expected.losses(make_batch())["loss"].backward()
    add_gradient_noise_(expected.parameters(), 0.1, seed=0)
    expected.optimizer(expected.parameter_groups()).step()
    for a, b, c in zip(noisy.parameters(), expected.parameters(), quiet.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(a, c) == (a.ndim < 2)


def test_weight_noise_mixes_once_an_epoch():
    model = small(SimCLR, gradient_noise=0.5, noise_on="weight", optimizer=sgd(0.0))
    before = weights(model)
    fit(model, batches=3)
    assert all(torch.equal(a, b) == (a.ndim < 2) for a, b in zip(weights(model), before, strict=True))


def test_simsiams_predictor_keeps_its_learning_rate():
    rates = []
    model = small(SimSiam)
    model.on_train_batch_end = lambda *args: rates.append([g["lr"] for g in model.optimizers().param_groups])
    fit(model, batches=5)
    assert [r[1] for r in rates] == [0.06] * 5
    assert rates[0][0] > rates[2][0] > rates[4][0]


@pytest.mark.parametrize("dim", [4, 2048])
def test_bounds_linear_simsiam(dim):
    model = SimSiam(backbone="small_conv", projector="linear", predictor="linear", dim=dim)
    assert isinstance(model.projector, torch.nn.Linear) and isinstance(model.predictor, torch.nn.Linear)
    assert model.project(torch.randn(2, 3, 32, 32)).shape == (2, dim)


def test_partitions_make_the_predictor_depend_on_the_features():
    """A static average of the sides' predictors would be linear in the features."""
    model = small(DirectPred, partitions=2, rho=0.0, optimizer=sgd(), momentum=0.0)
    step(model, make_batch(rows=16))
    z = torch.randn(64, 8)
    scaled = model.predictor(z)
    matrix = torch.linalg.lstsq(z, scaled).solution
    assert (z @ matrix - scaled).norm() > 0.01 * scaled.norm()
    sides = model.predictor.sides(z)
    same = sides.T[:, None].eq(sides.T[None]).all(-1)  # rows that lie on the same sides of both hyperplanes
    group = same[0].nonzero()[:, 0]
    within = torch.linalg.lstsq(z[group], scaled[group]).solution if len(group) >= 8 else None
    assert within is not None and (z[group] @ within - scaled[group]).norm() < 1e-4 * scaled.norm()
    # The loss uses the sides of the batch at hand: those of the batch mean, not of the origin.
    batch = make_batch(rows=16, seed=3)
    model.losses(batch)
    first = model._sides[0]
    projections = model.project(batch.views[0]).double() @ model.predictor.normals.double().T
    assert torch.equal(first, (projections >= projections.mean(0)).T)


def test_a_symmetric_two_layer_predictor_is_its_own_mirror_image_after_each_step():
    model = small(BYOL, symmetric_predictor=True, optimizer=sgd())
    first, second = (m for m in model.predictor if isinstance(m, torch.nn.Linear))
    assert torch.equal(first.weight, second.weight.T)
    before = first.weight.detach().clone()
    step(model, make_batch())
    assert torch.equal(first.weight, second.weight.T) and not torch.equal(first.weight, before)


@pytest.mark.parametrize(("init", "reset", "bound"), [("default", "xavier", 24), ("default", "default", 8)])
def test_resets_draw_as_the_paper_does(init, reset, bound):
    """Xavier's range is sqrt(6 / (fan_in + fan_out)), PyTorch's default 1 / sqrt(fan_in)."""
    model = small(BYOL, predictor_init=init, predictor_reset_init=reset, predictor_reset_every=1)
    fit(model, batches=1, max_epochs=2)
    weight = model.predictor[0].weight  # 8 to 16, a step after its reset
    limit = (6 / bound) ** 0.5 if reset == "xavier" else bound**-0.5
    assert 0.9 * limit < weight.abs().max() < 1.1 * limit


@pytest.mark.parametrize("method", [BYOL, RAFT])
def test_tangential_gradients_change_nothing_of_normalised_losses(method):
    """The loss does not change with a prediction's length, so its gradient has no other part (RAFT Sec. 5)."""
    batch = make_batch(dtype=torch.float64)
    plain, tangential = (gradients(small(method, tangential=t).double(), batch) for t in (False, True))
    for name, gradient in plain.items():
        torch.testing.assert_close(tangential[name], gradient, rtol=1e-9, atol=1e-12)
    bare = {"normalize": False, "predictor": "linear"}
    plain, tangential = (gradients(small(BYOL, tangential=t, **bare).double(), batch) for t in (False, True))
    assert not torch.allclose(plain["predictor.weight"], tangential["predictor.weight"])
