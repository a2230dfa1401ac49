"""The console script as a person runs it: interrupts, kills, the report in a browser.

Several ranks, and kills at every place, are in tests/reliability.
"""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.browser import browser

pytestmark = pytest.mark.slow

SCRIPT = [sys.executable, "-m", "lightning_ssl"]
# A small job.
JOB = [
    "--config=digits/byol.yaml",
    "--model.projector_norm=none",
    "--model.predictor_norm=none",
    "--model.backbone=lightning_ssl.nn.SmallConv",
    "--model.backbone.width=8",
    "--model.backbone.norm=group",
    "--trainer.max_epochs=2",
    "--trainer.limit_train_batches=8",
    "--trainer.check_val_every_n_epoch=1",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.accelerator=cpu",
]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def fit(folder, *args):
    command = [*SCRIPT, "fit", *JOB, *args]
    result = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def log(path):
    """Every logged value: {(step, key): value}."""
    with open(path, newline="") as file:
        return {
            (int(row["step"]), key): float(value)
            for row in csv.DictReader(file)
            for key, value in row.items()
            if value and key not in ("step", "epoch")
        }


def weights(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def assert_same_run(ours, reference, rtol=1e-5):
    values, expected = log(ours / "metrics.csv"), log(reference / "metrics.csv")
    assert values.keys() == expected.keys()
    for place, value in expected.items():
        assert values[place] == pytest.approx(value, rel=rtol, abs=1e-6), place
    for (name, a), b in zip(weights(ours).items(), weights(reference).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    fit(folder, "--name=one", "--data.batch_size=32")
    return folder / "runs" / "one"


def start(folder, *args):
    return subprocess.Popen(
        [*SCRIPT, "fit", *JOB, "--data.batch_size=32", *args],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path, seconds=200):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.02)


def test_interrupt_leaves_a_checkpoint_and_a_report_and_the_run_goes_on(uninterrupted, tmp_path):
    process = start(tmp_path, "--name=one")
    run = tmp_path / "runs" / "one"
    wait_for(run / "checkpoints" / "last.ckpt")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (run / "report.html").exists(), err[-2000:]
    assert "Traceback" not in out
    fit(tmp_path, "--name=one", "--data.batch_size=32", "--ckpt_path=last")
    assert_same_run(run, uninterrupted, rtol=1e-6)


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_kill_and_resume_is_the_uninterrupted_run(uninterrupted, tmp_path, delay):
    """Killed without warning, at moments after the first checkpoint: all values and weights come out bit-identical."""
    process = start(tmp_path, "--name=one")
    run = tmp_path / "runs" / "one"
    wait_for(run / "checkpoints" / "last.ckpt")
    time.sleep(delay)
    process.kill()
    process.communicate()
    fit(tmp_path, "--name=one", "--data.batch_size=32", "--ckpt_path=last")
    assert log(run / "metrics.csv") == log(uninterrupted / "metrics.csv")
    reference = weights(uninterrupted)
    assert all(torch.equal(value, reference[name]) for name, value in weights(run).items())


def test_report_opens_offline_in_a_browser(uninterrupted, tmp_path):
    with browser(tmp_path / "profile") as page:
        page.open(uninterrupted / "report.html")
        shown = page.run("document.body.innerText")
        for words in ("Learning", "Geometry", "Predictor", "Health", "val/linear_top1", "Config", "Versions"):
            assert words in shown, words
        assert page.run("document.querySelectorAll('.plot').length") > 10
        assert page.run("[...document.querySelectorAll('[src],[href]')].every(e => e.src.startsWith('data:'))")
        assert page.run("document.getElementById('verdict').getBoundingClientRect().bottom <= innerHeight")
        assert not page.problems()
