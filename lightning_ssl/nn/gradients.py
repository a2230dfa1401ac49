"""What the papers do to gradients: keep their tangential part, add noise to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def tangential(x: Tensor) -> Tensor:
    r"""The identity, whose backward keeps only the gradient's part orthogonal to each row (RAFT Sec. 5, Eq. 34).

    :math:`g \mapsto g - \langle g, \hat x \rangle \hat x`: rows turn but do not move along themselves. The gradient of
    a loss of l2-normalised rows is tangential already; for the squared error of plain rows it is not.

    Args:
        x: Rows, [N, d].
    """
    return _Tangential.apply(x)


class _Tangential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        unit = nn.functional.normalize(ctx.saved_tensors[0], dim=-1)
        return grad - (grad * unit).sum(dim=-1, keepdim=True) * unit


@torch.no_grad()
def add_gradient_noise_(parameters: Iterable[nn.Parameter], eta: float, seed: int) -> None:
    """Add eta * XavierInit(W) to the gradient of every weight matrix or filter bank (DDN-v2 Table 2).

    The noise is a function of `seed`, so that all ranks add the same.
    """
    for weight, noise in _xavier(parameters, seed):
        if weight.grad is not None:
            weight.grad.add_(noise, alpha=eta)


@torch.no_grad()
def mix_weights_(parameters: Iterable[nn.Parameter], eta: float, seed: int) -> None:
    """Move every weight matrix or filter bank a step towards a fresh draw, W <- (1 - eta) W + eta XavierInit(W)."""
    for weight, noise in _xavier(parameters, seed):
        weight.lerp_(noise, eta)


def _xavier(parameters: Iterable[nn.Parameter], seed: int) -> Iterable[tuple[nn.Parameter, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for weight in parameters:
        if weight.ndim >= 2:
            noise = nn.init.xavier_uniform_(torch.empty(weight.shape), generator=generator)
            yield weight, noise.to(weight)
