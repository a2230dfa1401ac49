"""The papers' theory, runnable: linear dynamics, latent trees, mixtures, the ring, EMA, BatchNorm, bounds."""

from lightning_ssl.theory import batchnorm, contrastive, ema, generalization, hltm, linear, mixture, ring

__all__ = ["batchnorm", "contrastive", "ema", "generalization", "hltm", "linear", "mixture", "ring"]
