"""Under FSDP2 every callback says what it says under DDP, and leaves the weights alone as it does there."""

from __future__ import annotations

import tempfile
from functools import partial

import pytest
import torch

from lightning_ssl import methods
from lightning_ssl.callbacks import DirectPredictor, PredictorReset, SymmetricPredictor
from lightning_ssl.data import ImageDataModule
from lightning_ssl.distributed import whole
from lightning_ssl.nn import SmallConv
from tests.callbacks import strangers
from tests.callbacks.fsdp2 import rank_trainer, sharded
from tests.callbacks.harness import History
from tests.callbacks.test_ranks import KEYS, watchers
from tests.ddp import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch shards nothing on processors"
)
ACTIONS = {
    "DirectPredictor": lambda: DirectPredictor("predictor", freq=2),
    "SymmetricPredictor": lambda: SymmetricPredictor("predictor"),
    "PredictorReset": lambda: PredictorReset("predictor", every_n_epochs=1),
}


def fit(rank, world_size, how, watching, action=None):
    """Two epochs; what was logged, and the weights at the end."""
    torch.manual_seed(0)
    history = History()
    callbacks = watchers() if watching else []
    callbacks += [ACTIONS[action]()] if action else []
    module = strangers.MeanLoss() if how == "ddp" else sharded(strangers.MeanLoss, how)
    data = strangers.ordered_loader(strangers.Pairs(24), 12, rank, world_size)
    val = strangers.loader(strangers.Pairs(6, seed=3), 3)
    with tempfile.TemporaryDirectory() as root:
        run = rank_trainer(rank, world_size, how, callbacks, logger=history, max_epochs=2, default_root_dir=root)
        run.fit(module, data, val)
    weights = {name: whole(x).clone() for name, x in module.state_dict().items()}
    return history.rows, {name: x.numpy() for name, x in weights.items()}


def same_values(found, expected):
    for (step, row), (expected_step, expected_row) in zip(found, expected, strict=True):
        assert step == expected_step and row.keys() == expected_row.keys()
        for key, value in expected_row.items():
            assert float(row[key]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), (step, key)


@pytest.mark.parametrize("how", ["parts", "layers"])
def test_every_value_is_that_of_ddp(how):
    (expected, weights), _ = run_ranks(2, fit, "ddp", True)
    (found, pieces), _ = run_ranks(2, fit, how, True)
    assert {key for _, row in found for key in row} >= KEYS
    same_values(found, expected)
    _, alone = run_ranks(2, fit, how, False)[0]
    for name, x in alone.items():
        assert (pieces[name] == x).all(), name  # watched or not
        assert pieces[name] == pytest.approx(weights[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_set_the_weights_that_they_set_under_ddp(action):
    (_, expected), _ = run_ranks(2, fit, "ddp", False, action)
    (_, found), _ = run_ranks(2, fit, "layers", False, action)
    for name, x in expected.items():
        assert found[name] == pytest.approx(x, rel=1e-4, abs=1e-6), name


OWN = {
    "SimCLR": {},
    "BYOL": {"momentum": 0.9},
    "SimSiam": {"projector": "linear", "dim": 8, "predictor": "linear"},
    "DirectPred": {"momentum": 0.9},
    "BarlowTwins": {"projector_hidden": 16, "dim": 8, "warmup_epochs": 0, "projector_norm": "none"},
    "RAFT": {"predictor": "linear"},
    "BYOLPrime": {"predictor": "linear"},
}
HEADS = {"projector_hidden": 16, "projector_dim": 8, "projector_norm": "none"}


def own_fit(rank, world_size, name, how, path):
    torch.manual_seed(0)
    options = OWN[name] if "dim" in OWN[name] else {**HEADS, **OWN[name]}
    if name == "BYOL":
        options = {**options, "predictor_norm": "none", "predictor_hidden": 16}
    options["optimizer"] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    options["backbone"] = SmallConv(width=8, norm="group")
    cls = getattr(methods, name)
    module = cls(**options) if how == "ddp" else sharded(cls, how, **options)
    data = ImageDataModule("digits", batch_size=8, probe_batch_size=8)
    run = rank_trainer(rank, world_size, how, [], max_steps=3, limit_val_batches=1, default_root_dir=path)
    run.fit(module, datamodule=data)
    weights = {name: whole(x).clone().numpy() for name, x in module.state_dict().items()}
    run.save_checkpoint(f"{path}/{how}.ckpt")
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_our_methods_train_as_under_ddp_and_their_checkpoints_load(name, tmp_path):
    expected, _ = run_ranks(2, own_fit, name, "ddp", str(tmp_path))
    for how in ("parts", "layers"):
        found, _ = run_ranks(2, own_fit, name, how, str(tmp_path))
        for key, x in expected.items():
            assert found[key] == pytest.approx(x, rel=1e-4, abs=1e-6), (how, key)
        state = torch.load(tmp_path / f"{how}.ckpt", weights_only=True)
        assert {key: tuple(x.shape) for key, x in state["state_dict"].items()} == {k: x.shape for k, x in found.items()}
        loaded = getattr(methods, name).load_from_checkpoint(
            tmp_path / f"{how}.ckpt", backbone=SmallConv(width=8, norm="group"), map_location="cpu"
        )
        for key, x in loaded.state_dict().items():
            assert (x.numpy() == found[key]).all(), key
