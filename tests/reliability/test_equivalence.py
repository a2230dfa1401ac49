"""The same run at any number of ranks: losses, weights and every callback's values, over 50 steps.

Networks without batch normalisation, which would see each rank's own rows only; double precision, for Adam's first
steps blow up the roundoff of gradients near zero.
"""

import csv
import os
import re
import socket
import subprocess
import sys

import pytest
import torch

from tests.reliability import jobs

pytestmark = pytest.mark.slow

METHODS = ["SimCLR", "BYOL", "DirectPred", "BarlowTwins"]
# CI starts every launcher with one method, and every method at 2 and 4 ranks; this starts them all with all.
EVERYTHING = bool(os.environ.get("LIGHTNING_SSL_ALL_LAUNCHES"))
LAUNCHED = METHODS if EVERYTHING else ["BYOL"]
SCRIPT = [sys.executable, "-m", "lightning_ssl"]
# Every callback, at six moments of the run; pictures are the first rank's own.
WATCHING = [re.sub(r"every_n_steps: \d+", "every_n_steps: 10", entry) for entry in jobs.CALLBACKS[:-1]]
WATCHING = [entry.replace("picture_every: 2", "picture_every: 0") for entry in WATCHING] + [
    "{class_path: lightning_ssl.runs.checkpoint.RunCheckpoint, init_args: {save_last: true}}"
]


def command(method, folder, ranks, *flags):
    """50 steps on the same global batches of 32."""
    return [
        *jobs.job(method, folder, callbacks=WATCHING),
        *jobs.NORM_FREE[method],
        "--model.backbone.norm=group",
        f"--data.batch_size={32 // ranks}",
        "--trainer.limit_train_batches=25",
        "--trainer.precision=64-true",
        *flags,
    ]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def values(run):
    """Every logged value: {(step, key): value}."""
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(int(row["step"]), key): float(row[key]) for row in rows for key in row if row[key] and key != "step"}


def assert_same(folder, reference):
    run = folder / "runs" / "run"
    ours, expected = values(run), values(reference)
    assert ours.keys() == expected.keys()
    assert len({step for step, key in expected if key == "train/loss"}) == 50
    for place, value in expected.items():
        assert ours[place] == pytest.approx(value, rel=1e-4, abs=1e-6), place
    state, expected = (jobs.checkpoint(where)["state_dict"] for where in (run, reference))
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return jobs.references(tmp_path_factory, lambda method, folder: command(method, folder, 1))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_ranks(method, ranks, one_process, tmp_path):
    """Each rank a process that was started from outside, as torchrun and SLURM start them."""
    port = free_port()
    flags = [f"--trainer.devices={ranks}", "--trainer.strategy=ddp"]
    processes = []
    for rank in range(ranks):
        place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(jobs.start(tmp_path, command(method, tmp_path, ranks, *flags), environment=place))
    for process in processes:
        process.join(300)
        assert process.exitcode == 0, process.kill() or jobs.output(tmp_path)[-3000:]
    assert jobs.output(tmp_path).count("finished after 50 steps") == 1  # one rank speaks
    assert_same(tmp_path, one_process(method))


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.mark.parametrize("ranks", [2, 4] if EVERYTHING else [2])
@pytest.mark.parametrize("method", LAUNCHED)
def test_lightnings_own_launcher(method, ranks, one_process, tmp_path):
    args = command(method, tmp_path, ranks, f"--trainer.devices={ranks}", "--trainer.strategy=ddp")
    done = subprocess.run([*SCRIPT, *args], cwd=tmp_path, env=environment(), capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert_same(tmp_path, one_process(method))


@pytest.mark.parametrize("method", LAUNCHED)
def test_two_torchrun_agents(method, one_process, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=test"]
    launcher += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "-m", "lightning_ssl"]
    flags = ["--trainer.strategy=ddp", "--trainer.devices=1", "--trainer.num_nodes=2"]
    args = [*launcher, *command(method, tmp_path, 2, *flags)]
    agents = [
        subprocess.Popen(args, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    printed = [agent.communicate(timeout=400)[0].decode() for agent in agents]
    assert all(agent.returncode == 0 for agent in agents), "\n".join(text[-2000:] for text in printed)
    assert_same(tmp_path, one_process(method))
