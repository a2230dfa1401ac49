"""The papers' theory, runnable: linear dynamics, latent trees, mixtures, the ring, EMA and BatchNorm."""

from lightning_ssl.theory import batchnorm, ema, hltm, linear, mixture, ring

__all__ = ["batchnorm", "ema", "hltm", "linear", "mixture", "ring"]
