"""Watch a module assembled from lightly's parts, as its documentation does, without an edit to it.

Needs `pip install lightly`. Trains the same SimSiam twice on the embedded digits, once without the stop-gradient,
and prints what the callbacks say of both.
"""

import lightning.pytorch as L
import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ssl.callbacks import CollapseMonitor, EffectiveRank, EigenspaceAlignment, UniformityAlignment


class Digits(Dataset):
    """Two views of a digit: shifted by a pixel, with noise."""

    def __init__(self):
        self.images = torch.tensor(load_digits().images / 16, dtype=torch.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        views = [
            torch.roll(self.images[i], torch.randint(-1, 2, (2,)).tolist(), (0, 1)) + 0.2 * torch.randn(8, 8)
            for _ in range(2)
        ]
        return tuple(view.expand(3, 8, 8) for view in views)


class SimSiam(L.LightningModule):
    """After lightly's examples, with a small backbone and heads that do not end in a normalisation."""

    def __init__(self, detach=True):
        super().__init__()
        self.detach = detach
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.AdaptiveAvgPool2d(1)
        )
        self.projection_head = BYOLProjectionHead(64, 64, 32)
        self.prediction_head = BYOLPredictionHead(32, 64, 32)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        z = self.projection_head(self.backbone(x).flatten(start_dim=1))
        return z.detach() if self.detach else z, self.prediction_head(z)

    def training_step(self, batch, batch_idx):
        (z0, p0), (z1, p1) = self.forward(batch[0]), self.forward(batch[1])
        return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def main():
    for detach in (True, False):
        L.seed_everything(0, verbose=False)
        monitor = CollapseMonitor("projection_head")
        trainer = L.Trainer(
            max_epochs=5,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                UniformityAlignment("projection_head", every_n_steps=20),
                EffectiveRank("backbone", every_n_steps=20),
                EigenspaceAlignment("prediction_head", every_n_steps=20),
                monitor,
            ],
        )
        trainer.fit(SimSiam(detach), DataLoader(Digits(), 64, shuffle=True, drop_last=True))
        found = trainer.callback_metrics
        print(f"{'with' if detach else 'without'} stop-gradient: {monitor.verdict}")
        for key in ("train/uniformity", "train/alignment", "train/effective_rank", "predictor/alignment_weighted"):
            print(f"  {key:30} {float(found[key]):8.3f}")


if __name__ == "__main__":
    main()
