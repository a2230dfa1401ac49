"""DataModules: images with batched augmentation, and the theory's synthetic models."""

from lightning_ssl.data.augment import Augmentation
from lightning_ssl.data.batch import ProbeBatch, ViewBatch
from lightning_ssl.data.digits import Nuisance
from lightning_ssl.data.image import ImageDataModule

__all__ = ["Augmentation", "ImageDataModule", "Nuisance", "ProbeBatch", "ViewBatch"]
