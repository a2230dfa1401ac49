"""What the README shows works as shown; only the size of the jobs is cut down here.

Its two first commands, which install, are run as they stand by ``.ci/run``.
"""

import re
import shlex
from pathlib import Path

import lightning.pytorch as L
import pytest
from torchvision import datasets

from lightning_ssl.runs.cli import main
from tests.data.files import write_cifar, write_folder, write_stl10

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("lightning-ssl") and "&&" not in line
]
SMALL = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=1",
    "--trainer.callbacks=[]",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.accelerator=cpu",
    "--data.batch_size=4",
]

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (ROOT / link).is_file(), link
    for config in re.findall(r"--config ([\w/]+\.yaml)", README):
        assert (ROOT / "configs" / config).is_file(), config


def test_drop_in_snippet_on_a_stranger(tmp_path):
    strangers = pytest.importorskip("tests.callbacks.strangers", reason="needs lightly")
    (code,) = re.findall(r"<!-- snippet: drop-in -->\n```python\n(.*?)```", README, re.DOTALL)

    class Trainer(L.Trainer):
        def __init__(self, **kwargs):
            super().__init__(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, **kwargs, **QUIET)

    names = {"L": type("L", (), {"Trainer": Trainer})}
    exec(code, names)
    module = strangers.LightlyBYOL()
    names["trainer"].fit(module, strangers.loader(strangers.Pairs(64)))
    for key in ("train/uniformity", "predictor/alignment_mean", "collapse/verdict"):
        assert key in names["trainer"].callback_metrics, key


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch):
    """In order, as a reader would type them: a run, the tables' configs, then its checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    write_cifar(tmp_path / "data")
    write_stl10(tmp_path / "data")
    for dataset in (datasets.CIFAR10, datasets.STL10):  # small files cannot have the originals' checksums
        for name in ("train_list", "test_list"):
            monkeypatch.setattr(dataset, name, [(file, None) for file, _ in getattr(dataset, name)])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {**datasets.CIFAR10.meta, "md5": None})
    write_folder(tmp_path / "FOLDER")
    main(["fit", "--name=NAME", "--config=digits/directpred.yaml", *SMALL[:3], *SMALL[4:]])
    assert len(COMMANDS) >= 6
    for command in COMMANDS:
        args = shlex.split(command)[1:]
        if "overlays/ddp.yaml" in args:  # as many processes, of a kind that is here
            continue
        if "--data.download" in args:
            del args[args.index("--data.download") : args.index("--data.download") + 2]
        if args[0] == "doctor":
            with pytest.raises(SystemExit) as ended:
                main([*args, "--checks=optimizer", *SMALL[4:]])
            assert ended.value.code == 0
            continue
        if args[0] in ("export", "runs"):
            with pytest.raises(SystemExit) as ended:
                main(args)
            assert ended.value.code == 0
            continue
        small = SMALL if args[0] == "fit" else SMALL[2:]
        if "--name" in args:  # a run whose checkpoint is used
            small = [*SMALL[:3], *SMALL[4:]]
        main([*args, *small])
    assert (tmp_path / "embeddings.npz").is_file()
