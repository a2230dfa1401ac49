"""Every shipped config is parsed, instantiated and run; every command in docs/configs.md and every sweep is parsed."""

import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from torchvision import datasets

import lightning_ssl.methods as methods
from lightning_ssl.runs.cli import configs_beneath, resolve_configs, shipped
from lightning_ssl.runs.run import RunCLI, SaveRunConfig
from tests.data.files import write_cifar, write_folder, write_stl10

ROOT = shipped("")
DATASETS = ("digits", "cifar10", "cifar100", "stl10", "imagenet")
METHODS = ("simclr", "byol", "simsiam", "directpred", "barlow_twins", "raft", "byol_prime")
CLASSES = dict(
    zip(METHODS, ("SimCLR", "BYOL", "SimSiam", "DirectPred", "BarlowTwins", "RAFT", "BYOLPrime"), strict=True)
)
PAIRS = [f"{dataset}/{method}.yaml" for dataset in DATASETS for method in METHODS]
ABLATIONS = sorted(f"ablations/{path.name}" for path in (ROOT / "ablations").glob("*.yaml"))
OVERLAYS = sorted(f"overlays/{path.name}" for path in (ROOT / "overlays").glob("*.yaml"))
SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))
DOCS = Path(__file__).parents[1] / "docs" / "configs.md"
CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.precision=32-true"]
# Runs behind a published figure, where the papers say so (DDN-v1 Tables 7-9 have 3; Table 9 of DirectPred one).
SEEDS = {f"ddn_v1_table{i}": 5 for i in (3, 4, 5)} | {"ddn_v2_table2": 5, "ddn_v2_table3": 5, "directpred_table9": 1}
SEEDS |= {f"directpred_{name}": 5 for name in (*(f"table{i}" for i in (1, 2, 3, 5, 6, 7, 8)), "fig6")}
SHORT = [
    *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", "--trainer.max_epochs=1"),
    *("--trainer.check_val_every_n_epoch=1", "--trainer.log_every_n_steps=1", "--data.batch_size=8"),
    *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
]


class Reusable(RunCLI):
    """The console script's parser, built once: building it takes longer than most tests."""

    ready = False

    def instantiate_classes(self):
        if self.ready:
            super().instantiate_classes()

    def _run_subcommand(self, subcommand):
        if self.ready:
            super()._run_subcommand(subcommand)

    def parse(self, *args):
        self.config = self.parser.parse_args(["fit", *resolve_configs(["fit", *args])[1:]])
        return self.config.fit

    def run_fit(self, *args, full=False, html=False):
        trainer = self.parse(*args).trainer
        kept = [c for c in trainer.callbacks if full or c.class_path.endswith(("UniformityAlignment", "RunReport"))]
        for callback in kept:
            if callback.class_path.endswith("RunReport"):
                callback.init_args.html = html  # drawing the page would take half of the time
        trainer.callbacks = kept
        self.before_instantiate_classes()
        self.instantiate_classes()
        self._run_subcommand("fit")
        return self.trainer


