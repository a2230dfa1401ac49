"""Series instead of images: a 1-D network, augmentations of its own, and the same callbacks.

Four kinds of waves, drawn on the spot; views are scaled, shifted in time and noisy. The callbacks read what leaves a
submodule, whatever went in: the only thing to say is which axis of [N, C, L] is which, and the Conv1d says that itself.
"""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssl.callbacks import CollapseMonitor, EffectiveRank, KNNProbe, UniformityAlignment
from lightning_ssl.functional import info_nce_loss, squared_distance


def waves(count, seed):
    """Series [count, 1, 128] of four shapes, at any phase and three octaves of pitch, and which shape."""
    g = torch.Generator().manual_seed(seed)
    phase = 6.283 * torch.rand(count, 1, generator=g)
    pitch = 2 ** (1 + 3 * torch.rand(count, 1, generator=g))
    t = pitch * torch.linspace(0, 6.283, 128) + phase
    shapes = torch.stack([t.sin(), t.sin().sign(), (t.sin() + (2 * t).sin()) / 2, 2 * (t / 6.283 % 1) - 1])
    kind = torch.randint(4, (count,), generator=g)
    return shapes[kind, torch.arange(count)].unsqueeze(1), kind


class Contrast(L.LightningModule):
    """SimCLR for series, written without this package's methods."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, 32, 9, stride=2), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 9, stride=2), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def view(self, x):
        scale = 0.6 + 0.8 * torch.rand(len(x), 1, 1)
        return torch.roll(scale * x, int(torch.randint(128, ())), -1) + 0.1 * torch.randn_like(x)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        z1, z2 = (F.normalize(self.head(self.encoder(self.view(x)).mean(dim=2))) for _ in range(2))
        others = torch.stack([z2.roll(shift, 0) for shift in range(1, 33)], dim=1)  # 32 negatives a sample
        r_neg = squared_distance(z1.unsqueeze(1).expand_as(others).flatten(0, 1), others.flatten(0, 1))
        return info_nce_loss(squared_distance(z1, z2), r_neg.view(len(x), 32), tau=0.2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main():
    L.seed_everything(0, verbose=False)
    train, test = TensorDataset(*waves(2048, 0)), TensorDataset(*waves(512, 1))
    monitor = CollapseMonitor("head")
    trainer = L.Trainer(
        max_epochs=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            UniformityAlignment("head"),
            EffectiveRank("encoder"),
            KNNProbe("encoder", (train, test), k=20, every_n_epochs=6),
            monitor,
        ],
    )
    module = Contrast()
    trainer.fit(module, DataLoader(train, 128, shuffle=True, drop_last=True))
    found = trainer.callback_metrics
    print(f"verdict: {monitor.verdict}")
    for key in ("train/uniformity", "train/alignment", "train/effective_rank", "val/knn_top1"):
        print(f"  {key:22} {float(found[key]):7.3f}")
    print("  (kNN of four classes: chance is 0.25)")


if __name__ == "__main__":
    main()
