"""What of each layer's gradient survives augmentation: the covariance operator of a trained checkpoint, and before.

    python examples/covariance_operator.py [CHECKPOINT]

CHECKPOINT is one of any run of `lightning-ssl fit` on the digits, as runs/NAME/checkpoints/last.ckpt; without one a
short run of SimCLR makes it.
"""

import copy
import sys
import tempfile
from importlib import import_module

import lightning.pytorch as L
import torch
from torch import nn

from lightning_ssl.data import ImageDataModule
from lightning_ssl.functional import covariance_operator_norms
from lightning_ssl.methods import SimCLR


def train(path):
    """A short run, saved."""
    trainer = L.Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    method = SimCLR("small_conv", projector_hidden=64, projector_dim=32)
    trainer.fit(method, datamodule=ImageDataModule(image_size=16, batch_size=128))
    trainer.save_checkpoint(path)


def load(path):
    """The method of a checkpoint as trained, and with new weights."""
    options = torch.load(path, weights_only=True, map_location="cpu")["hyper_parameters"]
    module, _, name = options.get("_class_path", "lightning_ssl.methods.SimCLR").rpartition(".")
    method = getattr(import_module(module), name)
    trained = method.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    fresh = copy.deepcopy(trained)
    for layer in fresh.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return trained, fresh


def operators(method, views):
    """Norms of both operators by layer, of the projector's outputs."""
    return covariance_operator_norms(nn.Sequential(method.backbone, method.projector), views)


def main():
    L.seed_everything(0, verbose=False)
    data = ImageDataModule(image_size=16, batch_size=128, seed=1)  # other views than those it was trained on
    data.setup()
    views = list(data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0).views)
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/last.ckpt"
        if len(sys.argv) < 2:
            train(path)
        trained, fresh = load(path)
    before, after = operators(fresh, views), operators(trained, views)
    print("inter-augmentation norm (survives) over intra-augmentation norm (does not), with the estimate's error")
    for layer, found in after.items():
        start = before[layer]
        print(
            f"  {layer:12} untrained {start.inter_norm / start.intra_norm:6.3f}   trained "
            f"{found.inter_norm / found.intra_norm:6.3f} ± {100 * found.relative_error:.0f} %"
        )


if __name__ == "__main__":
    main()
