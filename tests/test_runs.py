"""Runs as objects: whose a folder is, what a run leaves, the list of runs, and their comparison."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import yaml

from lightning_ssl import data, methods
from lightning_ssl.report.page import report_page
from lightning_ssl.runs.cli import main
from lightning_ssl.runs.compare import first_parting
from lightning_ssl.runs.help import DATASETS, METHODS, command_help, completions
from lightning_ssl.runs.owner import refusal, run_meant
from lightning_ssl.runs.records import read_run
from tests.browser import browser
from tests.test_cli import SHORT, folder  # noqa: F401
from tests.test_report import BROKEN, HEALTHY, curves, summary_of

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


@pytest.mark.slow
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


# The list and the comparison ----------------------------------------------------------------------------------------

CONFIG = """\
name: null
model: {{class_path: lightning_ssl.methods.BYOL, init_args: {{predictor: {predictor}, dim: 64}}}}
trainer: {{max_epochs: 4, callbacks: [{{class_path: lightning_ssl.callbacks.KNNProbe, init_args: {{k: {k}}}}}]}}
"""


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Two healthy runs and a broken one, as RunReport leaves them."""
    monkeypatch.chdir(tmp_path)
    for name, verdict in (("good", HEALTHY), ("bad", BROKEN), ("other", HEALTHY)):
        run, history = tmp_path / "runs" / name, curves(falls=verdict is BROKEN)
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text(CONFIG.format(predictor="none" if verdict is BROKEN else "mlp", k=3))
        summary = summary_of(history, [verdict], name=name)
        (run / "summary.json").write_text(json.dumps(summary))
        (run / "report.html").write_text(report_page(summary, history, run))
    evaluation = tmp_path / "runs" / "good-validate"
    evaluation.mkdir()
    (evaluation / "metrics.csv").write_text("step,val/loss\n0,1.0\n")
    return tmp_path / "runs"


