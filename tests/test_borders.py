"""What may know what: no private name crosses a package, and Lightning's private names stand in one file."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import lightning_ssl

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "lightning_ssl").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")])
# Private names that are not Lightning's: named tuples', torch's, torchmetrics', argparse's, the system's.
NOT_LIGHTNINGS = {
    "_C",
    "_current_graph_task_id",
    "_exit",
    "_asdict",
    "_foreach_lerp_",
    "_foreach_add",
    "_foreach_add_",
    "_foreach_mul",
    "_foreach_mul_",
    "_foreach_norm",
    "_linear_pointwise",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_cache",  # torchmetrics', as the next two
    "_defaults",
    "_reductions",
    "_fields",
    "_get_backend",  # torch's process groups', as the next two
    "_get_default_store",
    "_timeout",
    "_make",
    "_replace",
    "_BatchNorm",
    "_NormBase",
    "_buffers",
    "_modules",
    "_option_string_actions",
    "_parameters",
    "_reversed_padding_repeated_twice",
}


def package_of(name):
    """The part of ours that a dotted name belongs to, or None: lightning_ssl.data.synthetic.hltm is of data."""
    parts = name.split(".")
    if parts[0] != "lightning_ssl" or len(parts) < 2:
        return None
    is_package = (ROOT / "lightning_ssl" / parts[1]).is_dir() or parts[1] == "callbacks"
    return parts[1] if is_package else "lightning_ssl"


def dotted_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "lightning_ssl" else ("lightning_ssl", *parts))


def private(name):
    return name.startswith("_") and not name.startswith("__")


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_private_name_is_imported_across_packages(path):
    here = package_of(dotted_name(path))
    crossing = [
        name
        for name in imports(ast.parse(path.read_text()))
        if package_of(name) not in (None, here, "lightning_ssl") and any(map(private, name.split(".")[1:]))
    ]
    assert not crossing


def defined(tree):
    """Names that a file defines itself: functions, classes, class attributes, and what it assigns to `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


TREES = {path: ast.parse(path.read_text()) for path in FILES}
OURS = {name for tree in TREES.values() for name in defined(tree)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lightnings_private_names_stand_in_one_file(path):
    if path == ROOT / "lightning_ssl" / "_lightning.py":
        return
    foreign = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and private(node.attr):
            foreign.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)):
                foreign.add(name.value)
    foreign = foreign - OURS - NOT_LIGHTNINGS
    foreign |= {
        name for name in imports(TREES[path]) if name.startswith("lightning.") and any(map(private, name.split(".")))
    }
    assert not foreign


def test_no_class_overrides_what_lightning_keeps_to_itself():
    for module in pkgutil.walk_packages(lightning_ssl.__path__, "lightning_ssl."):
        if module.name in ("lightning_ssl.__main__", "lightning_ssl._lightning"):
            continue
        for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if cls.__module__ != module.name:
                continue
            hidden = {
                name
                for base in cls.__mro__
                if base.__module__.startswith(("lightning.", "pytorch_lightning."))
                for name in vars(base)
                if private(name) and not name.startswith(f"_{base.__name__}__") and name != "_abc_impl"
            }
            assert not hidden & set(vars(cls)), cls
