"""The type check sees the callbacks: what is wrong there, or passed to them wrongly, fails it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[1]
BLATANT = """

def _blatant(metric: SecondBatch) -> int:
    return "no number"


_number: int = functional.effective_rank("no tensor")
EffectiveRank(every_n_steps="often").no_such_method()
"""


def check(folder):
    environment = {**os.environ, "PYTHON": sys.executable, "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")}
    return subprocess.run([folder / ".ci" / "types"], env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_blatant_errors_in_a_callback_fail_the_check(tmp_path):
    for name in ("lightning_ssl", "callbacks", "configs", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    broken = tmp_path / "callbacks" / "effective_rank.py"
    before = len(broken.read_text().splitlines())
    broken.write_text(f"{broken.read_text()}\nfrom lightning_ssl import functional  # noqa: E402\n{BLATANT}")
    result = check(tmp_path)
    found = [line for line in result.stdout.splitlines() if "callbacks/effective_rank.py" in line and "error" in line]
    lines = {int(line.split(":")[1]) for line in found}
    assert result.returncode == 1
    assert len(found) >= 4 and min(lines) > before, result.stdout[-3000:]
