"""The examples in the docstrings run and print what they say; our own code warns only of what it means to."""

import doctest
import importlib
import inspect
import pkgutil
import re
import warnings

import lightning.pytorch as L
import pytest
import torch

import lightning_ssl
import lightning_ssl.callbacks

PACKAGES = (lightning_ssl, lightning_ssl.callbacks)  # an editable install keeps the second elsewhere
MODULES = sorted(
    {
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.ispkg and not module.name.endswith("__main__")
    }
)
SHOWN = ("lightning_ssl.functional.", "lightning_ssl.metrics.")
TOOLS = ("checks", "connection", "curvature", "descent", "estimate", "sketch", "_base")  # what those two are made of


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch, "L": L})
    assert result.failed == 0
    if name.startswith(SHOWN) and not name.endswith(TOOLS):
        assert result.attempted > 0, "a public module shows its use"


EXPORTED = [
    (package, name)
    for package in ("functional", "metrics", "nn", "methods", "data", "callbacks")
    for name, thing in vars(importlib.import_module(f"lightning_ssl.{package}")).items()
    if inspect.isclass(thing) and not name.startswith("_") and not issubclass(thing, tuple | Exception)
]


@pytest.mark.parametrize(("package", "name"), EXPORTED)
def test_a_public_class_has_an_example_and_arguments_in_sentences(package, name):
    text = inspect.cleandoc(vars(importlib.import_module(f"lightning_ssl.{package}"))[name].__doc__)
    assert ">>>" in text
    arguments = re.findall(r"^ {4}\w+: (\w+)", text.partition("Args:\n")[2].partition("\n\n")[0], re.M)
    assert not [word for word in arguments if word[0].islower() and "_" not in word], "capitals, as in a sentence"


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, RuntimeWarning, PendingDeprecationWarning])
def test_such_a_warning_from_our_own_code_is_an_error(category):
    with pytest.raises(category):
        warnings.warn_explicit("old", category, "image.py", 1, module="lightning_ssl.data.image")
    warnings.warn_explicit("old", DeprecationWarning, "theirs.py", 1, module="somebody.elses")  # theirs to mend