def reusable(*beneath):
    files = {"default_config_files": [str(shipped(name)) for name in beneath]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-ssl"])
        cli = Reusable(
            args=["fit", f"--config={shipped('digits/byol.yaml')}"],
            save_config_callback=SaveRunConfig,
            seed_everything_default=0,
            parser_kwargs={name: files for name in RunCLI.subcommands()},
            auto_configure_optimizers=False,
        )
    cli.ready = True
    return cli


@pytest.fixture(scope="module")
def cli():
    """The parser of a command whose --config names a method."""
    return reusable("default.yaml")


@pytest.fixture(scope="module")
def light():
    """The same without the diagnostics beneath, for what they have no part in: half the time."""
    return reusable()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A few images of each dataset in its original format."""
    root = tmp_path_factory.mktemp("data")
    write_cifar(root)
    write_cifar(root, hundred=True)
    write_stl10(root)
    write_folder(root, train=8)
    (root / "test").rename(root / "val")  # ImageNet's names
    wnids = ["class0", "class1"]
    torch.save(({wnid: (wnid,) for wnid in wnids}, wnids), root / "meta.bin")
    with pytest.MonkeyPatch.context() as patch:  # small files cannot have the originals' checksums
        for dataset in (datasets.CIFAR10, datasets.CIFAR100, datasets.STL10):
            for name in ("train_list", "test_list"):
                patch.setattr(dataset, name, [(file, None) for file, _ in getattr(dataset, name)])
        for dataset in (datasets.CIFAR10, datasets.CIFAR100):
            patch.setattr(dataset, "meta", {**dataset.meta, "md5": None})
        yield str(root)


# --- parsing ---


def test_nothing_is_shipped_that_is_not_tested():
    known = {*PAIRS, *ABLATIONS, *OVERLAYS, "default.yaml", "imagenet/callbacks.yaml", "cifar10_contrasts.yaml"}
    shipped_files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.yaml")}
    assert shipped_files == known | {f"sweeps/{path.name}" for path in SWEEPS}


@pytest.mark.parametrize("name", PAIRS)
def test_configs_hold_their_method_and_nothing_else(cli, name):
    """What a config does not say is the method's own default, not one of another config's."""
    dataset, method = name.removesuffix(".yaml").split("/")
    written = yaml.safe_load(shipped(name).read_text())
    config = cli.parse("--config", name)
    assert config.model.class_path == f"lightning_ssl.methods.{CLASSES[method]}"
    assert config.data.init_args.dataset == dataset
    parameters = inspect.signature(getattr(methods, CLASSES[method]).__init__).parameters
    for key, value in config.model.init_args.as_dict().items():
        expected = written["model"]["init_args"].get(key, parameters[key].default)
        if key == "optimizer":
            assert value["class_path"] == expected["class_path"]
            assert {**value["init_args"], **expected["init_args"]} == value["init_args"]
            assert value["init_args"]["weight_decay"] == expected["init_args"]["weight_decay"]  # said, never inherited
        elif isinstance(expected, dict):
            assert value["class_path"] == expected["class_path"]
        else:
            assert value == expected, key
    for key, value in written["data"]["init_args"].items():
        if key != "augmentation":
            assert config.data.init_args[key] == value
    assert config.trainer.max_epochs == written["trainer"]["max_epochs"]
    assert [c.class_path.rpartition(".")[2] for c in config.trainer.callbacks][:2] == ["LinearProbe", "KNNProbe"]


def commands():
    found = [
        match
        for line in DOCS.read_text().splitlines()
        for match in re.findall(r"`(lightning-ssl (?:fit|val)[^`]*)`", line)
    ]
    return [shlex.split(command)[2:] for command in found if "--config" in command and "overlays" not in command]


def kinds_of_commands():
    """One command of each kind: values of flags differ only."""
    kinds = {tuple(a for a in args if not re.fullmatch(r"-?[\d.]+", a)): args for args in commands()}
    return list(kinds.values())


def check_command(light, args):
    """A parsed command has the values that its configs and flags name, the last one of each."""
    config = light.parse(*args).as_dict()
    expected = {}
    names = [args[i + 1] for i, arg in enumerate(args) if arg == "--config"]
    for name, part in itertools.product(names, ("model", "data")):
        written = yaml.safe_load(shipped(name).read_text()).get(part, {}).get("init_args", {})
        expected |= {(part, key): value for key, value in written.items() if not isinstance(value, dict)}
    for arg, value in itertools.pairwise(args):
        if arg.startswith("--model."):
            expected["model", arg.removeprefix("--model.")] = yaml.safe_load(value)
    for (part, key), value in expected.items():
        assert config[part]["init_args"][key] == value, (args, key)


@pytest.mark.slow
def test_the_published_rows_parse_and_set_what_they_name(light):
    assert len(commands()) > 130
    for args in kinds_of_commands():
        check_command(light, args)


@pytest.mark.slow
def test_all_published_rows_parse_and_set_what_they_name(light):
    for args in commands():
        check_command(light, args)


def test_each_ablation_has_its_row():
    used = set(itertools.chain.from_iterable(commands()))
    assert set(ABLATIONS) <= used


def test_the_files_beneath_follow_the_flags():
    assert configs_beneath(["fit"]) == ["default.yaml", "digits/directpred.yaml"]
    assert configs_beneath(["fit", "--model", "BarlowTwins"]) == ["default.yaml", "digits/barlow_twins.yaml"]
    both = ["fit", "--model=lightning_ssl.methods.BYOLPrime", "--data.dataset", "stl10"]
    assert configs_beneath(both) == ["default.yaml", "stl10/byol_prime.yaml"]
    assert configs_beneath(["fit", "--model", "BYOL", "--data.dataset", "fashion_mnist"])[1] == "digits/byol.yaml"
    assert configs_beneath(["fit", "--model", "my.Model"]) == ["default.yaml"]
    assert configs_beneath(resolve_configs(["fit", "--config", "cifar10/byol.yaml"])) == ["default.yaml"]
    assert configs_beneath(resolve_configs(["fit", "--config", "overlays/bf16.yaml"]))[1] == "digits/directpred.yaml"


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps_name_real_commands_flags_and_metrics(light, path):
    sweep = yaml.safe_load(path.read_text())
    assert sweep["name"] == path.stem and sweep["program"] == "lightning-ssl" and sweep["method"] == "grid"
    assert sweep["metric"]["name"] in ("val/linear_top1", "val/knn_top1") and sweep["metric"]["goal"] == "maximize"
    assert sweep["command"] == ["lightning-ssl", "fit", "${args}", "--config", "overlays/wandb.yaml"]
    values = {key: entry.get("values", [entry.get("value")]) for key, entry in sweep["parameters"].items()}
    assert values["seed_everything"] == list(range(SEEDS.get(path.stem, 3)))
    for joined in values["config"]:
        assert all(shipped(name).is_file() for name in joined.split(",")), joined
    check_sweep(light, {key: options[-1] for key, options in values.items()})


def check_sweep(light, chosen):
    """As W&B's agent writes a choice of parameters, it is a command with these values."""
    config = light.parse(*(f"--{name}={value}" for name, value in chosen.items())).as_dict()
    assert config["seed_everything"] == chosen["seed_everything"]
    for key, value in chosen.items():
        if key.startswith("model."):
            assert config["model"]["init_args"][key.removeprefix("model.")] == value
        elif key.startswith("trainer."):
            assert config["trainer"][key.removeprefix("trainer.")] == value


@pytest.mark.slow
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_each_config_of_a_sweep_takes_its_flags(light, path):
    parameters = yaml.safe_load(path.read_text())["parameters"]
    values = {key: entry.get("values", [entry.get("value")]) for key, entry in parameters.items()}
    for config in values["config"]:
        check_sweep(light, {**{key: options[0] for key, options in values.items()}, "config": config})


@pytest.fixture(scope="module")
def plain(cli):
    return cli.parse("--config", "digits/byol.yaml").as_dict()


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_add_to_what_is_there(cli, plain, name):
    config = cli.parse("--config", "digits/byol.yaml", "--config", name).as_dict()
    assert config["model"] == plain["model"] and config["data"] == plain["data"]
    assert config["trainer"]["callbacks"][: len(plain["trainer"]["callbacks"])] == plain["trainer"]["callbacks"]
    assert config["trainer"]["logger"][0] == plain["trainer"]["logger"][0]
    assert config["trainer"] != plain["trainer"]
    many = "strategy" in shipped(name).read_text()
    assert config["trainer"]["sync_batchnorm"] == many
    if many:  # ranks that wait for others end some day
        assert config["trainer"]["strategy"]["class_path"].endswith("DDPStrategy")
        assert config["trainer"]["strategy"]["init_args"]["timeout"] == timedelta(minutes=10)
    else:
        assert config["trainer"]["strategy"] == "auto"


# --- two batches ---


def run(cli, folder, *args, full=False, html=False):
    """Two steps and a validation; with all diagnostics if `full`."""
    trainer = cli.run_fit(*args, f"--root={folder}", "--name=two", full=full, html=html)
    assert trainer.global_step == 2
    probes = ["val/linear_top1", "val/knn_top1"] if full else []
    for key in ("train/loss", "val/loss", "train/uniformity", *probes):
        assert trainer.logged_metrics[key].isfinite(), key
    assert (folder / "two" / "config.yaml").stat().st_size and (folder / "two" / "report.html").exists() == html
    return trainer


@pytest.mark.parametrize("method", METHODS)
def test_digits_run_for_two_batches(cli, tmp_path, method):
    config = ["--config", f"digits/{method}.yaml"]
    trainer = run(cli, tmp_path, *config, *SHORT, *CPU, full=True, html=method == "directpred")
    has_predictor = hasattr(trainer.lightning_module, "predictor")
    assert ("predictor/alignment_mean" in trainer.logged_metrics) == has_predictor


SMALLER = {  # only what a CPU could not do in seconds
    "imagenet": ["--data.image_size=64", "--data.num_workers=0", "--model.projector_hidden=256"],
    "imagenet/barlow_twins.yaml": ["--model.dim=256", "--model.warmup_epochs=0"],
    "imagenet/simsiam.yaml": ["--model.dim=256"],
    "barlow_twins": ["--model.warmup_epochs=0"],
    "simsiam": ["--model.dim=256"],  # the eigenspaces of 2048 dimensions take a CPU half a minute
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("digits")])
def test_real_datasets_run_for_two_batches(cli, tmp_path, data, name):
    dataset, method = name.removesuffix(".yaml").split("/")
    smaller = [*SMALLER.get(dataset, []), *SMALLER.get(name, SMALLER.get(method, []))]
    if dataset == "imagenet" and method not in ("barlow_twins", "simsiam"):
        smaller.append("--model.warmup_epochs=0")  # longer than this run
    run(cli, tmp_path, "--config", name, f"--data.root={data}", *smaller, *SHORT, *CPU, full=method == "directpred")


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_run_for_two_batches(cli, tmp_path, name):
    """On the digits, with the method of the ablation's row."""
    args = next(args for args in commands() if name in args)
    method = Path(args[1]).name
    configs = [arg for arg in args[2:] if arg.startswith("ablations/")]
    run(cli, tmp_path, "--config", ",".join([f"digits/{method}", *configs]), "--data.views=augment", *SHORT, *CPU)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16", "cpu"])
