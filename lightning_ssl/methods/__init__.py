"""The methods of the five papers, one LightningModule a file."""

from lightning_ssl.methods.barlow_twins import BarlowTwins
from lightning_ssl.methods.byol import BYOL
from lightning_ssl.methods.byol_prime import BYOLPrime
from lightning_ssl.methods.direct_pred import DirectPred
from lightning_ssl.methods.raft import RAFT
from lightning_ssl.methods.simclr import SimCLR
from lightning_ssl.methods.simsiam import SimSiam

__all__ = ["BYOL", "RAFT", "BYOLPrime", "BarlowTwins", "DirectPred", "SimCLR", "SimSiam"]
