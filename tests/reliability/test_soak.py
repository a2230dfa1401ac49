"""A long run with every callback: memory and open files stay level, and so do hooks over many fits of one module.

CI makes 1,000 steps; LIGHTNING_SSL_SOAK_STEPS=20000 makes as many as the reliability page reports.
"""

import gc
import multiprocessing
import os
import sys

import lightning.pytorch as L
import pytest
import torch

from lightning_ssl import callbacks, functional
from lightning_ssl.data import MixtureDataModule
from lightning_ssl.methods import BYOL
from lightning_ssl.nn import MLPBackbone
from lightning_ssl.runs.checkpoint import CheckpointFiles, RunCheckpoint
from lightning_ssl.runs.loggers import GuardLoggers, ResumableCSVLogger

STEPS = int(os.environ.get("LIGHTNING_SSL_SOAK_STEPS", "1000"))
STEPS_AN_EPOCH = max(50, STEPS // 40)


def watchers(every):
    return [
        callbacks.UniformityAlignment(every_n_steps=every),
        callbacks.EffectiveRank(every_n_steps=every),
        callbacks.CorrelationBound(every_n_steps=every, picture_every=5),
        callbacks.EigenspaceAlignment(every_n_steps=every, picture_every=5),
        callbacks.CovarianceOperatorNorm(every_n_steps=2 * every, samples=8, directions=2, principal=1),
        callbacks.CollapseMonitor(every_n_steps=every),
        callbacks.RepresentationCircle(every_n_steps=10 * every),
        callbacks.KNNProbe(k=5, every_n_epochs=1),
        callbacks.LinearProbe(l2=0.1, every_n_epochs=2),
        callbacks.SymmetricPredictor(),
        callbacks.PredictorReset(every_n_epochs=3),
        callbacks.RunReport(),
    ]


def tiny():
    backbone = MLPBackbone(in_features=10, hidden_features=8, out_features=8)
    model = BYOL(backbone=backbone, projector_hidden=8, projector_dim=4, projector_norm="none", predictor="linear")
    data = MixtureDataModule(components=4, draws=16 * STEPS_AN_EPOCH, batch_size=16, probe_draws=32)
    return model, data


class Gauge(L.Callback):
    """Resident memory, in MB, and open files, at the end of each epoch."""

    def __init__(self):
        self.memory, self.files = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        gc.collect()
        with open("/proc/self/statm") as file:
            self.memory.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
        self.files.append(len(os.listdir("/proc/self/fd")))


def soak(folder, steps, pipe):
    torch.set_num_threads(1)
    L.seed_everything(0)
    gauge = Gauge()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[GuardLoggers(), *watchers(every=STEPS_AN_EPOCH // 10), gauge, RunCheckpoint(save_last=True)],
        plugins=[CheckpointFiles()],
        logger=ResumableCSVLogger(folder, name="run", version=""),
        default_root_dir=folder,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = tiny()
    trainer.fit(model, data)
    pipe.send((trainer.global_step, gauge.memory, gauge.files))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_and_open_files_stay_level(tmp_path):
    context = multiprocessing.get_context("spawn")  # a process that has run nothing else
    ours, theirs = context.Pipe()
    process = context.Process(target=soak, args=(str(tmp_path), STEPS, theirs))
    process.start()
    assert ours.poll(60 + STEPS * 0.2), process.kill()
    steps, memory, files = ours.recv()
    process.join(60)
    assert steps == STEPS and process.exitcode == 0
    warm = max(2, len(memory) // 10)
    growth = max(memory[warm:]) - memory[warm]
    print(f"{steps} steps: {memory[warm]:.0f} MB when warm, then at most {growth:+.1f} MB; {files[-1]} open files")
    assert growth <= 20, memory
    assert max(files[warm:]) <= files[warm], files
    assert (tmp_path / "run" / "report.html").exists()


def test_an_observed_graph_is_let_go():
    """Tensor hooks that hold what holds their graph are never freed: 0.1 MB an observation, of a tiny network."""

    def tapes():
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing).__name__ == "Tape"]

    before = tapes()  # an earlier test's, held by the traceback of an error it expected
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    for exact in (False, True):
        functional.covariance_operator_norms(model, [torch.randn(8, 6), torch.randn(8, 6)], directions=2, exact=exact)
    assert len(tapes()) <= len(before)


def hooks(module):
    return sum(
        len(getattr(part, name))
        for part in module.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def test_hooks_and_files_do_not_add_up_over_many_fits(tmp_path):
    model, data = tiny()
    data.draws = 32
    ours = watchers(every=1)[:-1]
    logger = ResumableCSVLogger(tmp_path, name="run", version="")
    seen = []
    for _ in range(3):
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[GuardLoggers(), *ours],
            logger=logger,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
        optimizer = trainer.optimizers[0]
        seen.append((hooks(model), len(optimizer._optimizer_step_post_hooks), len(vars(logger))))
    assert seen == seen[:1] * 3
    assert seen[0][0] == 0
