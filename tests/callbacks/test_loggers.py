"""Scalars and pictures reach whichever logger there is; a logger or a disk that fails costs no training."""

from __future__ import annotations

import csv
import json
import os
import time

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    EigenspaceAlignment,
    RepresentationCircle,
    UniformityAlignment,
)
from tests.callbacks import strangers
from tests.callbacks.harness import History, trainer
from tests.wandb_reader import read_offline_run


def fit(logger, root, **options):
    callbacks = [
        UniformityAlignment("projector", every_n_steps=2),
        CorrelationBound("projector", num_classes=4, every_n_steps=2),
        EigenspaceAlignment("predictor", every_n_steps=2),
        RepresentationCircle("projector", every_n_steps=2),
    ]
    run = trainer(callbacks, logger=logger, default_root_dir=root, **options)
    run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)), strangers.loader(strangers.Pairs(8)))
    return run


PICTURES = {"train/correlation/step_00000000.png", "predictor/spectrum/step_00000000.png"}
PICTURES |= {f"circle/picture/step_0000000{step}.png" for step in (0, 2)}


def pictures(folder):
    return {path.relative_to(folder / "pictures").as_posix() for path in (folder / "pictures").rglob("*.png")}


def test_csv_and_tensorboard_together(tmp_path):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tensorboard")]
    fit(loggers, tmp_path)
    folder = tmp_path / "csv" / "version_0"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    seen = {int(row["step"]) for row in rows if row["train/uniformity"]}
    assert seen == {0, 2}  # at their own steps, whatever `log_every_n_steps` is
    assert any(row["val/uniformity"] for row in rows)
    assert pictures(folder) >= PICTURES
    with np.load(folder / "predictor_spectra.npz", allow_pickle=False) as spectra:
        assert spectra["step"].tolist() == [0, 2]
        assert spectra["eigenvalues"].shape == spectra["predictor_values"].shape == spectra["cosines"].shape == (2, 8)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard" / "version_0")).Reload()
    assert [event.step for event in events.Scalars("train/uniformity")] == [0, 2]
    assert [event.step for event in events.Images("circle/picture")] == [0, 2]


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, project="watch", offline=True)
    fit(logger, tmp_path)
    version = logger.version
    logger.experiment.finish()
    file, deadline = next(tmp_path.rglob("*.wandb")), time.monotonic() + 60
    while not any("val/uniformity" in row for row in history_of(file)) and time.monotonic() < deadline:
        time.sleep(0.2)  # W&B's own process writes it
    rows = history_of(file)
    steps = [row["trainer/global_step"] for row in rows if "train/uniformity" in row]
    assert steps == [0, 2]
    assert {"circle/picture/_type", "predictor/spectrum/_type"} <= {key for row in rows for key in row}
    assert pictures(tmp_path / "watch" / version) >= PICTURES  # two runs do not share a folder
    assert len(list(tmp_path.rglob("media/images/**/*.png"))) >= 4


def history_of(path):
    """The rows of an offline W&B run: a LevelDB log of protobuf records."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, rows = path.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        room = 32768 - at % 32768  # records are cut at the ends of blocks
        if room < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(b"".join(parts))
            parts = []
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_without_a_logger_pictures_go_to_the_root(tmp_path):
    run = fit(False, tmp_path)
    assert pictures(tmp_path) == PICTURES | {"val/correlation/step_00000003.png"}
    assert "train/uniformity" in run.callback_metrics and "val/uniformity" in run.callback_metrics


def test_fast_dev_run_leaves_no_files(tmp_path):
    fit(None, tmp_path, fast_dev_run=2)
    assert not list(tmp_path.iterdir())


class Broken(History):
    def log_metrics(self, metrics, step=None):
        if "train/uniformity" in metrics:
            raise OSError("No space left on device")
        super().log_metrics(metrics, step)


def test_a_failing_logger_costs_a_warning_only(tmp_path):
    healthy = History()
    with pytest.warns(UserWarning, match="No space left on device"):
        run = fit([Broken(), healthy], tmp_path)
    assert run.global_step == 4
    assert set(healthy.series("train/uniformity")) == {0, 2}


@pytest.mark.skipif(
    os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="needs a place that cannot be written"
)
def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path):
    (tmp_path / "pictures").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="could not write"):
        run = fit(False, tmp_path)
    assert run.global_step == 4


def test_values_are_there_for_other_callbacks(tmp_path):
    run = fit(False, tmp_path)
    assert isinstance(run.callback_metrics["train/alignment"], torch.Tensor)


class Collapsing(strangers.MeanLoss):
    def step(self, batch):
        with torch.no_grad():
            self.projector.weight.mul_(0.3)
        return super().step(batch)


@pytest.mark.slow
def test_a_collapse_is_one_alert_of_an_offline_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, project="watch", offline=True)
    run = trainer(
        [CollapseMonitor(every_n_steps=1)], logger=logger, max_epochs=9, max_steps=20, default_root_dir=tmp_path
    )
    with pytest.warns(UserWarning, match="complete collapse"):
        run.fit(Collapsing(), strangers.loader(strangers.Pairs(64)))
    assert dict(logger.experiment.summary)["collapse"] == "complete"
    wandb.finish()
    offline = read_offline_run(next(tmp_path.rglob("offline-run-*")))
    assert offline.alerts == ["collapse: complete"]
