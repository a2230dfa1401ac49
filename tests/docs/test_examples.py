"""The scripts and notebooks of examples/ run as they stand, from another folder, and print what they promise."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
SAYS = {  # of each script, what must be in its words
    "drop_in_lightly.py": [
        "with stop-gradient: healthy",
        "without stop-gradient: complete collapse of 'projection_head'",
    ],
    "own_method.py": ["(25.0, 25.0, 1.0): healthy at the end; on the way: nothing", "(25.0, 0.0, 0.0): "],
    "covariance_operator.py": ["untrained", "± "],
    "theory_over_a_run.py": ["off by", " 1500 "],
    "time_series.py": ["verdict: healthy", "val/knn_top1"],
}
NEEDS = {"drop_in_lightly.py": "lightly"}


def test_all_of_them_are_run_and_on_the_page():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)
    assert len(list(EXAMPLES.glob("*.ipynb"))) == 2
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"`examples/{path.name}`" in page, path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_a_script(name, tmp_path):
    pytest.importorskip(NEEDS.get(name, "torch"))
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for words in SAYS[name]:
        assert words in done.stdout, done.stdout
    if name == "covariance_operator.py":  # in every layer more survives than before
        ratios = re.findall(r"untrained +([\d.]+) +trained +([\d.]+)", done.stdout)
        assert len(ratios) == 5 and all(float(after) > float(before) for before, after in ratios)
    if name == "own_method.py":
        whole, alone = map(float, re.findall(r"kNN ([\d.]+)", done.stdout))
        assert whole > 0.5 and alone < 0.3
    if name == "theory_over_a_run.py":
        assert max(float(off) for off in re.findall(r"([\d.]+) %", done.stdout)) < 3
    if name == "time_series.py":
        assert float(re.search(r"val/knn_top1 +([\d.]+)", done.stdout)[1]) > 0.8


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, ("nbclient", "nbformat", "ipykernel"))), reason="needs nbclient, ipykernel")
@pytest.mark.parametrize("name", ["linear_theory.ipynb", "reading_a_run.ipynb"])
def test_a_notebook(name, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # or the kernel draws there and shows nothing
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert any("image/png" in output.get("data", {}) for output in outputs)
    if name == "linear_theory.ipynb":
        commutators = [float(value) for value in re.findall(r"commutator ([\d.]+)", printed)]
        assert len(commutators) == 4 and commutators[-1] < commutators[0] / 10
        grown, modes = map(int, re.search(r"(\d+) of (\d+) modes grow", printed).groups())
        assert 0 < grown < modes
    else:
        assert "with a predictor: healthy" in printed and "without: complete collapse" in printed
