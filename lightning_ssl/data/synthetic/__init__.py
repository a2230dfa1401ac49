"""The papers' generative models, each with the DataModule that draws from it; what is proved of them is in `theory`."""

from lightning_ssl.data.synthetic.base import EpochDraws, SyntheticDataModule
from lightning_ssl.data.synthetic.hltm import HLTM, HLTMDataModule, latent_position
from lightning_ssl.data.synthetic.mixture import GaussianMixture, MixtureDataModule
from lightning_ssl.data.synthetic.ring import ring_population

__all__ = [
    "HLTM",
    "EpochDraws",
    "GaussianMixture",
    "HLTMDataModule",
    "MixtureDataModule",
    "SyntheticDataModule",
    "latent_position",
    "ring_population",
]
