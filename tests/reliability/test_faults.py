"""Real faults in the middle of a run: the message names the cause, the end comes soon, the last checkpoint is whole."""

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_ssl.callbacks import KNNProbe
from lightning_ssl.data import ImageDataModule
from lightning_ssl.rng import permutation
from lightning_ssl.runs.loggers import GuardLoggers, ResumableCSVLogger, read_rows
from tests.callbacks import strangers
from tests.callbacks.harness import History, trainer
from tests.reliability import jobs

slow = pytest.mark.slow
SAVING = [
    "{class_path: lightning_ssl.runs.checkpoint.RunCheckpoint, init_args: {save_last: true, every_n_train_steps: 2}}"
]
WATCHING = [jobs.CALLBACKS[2], jobs.CALLBACKS[4], jobs.REPORT, *SAVING]  # scalars, pictures, the report


def fit(folder, *flags, callbacks=SAVING, method="SimCLR", during=None):
    """The run's exit code; `during` is called with its process once there is a checkpoint."""
    process = jobs.start(folder, jobs.job(method, folder, *flags, callbacks=callbacks))
    last, end = folder / "runs" / "run" / "checkpoints" / "last.ckpt", time.monotonic() + 200
    while during is not None and process.is_alive() and not last.exists() and time.monotonic() < end:
        time.sleep(0.002)
    if during is not None:
        during(process)
    process.join(200)  # bounded: a run that hangs fails here
    assert not process.is_alive(), process.kill() or jobs.output(folder)[-2000:]
    return process.exitcode


def good_checkpoint(folder):
    """The last checkpoint, which loads and holds finite weights, and that no half-written file is beside it."""
    state = jobs.checkpoint(folder / "runs" / "run")
    assert all(value.isfinite().all() for value in state["state_dict"].values())
    assert not [path.name for path in (folder / "runs" / "run" / "checkpoints").iterdir() if path.suffix != ".ckpt"]
    return state


def resumes(folder, *flags, callbacks=SAVING, method="SimCLR"):
    command = [*jobs.job(method, folder, *flags, callbacks=callbacks), "--ckpt_path=last"]
    assert jobs.run(folder, command) == 0, jobs.output(folder)[-2000:]


# The data ---------------------------------------------------------------------------------------------------------


@slow
def test_a_worker_that_dies(tmp_path):
    data = ["--data=tests.reliability.faulty.DyingWorker", "--data.num_workers=1"]
    assert fit(tmp_path, *data) == 1
    assert "DataLoader worker" in jobs.output(tmp_path) and "exited unexpectedly" in jobs.output(tmp_path)
    assert good_checkpoint(tmp_path)["global_step"] >= 2
    resumes(tmp_path)


def image_folder(root, count=12, size=16):
    for split in ("train", "test"):
        for label in ("a", "b"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (size, size, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@slow
def test_a_corrupt_image_in_the_middle_of_an_epoch(tmp_path):
    source = ImageDataModule("image_folder", root=str(image_folder(tmp_path / "images"))).source
    bad = Path(source.train.paths[permutation(24, 0, 0)[17]])  # the fifth batch's
    bad.write_bytes(bad.read_bytes()[:200])
    data = ["--data.dataset=image_folder", f"--data.root={tmp_path / 'images'}", "--data.image_size=16"]
    data += ["--data.batch_size=4", "--trainer.limit_val_batches=0"]
    assert fit(tmp_path, *data) == 1
    message = jobs.output(tmp_path)
    assert f"{bad} cannot be decoded" in message and "Repair or remove the file, or set on_corrupt='skip'" in message
    assert good_checkpoint(tmp_path)["global_step"] == 4
    resumes(tmp_path, *data, "--data.on_corrupt=skip")


@slow
def test_not_a_number_in_the_input(tmp_path):
    data = ["--data=tests.reliability.faulty.NaNInSecondEpoch", "--data.draws=64", "--data.batch_size=16"]
    model = ["--model.backbone=lightning_ssl.nn.MLPBackbone", "--model.backbone.in_features=10"]
    command = [f for f in jobs.job("SimCLR", tmp_path, *data, *model, callbacks=SAVING) if f not in jobs.BACKBONE]
    assert jobs.run(tmp_path, command) == 1
    message = jobs.output(tmp_path)
    assert "FloatingPointError: non-finite loss at step" in message and "views[1]" in message
    assert good_checkpoint(tmp_path)["global_step"] >= 4


def test_a_probe_dataset_that_vanishes(tmp_path):
    data = ImageDataModule("image_folder", root=str(image_folder(tmp_path / "images", 4)), image_size=16)

    class Vanish(GuardLoggers):
        def on_train_batch_end(self, trainer, *_):
            shutil.rmtree(tmp_path / "images", ignore_errors=True)

    history = History()
    probe = KNNProbe("backbone", data, k=3, every_n_steps=2)
    run = trainer([probe, Vanish()], logger=history)
    with pytest.warns(UserWarning, match=r"KNNProbe.*a probe failed, training goes on: .*images/train/a/0.png"):
        run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)))
    assert run.global_step == 4
    assert list(history.series("val/knn_top1")) == [0]  # the one before the loss


# The disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk takes a superuser; the test with a limit on file sizes runs everywhere")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk):
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


@slow
def test_a_full_disk_while_checkpointing(small_disk):
    assert fit(small_disk, during=lambda process: fill(small_disk)) == 1
    os.unlink(small_disk / "filler")
    state = good_checkpoint(small_disk)
    (small_disk / "output.txt").unlink()
    resumes(small_disk)
    assert state["global_step"] < good_checkpoint(small_disk)["global_step"] == 14


