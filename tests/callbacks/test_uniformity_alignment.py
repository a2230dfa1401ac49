"""The thin slice: from hooks on strangers' modules to logged values, on one rank and several."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ssl.callbacks import UniformityAlignment
from lightning_ssl.functional import alignment, uniformity
from tests.callbacks import strangers
from tests.callbacks.harness import History, ddp_trainer, tape, trainer
from tests.ddp import run_ranks

MODULES = [
    (strangers.LightlyBYOL, "projection_head"),
    (strangers.LightlySimSiam, "projection_head"),
    (strangers.LightlySimCLR, "backbone"),
    (strangers.LightlyBarlowTwins, "projection_head"),
    (strangers.DictConcatenated, "net.encoder"),
    (strangers.ManualTwoOptimizers, "projector"),
]


@pytest.mark.parametrize(("cls", "path"), MODULES, ids=[cls.__name__ for cls, _ in MODULES])
def test_values_are_those_of_the_training_views(cls, path):
    module = cls()
    calls = tape(module.get_submodule(path))
    history = History()
    data = strangers.Dicts(64) if cls is strangers.DictConcatenated else strangers.Pairs(64)
    trainer([UniformityAlignment(path, every_n_steps=2)], logger=history).fit(module, strangers.loader(data))
    with_grad = [y.flatten(1) for grad, _, y in calls if grad]
    per_step = len(with_grad) // 4
    for step in (0, 2):
        seen = with_grad[step * per_step : (step + 1) * per_step]
        first, second = seen[0].chunk(2) if cls is strangers.DictConcatenated else seen[:2]
        expected = (uniformity(first) + uniformity(second)) / 2
        assert history.series("train/uniformity")[step] == pytest.approx(float(expected), rel=1e-5)
        assert history.series("train/alignment")[step] == pytest.approx(float(alignment(first, second)), rel=1e-5)
    assert set(history.series("train/uniformity")) == {0, 2}


def _fit(rank, world_size, limit):
    torch.manual_seed(0)
    history = History()
    callbacks = [UniformityAlignment("projector", every_n_steps=1)]
    run = ddp_trainer(rank, world_size, callbacks, logger=history, limit_val_batches=limit, num_sanity_val_steps=1)
    train = strangers.ordered_loader(strangers.Pairs(24), 12, rank, world_size)
    run.fit(strangers.MeanLoss(), train, strangers.loader(strangers.Pairs(7, seed=3), 6 // world_size))
    return history.rows, {key: float(value) for key, value in run.callback_metrics.items()}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("limit", [1.0, 1])
def test_any_number_of_ranks_logs_the_same(world_size, limit):
    # Seven held-out samples: a sampler pads them, and last batches are uneven.
    alone = run_ranks(1, _fit, limit)[0]
    together = run_ranks(world_size, _fit, limit)
    rows = together[0][0]  # rank 0 holds the logger
    assert [(step, sorted(row)) for step, row in rows] == [(step, sorted(row)) for step, row in alone[0]]
    for (_, row), (_, expected) in zip(rows, alone[0], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    for _, metrics in together:
        assert metrics == pytest.approx(alone[1], rel=1e-5)
    assert {"train/uniformity", "train/alignment", "val/uniformity", "val/alignment"} <= alone[1].keys()


def test_a_wrong_path_names_the_nearest():
    with pytest.raises(MisconfigurationException, match=r"'projektion_head'.*Did you mean 'projection_head'"):
        trainer([UniformityAlignment("projektion_head")]).fit(
            strangers.LightlySimCLR(), strangers.loader(strangers.Pairs(16))
        )
