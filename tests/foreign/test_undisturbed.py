"""Other people's training is the same to the last bit with and without the callbacks, on one rank and on two."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.ddp import run_ranks
from tests.foreign import runs
from tests.foreign.zoo import CASES, parametrized


def left_behind(module: Any) -> dict[str, Any]:
    """Everything a run leaves: parameters, all buffers, modes, switches, hooks, random states."""
    found: dict[str, Any] = {f"parameter {name}": value.detach().clone() for name, value in module.named_parameters()}
    found |= {f"buffer {name}": value.detach().clone() for name, value in module.named_buffers()}
    found |= {f"gradient {name}": value.requires_grad for name, value in module.named_parameters()}
    for name, part in module.named_modules():
        found[f"mode {name}"] = part.training
        found[f"hooks {name}"] = (len(part._forward_hooks), len(part._forward_pre_hooks), "forward" in vars(part))
    found["random torch"] = torch.get_rng_state()
    found["random numpy"] = torch.tensor(np.random.get_state()[1].astype(np.int64))  # noqa: NPY002
    found["random python"] = random.getstate()
    return found


def differing(plain: dict[str, Any], watched: dict[str, Any]) -> list[str]:
    if plain.keys() != watched.keys():
        return sorted(plain.keys() ^ watched.keys())
    return [
        key
        for key, value in plain.items()
        if not (torch.equal(value, watched[key]) if isinstance(value, torch.Tensor) else value == watched[key])
    ]


def compared(case: Any, rank: int = 0, ranks: int = 1) -> list[str]:
    """What differs after the same run without and with the callbacks."""
    found = []
    plain, watched = runs.build(case), runs.build(case)
    for ours, theirs in zip(watched.module.buffers(), plain.module.buffers(), strict=True):
        ours.copy_(theirs)  # some are made by `torch.empty` and hold whatever was there
    for built, callbacks in ((plain, []), (watched, runs.watchers(case))):
        random.seed(rank), np.random.seed(rank)  # noqa: NPY002
        runs.fit(case, built, callbacks, runs.history(case.package), rank, ranks)
        found.append(left_behind(built.module))
    return differing(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", parametrized(list(CASES.values())))
def test_undisturbed(name):
    assert compared(CASES[name]) == []


def both(rank: int, ranks: int, name: str) -> list[str]:
    return compared(CASES[name], rank, ranks)


# A table of its own in each batch cannot be shared out; several backward passes a step are not for DDP's reducer.
ALONE = {"unrelated_rows", "two_optimizers", "checkpointed_reentrant", "normalising_datamodule"}


@pytest.mark.slow
@pytest.mark.parametrize("name", parametrized([case for case in CASES.values() if case.name not in ALONE]))
def test_undisturbed_on_two_ranks(name):
    assert run_ranks(2, both, name) == [[], []]
