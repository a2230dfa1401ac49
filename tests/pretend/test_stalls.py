"""What makes the host wait for a device: nothing on a step that is not due, little on one that is."""

import pytest

from tests.pretend import cases
from tests.pretend.ranks import on_ranks


def lines(text):
    return sum(int(line.split(" x ")[0]) for line in text.splitlines())


@pytest.mark.parametrize("with_callbacks", [False, True], ids=["alone", "with all callbacks"])
@pytest.mark.parametrize("name", cases.METHODS)
def test_a_step_that_is_not_due_waits_for_nothing(name, with_callbacks, on_device):
    found = on_device(cases.plain_steps, name, with_callbacks)
    assert len(found) == 4
    assert set(found) == {""}


def test_nor_does_it_after_one_that_was_due(on_device):
    assert set(on_device(cases.plain_steps, "BYOL", True, first_due=True)) == {""}


@pytest.mark.parametrize("kind", ["DirectPredictor", "SymmetricPredictor", "PredictorReset"])
def test_actions_wait_for_nothing(kind, on_device):
    assert set(on_device(cases.acting_steps, kind)) == {""}


@pytest.mark.parametrize("kind", cases.WATCHERS)
def test_a_due_callback_waits_three_times_at_most(kind, on_device):
    found, keys = on_device(cases.due_steps, kind)
    assert keys
    assert all(1 <= lines(step) <= 3 for step in found), found


@pytest.mark.slow
def test_the_same_holds_on_two_ranks(tmp_path):
    for quiet, due in on_ranks(tmp_path, cases.all_steps):
        assert quiet == {name: [""] * 4 for name in cases.METHODS}
        assert due.keys() == cases.WATCHERS.keys()
        assert all(1 <= lines(step) <= 3 for steps in due.values() for step in steps), due


def test_what_waits_for_a_progress_bar_is_lightnings(on_device):
    ours, theirs = on_device(cases.bar_steps)
    assert set(ours) == {""}
    assert all("_local_scalar_dense" in step for step in theirs)
