"""What a scheduler does to a run: signals, requeueing, restarts; and what a kill costs by default."""

import os
import signal
import time

import pytest

from lightning_ssl.runs.loggers import read_rows
from tests.reliability import jobs
from tests.reliability.test_equivalence import free_port
from tests.reliability.test_resume import assert_identical
from tests.wandb_reader import read_offline_run

pytestmark = pytest.mark.slow

WATCHING = [
    "{class_path: tests.reliability.faulty.Slowly}",
    jobs.CALLBACKS[2],
    jobs.REPORT,
    "{class_path: lightning_ssl.runs.checkpoint.RunCheckpoint, init_args: {save_last: true}}",
]
WANDB = "--config=overlays/wandb_offline.yaml"
SLURM = "--trainer.plugins=[{class_path: lightning.pytorch.plugins.environments.SLURMEnvironment}]"


def wait_for(condition, process, folder, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.is_alive(), jobs.output(folder)[-3000:]
        time.sleep(0.02)


def job(folder, *flags, unnamed=False):
    args = jobs.job("BYOL", folder, *flags, callbacks=WATCHING)
    return [arg for arg in args if not (unnamed and arg.startswith("--name"))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert jobs.run(folder, job(folder, WANDB)) == 0, jobs.output(folder)[-3000:]
    return folder / "runs" / "run"


def test_a_slurm_job_is_saved_queued_again_and_resumes_as_the_same_run(uninterrupted, tmp_path):
    """Without a name: it is the job's. `scontrol` is a script that writes down how it was called."""
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "called"}\n')
    script.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "ssl", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "PATH": f"{script.parent}:{os.environ['PATH']}"}
    args, run = job(tmp_path, WANDB, SLURM, unnamed=True), tmp_path / "runs" / "byol-job4711"
    process = jobs.start(tmp_path, args, environment=slurm)
    wait_for((run / "checkpoints" / "last.ckpt").exists, process, tmp_path)
    os.kill(process.pid, signal.SIGUSR1)
    process.join(100)
    assert process.exitcode == 75, jobs.output(tmp_path)[-3000:]
    words = jobs.output(tmp_path)
    assert "ended by SIGUSR1 after step" in words and "job 4711 is queued again" in words
    assert (tmp_path / "called").read_text() == "requeue 4711\n"
    assert 7 < jobs.checkpoint(run)["global_step"] < 14
    process = jobs.start(tmp_path, args, environment={**slurm, "SLURM_RESTART_COUNT": "1"})
    process.join(200)
    assert process.exitcode == 0, jobs.output(tmp_path)[-3000:]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["byol-job4711"]
    assert_identical(run, uninterrupted)
    parts = [read_offline_run(part) for part in sorted((run / "wandb").glob("offline-run-*"))]
    assert [part.run_id for part in parts] == ["byol-job4711"] * 2
    steps = [row["trainer/global_step"] for part in parts for row in part.history if "train/loss" in row]
    assert steps == list(range(14))  # the second part goes on where the first ended


def test_a_signal_to_one_rank_ends_all_after_the_same_step(tmp_path):
    """And the run then goes on, on one rank: the samples of a step are as many."""
    port, processes = free_port(), []
    flags = [*jobs.NORM_FREE["BYOL"], "--model.backbone.norm=group"]
    for rank in range(2):
        place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        args = job(tmp_path, *flags, "--data.batch_size=16", "--trainer.devices=2", "--trainer.strategy=ddp")
        processes.append(jobs.start(tmp_path, args, environment={**place, "MASTER_PORT": port}))
    run = tmp_path / "runs" / "run"
    wait_for((run / "checkpoints" / "last.ckpt").exists, processes[0], tmp_path)
    os.kill(processes[1].pid, signal.SIGTERM)
    for rank, process in enumerate(processes):
        process.join(100)  # a process that Lightning might have started, too, ends with 0: the first speaks for both
        assert process.exitcode == (0 if rank else 75), process.kill() or jobs.output(tmp_path)[-3000:]
    step = jobs.checkpoint(run)["global_step"]
    assert 7 < step < 14 and f"ended by SIGTERM after step {step}" in jobs.output(tmp_path)
    assert jobs.run(tmp_path, [*job(tmp_path, *flags), "--ckpt_path=last"]) == 0, jobs.output(tmp_path)[-3000:]
    assert jobs.checkpoint(run)["global_step"] == 14


@pytest.mark.parametrize("delay", [0.0, 0.35])
def test_a_kill_loses_at_most_one_epoch(tmp_path, delay):
    """With the shipped defaults, which validate every tenth epoch."""
    short = [flag for flag in jobs.SHORT if "check_val" not in flag]
    process = jobs.start(tmp_path, ["fit", *jobs.BACKBONE, *short, "--name=run", "--trainer.max_epochs=30"])
    run = tmp_path / "runs" / "run"

    def epoch():
        return max((int(row["epoch"]) for row in read_rows(str(run / "metrics.csv")) if "epoch" in row), default=0)

    wait_for(lambda: epoch() >= 3, process, tmp_path)
    time.sleep(delay)
    process.kill()
    process.join()
    assert jobs.checkpoint(run)["epoch"] >= epoch() - 1
