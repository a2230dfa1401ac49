"""Checkpoint files: whole or not there, held back until they count, read without running what is in them."""

import os
import resource
from datetime import timedelta

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_ssl._lightning import RESUMES_BEHIND_THE_STEP
from lightning_ssl.methods import BYOL, SimSiam
from lightning_ssl.runs.checkpoint import CheckpointError, CheckpointFiles, RunCheckpoint
from tests.methods.helpers import loader, small

GOOD = {"pytorch-lightning_version": "2.6.0", "state_dict": {"w": torch.arange(3.0)}}


def test_a_checkpoint_takes_its_place_when_it_is_released(tmp_path):
    files, place, old = CheckpointFiles(), tmp_path / "last.ckpt", tmp_path / "old.ckpt"
    files.save_checkpoint({**GOOD, "step": 1}, place)
    files.save_checkpoint({**GOOD, "step": 0}, old)
    with files.hold():
        files.save_checkpoint({**GOOD, "step": 2}, place)
        files.remove_checkpoint(old)
    assert files.load_checkpoint(place)["step"] == 1 and old.exists()  # so that a kill here loses nothing
    files.remove_checkpoint(tmp_path / "older.ckpt")  # waits for its turn
    assert files.load_checkpoint(place)["step"] == 1 and old.exists()
    files.release()
    assert files.load_checkpoint(place)["step"] == 2 and not old.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(CheckpointError, match=r"could not be written .*earlier checkpoints are untouched"):
        CheckpointFiles().save_checkpoint(GOOD, tmp_path / "folder" / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_no_other_file(tmp_path):
    files, place, limits = CheckpointFiles(), tmp_path / "last.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    files.save_checkpoint(GOOD, place)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(CheckpointError, match=r"could not be written .*File too large"):
            files.save_checkpoint({**GOOD, "more": torch.zeros(10_000)}, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert files.load_checkpoint(place)["state_dict"]["w"].tolist() == [0, 1, 2]


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, original=original: (done.append(name), original(*a)))
    CheckpointFiles().save_checkpoint(GOOD, tmp_path / "last.ckpt")
    assert done == ["fsync", "replace"]


@pytest.mark.parametrize("options", [{"every_n_train_steps": 2}, {}, {"every_n_epochs": 1, "save_last": False}])
def test_a_checkpoint_that_could_not_be_written_is_not_tried_again_by_the_exception(tmp_path, options):
    class Full(CheckpointFiles):
        tries = 0

        def save_checkpoint(self, *args, **kwargs):
            self.tries += 1
            raise CheckpointError("the disk is full")

    files = Full()
    saver = RunCheckpoint(tmp_path, **{"save_last": True, "save_on_exception": True, **options})
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[saver], plugins=[files], **quiet)
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.fit(small(BYOL), loader(4))
    assert files.tries == 1


@pytest.mark.parametrize("cut", [0, 1, 10, 500, -30])
def test_a_cut_off_checkpoint_is_told_from_a_whole_one(tmp_path, cut):
    files, place = CheckpointFiles(), tmp_path / "last.ckpt"
    files.save_checkpoint(GOOD, place)
    files.save_checkpoint(GOOD, tmp_path / "other.ckpt")
    place.write_bytes(place.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"last.ckpt' is .*damaged, or no checkpoint.*Others in .*other.ckpt"):
        files.load_checkpoint(place)
    assert files.load_checkpoint(tmp_path / "other.ckpt")["state_dict"]["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("interval", [1.0, 0.5])
@pytest.mark.parametrize("method", [BYOL, SimSiam])  # SimSiam has a schedule
def test_steps_that_a_validation_follows_are_saved_after_it(method, interval, tmp_path):
    """Wherever a run is resumed, it trains and validates as often as the uninterrupted one.

    Before 2.5 Lightning repeats the validation that a checkpoint in the midst of an epoch was made after.
    """

    class Count(L.Callback):
        steps, resumed = (), False

        def on_validation_end(self, trainer, pl_module):
            self.steps = (*self.steps, trainer.global_step)
            if not self.resumed:  # the saver's turn comes next
                assert not (tmp_path / f"step={trainer.global_step}.ckpt").exists()

    def fit(ckpt_path=None):
        count, model = Count(), small(method)
        count.resumed = ckpt_path is not None
        saver = RunCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            val_check_interval=interval,
            callbacks=[count, saver],
            plugins=[CheckpointFiles()],
            logger=False,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader(4), loader(1), ckpt_path=ckpt_path)
        return count.steps, model.state_dict()

    steps, _ = fit()
    assert steps == ((4, 8) if interval == 1.0 else (2, 4, 6, 8))
    assert sorted(int(path.stem.partition("=")[2]) for path in tmp_path.glob("*.ckpt")) == list(range(1, 9))
    for start in (3, 4, 6):
        later, _ = fit(tmp_path / f"step={start}.ckpt")
        again = not RESUMES_BEHIND_THE_STEP and start % 4
        assert later == tuple(step for step in steps if step > start or (again and step == start)), start


