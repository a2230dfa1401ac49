"""What the documents show runs: the method that CONTRIBUTING.md adds, the arguments of docs/ablations.md."""

import functools
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ssl.methods.base import Method
from lightning_ssl.nn import LinearBackbone
from tests.ddp import run_ranks
from tests.methods.helpers import METHODS, make_batch, rows_of
from tests.methods.test_ddp import Step
from tests.methods.test_training import Data

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ABLATIONS = re.findall(r"`([A-Za-z]+\([^`]*\))`(?=.*\|$)", (ROOT / "docs" / "ablations.md").read_text(), re.MULTILINE)


def block(name):
    return re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", TEXT, re.DOTALL).group(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the example as a module; written once, before any process reads it."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "variance_example.py").write_text(block("method"))
    return folder


def example(folder):
    """The example as a module."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("variance_example")


def test_example_trains_from_its_yaml_and_loads_again(folder, tmp_path):
    module = example(folder)
    config = yaml.safe_load(block("config"))
    config["model"]["class_path"] = "variance_example.Variance"
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    trainer = {"default_root_dir": tmp_path, "logger": "false", "max_epochs": 1, "enable_progress_bar": "false"}
    args = ["fit", f"--config={path}", *(f"--trainer.{k}={v}" for k, v in trainer.items()), "--model.optimizer.lr=0.01"]
    cli = LightningCLI(
        Method, Data, args=args, save_config_callback=None, subclass_mode_model=True, seed_everything_default=0
    )
    assert cli.model.weight == 2.0 and cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.01
    assert {"train/loss", "train/invariance"} <= set(cli.trainer.callback_metrics)
    loaded = module.Variance.load_from_checkpoint(cli.trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), cli.model.parameters(), strict=True))


def gradients(step, model, batch):
    step(batch).backward()
    return {k: p.grad for k, p in model.named_parameters()}


def example_model(folder):
    torch.manual_seed(0)
    model = example(folder).Variance(backbone=LinearBackbone(192, 16), dim=4)
    model.projector = nn.Linear(16, 4)  # no batch norm
    return model.double()


def on_rank(rank, world_size, folder):
    model = example_model(folder)
    batch = rows_of(make_batch(rows=8, dtype=torch.float64), slice(0, 3) if rank == 0 else slice(3, None))
    return gradients(DistributedDataParallel(Step(model)), model, batch)


def test_examples_gradient_on_two_ranks(folder):
    model = example_model(folder)
    expected = gradients(Step(model), model, make_batch(rows=8, dtype=torch.float64))
    for result in run_ranks(2, on_rank, str(folder)):
        for name, gradient in expected.items():
            torch.testing.assert_close(result[name], gradient)


def test_example_refuses_what_it_says(folder):
    with pytest.raises(ValueError, match="`weight`"):
        example(folder).Variance(weight=-1.0)


@pytest.mark.parametrize("expression", ABLATIONS)
def test_documented_ablations_construct_and_train(expression):
    small_ones = {m.__name__: functools.partial(m, backbone="small_conv") for m in METHODS}
    model = eval(expression, small_ones)
    loss = model.training_step(make_batch(rows=6, size=32), 0)
    loss.backward()
    assert loss.isfinite()


def test_there_are_documented_ablations():
    assert len(ABLATIONS) >= 15
