"""Precision, compiled submodules, strategies, and wrong uses, each with the words a person needs."""

from __future__ import annotations

import ast
import copy
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ssl import callbacks as ours
from lightning_ssl import functional
from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    CovarianceOperatorNorm,
    DirectPredictor,
    EffectiveRank,
    EigenspaceAlignment,
    KNNProbe,
    LinearProbe,
    PredictorReset,
    RepresentationCircle,
    SymmetricPredictor,
    UniformityAlignment,
)
from tests.callbacks import strangers
from tests.callbacks.harness import History, tape, trainer


def fit(module, callbacks, **options):
    history = History()
    run = trainer(callbacks, logger=history, **options)
    run.fit(module, strangers.loader(strangers.Pairs(64)))
    return history


def all_watchers(data):
    return [
        UniformityAlignment("projector", every_n_steps=1),
        CorrelationBound("projector", num_classes=4, every_n_steps=1),
        EffectiveRank("projector", every_n_steps=1),
        EigenspaceAlignment("predictor", every_n_steps=1),
        CollapseMonitor("projector", every_n_steps=1),
        CovarianceOperatorNorm(every_n_steps=2),
        KNNProbe("backbone", data, k=5),
        LinearProbe("backbone", data, l2=1e-2),
    ]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(precision):
    module = strangers.MeanLoss()
    calls = tape(module.projector)
    data = tuple(strangers.loader(strangers.Labelled(n)) for n in (32, 16))
    history = fit(module, all_watchers(data), precision=precision)
    (_, _, first), (_, _, second) = calls[:2]
    assert first.dtype == (torch.float64 if precision == "64-true" else torch.bfloat16)
    expected = (functional.uniformity(first.double()) + functional.uniformity(second.double())) / 2
    assert history.series("train/uniformity")[0] == pytest.approx(float(expected), rel=1e-5)
    expected = functional.effective_rank(torch.cat([first, second]).double())
    assert history.series("train/effective_rank")[0] == pytest.approx(float(expected), rel=1e-5)
    keys = {key for _, row in history.rows for key in row}
    assert {"predictor/alignment_mean", "cov_op/projector", "val/knn_top1", "val/linear_top1", "train/l_cor"} <= keys
    assert all(torch.isfinite(torch.tensor(float(value))) for _, row in history.rows for value in row.values())


