"""The doctor itself: what it says, what it refuses, and that nothing in a module can end it or be changed by it."""

import ctypes
import json
import os
import time

import lightning.pytorch as L
import pytest
import torch

from lightning_ssl.doctor import CHECKS, Finding, Report, Result, assert_healthy, examine
from lightning_ssl.doctor.batches import count_rows, find_views, parts, take
from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.steady import Steady
from lightning_ssl.doctor.target import fitted
from lightning_ssl.doctor.verdict import compare
from tests.doctor import data
from tests.doctor.modules import Contrast, Siamese


class Ends(Contrast):
    """Goes wrong in its own way at the first step, or, `late`, only in eval mode or at the fifth one."""

    def __init__(self, how):
        super().__init__("none")
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.how == "hang":
            time.sleep(1000)
        if self.how == "exit":
            os._exit(3)
        if self.how == "crash":
            ctypes.string_at(0)
        if self.how == "raise":
            raise KeyError("no such thing")
        if self.how == "memory":
            self.much = torch.empty(10**14, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)

    def forward(self, x):
        if not self.training:
            os._exit(4)
        return self.backbone(x)


@pytest.mark.parametrize(
    "how, words",
    [
        ("hang", "did not come to an end"),
        ("exit", "exit code 3"),
        ("crash", "SIGSEGV"),
        ("raise", "KeyError: 'no such thing'"),
        ("memory", "out of memory"),
    ],
)
def test_a_module_that_ends_its_process_does_not_end_the_doctor(how, words):
    report = examine(Ends(how), data.loader(), checks=["gradients"], limit=4)
    (finding,) = report.findings("step")
    assert finding.kind == "step_fails" and words in finding.seen
    assert not report.healthy and report.ended == ["step", "gradients"]


def test_what_ends_one_check_leaves_the_others():
    report = examine(Ends("late"), data.loader(), checks=["modes", "optimizer"])
    modes, optimizer = report.results
    assert modes.ended and "exit code 4" in modes.untold and modes.status == "unknown"
    assert optimizer.status == "ok" and report.healthy
    with pytest.raises(AssertionError, match="exit code 4"):
        assert_healthy(Ends("late"), data.loader(), checks=["modes"])


def test_the_module_its_data_and_the_random_numbers_stay_as_they_are():
    module, loader = Siamese(norm=True), data.loader()
    module.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    examine(module, loader, checks=["gradients"])
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module.training and "training_step" not in vars(module) and module._trainer is None


def test_a_class_that_nobody_can_import_with_one_batch():
    class Hidden(Contrast):
        pass

    module = Hidden("none")
    module.closure = lambda x: x  # cannot be pickled
    report = examine(module, next(iter(data.loader())), checks=["gradients"])
    assert report.healthy and report.results[0].status == "ok"


def test_assert_healthy_in_somebodys_tests():
    assert_healthy(Siamese(), data.loader(), checks=["target"])
    with pytest.raises(AssertionError, match="target_never_moves"):
        assert_healthy(Siamese("never_moves"), data.loader(), checks=["target"])


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"module": torch.nn.Linear(2, 2)}, TypeError, "`module` must be a LightningModule"),
        ({"data": 3}, TypeError, "`data` must be a DataModule"),
        ({"ranks": 1}, ValueError, "`ranks` must be"),
        ({"checks": ["rank"]}, ValueError, "`checks` must name some of ranks"),
        ({"checks": []}, ValueError, "`checks` must name"),
        ({"limit": 0}, ValueError, "`limit` must be above 0"),
        ({"trainer": L.Trainer}, TypeError, "`trainer` must be a dict"),
    ],
)
def test_bad_input(arguments, error, words):
    with pytest.raises(error, match=words):
        examine(**{"module": Contrast("none"), "data": [torch.zeros(4, 3)], **arguments})


def test_report():
    alarm = Finding("late", "the third view comes late", "alarm", "it matters", "here:3", "hurry")
    report = Report(
        "Net", [Result("views", [alarm, Finding("note", "fine so far")]), Result("ranks", untold="one row")]
    )
    text = str(report)
    for words in (
        "Net: 1 thing wrong",
        "views      WRONG",
        "! the third view",
        "remedy: hurry",
        "- fine so far",
        "one row",
    ):
        assert words in text
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["healthy"] is False and plain["checks"]["ranks"]["status"] == "unknown"
    assert plain["checks"]["views"]["findings"][0]["kind"] == "late" and report.untold == {"ranks": "one row"}


def test_checks_have_the_documented_names():
    assert (
        *("ranks", "views", "pairing", "gradients", "target"),
        *("optimizer", "resume", "modes", "start", "cost"),
    ) == CHECKS


# Its parts -----------------------------------------------------------------------------------------------------------


def test_batches_are_divided_by_rows():
    x = torch.arange(12.0).view(6, 2)
    batch = {"views": [x, -x], "meta": (torch.arange(6), list("abcdef")), "scale": torch.tensor(2.0), "table": None}
    assert count_rows(batch) == 6
    first, second = parts(batch, 2)
    assert torch.equal(torch.cat([first["views"][1], second["views"][1]]), -x)
    assert second["meta"][1] == ["d", "e", "f"] and second["scale"] == 2.0
    assert parts(batch, 4) is None
    views = find_views(batch)
    assert [len(v) for v in views.of(batch)] == [6, 6]
    changed = views.put(batch, [x, x])
    assert torch.equal(changed["views"][1], x) and torch.equal(batch["views"][1], -x)
    assert take(batch, torch.tensor([5, 0]))["meta"][1] == ["f", "a"]


def test_steady_draws_do_not_depend_on_how_many_rows_are_drawn():
    def draw(rows):
        torch.manual_seed(0)
        with Steady():
            found = [torch.rand(rows, 3), torch.randn(rows, 5), torch.nn.functional.dropout(torch.ones(rows, 40), 0.5)]
            found += [torch.empty(rows, 2).uniform_(2, 3), torch.randint(9, (rows,)), torch.randn(rows, 1)]
        return found

    for few, many in zip(draw(3), draw(17), strict=True):
        assert torch.equal(few[0].expand_as(many), many)
    with Steady() as mode:
        torch.rand(2)
    assert mode.draws[0].name == "rand" and "test_doctor" in mode.draws[0].where


def test_gradients_are_compared():
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    assert compare({name: x / 2 for name, x in one.items()}, one, list(one)) == pytest.approx((0.5, 1.0))
    assert compare({"a": torch.tensor([-4.0, 3.0])}, one, ["a"]) == pytest.approx((1.0, 0.0))


def test_momentum_is_measured():
    old, online = torch.randn(2, 50, dtype=torch.float64)
    momentum, misfit = fitted(old, 0.97 * old + 0.03 * online, (torch.randn(50).double(), online))
    assert momentum == pytest.approx(0.97) and misfit < 1e-9
    assert fitted(old, old + torch.randn(50).double(), (online,))[1] > 0.5


def test_isolation():
    assert Isolation(20).one(lambda x: x + 1, 41) == 42
    with pytest.raises(Ended, match="ZeroDivisionError"):
        Isolation(20).one(lambda: 1 / 0)
    before = time.monotonic()
    outcomes = Isolation(2).several(lambda rank, note: note(rank) or time.sleep(100 * rank), 2)
    assert time.monotonic() - before < 20
    assert [outcome.hung for outcome in outcomes] == [False, True] and outcomes[1].notes == [1]
