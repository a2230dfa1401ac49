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


def _fit(rank, world_size, samples, batch, limit):
    torch.manual_seed(0)
    module = strangers.LightlySimCLR(norm=False)
    history = History()
    callbacks = [UniformityAlignment("projection_head", every_n_steps=1)]
    run = ddp_trainer(rank, world_size, callbacks, logger=history, limit_val_batches=limit, num_sanity_val_steps=1)
    train = strangers.loader(strangers.Pairs(samples), batch // world_size)
    run.fit(module, train, strangers.loader(strangers.Pairs(7, seed=3), 4 // world_size + 1))
    values = {key: float(value) for key, value in run.callback_metrics.items()}
    return history.rows, values


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_logs_the_same(world_size):
    # 7 held-out samples: padded, in uneven last batches.
    alone, values = run_ranks(1, _fit, 24, 12, 1.0)[0]
    together = run_ranks(world_size, _fit, 24, 12, 1.0)
    for key in ("train/uniformity", "train/alignment"):
        # Steps after the first start from weights that NT-Xent, which sees its rank's negatives only, moved apart.
        assert dict(together[0][0][0][1])[key] == pytest.approx(alone[0][1][key], rel=1e-5)
    for _, other in together:
        assert other.keys() == values.keys()
        assert other["train/uniformity"] == together[0][1]["train/uniformity"]


def test_a_wrong_path_names_the_nearest():
    with pytest.raises(MisconfigurationException, match=r"'projektion_head'.*Did you mean 'projection_head'"):
        trainer([UniformityAlignment("projektion_head")]).fit(
            strangers.LightlySimCLR(), strangers.loader(strangers.Pairs(16))
        )
