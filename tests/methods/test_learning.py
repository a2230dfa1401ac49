"""What the papers say happens to a run, seen on the digits: minutes of training, so these tests are slow.

``python -m tests.methods.test_learning 0 1 2`` measures every run with these seeds and prints the table of
docs/ablations.md.
"""

import functools
import logging
import sys
import warnings
from typing import NamedTuple

import lightning.pytorch as L
import pytest
import torch

from lightning_ssl import functional
from lightning_ssl.data import ImageDataModule
from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, DirectPred, SimCLR, SimSiam
from lightning_ssl.nn import SmallConv


def adam(params):
    return torch.optim.Adam(params, lr=2e-3)


def slow_adam(params):
    return torch.optim.Adam(params, lr=5e-4)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=4e-4)


def fast_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=4e-4)


TWO_LAYERS = {"projector_hidden": 128, "projector_dim": 64}
ADAM = {**TWO_LAYERS, "optimizer": adam, "momentum": 0.98}
LINEAR = {**TWO_LAYERS, "optimizer": sgd, "momentum": 0.97, "predictor": "linear", "predictor_lr_scale": 10.0}

FIXED_RATE = {"projector_hidden": 128, "dim": 64, "scheduler": "constant"}
SYMMETRIC = {**LINEAR, "symmetric_predictor": True}
NO_EMA = {**SYMMETRIC, "momentum": 0.0}

# Linear predictors learn within a minute when their rate is higher than the encoder's (alpha_p > 1).
RUNS = {
    "SimCLR": (SimCLR, {**TWO_LAYERS, "optimizer": adam}),
    "Barlow Twins": (BarlowTwins, {**FIXED_RATE, "lambd": 0.02, "optimizer": adam, "warmup_epochs": 0}),
    "SimSiam": (SimSiam, {**FIXED_RATE, "optimizer": fast_sgd}),
    "DirectPred": (DirectPred, {**TWO_LAYERS, "optimizer": sgd, "momentum": 0.97}),
    "BYOL, mlp": (BYOL, ADAM),
    "BYOL, linear": (BYOL, LINEAR),
    "RAFT, mlp": (RAFT, {**ADAM, "predictor_norm": "batch"}),
    "RAFT, linear": (RAFT, LINEAR),
    "BYOL', mlp": (BYOLPrime, {**ADAM, "predictor_norm": "batch"}),
    "BYOL', linear": (BYOLPrime, LINEAR),
    "BYOL, none": (BYOL, {**ADAM, "predictor": "none"}),
    "BYOL', none": (BYOLPrime, {**ADAM, "predictor": "none"}),
    "RAFT, none": (RAFT, {**ADAM, "predictor": "none"}),
    "BYOL, no stop-gradient": (BYOL, {**ADAM, "momentum": 0.0, "stop_gradient": False}),
    "BYOL, mean": (BYOL, {**ADAM, "projector_norm": "mean", "predictor_norm": "mean"}),
    "BYOL, detached mean": (BYOL, {**ADAM, "projector_norm": "detached_mean", "predictor_norm": "detached_mean"}),
    "symmetric, EMA": (BYOL, SYMMETRIC),
    "symmetric, no EMA": (BYOL, NO_EMA),
    "symmetric, no EMA, alpha_p 1": (BYOL, {**NO_EMA, "optimizer": slow_adam, "predictor_lr_scale": 1.0}),
    "symmetric, no EMA, alpha_p 20": (BYOL, {**NO_EMA, "optimizer": slow_adam, "predictor_lr_scale": 20.0}),
}
# The settings were found with affine batch norms in the heads and two layers in SimSiam's projector.
for name, (method, options) in RUNS.items():
    if method in (SimCLR, BYOL, DirectPred):
        RUNS[name] = method, {**options, "norm_affine": True}
    elif method is SimSiam:
        RUNS[name] = method, {**options, "projector_layers": 2}
    elif method is BarlowTwins:
        RUNS[name] = method, {**options, "projector_bias": True}
EPOCHS = dict.fromkeys(RUNS, 30) | {"RAFT, linear": 45, "BYOL', linear": 45, "BYOL, linear": 60}  # of 22 steps


