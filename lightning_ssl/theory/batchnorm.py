"""What centring the back-propagated gradient adds to BYOL's update (DDN-v1 Sec. 5, Theorem 8, Corollaries 1-2).

A population is enumerated by its connections K_l(x') = f_{l-1}(x') (x) J_l(x')^T, ``[samples, views, P, outputs]``:
all samples x, and all augmented views x' of each, equally likely. Functions return updates of vec(W_l), ``[P]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Operators", "batchnorm_correction", "byol_update", "connections", "operators", "predictor_update"]


def connections(inputs: Tensor, jacobians: Tensor) -> Tensor:
    """K = f (x) J^T of f ``[samples, views, n_in]`` and J ``[samples, views, outputs, n_out]``; vec is column-major."""
    return torch.einsum("xvk,xvau->xvkua", inputs, jacobians).flatten(2, 3)


class Operators(NamedTuple):
    """Covariances of a population's connections: within samples EV, between them VE, and with a target's, Cov."""

    intra: Tensor
    inter: Tensor
    cross: Tensor


def operators(K: Tensor, K_target: Tensor) -> Operators:
    """E_x V_x'[K], V_x[K_mean] and Cov_x[K_mean, K_target_mean]."""
    mean, mean_target = K.mean(1), K_target.mean(1)
    centred, centred_target = mean - mean.mean(0), mean_target - mean_target.mean(0)
    within = K - mean.unsqueeze(1)
    samples, views = K.shape[:2]
    return Operators(
        torch.einsum("xvpa,xvqa->pq", within, within) / (samples * views),
        torch.einsum("xpa,xqa->pq", centred, centred) / samples,
        torch.einsum("xpa,xqa->pq", centred, centred_target) / samples,
    )


def byol_update(K: Tensor, w: Tensor, K_target: Tensor, w_target: Tensor) -> Tensor:
    """-E[d r / d vec(W)] of r = 1/2 |online(x1') - target(x2')|^2 with independent views of x (Theorem 1, Eq. 11)."""
    online = torch.einsum("xvpa,p->xva", K, w)
    target = torch.einsum("xvpa,p->xva", K_target, w_target).mean(1, keepdim=True)
    return -torch.einsum("xvpa,xva->p", K, online - target) / (K.shape[0] * K.shape[1])


def batchnorm_correction(K: Tensor, w: Tensor, K_target: Tensor, w_target: Tensor) -> Tensor:
    """What a gradient centred over the batch adds to the update: E[K] (E[K]^T w - E[K']^T w') (Theorem 8, Eq. 13)."""
    mean, mean_target = K.mean((0, 1)), K_target.mean((0, 1))
    return mean @ (mean.T @ w - mean_target.T @ w_target)


def predictor_update(K_base: Tensor, w: Tensor, predictor: Tensor, stop_gradient: bool = True) -> Tensor:
    """The centred update with a linear predictor and no EMA, in closed form (Corollary 2).

    ``K_base`` are the connections up to the predictor's input, ``predictor`` is W_pred.

    With the stop-gradient an (amplifying) term E[K W^T (I - W) K^T] appears next to the symmetric part; without it the
    term is -V[K (I - W)^T], which only shrinks. The symmetric part is then the sum of both branches' own, with the
    predictor and without: the paper's "2 sym" is right only for W_pred = I.
    """
    eye = torch.eye(len(predictor), dtype=predictor.dtype)
    ops = operators(K_base @ predictor.T, K_base)
    mean = K_base.mean(1)
    centred = mean - mean.mean(0)
    if stop_gradient:
        amplify = torch.einsum("xpa,ab,xqb->pq", centred, predictor.T @ (eye - predictor), centred) / len(centred)
        return -ops.intra @ w + amplify @ w
    gap = centred @ (eye - predictor).T
    both = ops.intra + operators(K_base, K_base).intra
    return -both @ w - torch.einsum("xpa,xqa->pq", gap, gap) @ w / len(gap)