INDUCTOR = pytest.param(
    "inductor",
    marks=[pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")],
)


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_submodules(how, backend):
    plain, compiled = strangers.MeanLoss(), strangers.MeanLoss()
    compiled.load_state_dict(plain.state_dict())
    if how == "wrapped":
        compiled.backbone = torch.compile(compiled.backbone, backend=backend)
        compiled.projector = torch.compile(compiled.projector, backend=backend)
    else:
        compiled.backbone.compile(backend=backend)
        compiled.projector.compile(backend=backend)
    data = tuple(strangers.loader(strangers.Labelled(n)) for n in (32, 16))
    one, other = (fit(module, all_watchers(data)) for module in (plain, compiled))
    assert len(one.series("train/uniformity")) == 4
    for key in ("train/uniformity", "train/alignment", "predictor/alignment_mean", "val/knn_top1"):
        assert other.series(key) == pytest.approx(one.series(key), rel=1e-4), key


def test_gradient_checkpointing_adds_no_views():
    class Checkpointed(strangers.MeanLoss):
        def step(self, batch):
            encode = lambda x: self.projector(self.backbone(x))  # noqa: E731
            z0, z1 = (torch.utils.checkpoint.checkpoint(encode, x, use_reentrant=False) for x in batch[0])
            return (self.predictor(z0) - z1.detach()).square().mean()

    module, plain = Checkpointed(), strangers.MeanLoss()
    plain.load_state_dict(module.state_dict())
    values = [fit(m, [UniformityAlignment("projector", every_n_steps=9)]).rows[0][1] for m in (module, plain)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


NAMES = [
    *("CollapseMonitor", "CorrelationBound", "CovarianceOperatorNorm", "DirectPredictor", "EffectiveRank"),
    *("EigenspaceAlignment", "KNNProbe", "LinearProbe", "PredictorReset", "RepresentationCircle"),
    *("SymmetricPredictor", "UniformityAlignment"),
]


@pytest.mark.parametrize("name", NAMES)
def test_sharded_strategies_are_refused(name):
    cls = getattr(ours, name)
    module = strangers.MeanLoss()
    callback = cls()
    for strategy in (FSDPStrategy.__new__(FSDPStrategy), type("DeepSpeedStrategy", (SingleDeviceStrategy,), {})):
        strategy = strategy.__new__(strategy) if isinstance(strategy, type) else strategy
        with pytest.raises(MisconfigurationException, match=rf"{name}.*use strategy='ddp'"):
            callback.setup(SimpleNamespace(strategy=strategy, callbacks=[callback], global_step=0), module, "fit")


class Identity(strangers.MeanLoss):
    def __init__(self):
        super().__init__()
        self.projector, self.predictor = nn.Linear(16, 8), nn.Identity()


class Narrow(strangers.MeanLoss):
    def __init__(self):
        super().__init__()
        self.predictor = nn.Linear(8, 4)


WRONG = [
    (UniformityAlignment("projectr"), strangers.MeanLoss, "`features` names 'projectr'.*Did you mean 'projector'"),
    (EffectiveRank(""), strangers.MeanLoss, "`features` must be the dotted path"),
    (CorrelationBound("backbone.9"), strangers.MeanLoss, "Submodules there are: backbone, backbone.0"),
    (CollapseMonitor(), strangers.LightlyBYOL, "'projector'.*Did you mean 'projection_head'"),
    (KNNProbe("encoder"), strangers.MeanLoss, "`encoder` names 'encoder'"),
    (LinearProbe("bakbone"), strangers.MeanLoss, "Did you mean 'backbone'"),
    (EigenspaceAlignment("prediktor"), strangers.MeanLoss, "Did you mean 'predictor'"),
    (EigenspaceAlignment(), Identity, "has no weights"),
    (EigenspaceAlignment(), Narrow, "maps 8 dimensions to 4"),
    (EigenspaceAlignment(previous="backbone.1"), strangers.MeanLoss, "does not end in an nn.Linear"),
    (SymmetricPredictor(), Narrow, "one square nn.Linear"),
    (SymmetricPredictor("prediction_head"), strangers.LightlyBYOL, "one square nn.Linear"),
    (DirectPredictor("prediction_head"), strangers.LightlyBYOL, "one square nn.Linear"),
    (DirectPredictor(), Identity, "has no weights"),
    (PredictorReset(init="identity"), Narrow, "one square nn.Linear"),
    (CovarianceOperatorNorm(["backbone.1"]), strangers.MeanLoss, "'backbone.1', a Flatten: only Linear and Conv"),
    (CovarianceOperatorNorm(["predictor"]), strangers.MeanLoss, "lies neither in encoder='backbone' nor"),
    (CovarianceOperatorNorm(output="head"), strangers.MeanLoss, "`output` names 'head'"),
]


@pytest.mark.parametrize(
    ("callback", "cls", "message"), WRONG, ids=[f"{type(w[0]).__name__}-{i}" for i, w in enumerate(WRONG)]
)
def test_wrong_places(callback, cls, message):
    with pytest.raises(MisconfigurationException, match=message):
        trainer([callback]).fit(cls(), strangers.loader(strangers.Pairs(16)))


BAD = [
    (UniformityAlignment, {"t": 0.0}, "`t` must be positive"),
    (UniformityAlignment, {"alpha": -1.0}, "`alpha` must be positive"),
    (UniformityAlignment, {"views": 0}, "`views`"),
    (UniformityAlignment, {"every_n_steps": 0}, "`every_n_steps` must be a positive integer"),
    (EffectiveRank, {"every_n_steps": None}, "both are None"),
    (CorrelationBound, {"num_classes": 0}, "`num_classes`"),
    (CollapseMonitor, {"patience": 0}, "`patience`"),
    (CollapseMonitor, {"complete": 2.0}, "`complete`"),
    (RepresentationCircle, {"pairs": -1}, "`pairs`"),
    (EigenspaceAlignment, {"predictor_lr_scale": 0.0}, "`predictor_lr_scale`"),
    (CovarianceOperatorNorm, {"layers": "backbone"}, "`layers` must be a list"),
    (CovarianceOperatorNorm, {"samples": 1}, "`samples`"),
    (CovarianceOperatorNorm, {"weight": "mse"}, "`weight`"),
    (KNNProbe, {"k": 0}, "`k` must be at least 1"),
    (KNNProbe, {"temperature": 0.0}, "`temperature`"),
    (KNNProbe, {"num_classes": 1}, "`num_classes`"),
    (LinearProbe, {"l2": 0.0}, "`l2`"),
    (LinearProbe, {"every_n_epochs": -1}, "`every_n_epochs`"),
    (DirectPredictor, {"rho": 1.0}, "`rho`"),
    (PredictorReset, {"every_n_epochs": 0}, "`every_n_epochs`"),
    (PredictorReset, {"init": "uniform"}, "`init_range`"),
]


@pytest.mark.parametrize(("cls", "arguments", "message"), BAD, ids=[f"{c.__name__}-{next(iter(a))}" for c, a, _ in BAD])
def test_bad_arguments(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


def test_same_keys_are_refused():
    # An interval does not keep two apart, neither their keys nor what a checkpoint keeps of them.
    with pytest.raises(RuntimeError, match=r"`callback\.state_key` must be unique"):
        trainer([UniformityAlignment("projector"), UniformityAlignment("projector", every_n_steps=7)])
    with pytest.raises(MisconfigurationException, match="give each its own `name=`"):
        trainer([UniformityAlignment("projector", name="a"), UniformityAlignment("backbone", name="a")]).fit(
            strangers.MeanLoss(), strangers.loader(strangers.Pairs(16))
        )


def test_a_place_that_is_never_called_is_a_warning():
    class Unused(strangers.MeanLoss):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    with pytest.warns(UserWarning, match="'spare' was not called with gradients during a training step"):
        assert not fit(Unused(), [UniformityAlignment("spare")]).rows


def test_a_module_built_in_setup():
    class Late(strangers.MeanLoss):
        def setup(self, stage):
            self.late = nn.Linear(8, 8)

        def step(self, batch):
            return super().step(batch) + 0 * self.late(self.projector(self.backbone(batch[0][0]))).sum()

    assert fit(Late(), [EffectiveRank("late")]).series("train/effective_rank")
    with pytest.raises(MisconfigurationException, match="Did you mean 'late'"):
        fit(Late(), [EffectiveRank("latte")])


def test_non_finite_features_are_a_warning():
    class Overflowing(strangers.MeanLoss):
        def step(self, batch):
            return (
                super().step(batch) + 0 * self.projector(self.backbone(batch[0][0]) * float("inf")).sum().nan_to_num()
            )

    with pytest.warns(UserWarning, match="non-finite rows"):
        history = fit(Overflowing(), [UniformityAlignment("projector"), EffectiveRank("backbone")], max_steps=2)
    assert history.series("train/effective_rank")


def test_everything_pickles_and_copies():
    for name in NAMES:
        callback = getattr(ours, name)()
        assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(callback))), L.Callback)


def test_callbacks_import_none_of_the_methods():
    # By their source, not a fresh interpreter: the direction holds for every file.
    for path in Path(ours.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith(tuple(f"lightning_ssl.{part}" for part in ("methods", "data", "cli"))), path
