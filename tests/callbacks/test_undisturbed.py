"""Watching changes nothing: not the weights, not the random numbers, not the module; and a run can be resumed."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    CovarianceOperatorNorm,
    DirectPredictor,
    EffectiveRank,
    EigenspaceAlignment,
    KNNProbe,
    LinearProbe,
    RepresentationCircle,
    UniformityAlignment,
)
from tests.callbacks import strangers
from tests.callbacks.harness import History, ddp_trainer, same_state, trainer
from tests.ddp import run_ranks


class Noisy(strangers.MeanLoss):
    """Uses all there is to disturb: dropout, batch statistics, noise drawn in the step, frozen and eval parts."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(strangers.small_backbone(), nn.Flatten(), nn.Dropout(0.2))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def on_train_epoch_start(self):
        self.backbone[0][1].eval()

    def step(self, batch):
        views = [x + 0.1 * torch.randn_like(x) + 0.01 * random.random() + 0.01 * np.random.rand() for x in batch[0]]  # noqa: NPY002
        return super().step([views])


def watchers(path="projector", predictor="predictor", encoder="backbone"):
    data = tuple(strangers.loader(strangers.Labelled(n), shuffle=True) for n in (32, 16))
    return [
        UniformityAlignment(path, every_n_steps=1),
        CorrelationBound(path, num_classes=4, every_n_steps=2, picture_every=1),
        EffectiveRank(encoder, every_n_steps=1),
        EigenspaceAlignment(predictor, every_n_steps=1, picture_every=1),
        CollapseMonitor(path, every_n_steps=1),
        RepresentationCircle(path, every_n_steps=3),
        KNNProbe(encoder, data, k=3, every_n_steps=2),
        LinearProbe(encoder, data, l2=1e-2),
        CovarianceOperatorNorm(encoder=encoder, output=path, every_n_steps=2),
    ]


def train(module, callbacks, tmp_path, **options):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
    run = trainer(callbacks, default_root_dir=tmp_path, **{"max_epochs": 2, "num_sanity_val_steps": 1, **options})
    run.fit(module, strangers.loader(strangers.Pairs(40), shuffle=True), strangers.loader(strangers.Pairs(9, seed=1)))
    return run


def test_weights_are_bit_identical(tmp_path):
    torch.manual_seed(1)
    plain = Noisy()
    watched = copy.deepcopy(plain)
    run = train(plain, [], tmp_path)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    watched_run = train(watched, watchers(), tmp_path)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]
    assert same_state(plain, watched)
    assert watched_run.global_step == run.global_step
    for a, b in zip(plain.modules(), watched.modules(), strict=True):
        assert a.training == b.training
        assert not b._forward_hooks and not b._forward_pre_hooks
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert a.requires_grad == b.requires_grad


@pytest.mark.parametrize("cls", [strangers.LightlyBYOL, strangers.LightlySimSiam])
def test_strangers_weights_are_bit_identical(cls, tmp_path):
    torch.manual_seed(1)
    plain = cls()
    watched = copy.deepcopy(plain)
    train(plain, [], tmp_path)
    train(watched, watchers("projection_head", "prediction_head"), tmp_path)
    assert same_state(plain, watched)


def both(rank, world_size, folder):
    """What is left of the same run without and with all the watching callbacks: random state and weights."""
    left = []
    torch.manual_seed(1)
    plain = Noisy()
    watched = copy.deepcopy(plain)
    for module, callbacks in ((plain, []), (watched, watchers())):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)  # noqa: NPY002
        run = ddp_trainer(rank, world_size, callbacks, max_epochs=2, num_sanity_val_steps=1, default_root_dir=folder)
        run.fit(module, strangers.loader(strangers.Pairs(36)), strangers.loader(strangers.Pairs(9, seed=1)))
        left.append((torch.get_rng_state(), dict(module.state_dict())))
    return left


def test_weights_are_bit_identical_on_two_ranks(tmp_path):
    for (rng, plain), (watched_rng, watched) in run_ranks(2, both, str(tmp_path)):
        assert torch.equal(rng, watched_rng)
        assert plain.keys() == watched.keys() and all(torch.equal(plain[name], watched[name]) for name in plain)


def test_checkpoints_go_both_ways(tmp_path):
    for ours, theirs in ((watchers(), []), ([], watchers())):
        saver = ModelCheckpoint(tmp_path, "half", save_last=False, enable_version_counter=False)
        train(Noisy(), [*ours, saver], tmp_path, max_epochs=1, enable_checkpointing=True)
        checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=True)  # nothing pickled
        assert checkpoint["state_dict"].keys() == Noisy().state_dict().keys()
        run = trainer(theirs, max_epochs=2, default_root_dir=tmp_path)
        run.fit(Noisy(), strangers.loader(strangers.Pairs(40)), ckpt_path=tmp_path / "half.ckpt")
        assert run.current_epoch == 2


def test_a_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path):
    def run(name, epochs, ckpt=None):
        torch.manual_seed(1)
        history = History()
        saver = ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [*watchers(), DirectPredictor("predictor", rho=0.5)]
        callbacks[1].picture_every = callbacks[3].picture_every = 0  # drawing is slow
        callbacks[5].every_n_steps = 1000
        callbacks[0].every_n_steps = 2  # 3 steps an epoch: due steps straddle the interruption
        options = {"default_root_dir": tmp_path / name, "max_epochs": epochs, "enable_checkpointing": True}
        runner = trainer([*callbacks, saver], logger=history, **options)
        module = strangers.MeanLoss()
        runner.fit(module, strangers.loader(strangers.Pairs(40)), strangers.loader(strangers.Pairs(9)), ckpt_path=ckpt)
        return history, module, callbacks

    whole, module, callbacks = run("whole", 4)
    first, _, _ = run("first", 2)
    second, resumed, resumed_callbacks = run("second", 4, ckpt=tmp_path / "first" / "epoch=1.ckpt")
    assert same_state(module, resumed)
    assert len(whole.rows) > 20
    assert first.rows + second.rows == whole.rows
    a, b = callbacks[3], resumed_callbacks[3]
    assert a._steps == b._steps
    assert torch.equal(torch.stack(a._spectra), torch.stack(b._spectra))
    for one, other in zip(callbacks, resumed_callbacks, strict=True):
        x, y = one.state_dict(), other.state_dict()
        assert x.keys() == y.keys()


def test_hooks_go_when_training_fails_and_do_not_add_up(tmp_path):
    class Failing(strangers.MeanLoss):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("the data is bad")
            return super().training_step(batch, batch_idx)

    module, callbacks = Failing(), watchers()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the data is bad"):
            train(module, callbacks, tmp_path)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
