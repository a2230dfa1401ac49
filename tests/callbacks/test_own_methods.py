"""The methods of this package under their own diagnostics, with the defaults; and who collapses."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_ssl import functional, methods
from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    CovarianceOperatorNorm,
    EffectiveRank,
    EigenspaceAlignment,
    KNNProbe,
    LinearProbe,
    RepresentationCircle,
    UniformityAlignment,
)
from lightning_ssl.data import ImageDataModule
from tests.callbacks.harness import History, tape, trainer

METHODS = {
    "SimCLR": {},
    "BYOL": {},
    "SimSiam": {"projector_hidden": 128, "dim": 64},
    "DirectPred": {},
    "BarlowTwins": {"projector_hidden": 128, "dim": 64, "warmup_epochs": 0},
    "RAFT": {},
    "BYOLPrime": {},
}


@pytest.mark.parametrize("name", ["SimCLR", "DirectPred", "BarlowTwins"])
def test_defaults_fit(name):
    method = getattr(methods, name)(backbone="small_conv", **METHODS[name])
    calls = tape(method.projector)
    callbacks = [UniformityAlignment(), CorrelationBound(), EffectiveRank(), CollapseMonitor(), RepresentationCircle()]
    callbacks += [KNNProbe(k=20), LinearProbe(every_n_epochs=1), CovarianceOperatorNorm(samples=8)]
    if hasattr(method, "predictor"):
        callbacks.append(EigenspaceAlignment())
    history = History()
    run = trainer(callbacks, logger=history, limit_train_batches=2, limit_val_batches=1)
    run.fit(method, datamodule=ImageDataModule("digits", batch_size=32))
    views = [y for grad, _, y in calls if grad][:2]
    expected = sum(functional.uniformity(view) for view in views) / 2
    assert history.series("train/uniformity")[0] == pytest.approx(float(expected), rel=1e-4)
    keys = {key for _, row in history.rows for key in row}
    assert {"val/uniformity", "val/alignment", "train/l_bound", "train/effective_rank", "collapse/verdict"} <= keys
    assert {"val/knn_top1", "val/linear_top1", "cov_op/projector.0", "circle/explained_variance"} <= keys
    assert ("predictor/alignment_mean" in keys) == hasattr(method, "predictor")


def verdicts(name, epochs, seed=0, **options):
    torch.manual_seed(seed)
    method = getattr(methods, name)(backbone="small_conv", **options)
    history = History()
    run = trainer([CollapseMonitor()], logger=history, max_epochs=epochs, limit_val_batches=0)
    run.fit(method, datamodule=ImageDataModule("digits", batch_size=128))
    return history.series("collapse/verdict")


COLLAPSING = {"no predictor": {"predictor": "none"}, "no stop-gradient": {"momentum": 0.0, "stop_gradient": False}}


@pytest.mark.parametrize("how", COLLAPSING)
def test_a_collapse_is_caught_within_two_epochs(how):
    with pytest.warns(UserWarning, match="complete collapse of 'projector' at step"):
        assert list(verdicts("BYOL", 2, **COLLAPSING[how]).values())[-1] == 3


# A linear predictor at the encoder's own rate does collapse on digits; at ten times that it learns.
HEALTHY = [*METHODS.items(), ("BYOL", {"predictor": "linear", "predictor_lr_scale": 10.0})]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "options"), HEALTHY, ids=[*METHODS, "BYOL linear"])
def test_healthy_runs_are_left_alone(name, options, seed):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*collapse of")
        assert set(verdicts(name, 4, seed, **options).values()) == {0.0}
