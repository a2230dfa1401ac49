"""No alarm on right modules, ours and other people's. `python -m tests.doctor.right` runs every check on all."""

import pytest

from lightning_ssl.doctor import CHECKS, examine
from tests.doctor.right import FOREIGN, RIGHT, build
from tests.foreign import zoo

# All modules with the checks that cost little; some with every check that can raise an alarm.
QUICK = ["gradients", "optimizer"]
WHOLE = ["simclr", "directpred", "raft", "plain_queue", "lightly_dino", "hf_vit"]
FAST = ["byol", "plain_siamese_norm"]


def named(names):
    found = []
    for name in names:
        marks = [] if name in FAST else [pytest.mark.slow]
        if name in FOREIGN and zoo.absent(zoo.CASES[name]):
            marks.append(pytest.mark.skip(reason=f"{zoo.absent(zoo.CASES[name])} not installed"))
        found.append(pytest.param(name, marks=marks))
    return found


def told(report):
    return [f"{result.check}: {f.kind}: {f.seen}" for result in report.results for f in result.findings
            if f.severity == "alarm"]  # fmt: skip


@pytest.mark.parametrize("name", named(RIGHT))
def test_no_alarm_in_one_process(name):
    report = examine(*build(name), checks=QUICK)
    assert report.healthy, told(report)
    assert not report.ended


@pytest.mark.slow
@pytest.mark.parametrize("name", named(WHOLE))
def test_no_alarm_of_any_check(name):
    report = examine(*build(name), checks=[check for check in CHECKS if check not in (*QUICK, "start", "cost")])
    assert report.healthy, told(report)
    assert not report.ended


def test_there_are_enough():
    assert len(RIGHT) >= 40
