"""The views do not depend on the Trainer's precision, but for their type."""

import lightning.pytorch as L
import pytest
import torch

from lightning_ssl.data import ImageDataModule


class Keep(L.LightningModule):
    """Keeps the views it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.views = []

    def training_step(self, batch, batch_idx):
        self.views.extend(batch.views)
        return self.weight * batch.views[0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def views(precision, **options):
    module = Keep()
    trainer = L.Trainer(
        max_steps=1,
        precision=precision,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=ImageDataModule(batch_size=8, **options))
    return module.views


@pytest.mark.parametrize("options", [{}, {"views": "augment"}], ids=["resampled", "augmented"])
@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_views_are_made_in_single_precision(precision, dtype, options):
    for ours, single in zip(views(precision, **options), views("32-true", **options), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, single.to(dtype))
