"""Each callback's number on strangers' modules is the functional value on tensors captured another way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_ssl import functional
from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    CovarianceOperatorNorm,
    DirectPredictor,
    EffectiveRank,
    EigenspaceAlignment,
    PredictorReset,
    RepresentationCircle,
    SymmetricPredictor,
    UniformityAlignment,
)
from tests.callbacks import strangers
from tests.callbacks.harness import History, tape, trainer

PREDICTORS = [
    (strangers.LightlyBYOL, "prediction_head"),
    (strangers.LightlySimSiam, "prediction_head"),
    (strangers.DictConcatenated, "predict"),
    (strangers.ManualTwoOptimizers, "predictor"),
    (strangers.MeanLoss, "predictor"),
    (strangers.BoxedEncoder, "predict"),
]
FEATURES = [
    (strangers.LightlyBYOL, "projection_head"),
    (strangers.LightlySimSiam, "backbone"),
    (strangers.LightlySimCLR, "projection_head"),
    (strangers.LightlyBarlowTwins, "projection_head"),
    (strangers.DictConcatenated, "net.head"),
    (strangers.ManualTwoOptimizers, "backbone"),
]


def fit(module, callbacks, samples=64, **options):
    data = strangers.Dicts(samples) if isinstance(module, strangers.DictConcatenated) else strangers.Pairs(samples)
    history = History()
    trainer(callbacks, logger=history, **options).fit(module, strangers.loader(data))
    return history


def steps_of(module, calls, steps):
    """Inputs and outputs of each step's views: of two optimizers' calls the first's."""
    with_grad = [(x.flatten(1).double(), y.flatten(1).double()) for grad, x, y in calls if grad]
    per_step = len(with_grad) // steps
    wanted = min(per_step, 2)
    return [with_grad[i * per_step : i * per_step + wanted] for i in range(steps)]


