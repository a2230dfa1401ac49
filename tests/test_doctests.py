"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import lightning_ssl.functional
import lightning_ssl.metrics

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (lightning_ssl.functional, lightning_ssl.metrics)
    for module in pkgutil.iter_modules(package.__path__)
    if not module.name.startswith("_")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0
    assert result.attempted > 0, "a public module shows its use"
