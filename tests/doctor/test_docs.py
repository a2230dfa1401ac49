"""What docs/doctor.md and the README show is what happens."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from lightning_ssl.doctor import CHECKS, examine
from tests.doctor import data
from tests.doctor.modules import Siamese

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text()


def example(name):
    (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    return code


def test_every_check_is_in_the_table():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(CHECKS)


def test_the_ten_lines_for_other_peoples_tests(monkeypatch):
    project = types.ModuleType("my_project")
    project.MyModule, project.my_loader = Siamese, data.loader
    monkeypatch.setitem(sys.modules, "my_project", project)
    code = example("test").replace('["ranks", "pairing", "gradients", "target", "resume"]', '["target"]')
    assert len(example("test").strip().splitlines()) <= 10
    names = {}
    exec(code, names)
    names["test_module_is_healthy"]()


@pytest.mark.slow
def test_the_report_of_the_broken_module(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(example("broken"))
    monkeypatch.syspath_prepend(tmp_path)
    import broken

    torch.manual_seed(0)
    report = examine(
        broken.Twins(), data.loader(), checks=["ranks", "target", "optimizer"], trainer={"max_epochs": 100}
    )
    kinds = [finding.kind for finding in report.alarms]
    assert kinds == ["gather_detached", "momentum_swapped", "in_no_group", "schedule_never_moves"]
    shown = re.findall(r"\[(\w+)\]\n", PAGE[PAGE.index("```text") :])
    assert all(kind in shown for kind in kinds)