def answered(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_runs_are_listed(three, capsys):
    lines = answered(capsys, "runs").splitlines()
    assert len(lines) == 4  # an evaluation is no run
    (bad,) = [line for line in lines if line.startswith("bad")]
    for words in ("BYOL", "digits", "finished", "400", "Complete collapse of projector since step 120",
                  "kNN 30.0% @0 (10.0% @399)"):  # fmt: skip
        assert words in bad, words
    assert {run["run"]["name"] for run in json.loads(answered(capsys, "runs", str(three), "--json"))} == {
        "good",
        "bad",
        "other",
    }
    assert "is no folder" in refused(capsys, "runs", "nowhere")


def test_a_run_without_a_summary_and_one_that_was_killed(three):
    (three / "good" / "summary.json").unlink()
    (three / "good" / "report.html").unlink()
    (three / "good" / "metrics.csv").write_text("step,train/loss\n0,1.5\n9,0.5\n10,0.")  # cut off by a kill
    run = read_run(three / "good")
    assert run.summary["steps"] == 10 and run.curves == {"train/loss": [(0, 1.5), (9, 0.5)]}
    bad = read_run(three / "bad")
    bad.summary["run"] |= {"state": "running", "pid": 2**22 + 1, "host": os.uname().nodename}
    assert bad.state == "killed"


def test_three_runs_are_compared_in_a_browser(three, capsys, tmp_path):
    out = answered(capsys, "compare", "good", "bad", "runs/other")
    for words in (
        "bad broke: Complete collapse of projector since step 120",
        "Likely cause: there is no predictor",
        "good, other are healthy",
        "differ in 1 option.",
    ):
        assert words in out, words
    assert re.search(r"model.predictor +mlp +none +mlp", out)
    parting = int(re.search(r"bad parts from good at step (\d+)", out)[1])
    assert 0 < parting <= 40
    assert "other parts" not in out
    with browser(tmp_path / "profile") as page:
        page.open(three / "compare-good-bad-other.html")
        assert page.run("document.querySelector('#verdict h2').innerText") == "bad broke"
        assert page.run("document.getElementById('verdict').getBoundingClientRect().bottom <= innerHeight")
        assert f"step {parting}" in page.run("document.getElementById('runs').innerText")
        assert "model.predictor" in page.run("document.getElementById('differences').innerText")
        page.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
        plot = "document.querySelector('.plot').uplot"
        assert page.run(f"{plot}.series.slice(1).map(s => s.label)") == ["good", "bad", "other"]
        left, top, width, height = page.run(
            f"(b => [b.left, b.top, b.width, b.height])({plot}.over.getBoundingClientRect())"
        )
        page.mouse("mouseMoved", left + width / 2, top + height / 2)
        assert {"good", "bad", "other"} <= {
            line.partition(":")[0] for line in page.run("document.querySelector('.tip').innerText").split("\n")
        }
        page.drag(left + width * 0.2, top + height / 2, left + width * 0.6)
        low, high = page.run(f"[{plot}.scales.x.min, {plot}.scales.x.max]")
        assert 70 < low < 90 and 230 < high < 250
        page.run("document.querySelectorAll('.key input')[1].click()")  # without the broken one
        assert page.run(f"{plot}.series.map(s => s.show)") == [True, True, False, True]
        assert not page.problems()
    found = json.loads(answered(capsys, "compare", "good", "bad", "--json"))
    assert found["differences"] == {"model.predictor": ["mlp", "none"]} and found["verdicts"]["bad"]["grade"] == "bad"
    assert "there is no run 'none'" in refused(capsys, "compare", "good", "none")
    assert "two runs or more" in refused(capsys, "compare", "good", "good")


def test_noise_is_no_parting():
    rng, steps = np.random.default_rng(0), range(0, 1000, 10)
    one, two, leaves = ([(s, 1.0 + 0.05 * rng.normal() + (s > 500) * away) for s in steps] for away in (0, 0, 1))
    assert first_parting(one, two) is None
    assert first_parting(one, [(s, v + 2 * (s == 300)) for s, v in two]) is None  # a spike is none either
    assert first_parting(one, leaves)[0] in range(510, 530)
    assert first_parting([(0, 0.3), (99, 0.8)], [(0, 0.3), (99, 0.1)])[0] == 99
    assert first_parting([], one) is None and first_parting([(0, 1.0)], [(5, 2.0)]) is None


# Help ---------------------------------------------------------------------------------------------------------------


def test_help_is_one_screen_and_true(folder, capsys):  # noqa: F811
    assert sorted(METHODS) == sorted(methods.__all__)
    assert get_args(get_args(get_type_hints(data.ImageDataModule.__init__)["dataset"])[0]) == DATASETS
    for command in ("fit", "validate", "test", "predict"):
        text = answered(capsys, command, "--help")
        assert len(text.splitlines()) <= 80 and max(map(len, text.splitlines())) <= 110
        assert "--help.all" in text and "--print_config" in text
    everything = answered(capsys, "fit", "--help.all")
    assert len(everything.splitlines()) > 300
    for flag in re.findall(r"--[a-z_.]+", command_help("fit")):
        head = flag.removesuffix(".help").rstrip(".")
        own = head.startswith(("--model.", "--data.", "--knn", "--linear", "--covariance", "--help", "--print_config"))
        assert own or head in everything, flag
    top = answered(capsys, "--help")
    for command in ("fit", "validate", "test", "predict", "doctor", "runs", "compare", "reproduce", "dashboard"):
        assert f"\n  {command} " in top
        assert f"'{command}'" in refused(capsys, "fitt") and f"{command}," in refused(capsys) + ","
    assert answered(capsys, "--version").startswith("lightning-ssl 0.")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--lr=0.1", "--model.optimizer.lr"),
        ("--learning-rate=0.1", "--model.optimizer.lr"),
        ("--epochs=3", "--trainer.max_epochs"),
        ("--batch_size=3", "--data.batch_size"),
        ("--gpus=3", "--trainer.devices"),
        ("--resume", "--ckpt_path last"),
        ("--projector_dim=3", "--model.projector_dim"),
        ("--gradient_clip_val=1", "--trainer.gradient_clip_val"),
        ("--trainer.max_epocs=1", "--trainer.max_epochs"),
    ],
)
def test_near_misses_are_found_by_meaning(folder, capsys, flag, meant):  # noqa: F811
    assert f"(did you mean '{meant}'?)" in refused(capsys, "fit", flag)


def test_words_are_completed(three, capsys):
    assert completions(["co"]) == ["compare", "completion"]
    assert completions(["fit", "--model", "Sim"]) == ["SimCLR", "SimSiam"]
    assert completions(["fit", "--model", "=", "BYOL"]) == ["BYOL", "BYOLPrime"]
    assert completions(["fit", "--model=Barl"]) == ["--model=BarlowTwins"]
    assert "--trainer.max_epochs" in completions(["fit", "--tr"])
    assert completions(["fit", "--config", "digits/b"]) == [
        "digits/barlow_twins.yaml",
        "digits/byol.yaml",
        "digits/byol_prime.yaml",
    ]
    assert completions(["compare", "good", "b"]) == ["bad"]
    bash = answered(capsys, "completion", "bash")
    ask = f"{bash}\nCOMP_WORDS=(lightning-ssl fit --model BY)\nCOMP_CWORD=3\n_lightning_ssl\necho ${{COMPREPLY[@]}}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.stdout.split() == ["BYOL", "BYOLPrime"], done.stderr


def seconds(*args):
    before = os.times()
    subprocess.run([sys.executable, *args], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_what_needs_no_torch_answers_at_once(three):
    """In time of the processor, which others on the machine do not change; none of it imports Lightning."""
    limit = 1.5 * seconds("-c", "import lightning.pytorch")
    for args in (["--help"], ["fit", "--help"], ["--version"], ["runs"], ["compare", "good", "bad", "other"]):
        assert seconds("-m", "lightning_ssl", *args) < limit / 3, args
