"""Every Python block of README, CONTRIBUTING and the docs runs, in the order of its page."""

import json
import sys
import types

import lightning.pytorch as L
import pytest

from tests.docs.pages import PAGES, blocks, run_python

TUTORIALS = [page for page in PAGES if "/tutorials/" in page]  # with their commands: tests/docs/test_tutorials.py
SNIPPETS = [page for page in PAGES if page not in TUTORIALS and blocks(page, "python")]
SLOW = {"docs/doctor.md"}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Trainer(L.Trainer):
    def __init__(self, **options):
        super().__init__(**{"max_epochs": 1, "limit_train_batches": 2, "accelerator": "cpu", **QUIET, **options})


def in_a_project(monkeypatch):
    """What a reader has: a module, a loader, both in a package of their own, and Lightning as L."""
    from tests.doctor import data
    from tests.doctor.modules import Siamese

    project = types.ModuleType("my_project")
    project.MyModule, project.my_loader = Siamese, data.loader
    monkeypatch.setitem(sys.modules, "my_project", project)
    lightning = types.SimpleNamespace(**{**vars(L), "Trainer": Trainer})
    return {"L": lightning, "module": Siamese(), "loader": data.loader()}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in SNIPPETS]
)
def test_the_pages_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "NAME"
    run.mkdir(parents=True)
    summary = {
        "schema": 1,
        "run": {"state": "finished"},
        "verdicts": [{"kind": "healthy"}],
        "quantities": {"val/knn_top1": {"best": {"step": 0, "value": 0.3}}},
        "config_hash": "c2847a93",
        "versions": {"torch": "2"},
        "cost": {"seconds": 1.0},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    names = in_a_project(monkeypatch)
    for block in blocks(page, "python"):
        run_python(block, page, names)


def test_no_page_is_forgotten():
    counted = {page: len(blocks(page, "python")) for page in PAGES}
    assert counted["docs/callbacks.md"] >= 15 and counted["README.md"] >= 1
    assert set(SNIPPETS) | set(TUTORIALS) >= {page for page, count in counted.items() if count}
