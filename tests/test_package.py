"""The wheel holds everything, imports outside the checkout, and takes no name that is not ours."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("lightning_ssl", "callbacks", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    dist = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", dist, source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = dist.glob("*.whl")
    return path


def test_wheel_has_every_file_and_no_foreign_top_level_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_ssl"}
    for folder, prefix in (("lightning_ssl", ""), ("callbacks", "lightning_ssl/"), ("configs", "lightning_ssl/")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".typed", ".js", ".css", ".LICENSE"):
                assert prefix + path.relative_to(ROOT).as_posix() in names


def test_wheel_imports_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = (
        "import importlib, pkgutil, sys, lightning_ssl\n"
        f"assert lightning_ssl.__file__.startswith({str(target)!r}), lightning_ssl.__file__\n"
        "for module in pkgutil.walk_packages(lightning_ssl.__path__, 'lightning_ssl.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        f"        assert importlib.import_module(module.name).__file__.startswith({str(target)!r}), module.name\n"
        "for part in 'functional metrics nn methods data theory callbacks configs runs distributed'.split():\n"
        "    assert 'lightning_ssl.' + part in sys.modules, part\n"
        "for foreign in ('callbacks', 'configs', 'tests'):\n"
        "    try:\n"
        "        importlib.import_module(foreign)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    raise AssertionError(foreign + ' must not be importable')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": str(target), "PATH": ""})


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("lightning_ssl/functional", ["metrics", "callbacks", "nn", "methods", "data", "theory", "runs"]),
        ("lightning_ssl/metrics", ["callbacks", "nn", "methods", "data", "theory", "runs"]),
        ("callbacks", ["methods", "data", "theory", "runs"]),
        ("lightning_ssl/nn", ["metrics", "callbacks", "methods", "data", "theory", "runs"]),
        ("lightning_ssl/methods", ["metrics", "callbacks", "data", "theory", "runs"]),
        ("lightning_ssl/data", ["functional", "metrics", "callbacks", "nn", "methods", "theory", "runs"]),
    ],
)
def test_imports_point_one_way(folder, forbidden):
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_names(path):
            assert name.split(".")[0] != "pytorch_lightning", f"{path}: import lightning.pytorch"
            for part in forbidden:
                assert not f"{name}.".startswith(f"lightning_ssl.{part}."), f"{path} imports {name}"
