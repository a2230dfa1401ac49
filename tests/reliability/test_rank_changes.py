"""A run that goes on at another number of ranks, or in other steps, in the middle of an epoch."""

import functools
from collections import defaultdict

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ssl._lightning import RESUMES_BEHIND_THE_STEP
from lightning_ssl.data import MixtureDataModule
from lightning_ssl.methods import SimCLR
from lightning_ssl.nn import MLPBackbone
from tests.reliability import jobs
from tests.reliability.test_equivalence import free_port, values

WATCHING = [
    jobs.CALLBACKS[2],
    "{class_path: tests.reliability.faulty.Seen}",
    "{class_path: lightning_ssl.runs.checkpoint.RunCheckpoint, "
    "init_args: {save_last: true, every_n_train_steps: 4, save_top_k: -1}}",
]


def run(folder, ranks, *flags):
    """Two epochs of seven steps of 32 samples in double precision."""
    port, processes = free_port(), []
    args = jobs.job("BYOL", folder, *jobs.NORM_FREE["BYOL"], "--model.backbone.norm=group", callbacks=WATCHING)
    args += [f"--data.batch_size={32 // ranks}", "--trainer.precision=64-true", f"--trainer.devices={ranks}", *flags]
    for rank in range(ranks):
        place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        strategy = ["--trainer.strategy=ddp"] if ranks > 1 else []
        environment = {**place, "MASTER_PORT": port} if ranks > 1 else {}
        processes.append(jobs.start(folder, [*args, *strategy], environment=environment))
    for process in processes:
        process.join(300)
        assert process.exitcode == 0, process.kill() or jobs.output(folder)[-3000:]
    return folder / "runs" / "run"


def seen(folder):
    """The samples of each step, of all ranks: {(epoch, step): {sample: times}}."""
    found = defaultdict(lambda: defaultdict(int))
    for path in folder.glob("seen-*.txt"):
        for line in path.read_text().splitlines():
            epoch, step, *samples = map(int, line.split())
            for sample in samples:
                found[epoch, step][sample] += 1
    return found


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    @functools.cache
    def make(ranks):
        folder = tmp_path_factory.mktemp(f"on_{ranks}")
        run(folder, ranks)
        return folder

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_the_same_run_at_another_number_of_ranks(before, after, unchanged, tmp_path):
    """From the fourth of an epoch's seven steps on."""
    reference = unchanged(before)
    start = next((reference / "runs" / "run" / "checkpoints").glob("*step=4.ckpt"))
    now = run(tmp_path, after, f"--ckpt_path={start}")
    ours, expected = seen(tmp_path), seen(reference)
    assert ours == {place: samples for place, samples in expected.items() if place[1] >= 4}
    epoch = [sample for (epoch, step), samples in expected.items() if epoch == 0 and step < 4 for sample in samples]
    epoch += [sample for (epoch, _), samples in ours.items() if epoch == 0 for sample in samples]
    assert len(epoch) == len(set(epoch)) == 7 * 32
    logged, expected = values(now), values(reference / "runs" / "run")
    expected = {place: value for place, value in expected.items() if place[0] >= 4}
    assert logged.keys() == expected.keys()
    for place, value in expected.items():
        assert logged[place] == pytest.approx(value, rel=1e-4, abs=1e-6), place
    state, expected = (jobs.checkpoint(where)["state_dict"] for where in (now, reference / "runs" / "run"))
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Watch(L.Callback):
    def __init__(self):
        self.samples, self.validated = defaultdict(list), []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.samples[trainer.current_epoch] += batch.index.tolist()

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.current_epoch)


@pytest.mark.parametrize(("size", "steps"), [(8, 6), (16, 3), (24, 2), (20, 2)])
def test_other_steps_go_on_behind_the_same_sample(size, steps, tmp_path):
    """80 samples in steps of 16, two of them done: 48 are left, which make `steps` whole steps of another size."""

    def fit(batch_size, path=None):
        watch = Watch()
        data = MixtureDataModule(components=4, draws=80, batch_size=batch_size, probe_draws=32)
        backbone = MLPBackbone(in_features=10, hidden_features=8, out_features=8)
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            callbacks=[watch, saver],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(SimCLR(backbone=backbone, projector_hidden=8, projector_dim=4), data, ckpt_path=path)
        return watch, trainer.global_step

    first, _ = fit(16)
    if size == 16:
        later, total = fit(16, tmp_path / "step=2.ckpt")
    else:
        with pytest.warns(UserWarning, match=rf"{size} samples a step.*where it had 16: behind sample 32 of epoch 0"):
            later, total = fit(size, tmp_path / "step=2.ckpt")
    assert later.samples[0] == list(range(32, 32 + steps * size))
    assert later.samples[1] == list(range(80 // size * size)) and first.samples[1] == list(range(80))
    assert total == 2 + steps + 80 // size
    # Before 2.5 Lightning may leave out the validation of an epoch that it resumes in, with its own ModelCheckpoint.
    assert later.validated == [0, 1] or (not RESUMES_BEHIND_THE_STEP and later.validated == [1])