@pytest.mark.parametrize(("cls", "path"), PREDICTORS, ids=[cls.__name__ for cls, _ in PREDICTORS])
def test_eigenspace_alignment(cls, path, tmp_path):
    module = cls()
    predictor = module.get_submodule(path)
    weights = []
    if isinstance(predictor, nn.Linear):
        predictor.register_forward_hook(lambda m, a, o: weights.append(m.weight.detach().double().clone()))
    calls = tape(predictor)
    callback = EigenspaceAlignment(path, every_n_steps=1)
    history = fit(module, [callback], default_root_dir=tmp_path)
    for step, views in enumerate(steps_of(module, calls, 4)):
        inputs, outputs = (torch.cat(parts) for parts in zip(*views, strict=True))
        F = functional.second_moment(inputs)
        linear = isinstance(predictor, nn.Linear)
        W = weights[step * len(weights) // 4] if linear else functional.effective_predictor(inputs, outputs)
        expected = functional.eigenspace_alignment(F, W)
        cosines, s = expected.cosines, expected.eigenvalues.clamp_min(0)
        for key, value in {
            "alignment_mean": cosines.mean(),
            "alignment_weighted": (cosines * s).sum() / s.sum(),
            "commutator_norm": functional.commutator_norm(F, W),
            "asymmetry": functional.asymmetry(W),
            "smallest_symmetric_value": torch.linalg.eigvalsh((W + W.T) / 2)[0],
        }.items():
            assert history.series(f"predictor/{key}")[step] == pytest.approx(float(value), rel=1e-5, abs=1e-6), key
        assert callback._spectra[step][1] == pytest.approx(expected.predictor_values.float(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("cls", "path"), FEATURES, ids=[cls.__name__ for cls, _ in FEATURES])
def test_feature_callbacks(cls, path):
    module = cls()
    calls = tape(module.get_submodule(path))
    callbacks = [
        UniformityAlignment(path, every_n_steps=1),
        CorrelationBound(path, num_classes=4, unbiased=False, every_n_steps=1),
        EffectiveRank(path, every_n_steps=1),
        CollapseMonitor(path, every_n_steps=1),
        RepresentationCircle(path, every_n_steps=2),
    ]
    history = fit(module, callbacks)
    for step, views in enumerate(steps_of(module, calls, 4)):
        rows = torch.cat([y for _, y in views])
        l_cor = functional.correlation_loss(rows)
        unit = nn.functional.normalize(rows, dim=1)
        deviations = unit.std(dim=0, correction=0) * rows.shape[1] ** 0.5
        for key, value in {
            "train/l_cor": l_cor,
            "train/l_bound": functional.generalization_bound(l_cor, rows.shape[1], 4),
            "train/effective_rank": functional.effective_rank(rows),
            "train/feature_std": deviations.mean(),
            "train/alive_dimensions": (deviations > 0.01).double().mean(),
            "collapse/std": deviations.mean(),
            "collapse/rank": 1 / (torch.linalg.eigvalsh(unit.T.cov()) / unit.T.cov().trace()).square().sum(),
        }.items():
            assert history.series(key)[step] == pytest.approx(float(value), rel=1e-4), key
    assert set(history.series("circle/explained_variance")) == {0, 2}


def test_an_accumulated_step_is_seen_once_and_by_its_first_batch():
    module = strangers.MeanLoss()
    calls = tape(module.projector)
    history = fit(module, [UniformityAlignment("projector", every_n_steps=1)], accumulate_grad_batches=2)
    views = steps_of(module, calls, 4)
    assert set(history.series("train/alignment")) == {0, 1}
    for step, micro_batch in ((0, 0), (1, 2)):
        (_, first), (_, second) = views[micro_batch]
        expected = float(functional.alignment(first, second))
        assert history.series("train/alignment")[step] == pytest.approx(expected, rel=1e-6)


def test_epochs_as_interval():
    history = fit(
        strangers.MeanLoss(), [EffectiveRank("projector", every_n_steps=None, every_n_epochs=2)], max_epochs=5
    )
    assert set(history.series("train/effective_rank")) == {0, 8, 16}


def test_two_instances_keep_their_keys_apart():
    callbacks = [
        UniformityAlignment("projector"),
        UniformityAlignment("backbone"),
        UniformityAlignment("predictor", name="p"),
    ]
    history = fit(strangers.MeanLoss(), callbacks)
    keys = {key for _, row in history.rows for key in row if key.endswith("uniformity")}
    assert keys == {"train/projector/uniformity", "train/backbone/uniformity", "train/p/uniformity"}
    assert len({callback.state_key for callback in callbacks}) == 3


def test_acting_on_a_strangers_predictor():
    module = strangers.MeanLoss()
    calls = tape(module.predictor)
    fit(module, [DirectPredictor("predictor", rho=0.0, eps=0.2)])
    inputs = torch.cat([x for x, _ in steps_of(module, calls, 4)[-1]])
    expected = functional.direct_predictor(functional.second_moment(inputs), eps=0.2)
    torch.testing.assert_close(module.predictor.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)

    module = strangers.ManualTwoOptimizers()
    fit(module, [SymmetricPredictor("predictor")])
    assert torch.equal(module.predictor.weight, module.predictor.weight.T)

    module = strangers.LightlyBYOL()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    fit(module, [PredictorReset("prediction_head", every_n_epochs=1, init="uniform", init_range=1e-3)], max_epochs=2)
    assert 0 < module.prediction_head.layers[0].weight.abs().max() <= 1e-3  # an MLP; the draw is not the default one
    assert module.projection_head.layers[0].weight.abs().max() > 1e-2


def test_what_happens_between_encoder_and_head_is_seen_or_said():
    class Scaled(strangers.MeanLoss):
        def step(self, batch):
            z0, z1 = (self.projector(2 * self.backbone(x)) for x in batch[0])
            return (self.predictor(z0) - z1.detach()).square().mean()

    with pytest.warns(UserWarning, match="between 'backbone' and 'projector' that is not repeated here"):
        history = fit(Scaled(), [CovarianceOperatorNorm(name="scaled", every_n_steps=9)])
    assert not history.series("cov_op/scaled/projector")  # no number is better than one of another network


class FirstToken(nn.Module):
    def forward(self, x):
        return x[:, 0]


@pytest.mark.parametrize(
    ("cls", "encoder", "output"),
    [
        (strangers.LightlySimCLR, "backbone", "projection_head"),
        (strangers.LightlyBYOL, "backbone", "backbone"),
        (strangers.DictConcatenated, "net.encoder", "net.head"),
        (strangers.ManualTwoOptimizers, "backbone", "backbone.0.3"),
        (strangers.MultiCrop, "student", "head"),
        (strangers.BoxedEncoder, "encoder", "output"),
    ],
)
def test_covariance_operator_norm(cls, encoder, output, recwarn):
    module = cls()
    twin = cls()
    twin.load_state_dict(module.state_dict())
    calls = tape(module.get_submodule("encoder.trunk" if cls is strangers.BoxedEncoder else encoder))
    callback = CovarianceOperatorNorm(encoder=encoder, output=output, exact=True, every_n_steps=3, samples=12)
    history = fit(module, [callback])
    entered = [x for grad, x, _ in calls if grad]
    together = cls in (strangers.DictConcatenated, strangers.MultiCrop)
    views = entered[0].chunk(2) if together else entered[:2]
    first, second = (view[:12] for view in views)
    encode, head = twin.get_submodule(encoder), twin.get_submodule(output)
    if cls is strangers.MultiCrop:
        model = nn.Sequential(encode, FirstToken(), head)
    elif cls is strangers.BoxedEncoder:
        model = nn.Sequential(encode.trunk, FirstToken(), encode.pooler, nn.Tanh(), head)
    elif encoder == output:
        model = nn.Sequential(encode, nn.Flatten())
    elif output.startswith(encoder):
        model = nn.Sequential(*list(encode[0])[:4], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    else:
        model = nn.Sequential(encode, nn.Flatten(), head)
    together = [view for view, _ in zip(views, range(2), strict=False)]
    if cls in (strangers.DictConcatenated, strangers.MultiCrop):
        together = [entered[0], entered[0]]  # normalised in one call
    expected = operators(model, [first, second], together)
    logged = {key: value for step, row in history.rows if step == 0 for key, value in row.items()}
    names = [key for key in logged if key.startswith("cov_op/")]
    assert len(names) == len(expected) >= 2
    for key, (inter, intra) in zip(names, expected, strict=True):
        layer = key.removeprefix("cov_op/")
        assert logged[key] == pytest.approx(float(inter.norm()), rel=1e-3), layer
        assert logged[f"cov_op_trace/{layer}"] == pytest.approx(float(inter.trace()), rel=1e-3)
        assert logged[f"cov_op_intra/{layer}"] == pytest.approx(float(intra.norm()), rel=1e-3)
    assert {step for step, row in history.rows if names[0] in row} == {0, 3}
    assert not [str(w.message) for w in recwarn if "CovarianceOperatorNorm" in str(w.message)]


def operators(model, views, normalised_with):
    """Each layer's operators from Jacobians of single samples, normalisations held at the statistics of the step."""
    layers = [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
    rows = {name: [] for name in layers}
    for view, batch in zip(views, normalised_with, strict=True):
        frozen = copy.deepcopy(model).train()
        for part in frozen.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.momentum = 1.0
                # Its input's own variance, not the unbiased one that running statistics keep.
                part.register_forward_pre_hook(lambda m, args: setattr(m, "seen", args[0].detach()))
        frozen(batch)
        for part in frozen.eval().modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                axes = [axis for axis in range(part.seen.ndim) if axis != 1]
                part.running_var, part.running_mean = torch.var_mean(part.seen, dim=axes, correction=0)
        for name in layers:
            weight = f"{name}.weight"

            def output(w, x, frozen=frozen, weight=weight):
                return torch.func.functional_call(frozen, {weight: w}, x[None])[0]

            value = dict(frozen.named_parameters())[weight].detach()
            rows[name].append(torch.stack([torch.func.jacrev(output)(value, x).flatten(1).T for x in view]))
    return [functional.covariance_operator(torch.stack(rows[name], dim=1).double(), unbiased=True) for name in layers]
