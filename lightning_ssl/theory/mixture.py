"""Two-layer ReLU networks with a diagonal top layer on mixtures of Gaussians (DDN-v1 4.2, Theorem 5, G.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssl.data.synthetic import GaussianMixture

__all__ = ["GaussianMixture", "TwoLayer", "two_layer_flow"]


class Flow(NamedTuple):
    """Derivatives of w_1j ``[..., units, dim]`` and w_2j ``[..., units]``, and A_j ``[..., units, dim, dim]``."""

    w1: Tensor
    w2: Tensor
    A: Tensor


def two_layer_flow(population: Tensor, w1: Tensor, w2: Tensor, linear: bool = False) -> Flow:
    r"""Theorem 5 on an enumerated population, for L_simp and W_2 = diag(w_2).

    :math:`\dot w_{2j} = (w_{1j}^T A_j w_{1j}) w_{2j}`, :math:`\dot w_{1j} = w_{2j}^2 A_j w_{1j}` with
    :math:`A_j = V_{z_0}[u_j(z_0)]`, :math:`u_j = E[x 1(w_{1j}^T x \ge 0) | z_0]`. Hence
    :math:`|w_{1j}|^2 - w_{2j}^2` is conserved, for the gate is piecewise constant.

    Args:
        population: Samples x views x dim, all equally likely.
        w1: Weights into the hidden units, ``[units, dim]``.
        w2: Diagonal of the top layer, ``[units]``.
        linear: Leave the units' gate open.
    """
    gate = torch.ones((), dtype=population.dtype) if linear else (population @ w1.T >= 0).to(population.dtype)
    u = (population.unsqueeze(-2) * gate.unsqueeze(-1)).mean(1) if not linear else population.mean(1).unsqueeze(1)
    u = u.expand(len(population), *w1.shape)  # [samples, units, dim]
    centred = u - u.mean(0)
    A = torch.einsum("xjd,xje->jde", centred, centred) / len(centred)
    Aw = torch.einsum("jde,je->jd", A, w1)
    return Flow(w2.square().unsqueeze(-1) * Aw, (w1 * Aw).sum(-1) * w2, A)


class TwoLayer:
    """Many networks x -> diag(w2) ReLU(W1 x + b1) trained at once by SGD on a contrastive loss with H = 1 (G.1).

    Args:
        dim: Input dimension.
        units: Hidden units, which equals the outputs.
        runs: Number of independent networks.
        loss: "nce" or "simple".
        normalize: L2-normalise the outputs.
        tau: Temperature of "nce".
        bias: Give the hidden layer a bias; the top layer never has one, or its outputs would mix.
        seed: Seed of the initialisation.
    """

    def __init__(
        self,
        dim: int = 10,
        units: int = 10,
        runs: int = 1,
        loss: str = "nce",
        normalize: bool = True,
        tau: float = 0.05,
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        if loss not in ("nce", "simple"):
            raise ValueError(f"`loss` must be 'nce' or 'simple', got {loss!r}")
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(dim)
        self.w1 = (torch.rand(runs, units, dim, generator=generator) * 2 - 1) * bound
        self.b1 = (torch.rand(runs, units, generator=generator) * 2 - 1) * bound * float(bias)
        self.w2 = (torch.rand(runs, units, generator=generator) * 2 - 1) / math.sqrt(units)
        self.loss, self.normalize, self.tau, self.bias = loss, normalize, tau, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs ``[runs, n, units]`` of ``[runs, n, dim]``."""
        f = torch.relu(x @ self.w1.mT + self.b1.unsqueeze(1)) * self.w2.unsqueeze(1)
        return f / (f.norm(dim=-1, keepdim=True) + 1e-4) if self.normalize else f

    def step(self, anchor: Tensor, positive: Tensor, negative: Tensor, lr: float) -> Tensor:
        """One SGD step of every run on ``[runs, batch, dim]`` triples; returns the loss, ``[runs]``."""
        parameters = [self.w1, self.w2, *([self.b1] if self.bias else [])]
        for p in parameters:
            p.requires_grad_()
        f, f_pos, f_neg = self(torch.cat([anchor, positive, negative], dim=1)).chunk(3, dim=1)
        gap = ((f - f_pos).square().sum(-1) - (f - f_neg).square().sum(-1)) / 2  # r+ - r-
        loss = (torch.nn.functional.softplus(gap / self.tau) if self.loss == "nce" else gap).mean(-1)
        gradients = torch.autograd.grad(loss.sum(), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.requires_grad_(False)
                p -= lr * g
        return loss.detach()

    def active_clusters(self, means: Tensor) -> Tensor:
        """How many cluster centres ``[runs, clusters, dim]`` activate each hidden unit, ``[runs, units]``."""
        return ((means @ self.w1.mT + self.b1.unsqueeze(1)) > 0).sum(1)
