"""A method of one's own: VICReg's three terms as a `Method`, on the embedded digits with probes and a verdict.

`Method` brings the steps, logging, optimizer and the mean over ranks; the file holds the networks and the loss.
"""

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_ssl.callbacks import CollapseMonitor, KNNProbe, LinearProbe
from lightning_ssl.data import ImageDataModule
from lightning_ssl.methods.base import Method, views
from lightning_ssl.nn import SmallConv, build_backbone, gather_rows, mlp, num_features


class VICReg(Method):
    """Invariance, a floor under each feature's deviation, and small covariances; over all ranks' rows."""

    loss_is_global = True

    def __init__(
        self,
        backbone: str | nn.Module = "small_conv",
        dim: int = 64,
        weights: tuple[float, float, float] = (25.0, 25.0, 1.0),
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=2e-3),
    ) -> None:
        super().__init__()
        self.keep_hyperparameters()
        self.weights = weights
        self.backbone = build_backbone(backbone)
        self.projector = mlp([num_features(self.backbone), 128, dim])
        self.use_optimizer(optimizer, scheduler="constant", warmup_epochs=0)

    def losses(self, batch: Any) -> dict[str, Tensor]:
        z1, z2 = (gather_rows(self.project(x)) for x in views(batch))
        invariance = (z1 - z2).square().mean()
        floor, covariance = z1.new_zeros(()), z1.new_zeros(())
        for z in (z1, z2):
            z = z - z.mean(dim=0)
            floor = floor + (1 - (z.var(dim=0) + 1e-4).sqrt()).clamp_min(0).mean() / 2
            c = z.T @ z / (len(z) - 1)
            covariance = covariance + (c - c.diag().diag()).square().sum() / z.shape[1]
        a, b, c = self.weights
        loss = a * invariance + b * floor + c * covariance
        return {"loss": loss, "invariance": invariance, "floor": floor, "covariance": covariance}


def main():
    for weights in ((25.0, 25.0, 1.0), (25.0, 0.0, 0.0)):
        L.seed_everything(0, verbose=False)
        monitor = CollapseMonitor("projector")
        trainer = L.Trainer(
            max_epochs=12,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[monitor, KNNProbe(every_n_epochs=12), LinearProbe(every_n_epochs=12)],
        )
        trainer.fit(
            VICReg(SmallConv(width=16), weights=weights), datamodule=ImageDataModule(image_size=16, batch_size=64)
        )
        found = trainer.callback_metrics
        turns = [f"{turn.after} at step {turn.step}" for turn in monitor.verdict.turns]
        print(f"weights {weights}: {monitor.verdict.kind} at the end; on the way: {', '.join(turns) or 'nothing'}")
        print(f"  kNN {found['val/knn_top1']:.3f}, linear probe {found['val/linear_top1']:.3f}")


if __name__ == "__main__":
    main()