def test_a_checkpoint_counts_when_its_step_is_logged_and_not_before(tmp_path):
    seen = {}

    class Log(DummyLogger):
        def log_metrics(self, metrics, step=None):
            seen.setdefault(step, {int(path.stem.partition("=")[2]) for path in tmp_path.glob("*.ckpt")})

    saver = RunCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=Log(), callbacks=[saver], plugins=[CheckpointFiles()], **quiet
    )
    trainer.fit(small(BYOL), loader(4))
    assert [seen[step] for step in range(3)] == [set(), {1}, {1, 2}]  # logged after the save, before its release
    assert {int(path.stem.partition("=")[2]) for path in tmp_path.glob("*.ckpt")} == {1, 2, 3, 4}


def broken():
    """Four batches, of which the third cannot be loaded."""

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 2:
                raise RuntimeError("on purpose")
            return batches[i]

    batches = loader(4).dataset
    return torch.utils.data.DataLoader(Broken(), batch_size=None)


@pytest.mark.parametrize(
    ("asked", "callback", "left"), [(False, None, None), (True, None, 2), (True, "on_train_batch_end", None)]
)
def test_an_exception_leaves_a_checkpoint_where_that_was_asked_for(tmp_path, asked, callback, left):
    """Between two steps, that is, as when a batch cannot be loaded; in the middle of one there is nothing to save."""

    class Fail(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2 and callback is not None:
                raise RuntimeError("on purpose")

    saver = RunCheckpoint(tmp_path, filename="{step}", save_last=True, save_on_exception=asked)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[Fail(), saver], plugins=[CheckpointFiles()], **quiet
    )
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(small(BYOL), broken() if callback is None else loader(4))
    assert [torch.load(path)["global_step"] for path in tmp_path.glob("*.ckpt")] == ([] if left is None else [left])


def test_an_exception_does_not_overwrite_another_runs_checkpoint(tmp_path):
    (tmp_path / "last.ckpt").write_text("another run's")
    saver = RunCheckpoint(tmp_path, save_last=True, save_on_exception=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[saver], plugins=[CheckpointFiles()], **quiet)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(small(BYOL), broken())
    assert (tmp_path / "last.ckpt").read_text() == "another run's"


@pytest.mark.parametrize(("validates", "options"), [(1, {}), (3, {}), (3, {"monitor": "val/loss"}), (1, {"keep": 1})])
def test_there_is_a_checkpoint_an_epoch_whatever_the_validation(tmp_path, validates, options):
    """The last two, or `keep`, of those of each epoch are kept besides last.ckpt; with a monitor, the best one is."""
    seen = {}

    class Look(L.Callback):
        def on_before_backward(self, trainer, *_):
            if trainer.fit_loop.epoch_loop.batch_idx:
                return
            seen[trainer.current_epoch] = sorted(path.name for path in tmp_path.glob("*.ckpt"))
            if seen[trainer.current_epoch]:
                assert torch.load(tmp_path / "last.ckpt")["global_step"] == 2 * trainer.current_epoch

    saver = RunCheckpoint(tmp_path, filename="{step}", save_last=True, **options)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=4,
        check_val_every_n_epoch=validates,
        num_sanity_val_steps=0,
        callbacks=[Look(), saver],
        plugins=[CheckpointFiles()],
        **quiet,
    )
    trainer.fit(small(BYOL), loader(2), loader(1))
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 8
    kept = {path.name for path in tmp_path.glob("*.ckpt")} - {"last.ckpt"}
    if "monitor" in options:
        assert seen[3][:1] == ["last.ckpt"] and kept == {"step=6.ckpt"}
    else:
        assert kept == ({"step=8.ckpt"} if options else {"step=6.ckpt", "step=8.ckpt"})
    assert seen[0] == [] and all("last.ckpt" in seen[epoch] for epoch in (1, 2))


def test_the_clock_asks_for_checkpoints_too(tmp_path):
    steps = []

    class Look(L.Callback):
        def on_save_checkpoint(self, trainer, *_):
            steps.append(trainer.global_step)

    always = RunCheckpoint(tmp_path, save_top_k=0, save_last=True, train_time_interval=timedelta(0))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[Look(), always], **quiet)
    trainer.fit(small(BYOL), loader(4))
    assert steps == [1, 2, 3, 4]


def test_the_newest_of_the_others_is_named_first(tmp_path):
    files = CheckpointFiles()
    for age, name in enumerate(("new", "older", "oldest")):
        files.save_checkpoint(GOOD, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (1000 - age, 1000 - age))
    (tmp_path / "last.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"new\.ckpt, older\.ckpt, oldest\.ckpt"):
        files.load_checkpoint(tmp_path / "last.ckpt")
