"""The console script, in process: fit, resume, validate, predict, and what it says to wrong uses."""

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lightning_ssl.runs.cli import main, resolve_configs, shipped
from lightning_ssl.runs.explain import innermost
from lightning_ssl.runs.run import ResumableCSVLogger, explain, write_embeddings
from tests.ddp import run_ranks

# The default job, cut down to seconds; what is cut is size only.
SHORT = [
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=2",
    "--trainer.check_val_every_n_epoch=1",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.accelerator=cpu",
    "--data.batch_size=32",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    return tmp_path


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def logged(path, key):
    return {int(row["step"]): float(row[key]) for row in rows(path) if row.get(key)}


def test_fit_resume_validate_predict(folder, capsys):
    main(["fit", "--name=a", "--trainer.max_epochs=1", *SHORT])
    printed = capsys.readouterr().out
    for words in (
        "DirectPred finished after 3 steps",
        "linear probe",
        "kNN probe",
        "uniformity",
        "alignment",
        "collapse",
    ):
        assert words in printed
    run = folder / "runs" / "a"
    for name in ("config.yaml", "metrics.csv", "report.html", "predictor_spectra.npz", "checkpoints/last.ckpt"):
        assert (run / name).stat().st_size, name
    assert list((run / "pictures").rglob("*.png"))
    first = logged(run / "metrics.csv", "train/loss")
    assert sorted(first) == [0, 1, 2]

    main(["fit", "--trainer.max_epochs=2", "--ckpt_path=last", *SHORT])  # the latest run
    both = logged(run / "metrics.csv", "train/loss")
    assert sorted(both) == [0, 1, 2, 3, 4, 5]
    assert {step: both[step] for step in first} == first
    assert "finished after 6 steps" in capsys.readouterr().out

    main(["validate", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", "--name=b", *SHORT])
    values = rows(folder / "runs" / "b" / "metrics.csv")[-1]
    for key in ("val/linear_top1", "val/knn_top1", "val/uniformity", "val/alignment", "val/effective_rank"):
        assert values[key], key

    main(["predict", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", "--name=c", *SHORT])
    arrays = np.load(folder / "embeddings.npz")
    assert (np.diff(arrays["index"]) > 0).all()
    assert len(arrays["features"]) == len(arrays["label"]) == len(arrays["index"])


@pytest.mark.slow
def test_uninterrupted_run_is_the_resumed_one(folder):
    main(["fit", "--name=whole", "--trainer.max_epochs=2", *SHORT])
    main(["fit", "--name=parts", "--trainer.max_epochs=1", *SHORT])
    main(["fit", "--name=parts", "--trainer.max_epochs=2", "--ckpt_path=last", *SHORT])
    whole, parts = (torch.load(f"runs/{run}/checkpoints/last.ckpt", weights_only=True) for run in ("whole", "parts"))
    assert all(torch.equal(value, parts["state_dict"][name]) for name, value in whole["state_dict"].items())
    assert logged("runs/whole/metrics.csv", "train/loss") == logged("runs/parts/metrics.csv", "train/loss")


def test_one_flag_switches_to_a_method_without_predictor(folder):
    main(["fit", "--model", "SimCLR", "--trainer.max_epochs=1", *SHORT])
    (run,) = Path("runs").iterdir()
    assert "simclr" in run.name
    assert logged(run / "metrics.csv", "train/uniformity")


@pytest.mark.parametrize("callbacks", ["ModelCheckpoint", "null", "[]"])
def test_one_callback_alone_needs_no_list(folder, callbacks):
    main(["fit", "--model=SimCLR", "--name=a", f"--trainer.callbacks={callbacks}", "--trainer.max_epochs=1", *SHORT])
    assert any(Path("runs/a").rglob("*.ckpt"))  # ModelCheckpoint is the Trainer's default, too


def predict_on(rank, world_size, output):
    """Rank r's rows r, r + world_size, ... and one that a sampler added, in bfloat16."""
    index = torch.tensor([*range(rank, 10, world_size), 0])
    features = torch.stack([index, index * 0.5], dim=1).to(torch.bfloat16)
    write_embeddings([{"features": features, "label": index % 3, "index": index}], output)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_embeddings_of_all_ranks_are_written_once(tmp_path, world_size):
    output = str(tmp_path / "embeddings.npz")
    run_ranks(world_size, predict_on, output)
    arrays = np.load(output)
    assert arrays["index"].tolist() == list(range(10))
    assert arrays["features"].dtype == np.float32
    assert arrays["features"].tolist() == [[i, i / 2] for i in range(10)]
    assert arrays["label"].tolist() == [i % 3 for i in range(10)]


def test_runs_do_not_collide(folder):
    for _ in range(2):
        main(["fit", "--trainer.fast_dev_run=1", *SHORT])
        main(["fit", "--root=other", "--trainer.max_epochs=1", "--trainer.callbacks=[]", *SHORT])
    assert len(list(Path("other").iterdir())) == 2


def test_the_log_keeps_what_is_not_logged_again(tmp_path):
    for steps in ([0, 1, 2, 3], [2, 3, 4]):
        logger = ResumableCSVLogger(tmp_path, name="run", version="")
        for step in steps:
            logger.log_metrics({"a": step + len(steps) / 10, **({"b": 1.0} if step > 3 else {})}, step)
            logger.save()
    assert logged(tmp_path / "run" / "metrics.csv", "a") == {0: 0.4, 1: 1.4, 2: 2.3, 3: 3.3, 4: 4.3}
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.csv")] == ["0", "1", "2", "3", "4"]  # each once


def test_shipped_configs_are_found_by_their_bare_names(folder):
    found = str(shipped("default.yaml"))
    assert resolve_configs(["fit", "--config", "default.yaml", "-c=default.yaml"]) == [
        "fit",
        f"--config={found}",
        f"-c={found}",
    ]
    byol = str(shipped("cifar10/byol.yaml"))
    assert resolve_configs(["fit", "--name", "a", "-c", "default.yaml,cifar10/byol.yaml"]) == [
        "fit",
        f"-c={found}",
        f"-c={byol}",
        "--name",
        "a",
    ]
    Path("default.yaml").write_text("{}")  # the user's own file comes first
    assert resolve_configs(["fit", "-c", "default.yaml"]) == ["fit", "-c=default.yaml"]
    assert resolve_configs(["fit", "--config", "none.yaml"]) == ["fit", "--config=none.yaml"]


def test_callbacks_are_tuned_and_switched_off_by_name(folder):
    args = ["fit", "--name=a", "--trainer.max_epochs=1", *SHORT]
    off = [f"--{name}=false" for name in ("eigenspace_alignment", "covariance_operator_norm", "run_report")]
    main(
        [
            *args,
            "--knn_probe.k",
            "3",
            "--knn.every_n_epochs=1",
            "--collapse_monitor.patience",
            "3",
            "--linear",
            "false",
            *off,
        ]
    )
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())["trainer"]["callbacks"]
    options = {entry["class_path"].rpartition(".")[2]: entry.get("init_args", {}) for entry in saved}
    assert options["KNNProbe"]["k"] == 3 and options["KNNProbe"]["every_n_epochs"] == 1
    assert options["CollapseMonitor"]["patience"] == 3
    assert "LinearProbe" not in options and "RunReport" not in options and "EffectiveRank" in options
    # The same with the config that the run has left.
    main([*args, "--config=runs/a/config.yaml", "--name=b", "--knn.k=5", "--uniformity_alignment=false"])
    saved = yaml.safe_load(Path("runs/b/config.yaml").read_text())["trainer"]["callbacks"]
    options = {entry["class_path"].rpartition(".")[2]: entry.get("init_args", {}) for entry in saved}
    assert options["KNNProbe"]["k"] == 5 and options["KNNProbe"]["every_n_epochs"] == 1
    assert "UniformityAlignment" not in options and "LinearProbe" not in options


def test_names_reach_the_processes_that_a_run_starts(folder, monkeypatch):
    """They are given sys.argv, which must keep the names, and parse it again."""
    command = ["fit", "--name=a", "--knn.k=3", "--trainer.fast_dev_run=1", *SHORT]
    monkeypatch.setattr("sys.argv", ["lightning-ssl", *command])
    main()
    assert "--knn.k=3" in sys.argv
    main()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fit", "--model", "Byoll"], r"there is no 'Byoll' \(did you mean 'BYOL'\?\).*SimCLR"),
        (["fit", "--data", "ImageModule"], "did you mean 'ImageDataModule'"),
        (["fit", "--data.dataset", "cifar11"], "one of digits, cifar10.*did you mean 'cifar10'"),
        (["fit", "--data.datset", "cifar10"], "no option 'datset'.*did you mean 'dataset'"),
        (["fit", "--trainer.callbacks+=KnnProbe"], "did you mean 'KNNProbe'.*UniformityAlignment"),
        (["fit", "--model.predictor", "mlp"], "DirectPred sets the weight of a linear predictor"),
        (["fit", "--model", "BYOL", "--model.predictor", "cubic"], "one of mlp, linear, none"),
        (["fit", "--modl", "BYOL"], "no flag --modl.*did you mean '--model'"),
        (["fit", "--config", "nope.yaml"], "nope.yaml"),
        (["fit", "--ckpt_path", "last"], "no run in 'runs' has a checkpoint"),
        (["fti"], "choose from"),
        (["fit", "--knn.every_n_epoch", "1"], "KNNProbe has no option 'every_n_epoch'.*did you mean 'every_n_epochs'"),
        (["fit", "--knn.every_n_epochs", "often"], "every_n_epochs must be int.*got 'often'"),
        (["fit", "--knm.k=3"], r"no flag --knm.k \(did you mean '--knn.k'\?\).*collapse_monitor"),
        (["fit", "--linear"], "--linear must be false .* or true"),
        (["fit", "--linear", "maybe"], "--linear must be false .* or true, got 'maybe'"),
        (["fit", "--trainer.callbacks=[]", "--linear=false"], "this run has no LinearProbe.*callbacks.=LinearProbe"),
    ],
)
def test_wrong_uses_are_answered_in_plain_words(folder, capsys, args, words):
    with pytest.raises(SystemExit) as exit_:
        main(args)
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert re.search(words, message, re.DOTALL), message
    assert "Traceback" not in message


def test_messages_that_need_no_words_of_ours_pass_through():
    assert explain("Something else", []) == "Something else"


def test_a_refusal_is_found_among_all_that_was_tried():
    tried = "Does not validate against any of the Union subtypes\nSubtypes: [a, b]\nErrors:\n  - Expected a <class "
    tried += (
        "'NoneType'>\n  - `k` must be at least 1, got 0; give more\nGiven value type: <class 'dict'>\nGiven value: {}"
    )
    assert innermost(tried) == "`k` must be at least 1, got 0; give more"
    assert innermost("`k` must be\n  - a thing") == "`k` must be\n  - a thing"
