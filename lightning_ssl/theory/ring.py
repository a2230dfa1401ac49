"""Why a neuron must be nonlinear and local to detect an object on a ring (DDN-v2 Sec. 5.1, Eqs. 11-13)."""

from __future__ import annotations

from torch import Tensor

from lightning_ssl.data.synthetic import ring_population

__all__ = ["amplification", "neuron_operator", "ring_population"]


def neuron_operator(population: Tensor, weight: Tensor | None = None, bias: float = 0.0) -> Tensor:
    """OP = V_z0[E_z'[K | z0]] of one neuron, exactly, ``[pixels, pixels]``.

    K(x) = x for a linear neuron (``weight`` None), x 1[w^T x + b > 0] for a ReLU neuron.

    Args:
        population: Objects x positions x pixels, see :func:`ring_population`.
        weight: The ReLU neuron's weight, ``[pixels]``.
        bias: Its bias.
    """
    connection = population
    if weight is not None:
        connection = population * ((population @ weight + bias) > 0).to(population.dtype).unsqueeze(-1)
    mean = connection.mean(1)
    centred = mean - mean.mean(0)
    return centred.T @ centred / len(centred)


def amplification(population: Tensor, weight: Tensor, bias: float = 0.0, step: float = 1.0) -> Tensor:
    """The weight after one step of L_simp in the large-batch limit, w + step OP w (Theorem 3, Eq. 13)."""
    return weight + step * neuron_operator(population, weight, bias) @ weight
