"""The tutorials, as a reader follows them: every command and every block of Python, in the order of the page."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, run_bash, run_python

COMMAND_LINE = "docs/tutorials/command_line.md"


def follow(page, folder, monkeypatch):
    """Do what the page says; returns the names that its code left, and what its commands printed."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("LIGHTNING_SSL_RUN", raising=False)
    names, printed = {}, []
    for block in blocks(page, "python", "bash"):
        if block.kind == "python":
            run_python(block, page, names)
        else:
            printed.append(run_bash(block))
    return names, printed


@pytest.mark.slow
@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm")
def test_a_strangers_path(tmp_path, monkeypatch):
    """A folder without labels, a run, a page with a verdict, scikit-learn, torchvision and timm: a command a step."""
    steps = re.findall(r"<!-- step: (\w+) -->\n```bash\n(.*?)```", (ROOT / COMMAND_LINE).read_text(), re.S)
    for name in ("fit", "embed", "export"):
        (commands,) = [code.strip().splitlines() for step, code in steps if step == name]
        assert len(commands) == 1 and commands[0].startswith(f"lightning-ssl {name} "), name
    names, printed = follow(COMMAND_LINE, tmp_path, monkeypatch)
    assert "200 images in 'images', without classes" in printed[0] and "Healthy" in printed[0]
    page = Path("runs/mine/report.html").read_text()
    verdict = json.loads(Path("runs/mine/summary.json").read_text())["verdicts"][0]
    assert verdict["place"] == "projector" and "Healthy: no collapse" in page
    assert "mine" in printed[1] and re.search(r"decayed.*collapse", printed[2]), printed[2]
    # Looked at from here, too: the page's own assertions might be edited away.
    import torch

    assert names["found"]["features"].shape == (200, 512) and set(names["found"]["label"]) == {-1}
    assert len(names["clusters"]) == 200
    with torch.no_grad():
        ours, theirs = names["theirs"](names["batch"].image), names["timms"](names["batch"].image)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, names["expected"], atol=1e-4, rtol=1e-4)
    assert len(ours) == 40 and float(ours.std()) > 0.01
    assert json.loads(Path("runs/mine/summary.json").read_text())["epochs"] == 4  # it went on
    assert Path("runs/again/report.html").is_file()


@pytest.mark.slow
def test_drop_in(tmp_path, monkeypatch):
    names, _ = follow("docs/tutorials/drop_in.md", tmp_path, monkeypatch)
    assert names["worse"]["train/uniformity"] > -0.1 > names["values"]["train/uniformity"]
    assert len(list(tmp_path.rglob("report.html"))) == 1


@pytest.mark.slow
def test_theory(tmp_path, monkeypatch):
    names, printed = follow("docs/tutorials/theory.md", tmp_path, monkeypatch)
    assert names["modes"].p[-1, 0] < 0.05 < 0.9 < names["modes"].p[-1, 1]
    assert "ema-weight-decay" in printed[-1] and list(tmp_path.glob("figures/**/*.png"))
    assert list(tmp_path.glob("overlay/**/*.png"))
