"""DataModules: images with batched augmentation, and the theory's synthetic models."""

from lightning_ssl.data.augment import Augmentation
from lightning_ssl.data.batch import ProbeBatch, ViewBatch
from lightning_ssl.data.digits import Nuisance
from lightning_ssl.data.hltm import HLTM, HLTMDataModule
from lightning_ssl.data.image import ImageDataModule
from lightning_ssl.data.mixture import GaussianMixture, MixtureDataModule
from lightning_ssl.data.ring import ring_population

__all__ = [
    "HLTM",
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
