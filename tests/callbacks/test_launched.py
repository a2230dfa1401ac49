"""Through Lightning's own launcher, as users start it: two processes, and a fault on one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from tests.callbacks import strangers
from tests.callbacks.test_ranks import watchers
from tests.callbacks.harness import trainer

class Faulty(strangers.MeanLoss):
    def training_step(self, batch, batch_idx):
        if sys.argv[1] == "fault" and batch_idx == 1 and self.global_rank == 1:
            raise RuntimeError("rank 1 is broken")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    torch.set_num_threads(1)
    callbacks = watchers()
    if sys.argv[1] == "path":
        callbacks[0].places["features"] = callbacks[0].features = "no_such_place"
    run = trainer(callbacks, devices=2, strategy="ddp", num_sanity_val_steps=2, default_root_dir=sys.argv[2])
    run.fit(Faulty(), strangers.loader(strangers.Pairs(32), 8), strangers.loader(strangers.Pairs(7), 2))
    print("FINISHED", run.global_rank, sorted(run.callback_metrics))
"""


def launch(case, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {
        key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), case, str(tmp_path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)


@pytest.mark.slow
def test_two_processes(tmp_path):
    done = launch("healthy", tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [line for line in done.stdout.splitlines() if line.startswith("FINISHED")]
    assert len(ranks) == 2
    assert ranks[0].split(" ", 2)[2] == ranks[1].split(" ", 2)[2]
    assert "val/uniformity" in ranks[0] and "val/knn_top1" in ranks[0]
    assert len(list(tmp_path.rglob("*.png"))) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), [("fault", "rank 1 is broken"), ("path", "no_such_place")])
def test_a_fault_ends_all_ranks(case, words, tmp_path):
    done = launch(case, tmp_path)  # would raise TimeoutExpired if a rank waited for another
    assert done.returncode != 0
    assert words in done.stderr
    assert "FINISHED" not in done.stdout