def limit(size):
    return lambda process: resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))


@slow
def test_a_checkpoint_that_does_not_fit(tmp_path):
    """Files may not grow beyond a size, which is set once there is a checkpoint."""
    assert fit(tmp_path, during=limit(30_000)) == 1
    message = jobs.output(tmp_path).splitlines()[-1]
    assert "could not be written" in message and "File too large" in message and "--ckpt_path last" in message
    assert 2 <= good_checkpoint(tmp_path)["global_step"] < 14
    resumes(tmp_path)


@slow
def test_a_log_that_cannot_be_written(tmp_path):
    args = jobs.job("SimCLR", tmp_path, "--trainer.enable_checkpointing=false", callbacks=jobs.CALLBACKS[2:-1])
    process = jobs.start(tmp_path, args)
    log, end = tmp_path / "runs" / "run" / "metrics.csv", time.monotonic() + 200
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.002)
    # What is printed goes to a file as well, and needs room for the warning.
    limit(max(log.stat().st_size, (tmp_path / "output.txt").stat().st_size) + 1500)(process)
    process.join(200)
    assert process.exitcode == 0, jobs.output(tmp_path)[-2000:]
    assert "training goes on" in jobs.output(tmp_path)
    rows = read_rows(str(log))
    assert rows and all(int(row["step"]) < 14 for row in rows)


def test_a_row_of_the_log_that_was_cut_off_by_a_kill_is_left_out(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,loss\n0,0.5\n1,0.25")  # of 0.2517, say
    assert read_rows(str(log)) == [{"step": "0", "loss": "0.5"}]


def test_rows_wait_for_room_and_none_is_torn(tmp_path):
    logger = ResumableCSVLogger(tmp_path, name="run", version="")
    path = tmp_path / "run" / "metrics.csv"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(40):
        if step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
        if step == 30:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logger.log_metrics({"a": float(step), **({"late": 1.0} if step > 20 else {})}, step)
        try:
            logger.save()
            assert not 10 <= step < 30
        except OSError:
            assert 10 <= step < 30
            assert len(read_rows(str(path))) == 10  # a header that did not fit cost nothing, either
    assert [int(row["step"]) for row in read_rows(str(path))] == list(range(40))


# The loggers and pictures -----------------------------------------------------------------------------------------


class Away(History):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("the service is away")

    def save(self):
        raise ConnectionError("the service is away")

    def after_save_checkpoint(self, checkpoint_callback):
        raise ConnectionError("the service is away")


class Logging(strangers.MeanLoss):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_logger_that_raises(tmp_path):
    healthy = History()
    run = trainer([GuardLoggers()], logger=[Away(), healthy], log_every_n_steps=1, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="Away: log_metrics failed, training goes on: the service is away"):
        run.fit(Logging(), strangers.loader(strangers.Pairs(64)))
    assert run.global_step == 4 and len(healthy.rows) == 4
    run.fit_loop.max_epochs = 2
    run.fit(Logging(), strangers.loader(strangers.Pairs(64)))  # guarded once, not twice over
    assert run.global_step == 8


def test_a_logger_that_cannot_start_ends_the_run_before_its_first_step():
    class Dead(History):
        @property
        def experiment(self):
            raise ConnectionError("no account")

    run = trainer([GuardLoggers()], logger=Dead())
    with pytest.raises(ConnectionError, match="no account"):
        run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)))
    assert run.global_step == 0


@slow
def test_a_logger_and_the_pictures_fail_in_a_run_of_the_console_script(tmp_path):
    loggers = "[{class_path: lightning_ssl.runs.loggers.ResumableCSVLogger, init_args: {save_dir: runs}}, "
    loggers += "{class_path: tests.reliability.faulty.RaisingLogger}]"
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "pictures").write_text("a file where a folder should be")
    assert fit(tmp_path, f"--trainer.logger={loggers}", callbacks=WATCHING) == 0
    message = jobs.output(tmp_path)
    assert "RaisingLogger: log_metrics failed, training goes on: the service is away" in message
    assert "could not write files" in message
    steps = {int(row["step"]) for row in read_rows(str(run / "metrics.csv")) if "train/loss" in row}
    assert steps == set(range(14)) and good_checkpoint(tmp_path)["global_step"] == 14
    assert (run / "report.html").stat().st_size


# The ranks --------------------------------------------------------------------------------------------------------


@slow
def test_one_rank_raises_while_the_other_waits(tmp_path):
    """With checkpoints on exceptions on, which would wait for the other rank."""
    saving = [SAVING[0].replace("save_last: true", "save_last: true, save_on_exception: true")]
    args = jobs.job("tests.reliability.faulty.RaisesOnRankOne", tmp_path, callbacks=WATCHING[:-1] + saving)
    args += [*jobs.NORM_FREE["BYOL"], "--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=16"]
    args += ["--model.projector_hidden=16", "--model.projector_dim=8", "--model.predictor_hidden=16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lightning_ssl", *args], cwd=tmp_path, env=environment, capture_output=True, timeout=240
    )
    message = done.stderr.decode()
    assert done.returncode != 0
    assert "RuntimeError: rank 1 is broken" in message
    assert time.monotonic() - begun < 200  # gloo itself would wait for half an hour
    state = good_checkpoint(tmp_path)
    assert 2 <= state["global_step"] <= 5
