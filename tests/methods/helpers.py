"""Small methods and batches for the tests."""

from __future__ import annotations

from typing import NamedTuple

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, DirectPred, SimCLR, SimSiam
from lightning_ssl.nn import SmallConv


class Batch(NamedTuple):
    """Any object with these fields will do: methods do not import lightning_ssl.data."""

    views: tuple[Tensor, ...]
    label: Tensor
    index: Tensor
    image: Tensor | None = None


def make_batch(rows=8, size=8, dtype=torch.float32, seed=0, image=True):
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randn(rows, 3, size, size, generator=generator, dtype=dtype)
    views = tuple(clean + 0.5 * torch.randn(clean.shape, generator=generator, dtype=dtype) for _ in range(2))
    return Batch(views, torch.arange(rows) % 4, torch.arange(rows), clean if image else None)


def rows_of(batch, rows):
    image = None if batch.image is None else batch.image[rows]
    return Batch(tuple(v[rows] for v in batch.views), batch.label[rows], batch.index[rows], image)


# Sizes for a test; what remains are the methods' defaults.
SMALL = {
    SimCLR: {"projector_hidden": 16, "projector_dim": 8},
    BYOL: {"projector_hidden": 16, "projector_dim": 8, "predictor_hidden": 16},
    SimSiam: {"projector_hidden": 16, "dim": 8},
    DirectPred: {"projector_hidden": 16, "projector_dim": 8},
    BarlowTwins: {"projector_hidden": 16, "dim": 8, "warmup_epochs": 0},
    RAFT: {"projector_hidden": 16, "projector_dim": 8, "predictor_hidden": 16},
    BYOLPrime: {"projector_hidden": 16, "projector_dim": 8, "predictor_hidden": 16},
}
# Nothing that mixes the samples of a batch, for comparisons of ranks with one process.
NORM_FREE = {
    SimCLR: {"projector_norm": "none"},
    BYOL: {"projector_norm": "none", "predictor_norm": "none"},
    SimSiam: {"projector": "linear", "predictor": "linear"},
    DirectPred: {"projector_norm": "none"},
    BarlowTwins: {"projector_norm": "none"},
    RAFT: {"projector_norm": "none"},
    BYOLPrime: {"projector_norm": "none"},
}
METHODS = list(SMALL)


def small(method, norm="batch", seed=0, **options):
    torch.manual_seed(seed)
    return method(backbone=SmallConv(width=8, depth=2, norm=norm), **{**SMALL[method], **options})


def norm_free(method, seed=0, **options):
    return small(method, "group", seed, **{**NORM_FREE[method], **options})


class Batches(Dataset):
    """Whole batches as items, so that no DataModule is needed."""

    def __init__(self, number, **options):
        self.batches = [make_batch(seed=i, **options) for i in range(number)]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        return self.batches[i]


def loader(number=4, **options):
    return DataLoader(Batches(number, **options), batch_size=None)


def fit(model, batches=4, val=0, image=True, rows=8, ckpt_path=None, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    trainer = L.Trainer(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **options)
    held_out = loader(val, image=image, rows=rows) if val else None
    trainer.fit(model, loader(batches, image=image, rows=rows), held_out, ckpt_path=ckpt_path)
    return trainer
