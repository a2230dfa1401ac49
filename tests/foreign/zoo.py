"""All configurations of other people's modules that the callbacks are held to."""

from __future__ import annotations

import importlib.util

import pytest

from tests.foreign import zoo_lightly, zoo_packages, zoo_plain
from tests.foreign.case import Case

CASES: dict[str, Case] = {case.name: case for case in [*zoo_plain.CASES, *zoo_lightly.CASES, *zoo_packages.CASES]}


def absent(case: Case) -> str:
    """The packages that a case needs and that are not there."""
    return ", ".join(name for name in case.needs if importlib.util.find_spec(name) is None)


def parametrized(cases: list[Case]) -> list[object]:
    """The cases as parameters: skipped where a package is missing, slow ones marked."""
    found = []
    for case in cases:
        marks = [pytest.mark.slow] if case.slow else []
        if absent(case):
            marks.append(pytest.mark.skip(reason=f"{absent(case)} not installed"))
        found.append(pytest.param(case.name, id=case.name, marks=marks))
    return found
