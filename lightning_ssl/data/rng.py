"""The earlier name of :mod:`lightning_ssl.rng`."""

from lightning_ssl.rng import CLEAN, permutation, random_bits, uniforms

__all__ = ["CLEAN", "permutation", "random_bits", "uniforms"]