def test_precisions_run_for_two_batches(cli, tmp_path, name):
    here = ["--trainer.precision=32-true"] if name == "fp16" else []  # float16 needs a GPU
    run(cli, tmp_path, "--config", f"digits/byol.yaml,overlays/{name}.yaml", *SHORT, *CPU[:2], *here)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "multinode", "slurm", "wandb"])
def test_launchers_run_for_two_batches(tmp_path, name):
    """In a process of its own, on one CPU: SyncBatchNorm needs a GPU, several machines need several."""
    command = [sys.executable, "-m", "lightning_ssl"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    if name == "multinode":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "lightning_ssl"]
    elif name == "slurm":
        slurm = {"JOB_ID": "1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "NNODES": "1"}
        environment |= {f"SLURM_{key}": value for key, value in slurm.items()}
        environment |= {"SLURM_JOB_NAME": "fit", "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS_PER_NODE": "1"}
    one = [*CPU, "--trainer.num_nodes=1", "--trainer.sync_batchnorm=false", "--name=two"]
    done = subprocess.run(
        [*command, "fit", "--config", f"digits/byol.yaml,overlays/{name}.yaml", *SHORT, *one],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "BYOL finished after 2 steps" in done.stdout
    assert (name == "wandb") == bool(list(tmp_path.rglob("*.wandb")))
