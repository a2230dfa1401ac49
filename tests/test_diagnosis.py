"""Runs broken in known ways, on the digits: their pages name the collapse, its step and its likely cause."""

import json
import re
from pathlib import Path

import pytest
import torch

from lightning_ssl import callbacks
from lightning_ssl.methods import SimCLR
from lightning_ssl.runs.cli import main
from tests.browser import browser
from tests.test_cli import SHORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(callbacks, "PlaceVerdict"), reason="needs verdicts by place"),
]

# Eight epochs of a small network.
JOB = [
    *(flag for flag in SHORT if "limit_train" not in flag and "batch_size" not in flag),
    "--trainer.max_epochs=8",
    "--model.backbone=lightning_ssl.nn.SmallConv",
    "--model.backbone.width=8",
    "--model.backbone.depth=4",
    "--knn.every_n_epochs=4",
    *(f"--{name}=false" for name in ("linear", "covariance_operator_norm", "correlation_bound")),
]
RUNS = {
    "healthy": ["--model=SimCLR"],
    "no_predictor": ["--model=BYOL", "--model.predictor=none", "--model.momentum=0"],
    "no_stop_gradient": ["--model=SimSiam", "--model.stop_gradient=false"],
    "weight_decay": ["--model=BYOL", "--model.optimizer.weight_decay=1.0"],
    "k_of_d": ["--model=tests.test_diagnosis.FewDimensions", "--model.projector_dim=64"],
}


class FewDimensions(SimCLR):
    """SimCLR whose projector has four live dimensions from the second epoch on."""

    def __init__(self, projector_dim: int = 64, **options) -> None:
        super().__init__(projector_dim=projector_dim, **options)
        alive = (torch.arange(projector_dim) < 4).float()
        self.projector.register_forward_hook(lambda module, args, out: out * alive if self.current_epoch else out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["lightning-ssl"])
        for name, flags in RUNS.items():
            main(["fit", f"--name={name}", *flags, *JOB])
    return folder / "runs"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize(
    ("name", "collapse", "cause", "before"),
    [
        ("no_predictor", "Complete collapse", "no predictor", 88),
        ("no_stop_gradient", "(Complete|Dimensional|Partial) collapse", "no stop-gradient", 120),
        ("weight_decay", "(Complete|Dimensional|Partial) collapse", r"weight decay \(1\)", 160),
        ("k_of_d", "(Dimensional|Partial) collapse", "", 140),
    ],
)
def test_the_page_of_a_broken_run_names_the_collapse(runs, page, name, collapse, cause, before):
    page.open(runs / name / "report.html")
    title, *sentences = page.run("document.getElementById('verdict').innerText").split("\n")
    found = re.match(rf"{collapse} of projector since step (\d+)", title)
    assert found and int(found[found.lastindex]) < before, title
    assert re.search(rf"Likely cause: .*{cause}", "\n".join(sentences)), sentences
    assert "Remedy: " in "\n".join(sentences)
    assert page.run("document.getElementById('verdict').getBoundingClientRect().bottom <= innerHeight")
    assert not page.problems()


def test_a_healthy_runs_page_says_why_it_can_tell(runs, page):
    page.open(runs / "healthy" / "report.html")
    said = page.run("document.getElementById('verdict').innerText")
    assert said.startswith("Healthy: no collapse") and "projector is healthy: " in said
    assert re.search(r"Effective rank went from [\d.]+ \(step 0\) to [\d.]+ \(step \d+\)", said)


def test_three_of_them_are_compared(runs, page, capsys, monkeypatch):
    monkeypatch.chdir(runs.parent)
    with pytest.raises(SystemExit):
        main(["compare", "healthy", "weight_decay", "no_predictor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["reference"] == "healthy" and found["verdicts"]["weight_decay"]["grade"] == "bad"
    assert [float(value) for value in found["differences"]["model.optimizer.weight_decay"]] == [0, 1, 0]
    assert found["partings"]["weight_decay"] and "weight_decay broke" in found["sentences"][0]
    page.open(Path(found["page"]))
    assert page.run("document.querySelector('#verdict h2').innerText") == "weight_decay, no_predictor broke"
    assert not page.problems()
