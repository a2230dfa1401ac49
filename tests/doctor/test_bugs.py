"""Every mistake of the zoo is found, by the check that is there for it, in words that name it."""

import pytest
import torch

from lightning_ssl.doctor import examine
from tests.doctor.bugs import BUGS

PARAMETERS = [pytest.param(bug, id=bug.name, marks=[] if bug.fast else [pytest.mark.slow]) for bug in BUGS]


@pytest.mark.parametrize("bug", PARAMETERS)
def test_found(bug):
    torch.manual_seed(0)
    report = examine(bug.module(), bug.loader(), checks=[bug.check], trainer=bug.options, limit=bug.limit)
    found = [f for f in report.findings(bug.check) if f.severity == "alarm" and f.kind == bug.kind]
    assert found, report
    assert bug.words in f"{found[0].seen} {found[0].where} {found[0].why}"
    assert found[0].why and found[0].remedy
    assert not report.healthy


def test_there_are_enough_of_each_check():
    kinds = {bug.check for bug in BUGS}
    assert len(BUGS) >= 30 and kinds == {
        "ranks",
        "views",
        "pairing",
        "gradients",
        "target",
        "optimizer",
        "resume",
        "modes",
        "start",
    }
