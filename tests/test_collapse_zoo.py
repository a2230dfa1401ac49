"""The zoo's runs are what they are said to be, and the replay of the rules sees what the monitor would."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks._zoo import Tape, digits_data, record, zoo
from benchmarks._zoo_judge import judge, load, truth
from lightning_ssl.callbacks import CollapseMonitor
from lightning_ssl.callbacks._judge import Rules


def test_the_zoo_has_both_halves_of_everything():
    runs = zoo(images=True)
    assert len(runs) >= 60 and len({run.name for run in runs}) == len(runs)
    families = [{run.family for run in runs if run.half == half} for half in (0, 1)]
    assert families[0] == families[1] and len(families[0]) >= 25
    seeds = [{run.seed for run in runs if run.half == half} for half in (0, 1)]
    assert not seeds[0] & seeds[1], "other seeds"
    settings = [
        {
            (run.family, run.optimizer, run.lr, run.batch, run.norm, run.cut, str(run.options))
            for run in runs
            if run.half == h
        }
        for h in (0, 1)
    ]
    assert not settings[0] & settings[1], "and other settings"


@pytest.mark.slow
def test_a_recording_replays_as_the_monitor_sees_it(tmp_path, monkeypatch):
    run = next(run for run in zoo(images=False) if run.family == "BYOL no predictor" and run.lr == 2e-3)
    run = dataclasses.replace(run, steps=40)
    monitor, seen = CollapseMonitor(), []

    def note(self, path, outputs, keep=Tape._note_place):
        keep(self, path, outputs)
        if path == "projector":
            views = torch.stack(outputs, 1)
            rows = views.flatten(0, 1)
            numbers = monitor._numbers("projector", rows, views, True).tolist()
            monitor._judge("projector", 5 * len(seen), numbers, None)
            seen.append(monitor._judges["projector"].recent[-1])

    monkeypatch.setattr(Tape, "_note_place", note)
    arrays = record(run, digits_data())
    file = tmp_path / "run.npz"
    with open(file, "wb") as out:
        np.savez(out, **arrays)
    replay = load(run, file)
    for mine, theirs in zip(replay.looks["projector"], seen, strict=True):
        for name in ("deviation", "participation", "rank", "alive", "noise"):
            assert getattr(mine, name) == pytest.approx(theirs[name], rel=0.02), (mine.step, name)
    said = judge(replay, Rules())
    assert said.kinds[-1] == monitor.verdict.kind and truth(replay) in ("complete", "neither", "healthy")
