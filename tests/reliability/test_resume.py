"""Killed without warning wherever it is, a run resumed by the same command is the uninterrupted one, bit for bit."""

import random

import numpy as np
import pytest
import torch

from tests.reliability import jobs

pytestmark = pytest.mark.slow

# Ten kills, every method and every place among them, at moments drawn once and for all.
COUNTS = {
    "step": 17,
    "optimizer": 14,
    "validation": 4,
    "probe": 8,
    "watch": 30,
    "checkpoint": 14,
    "rename": 14,
    "log": 40,
}
_random = random.Random(8)
_places = ["step", "checkpoint", "probe", "rename", "log", "validation", "optimizer", "watch", "rename", "log"]
KILLS = [
    (jobs.METHODS[i % len(jobs.METHODS)], place, _random.randint(1, COUNTS[place])) for i, place in enumerate(_places)
]
# What else has a state: sampled negatives, resets, a schedule.
OPTIONS = {
    "SimCLR": ["--model.negatives=3"],
    "BYOL": ["--model.predictor_reset_every=3", "--model.momentum_schedule=cosine"],
    "SimSiam": ["--model.scheduler=cosine"],
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return jobs.references(tmp_path_factory, lambda method, folder: jobs.job(method, folder, *OPTIONS.get(method, [])))


def assert_identical(run, reference):
    ours, theirs = jobs.log(run), jobs.log(reference)
    assert ours == theirs, sorted(set(ours) ^ set(theirs))[:10]
    state, expected = jobs.checkpoint(run), jobs.checkpoint(reference)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert not jobs.differences(state[part], expected[part]), part
    watched = {key: value for key, value in state["callbacks"].items() if "Checkpoint" not in key}
    theirs = {key: value for key, value in expected["callbacks"].items() if "Checkpoint" not in key}
    assert not jobs.differences(watched, theirs)
    ours, theirs = jobs.arrays(run), jobs.arrays(reference)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    ours, theirs = jobs.pictures(run), jobs.pictures(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("method", "place", "count"), KILLS, ids=lambda value: str(value))
def test_a_killed_run_resumes_as_if_never_stopped(method, place, count, uninterrupted, tmp_path):
    command = jobs.job(method, tmp_path, *OPTIONS.get(method, []))
    assert jobs.run(tmp_path, command, kill=(place, count)) == -9, jobs.output(tmp_path)[-3000:]
    for path in tmp_path.rglob("*.ckpt"):  # whatever is there is whole
        assert torch.load(path, weights_only=True)["state_dict"]
    assert jobs.run(tmp_path, [*command, "--ckpt_path=last"]) == 0, jobs.output(tmp_path)[-3000:]
    assert_identical(tmp_path / "runs" / "run", uninterrupted(method))


def test_a_run_killed_again_and_again(uninterrupted, tmp_path):
    command = jobs.job("DirectPred", tmp_path)
    for kill in (("step", 5), ("rename", 2), ("probe", 3)):
        assert jobs.run(tmp_path, command, kill=kill) == -9, jobs.output(tmp_path)[-3000:]
        command = [*jobs.job("DirectPred", tmp_path), "--ckpt_path=last"]
    assert jobs.run(tmp_path, command) == 0, jobs.output(tmp_path)[-3000:]
    assert_identical(tmp_path / "runs" / "run", uninterrupted("DirectPred"))


def test_a_cut_off_checkpoint_is_named_and_the_others_are_left_alone(tmp_path):
    command = jobs.job("BarlowTwins", tmp_path, "--trainer.max_epochs=1", callbacks=jobs.CALLBACKS[-1:])
    assert jobs.run(tmp_path, command) == 0, jobs.output(tmp_path)[-3000:]
    last = tmp_path / "runs" / "run" / "checkpoints" / "last.ckpt"
    others = {path: path.read_bytes() for path in last.parent.iterdir() if path != last}
    assert others
    last.write_bytes(last.read_bytes()[:5000])
    assert jobs.run(tmp_path, [*command, "--ckpt_path=last"]) == 1
    message = jobs.output(tmp_path).splitlines()[-1]
    assert "last.ckpt' is cut off, damaged, or no checkpoint" in message
    assert next(iter(others)).name in message
    assert {path: path.read_bytes() for path in others} == others
