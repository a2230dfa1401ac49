"""Each benchmark runs at tiny sizes and finds the same answers as its peers; nothing here looks at a clock."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import ALONE, NAMES, _bench
from benchmarks._bench import Row, costs, faster, peak_memory, race, table

PEERS = {
    "augmentation": ["lightly", "kornia", "albumentations"],
    "loading": ["lightly"],
    "knn": ["lightly"],
    "linear_probe": ["lightly"],
    "covariance_operator": ["backpack", "nngeometry"],
    "throughput": ["lightly"],
}
EXPENSIVE = {"ddp", "growth", "loading", "probe_memory", "probe_scale", "startup", "step"}  # they start processes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in EXPENSIVE else []) for name in NAMES]
)
def test_runs_and_agrees(name: str) -> None:
    for peer in PEERS.get(name, []):
        pytest.importorskip(peer)
    torch.manual_seed(0)
    module = importlib.import_module(f"benchmarks.{name}")
    section = module.run(tiny=True)  # its own assertions are the test
    assert section.rows and all(isinstance(row, Row) and row.work for row in section.rows)
    assert module.__doc__ and module.__doc__.count("\n") > 1


def test_every_benchmark_is_listed() -> None:
    files = {path.stem for path in Path(_bench.__file__).parent.glob("[a-z]*.py")}
    assert files == {*NAMES, *ALONE}


def test_contenders_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    seconds = race({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warm_up=1)
    assert calls == ["a", "b"] * 4
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_ratios_say_who_wins() -> None:
    won, lost = faster("w", "p", [1.0, 1.0, 9.0], [4.0, 6.0, 5.0], 5), faster("w", "p", [1.0], [4.9], 5)
    assert (won.reached, lost.reached) == (True, False) and won.ratio == "5x (0.556-6) as fast"
    below, above = costs("w", "p", [1.0], [1.0], 1.1), costs("w", "p", [1.2], [1.0], 1.1)
    assert (below.reached, above.reached) == (True, False)
    assert faster("w", "p", [1e-3], [1e-3]).reached is None
    assert "**no**" in table([lost]) and "| yes |" in table([won])


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench, "PAGE", tmp_path / "page.md")
    _bench.write("knn", "old")
    _bench.write("augmentation", "first\n\n| a |")
    _bench.write("knn", "new")
    text = (tmp_path / "page.md").read_text()
    assert text == f"{_bench.HEADER}\n## augmentation\n\nfirst\n\n| a |\n\n## knn\n\nnew\n"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_sees_what_was_freed_again() -> None:
    assert 0.09 < peak_memory(lambda: torch.ones(25_000_000).sum()) < 0.2


def test_unknown_name_is_refused() -> None:
    found = subprocess.run([sys.executable, "-m", "benchmarks", "kn"], capture_output=True, text=True)
    assert found.returncode == 2 and "no benchmark kn; there are augmentation, loading" in found.stderr