class Result(NamedTuple):
    untrained: float  # linear probe on the backbone's features, %
    probe: float  # the same after training
    uniformity: float  # of the projector's outputs on the test images
    alignment: float  # of the predictor's outputs (the projector's without one) on two views of them


def data(seed):
    return ImageDataModule(batch_size=64, image_size=16, seed=seed)


@torch.no_grad()
def measure(model, seed):
    """Linear probe, uniformity and alignment, in evaluation mode."""
    module = data(seed)
    module.setup("fit")
    (x, y), (x_test, y_test) = (
        (torch.cat([b.image for b in loader]), torch.cat([b.label for b in loader]))
        for loader in module.probe_dataloaders()
    )
    model.eval()
    probe = functional.fit_linear_probe(model(x), y, 10, 1e-4)
    accuracy = ((model(x_test) @ probe.weight.T + probe.bias).argmax(1) == y_test).double().mean()
    uniformity = functional.uniformity(model.project(x_test))
    predictor = getattr(model, "predictor", torch.nn.Identity())
    views = module.on_after_batch_transfer(next(iter(module.val_dataloader())), 0).views
    alignment = functional.cross_model_loss(*(predictor(model.project(view)) for view in views[:2]))
    model.train()  # the Trainer keeps the mode it finds
    return 100 * float(accuracy), float(uniformity), float(alignment)


@functools.cache
def run(name, seed=0):
    method, options = RUNS[name]
    L.seed_everything(seed, verbose=False)
    model = method(backbone=SmallConv(width=16), **options)
    untrained, *_ = measure(model, seed)
    trainer = L.Trainer(
        max_epochs=EPOCHS[name],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, datamodule=data(seed))
    return Result(untrained, *measure(model, seed))


LEARN = [name for name in RUNS if not any(word in name for word in ("none", "stop", "mean", "symmetric"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARN)
def test_beats_the_untrained_encoder(name):
    result = run(name)
    assert result.probe >= result.untrained + 15, result
    assert result.uniformity < -0.25, result  # a linear predictor's run spreads slowly, all others are beyond -1


@pytest.mark.slow
@pytest.mark.parametrize(
    "collapsed,healthy",
    [("BYOL, none", "BYOL, mlp"), ("BYOL', none", "BYOL', mlp"), ("BYOL, no stop-gradient", "BYOL, mlp")],
)
def test_collapses_at_the_projector(collapsed, healthy):
    assert run(collapsed).uniformity > -0.1, run(collapsed)
    assert run(healthy).uniformity < -0.5, run(healthy)
    assert run(collapsed).probe <= run(healthy).probe - 5


@pytest.mark.slow
def test_raft_without_predictor_keeps_alignment_from_vanishing():
    assert run("RAFT, none").alignment > 100 * run("BYOL', none").alignment


@pytest.mark.slow
def test_a_detached_mean_falls_behind_a_kept_one():
    assert run("BYOL, detached mean").probe <= run("BYOL, mean").probe - 5


@pytest.mark.slow
def test_a_symmetric_predictor_needs_the_moving_average():
    assert run("symmetric, no EMA").uniformity > -0.1
    assert run("symmetric, EMA").probe >= run("symmetric, no EMA").probe + 5


@pytest.mark.slow
def test_a_fast_predictor_replaces_the_moving_average():
    slow, fast = run("symmetric, no EMA, alpha_p 1"), run("symmetric, no EMA, alpha_p 20")
    assert slow.uniformity > -0.1 and slow.probe < slow.untrained, slow
    assert fast.uniformity < -0.5 and fast.probe >= fast.untrained + 15, fast


def main(seeds, names=None):
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("| run | untrained, % | linear probe, % | uniformity | alignment |\n|---|---|---|---|---|")
    for name in names or RUNS:
        columns = zip(*(run(name, seed) for seed in seeds), strict=True)
        cells = [
            " / ".join(f"{value:{form}}" for value in column)
            for column, form in zip(columns, (".1f", ".1f", ".2f", ".1e"), strict=True)
        ]
        print("|", name, "|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0])
