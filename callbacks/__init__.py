"""Drop-in callbacks: what a self-supervised run learns, and why, at any number of ranks."""

from lightning_ssl.callbacks.knn_probe import KNNProbe
from lightning_ssl.callbacks.linear_probe import LinearProbe
from lightning_ssl.callbacks.uniformity_alignment import UniformityAlignment

__all__ = ["KNNProbe", "LinearProbe", "UniformityAlignment"]
