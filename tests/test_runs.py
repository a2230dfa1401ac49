"""Runs as objects: whose a folder is, what a run leaves, the list of runs, and their comparison."""

import os
import time
from pathlib import Path

import pytest
import torch
import yaml

from lightning_ssl.runs.cli import main
from lightning_ssl.runs.owner import refusal, run_meant
from tests.test_cli import SHORT, folder  # noqa: F401

QUICK = [
    *SHORT,
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--model.backbone=lightning_ssl.nn.SmallConv",
    "--model.backbone.width=4",
    "--model.backbone.depth=2",
    "--trainer.max_epochs=1",
]
FEW = [f"--{name}=false" for name in ("linear", "knn", "covariance_operator_norm", "correlation_bound")]


def contents(run):
    return {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


def refused(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    message = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in message, message
    return message


def test_a_folder_belongs_to_one_run(folder, capsys):  # noqa: F811
    main(["fit", "--name=keep", *QUICK, *FEW])
    before = contents("runs")
    assert "--name 'keep' is taken" in refused(capsys, "fit", "--name=keep", "--model=BYOL", *QUICK)
    assert "trained DirectPred, not SimCLR" in refused(capsys, "fit", "--model=SimCLR", "--ckpt_path=last", *QUICK)
    assert contents("runs") == before
    main(["fit", "--name=keep", "--trainer.fast_dev_run=1", *QUICK])  # writes nothing
    assert contents("runs") == before

    # It goes on, with its own last checkpoint, and keeps the config it began with.
    main(["fit", "--name=keep", "--ckpt_path=last", *QUICK, *FEW, "--trainer.max_epochs=2"])
    assert torch.load("runs/keep/checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    epochs = [yaml.safe_load(Path("runs/keep", name).read_text()) for name in ("config-1.yaml", "config.yaml")]
    assert [config["trainer"]["max_epochs"] for config in epochs] == [1, 2]
    assert epochs[1]["ckpt_path"] is None  # a run with this config is another run
    main(["fit", "--name=keep", "--ckpt_path=last", *QUICK, *FEW, "--trainer.max_epochs=2"])  # nothing new
    assert not Path("runs/keep/config-2.yaml").exists()


def test_last_is_the_last_of_the_run_that_is_meant(folder, capsys):  # noqa: F811
    main(["fit", "--name=healthy", *QUICK, *FEW])
    main(["fit", "--name=other", "--model=BYOL", *QUICK, *FEW])
    os.utime("runs/other/checkpoints/last.ckpt", (time.time() + 9, time.time() + 9))  # the latest
    before = contents("runs")
    main(["predict", "--config=runs/healthy/config.yaml", "--ckpt_path=last", *QUICK[:-1]])
    main(["validate", "--name=healthy", "--ckpt_path=last", *QUICK[:-1]])
    other = [*QUICK, *FEW, "--model.projector_dim=16", "--trainer.max_epochs=2"]
    assert "holds another network" in refused(capsys, "fit", "--name=healthy", "--ckpt_path=last", *other)
    after = contents("runs")
    assert {path: after.get(path) for path in before} == before  # nothing of a run was touched
    written = {path.parts[1] for path in after} - {"healthy", "other"}
    assert sorted(name[:16] for name in written) == ["healthy-predict-", "healthy-validate"]
    assert "no run in 'none' has a checkpoint" in refused(capsys, "test", "--root=none", "--ckpt_path=last")


def test_the_run_that_is_meant(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / "last.ckpt").write_text("")
    os.utime(tmp_path / "a" / "checkpoints" / "last.ckpt", (1, 1))
    root = str(tmp_path)
    assert run_meant(root, None, []) == tmp_path / "b"
    assert run_meant(root, None, ["digits/byol.yaml", str(tmp_path / "a" / "config.yaml")]) == tmp_path / "a"
    assert run_meant(root, "c", [str(tmp_path / "a" / "config.yaml")]) == tmp_path / "c"
    assert run_meant(str(tmp_path / "none"), None, []) is None


def test_a_job_that_is_started_again_is_not_refused(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("model: {class_path: a.BYOL}")
    assert "is taken" in refusal(tmp_path, None, "a.BYOL", again=False)
    assert not refusal(tmp_path, None, "a.BYOL", again=True)
    assert not refusal(tmp_path, str(tmp_path / "checkpoints" / "epoch=1.ckpt"), "a.BYOL", again=False)
    assert "is taken" in refusal(tmp_path, "elsewhere/epoch=1.ckpt", "a.BYOL", again=False)
    monkeypatch.setenv("RANK", "1")  # the first rank has just made it
    assert not refusal(tmp_path, None, "a.BYOL", again=False)
