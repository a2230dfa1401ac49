"""Projectors and predictors."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import nn

from lightning_ssl.nn.norm import build_norm
from lightning_ssl.nn.predictor_actions import PredictorInit, reset_parameters_


def mlp(dims: list[int], norm: str = "batch", last_norm: str = "none", last_bias: bool = True) -> nn.Sequential:
    """Linear layers through `dims`, each but the last followed by its norm and a ReLU.

    A linear layer directly before a norm that subtracts the mean keeps its bias all the same, as in the papers.
    """
    if len(dims) < 2 or min(dims) < 1:
        raise ValueError(f"`dims` must be at least two positive sizes, got {dims}")
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(dims)):
        last = i == len(dims) - 2
        layers.append(nn.Linear(n_in, n_out, bias=last_bias if last else True))
        norm_layer = build_norm(last_norm if last else norm, n_out, affine=not last)
        if not isinstance(norm_layer, nn.Identity):
            layers.append(norm_layer)
        if not last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def build_predictor(
    kind: Literal["mlp", "linear", "none"],
    dim: int,
    hidden: int = 512,
    norm: str | None = None,
    bias: bool = True,
    init: PredictorInit = "default",
    init_range: float | None = None,
    seed: int | None = None,
) -> nn.Module:
    """A predictor from `dim` to `dim` features.

    Args:
        kind: "mlp" (Linear, norm, ReLU, Linear), "linear", or "none" (the identity).
        dim: Number of features.
        hidden: Width of the MLP.
        norm: A name for :func:`build_norm`; None means "batch" in an MLP and no norm around a linear predictor. With
            "linear" the norm acts on the output (DDN-v1 Tables 7-9).
        bias: Whether the last linear layer has a bias.
        init: How the weights start, see :func:`reset_parameters_`.
        init_range: The range of init "uniform" and "positive".
        seed: Seed of a non-default start; None draws it from the global generator.
    """
    if kind == "none":
        if init != "default" or norm not in (None, "none"):
            raise ValueError(f'predictor="none" has nothing to initialise or normalise, got {init=} and {norm=}')
        return nn.Identity()
    if kind == "mlp":
        predictor: nn.Module = mlp([dim, hidden, dim], norm or "batch", last_bias=bias)
    elif kind == "linear":
        predictor = nn.Linear(dim, dim, bias=bias)
        if norm not in (None, "none"):
            predictor = nn.Sequential(predictor, build_norm(norm, dim))
    else:
        raise ValueError(f'`predictor` must be "mlp", "linear" or "none", got {kind!r}')
    if init != "default":
        reset_parameters_(predictor, init, init_range, int(torch.randint(2**31, ())) if seed is None else seed)
    return predictor
