"""On other people's modules every logged value is the true one, or there is a warning that says what to pass."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.foreign.runs import catch, compare, ours, watch
from tests.foreign.truth import Caught
from tests.foreign.zoo import CASES, parametrized


@lru_cache(maxsize=1)
def caught(name: str) -> Caught:
    return catch(CASES[name])


def told(text: list[str]) -> str:
    return "\n".join(text)


@pytest.mark.parametrize("name", parametrized(list(CASES.values())))
def test_values(name):
    case = CASES[name]
    watched = watch(case)
    problems = compare(case, caught(name), watched, bare=False)
    assert not problems, f"{told(problems)}\nwarnings: {told(ours(watched))}"


BARE = [case for case in CASES.values() if (case.declared or case.bare_features) and case.bare != "skip"]


@pytest.mark.parametrize("name", parametrized(BARE))
def test_values_without_arguments(name):
    case = CASES[name]
    watched = watch(case, bare=True)
    problems = compare(case, caught(name), watched, bare=True)
    assert not problems, f"{told(problems)}\nwarnings: {told(ours(watched))}"
