"""Projectors and predictors."""

from __future__ import annotations

import itertools
from typing import Literal, get_args

import torch
from torch import nn

from lightning_ssl.nn.norm import Affine, build_norm
from lightning_ssl.nn.predictor_actions import PredictorInit, reset_parameters_


def mlp(
    dims: list[int],
    norm: str = "batch",
    last_norm: str = "none",
    last_bias: bool = True,
    bias: bool = True,
    affine: bool = True,
    last_affine: Affine = False,
) -> nn.Sequential:
    """Linear layers through `dims`, each but the last followed by its norm and a ReLU.

    Args:
        dims: Sizes, from the input's to the output's.
        norm: A name for :func:`build_norm`, of the hidden layers.
        last_norm: Likewise, of the output.
        last_bias: Whether the last linear layer has a bias.
        bias: Whether the hidden ones have; before a norm that subtracts the mean it does nothing.
        affine: Whether the hidden layers' batch norms have their affine part.
        last_affine: Likewise of the output's, or "scale" for the scale alone.
    """
    if len(dims) < 2 or min(dims) < 1:
        raise ValueError(f"`dims` must be at least two positive sizes, got {dims}")
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(dims)):
        last = i == len(dims) - 2
        layers.append(nn.Linear(n_in, n_out, bias=last_bias if last else bias))
        norm_layer = build_norm(last_norm if last else norm, n_out, last_affine if last else affine)
        if not isinstance(norm_layer, nn.Identity):
            layers.append(norm_layer)
        if not last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


HeadInit = Literal["default", "normal", "lecun"]
"""How a head's weights start: torch's way, from N(0, 0.01²), or by LeCun's rule."""


@torch.no_grad()
def init_head_(head: nn.Module, init: HeadInit) -> None:
    """Draw a head's linear layers as a method's own code does.

    Args:
        head: Any module.
        init: "default", PyTorch's, leaves them; "normal", weights of deviation 0.01 (SimCLR); "lecun", normal weights
            of deviation 1/sqrt(fan-in), cut off at two deviations (BYOL). Both set biases to 0.
    """
    if init not in get_args(HeadInit):
        raise ValueError(f"`head_init` must be one of {', '.join(get_args(HeadInit))}, got {init!r}")
    if init == "default":
        return
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            if init == "normal":
                nn.init.normal_(layer.weight, std=0.01)
            else:
                deviation = layer.in_features**-0.5
                nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def build_predictor(
    kind: Literal["mlp", "linear", "none"],
    dim: int,
    hidden: int = 512,
    norm: str | None = None,
    bias: bool = True,
    init: PredictorInit = "default",
    init_range: float | None = None,
    seed: int | None = None,
    hidden_bias: bool = True,
    affine: bool = True,
    norm_place: Literal["before", "after"] = "before",
) -> nn.Module:
    """A predictor from `dim` to `dim` features.

    Args:
        kind: "mlp" (Linear, norm, ReLU, Linear), "linear", or "none" (the identity).
        dim: Number of features.
        hidden: Width of the MLP.
        norm: A name for :func:`build_norm`; None means "batch" in an MLP and no norm around a linear predictor.
        bias: Whether the last linear layer has a bias.
        init: How the weights start, see :func:`reset_parameters_`.
        init_range: The range of init "uniform" and "positive".
        seed: Seed of a non-default start; None draws it from the global generator.
        hidden_bias: Whether an MLP's first layer has a bias.
        affine: Whether batch norms have their affine part.
        norm_place: With "linear", whether the norm comes before the linear map, as behind DDN-v1's Tables 7-9 (after
            it, it would undo the range of the weights that these sweep), or after it.
    """
    if norm_place not in ("before", "after"):
        raise ValueError(f'`norm_place` must be "before" or "after", got {norm_place!r}')
    if kind == "none":
        if init != "default" or norm not in (None, "none"):
            raise ValueError(f'predictor="none" has nothing to initialise or normalise, got {init=} and {norm=}')
        return nn.Identity()
    if kind == "mlp":
        predictor: nn.Module = mlp([dim, hidden, dim], norm or "batch", last_bias=bias, bias=hidden_bias, affine=affine)
    elif kind == "linear":
        predictor = nn.Linear(dim, dim, bias=bias)
        if norm not in (None, "none"):
            parts = [build_norm(norm, dim, affine), predictor]
            predictor = nn.Sequential(*(parts if norm_place == "before" else parts[::-1]))
    else:
        raise ValueError(f'`predictor` must be "mlp", "linear" or "none", got {kind!r}')
    if init != "default":
        reset_parameters_(predictor, init, init_range, int(torch.randint(2**31, ())) if seed is None else seed)
    return predictor
