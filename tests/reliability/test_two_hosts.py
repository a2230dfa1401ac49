"""Two hosts, which are network namespaces with a link between them: the same run as on one, and faults that end it."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reliability import jobs
from tests.reliability.test_equivalence import free_port

pytestmark = pytest.mark.slow

TIMEOUT = 15  # of a collective, in seconds
SPARE = 60  # seconds, on a machine that does other things, too
SLOWLY = "{{class_path: tests.reliability.faulty.Slowly, init_args: {{seconds: 0.1, hang: {0}}}}}"
SAVING = (
    "{class_path: lightning_ssl.runs.checkpoint.RunCheckpoint, init_args: {save_last: true, every_n_train_steps: 2}}"
)


class Hosts:
    """A link between two namespaces with a hostname each, and torchrun's agent on both."""

    def __init__(self, number):
        self.names = [f"lssl{number}a", f"lssl{number}b"]
        self.addresses = [f"10.213.{number % 250}.1", f"10.213.{number % 250}.2"]
        self.agents = []

    def ip(self, *args, check=True):
        return subprocess.run(["ip", *args], capture_output=True, check=check)

    def make(self):
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        self.ip(
            "link",
            "add",
            "wire",
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            own = Path("/etc/netns") / name  # `ip netns exec` puts what is there over /etc
            own.mkdir(parents=True)
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
            self.ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            self.ip("-n", name, "link", "set", "wire", "up")

    def start(self, folders, args, restarts=0):
        """The agents, each with one worker; what they print goes to a file in each folder."""
        self.agents = []
        end = f"{self.addresses[0]}:{free_port()}"
        for node, folder in enumerate(folders):
            place = ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "sh", "-c"]
            place += [f'hostname {self.names[node]} && exec "$@"', "sh"]
            run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=test"]
            run += ["--rdzv_backend=c10d", f"--rdzv_endpoint={end}", f"--local-addr={self.addresses[node]}"]
            run += [f"--max-restarts={restarts}", "-m", "lightning_ssl", *args]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                "GLOO_SOCKET_IFNAME": "wire",
            }
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see overlays/multinode.yaml
            environment["PYTHONPATH"] = str(Path(__file__).parents[2])
            with open(folder / f"host{node}.txt", "wb") as output:
                self.agents.append(
                    subprocess.Popen([*place, *run], cwd=folder, env=environment, stdout=output, stderr=output)
                )
        self.folders = folders
        self.begun_at = self.step()

    def output(self, node):
        return (self.folders[node] / f"host{node}.txt").read_text()

    def workers(self):
        """The processes of the ranks, of both hosts."""
        found = []
        for agent in self.agents:
            listed = subprocess.run(
                ["ps", "-o", "pid=,args=", "--ppid", str(agent.pid)], capture_output=True, text=True
            )
            found.append([int(line.split()[0]) for line in listed.stdout.splitlines() if "lightning_ssl" in line])
        return found

    def step(self):
        """Of the last checkpoint."""
        run = self.folders[0] / "runs" / "run"
        return jobs.checkpoint(run)["global_step"] if (run / "checkpoints" / "last.ckpt").exists() else 0

    def wait_for_steps(self, number=4, seconds=200):
        """Until so many more than at the start are saved."""
        end = time.monotonic() + seconds
        while self.step() < self.begun_at + number:
            assert time.monotonic() < end and all(a.poll() is None for a in self.agents), self.output(0) + self.output(
                1
            )
            time.sleep(0.1)

    def seconds_until_ranks_end(self, workers, within):
        begun = time.monotonic()
        while any(alive(pid) for pid in workers):
            assert time.monotonic() - begun < within, self.output(0)[-3000:] + self.output(1)[-3000:]
            time.sleep(0.05)
        return time.monotonic() - begun

    def finish(self):
        for agent in self.agents:
            assert agent.wait(240) == 0, self.output(0)[-3000:] + self.output(1)[-3000:]

    def end(self):
        for pid in [pid for pids in self.workers() for pid in pids] + [agent.pid for agent in self.agents]:
            if alive(pid):
                os.kill(pid, 9)
        for agent in self.agents:
            agent.wait(20)
        self.agents = []

    def remove(self):
        self.end()
        for name in self.names:
            self.ip("netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def alive(pid):
    """Running: not gone, nor waiting for its parent to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def hosts():
    made = Hosts(os.getpid())
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces take a superuser, iproute2 and unshare")
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield made
    made.remove()


def command(folder, *flags, hang=-1):
    """Two epochs of 30 steps of BYOL on two ranks."""
    return [
        *jobs.job("BYOL", folder, callbacks=[SLOWLY.format(hang), jobs.CALLBACKS[2], jobs.REPORT, SAVING]),
        *jobs.NORM_FREE["BYOL"],
        "--model.backbone.norm=group",
        "--data.batch_size=16",
        "--trainer.limit_train_batches=30",
        "--trainer.devices=1",
        "--trainer.num_nodes=2",
        "--trainer.strategy=DDPStrategy",
        f"--trainer.strategy.timeout=0:00:{TIMEOUT}",
        *flags,
    ]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    """The uninterrupted run of two processes on one host, not slowed."""
    folder, port = tmp_path_factory.mktemp("one_host"), free_port()
    processes = []
    for rank in range(2):
        place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        args = [*command(folder), "--trainer.devices=2", "--trainer.num_nodes=1"]
        processes.append(jobs.start(folder, args, environment={**place, "MASTER_PORT": port}))
    for process in processes:
        process.join(300)
        assert process.exitcode == 0, process.kill() or jobs.output(folder)[-3000:]
    return folder / "runs" / "run"


def assert_identical(run, reference):
    state, expected = jobs.checkpoint(run), jobs.checkpoint(reference)
    for part in ("state_dict", "optimizer_states", "global_step", "epoch"):
        assert not jobs.differences(state[part], expected[part], part)
    assert jobs.log(run) == jobs.log(reference)


LINE = r"lightning-ssl: rank {0} of 2 on \S+ ended at step \d+, .*last collective of ours: .*goes on"


def test_faults_end_the_run_and_it_goes_on(hosts, one_host, tmp_path):
    """A worker killed, a rank that hangs, an agent killed, the link cut, one after another; then on to the end."""
    took, both = {}, [tmp_path, tmp_path]
    hosts.start(both, command(tmp_path))
    hosts.wait_for_steps()
    workers = [pid for pids in hosts.workers() for pid in pids]
    assert len(workers) == 2
    os.kill(workers[1], 9)
    took["worker killed"] = hosts.seconds_until_ranks_end(workers, TIMEOUT + SPARE)
    assert re.search(LINE.format(0), hosts.output(0)), hosts.output(0)[-3000:]
    hosts.end()
    assert hosts.step() >= 4

    hosts.start(both, [*command(tmp_path, hang=hosts.step() + 4), "--ckpt_path=last"])
    hosts.wait_for_steps()
    workers = [pid for pids in hosts.workers() for pid in pids]
    took["a rank hangs"] = hosts.seconds_until_ranks_end(workers, TIMEOUT + SPARE)
    assert re.search(LINE.format(0), hosts.output(0)), hosts.output(0)[-3000:]
    words = hosts.output(1)
    assert re.search(LINE.format(1), words), words[-3000:]
    # Rank 0 holds the store, which may be gone before rank 1 has read why.
    assert ("rank 0 on" in words and "ended first" in words) or "the store that the ranks meet at" in words
    hosts.end()

    hosts.start(both, [*command(tmp_path), "--ckpt_path=last"])
    hosts.wait_for_steps()
    workers = [pid for pids in hosts.workers() for pid in pids]
    hosts.agents[1].kill()
    took["agent killed"] = hosts.seconds_until_ranks_end(workers, TIMEOUT + SPARE)
    assert "ended by the loss of the agent that started a rank after step" in hosts.output(0), hosts.output(0)[-3000:]
    hosts.end()

    hosts.start(both, [*command(tmp_path), "--ckpt_path=last"])
    hosts.wait_for_steps()
    workers = [pid for pids in hosts.workers() for pid in pids]
    hosts.ip("-n", hosts.names[1], "link", "set", "wire", "down")
    took["link cut"] = hosts.seconds_until_ranks_end(workers, TIMEOUT + SPARE)
    hosts.ip("-n", hosts.names[1], "link", "set", "wire", "up")
    for rank in range(2):
        assert re.search(LINE.format(rank), hosts.output(rank)), hosts.output(rank)[-3000:]
    hosts.end()

    hosts.start(both, [*command(tmp_path), "--ckpt_path=last"])
    hosts.finish()
    assert_identical(tmp_path / "runs" / "run", one_host)
    print({fault: f"{seconds:.0f} s" for fault, seconds in took.items()}, f"with a timeout of {TIMEOUT} s")


def test_workers_that_torchrun_starts_again_resume_by_themselves(hosts, one_host, tmp_path):
    hosts.start([tmp_path, tmp_path], command(tmp_path), restarts=1)
    hosts.wait_for_steps(6)
    os.kill(hosts.workers()[1][0], 9)
    hosts.finish()
    assert "all 2 ranks resume from step" in hosts.output(0)
    assert_identical(tmp_path / "runs" / "run", one_host)


@pytest.mark.parametrize("path", ["last", "runs/run/checkpoints/last.ckpt"])
def test_a_host_without_the_checkpoint(hosts, one_host, tmp_path, path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    shutil.copytree(one_host, folders[0] / "runs" / "run")
    content = {file: file.read_bytes() for file in folders[0].rglob("*.ckpt")}
    begun = time.monotonic()
    hosts.start(folders, [*command(tmp_path), "--trainer.max_epochs=3", f"--ckpt_path={path}"])
    for node, agent in enumerate(hosts.agents):
        assert agent.wait(TIMEOUT + 120) != 0
        words = hosts.output(node)
        assert "the ranks do not resume from the same state" in words, words[-3000:]
        assert f"rank 0 on {hosts.names[0]}: " in words and "step 60, content" in words
        assert f"rank 1 on {hosts.names[1]}: " in words and "Put --root on a disk that all hosts share" in words
    print(f"{time.monotonic() - begun:.0f} s from start to end")
    assert {file: file.read_bytes() for file in content} == content
    hosts.end()
