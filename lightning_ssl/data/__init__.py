"""DataModules: images with batched augmentation, and the theory's synthetic models."""

from lightning_ssl.data.augment import Augment, Augmentation
from lightning_ssl.data.batch import ProbeBatch, ViewBatch
from lightning_ssl.data.digits import Nuisance
from lightning_ssl.data.image import ImageDataModule
from lightning_ssl.data.synthetic import HLTM, GaussianMixture, HLTMDataModule, MixtureDataModule, ring_population

__all__ = [
    "HLTM",
    "Augment",
    "Augmentation",
    "GaussianMixture",
    "HLTMDataModule",
    "ImageDataModule",
    "MixtureDataModule",
    "Nuisance",
    "ProbeBatch",
    "ViewBatch",
    "ring_population",
]
