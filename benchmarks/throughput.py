"""SimCLR and BYOL against the same training in lightly's Lightning examples and in stable-pretraining.

Same images (bytes in memory, 32 x 32), backbone, heads of 512 and 128, batch, CIFAR recipe, SGD and precision; whole
`Trainer.fit`s in turns, on one thread and without loader workers, in CPU seconds: what a batch costs, wherever it is
spent. The step is from batch start to batch end; end to end is from batch end to batch end, data included. ResNet-18 on
a processor hides any loader behind its step; a small conv net shows the loader's cost where the network is fast, as on
a GPU.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as TF

from benchmarks._bench import Section, faster, main
from lightning_ssl.data import ImageDataModule
from lightning_ssl.data.sources import FACTS, Source, Split
from lightning_ssl.methods import BYOL, SimCLR
from lightning_ssl.nn import build_backbone

FACT = FACTS["cifar10"]
NOTE = """\
Steps are level within their spread: all run the same convolutions. End to end a ResNet-18 on a processor leaves nothing
to win, since its step is dozens of times the loader's work."""
SGD: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "weight_decay": 4e-4}


class LightlySimCLR(L.LightningModule):
    def __init__(self, backbone: nn.Module) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        super().__init__()
        self.backbone = backbone
        self.projection_head = SimCLRProjectionHead(backbone.num_features, 512, 128)
        self.criterion = NTXentLoss(temperature=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x0, x1), _ = batch
        z0, z1 = (self.projection_head(self.backbone(x).flatten(start_dim=1)) for x in (x0, x1))
        return self.criterion(z0, z1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), **SGD)


class LightlyBYOL(LightlySimCLR):
    def __init__(self, backbone: nn.Module) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__(backbone)
        self.projection_head = BYOLProjectionHead(backbone.num_features, 512, 128)
        self.prediction_head = BYOLPredictionHead(128, 512, 128)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from lightly.models.utils import update_momentum

        update_momentum(self.backbone, self.backbone_momentum, m=0.996)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.996)
        (x0, x1), _ = batch
        p0, p1 = (self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1))) for x in (x0, x1))
        with torch.no_grad():
            z0, z1 = (self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)) for x in (x0, x1))
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))


class Pictures(Dataset):
    """What torchvision's CIFAR10 hands out: PIL images and classes."""

    def __init__(self, images: Tensor, transform: Callable[[Any], Any] | None = None) -> None:
        self.pictures, self.transform = [TF.to_pil_image(image) for image in images], transform

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.transform(self.pictures[i]) if self.transform else self.pictures[i], 0


class Clock(L.Callback):
    """Times steps, and whole turns of the loop; the first two batches are the warm-up."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts.append(time.process_time())

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.process_time())

    def times(self) -> tuple[list[float], list[float]]:
        steps = [b - a for a, b in zip(self.starts, self.ends, strict=True)][2:]
        return steps, [b - a for a, b in zip(self.ends[1:], self.ends[2:], strict=False)]


def fit(module: L.LightningModule, data: Any, batches: int, callbacks: tuple[L.Callback, ...] = ()) -> Clock:
    clock = Clock()
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=batches, callbacks=[*callbacks, clock], **quiet
    )
    if not type(module).__module__.startswith("stable_pretraining"):  # it adds its own to everybody's trainers
        own = [callback for callback in trainer.callbacks if not type(callback).__module__.startswith("stable_")]
        trainer.callbacks = own
    trainer.fit(module, data)
    return clock


def ours(method: str, backbone: str, images: Tensor, batch: int) -> tuple[L.LightningModule, Any, tuple[()]]:
    data = ImageDataModule("cifar10", batch_size=batch)
    split = Split(torch.zeros(len(images), dtype=torch.int64), images)
    data._source = Source(split, split, split, ["none"])
    module = SimCLR(backbone, tau=0.5) if method == "SimCLR" else BYOL(backbone)
    data.val_dataloader = lambda: []  # the peers validate nothing either
    return module, data, ()


def lightly(method: str, backbone: str, images: Tensor, batch: int) -> tuple[L.LightningModule, Any, tuple[()]]:
    from lightly.transforms import SimCLRTransform

    normal = {"mean": list(FACT.mean), "std": list(FACT.std)}
    dataset = Pictures(images, SimCLRTransform(32, cj_strength=0.5, gaussian_blur=0.0, normalize=normal))
    loader = DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True, num_workers=0)
    net = build_backbone(backbone)
    return (LightlySimCLR if method == "SimCLR" else LightlyBYOL)(net), loader, ()


def stable_pretraining(method: str, backbone: str, images: Tensor, batch: int) -> Any:
    import stable_pretraining as spt
    from stable_pretraining import forward
    from stable_pretraining.data import transforms as T

    recipe = T.Compose(
        T.RGB(),
        T.RandomResizedCrop((32, 32), scale=(0.08, 1.0)),
        T.RandomHorizontalFlip(p=0.5),
        T.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, p=0.8),
        T.RandomGrayscale(p=0.2),
        T.ToImage(mean=FACT.mean, std=FACT.std),
    )
    dataset = spt.data.FromTorchDataset(
        Pictures(images), names=["image", "label"], transform=T.MultiViewTransform([recipe, recipe])
    )
    loader = DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True, num_workers=0)
    net, optim = (
        build_backbone(backbone),
        {"optimizer": {"type": "SGD", **SGD}, "scheduler": {"type": "ConstantLR"}},
    )
    head, predictor = (
        nn.Sequential(nn.Linear(d, 512), nn.BatchNorm1d(512), nn.ReLU(inplace=True), nn.Linear(512, 128))
        for d in (net.num_features, 128)
    )
    if method == "SimCLR":
        loss = spt.losses.NTXEntLoss(temperature=0.5)
        parts: dict[str, Any] = {"backbone": net, "projector": head, "simclr_loss": loss}
        return spt.Module(forward=forward.simclr, optim=optim, **parts), spt.data.DataModule(train=loader), ()
    parts = {
        "backbone": spt.TeacherStudentWrapper(net, base_ema_coefficient=0.996),
        "projector": spt.TeacherStudentWrapper(head, base_ema_coefficient=0.996),
        "predictor": predictor,
        "byol_loss": spt.losses.BYOLLoss(),
    }
    module = spt.Module(forward=forward.byol, optim=optim, **parts)
    return module, spt.data.DataModule(train=loader), (spt.callbacks.TeacherStudentCallback(),)


def check_losses() -> None:
    """The same projections give the same loss, whoever computes it."""
    from lightly.loss import NegativeCosineSimilarity, NTXentLoss

    z1, z2 = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    unit = [nn.functional.normalize(z, dim=1) for z in (z1, z2)]
    ours = SimCLR("small_conv", tau=0.5)._contrast(*unit, None)
    torch.testing.assert_close(ours, NTXentLoss(temperature=0.5)(z1, z2), rtol=1e-4, atol=1e-5)
    both = 2 + 2 * NegativeCosineSimilarity()(z1, z2)
    torch.testing.assert_close(BYOL("small_conv").regress(z1, z2), both, rtol=1e-4, atol=1e-5)


def run(tiny: bool = False) -> Section:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")  # stable-pretraining's log
    check_losses()
    makers: dict[str, Callable[..., Any]] = {"ours": ours}
    peers = ["lightly"]
    makers["lightly"] = lightly
    if importlib.util.find_spec("stable_pretraining") and not tiny:
        makers["stable-pretraining"] = stable_pretraining
        peers.append("stable-pretraining")
    cases = [("small_conv", 16, 4, 1)] if tiny else [("small_conv", 256, 6, 2), ("resnet18", 16, 5, 1)]
    rows = []
    for method in ("SimCLR", "BYOL"):
        for backbone, batch, batches, rounds in cases:
            images = torch.randint(0, 256, (batch * batches, 3, 32, 32), dtype=torch.uint8)
            steps: dict[str, list[float]] = {}
            turns: dict[str, list[float]] = {}
            for _ in range(rounds):
                for name, make in makers.items():
                    module, data, callbacks = make(method, backbone, images, batch)
                    step, turn = fit(module, data, batches, callbacks).times()
                    steps.setdefault(name, []).extend(step)
                    turns.setdefault(name, []).extend(turn)
            work = f"{method}, {backbone}, batch {batch}"
            for peer in peers:
                rows.append(faster(f"{work}, step", peer, steps["ours"], steps[peer], 1))
                rows.append(faster(f"{work}, end to end", peer, turns["ours"], turns[peer], 1.3))
    notes = [NOTE] if len(peers) > 1 else [NOTE, "stable-pretraining is not installed here."]
    return Section(rows, notes, ["torchvision", *peers])


if __name__ == "__main__":
    main(run, threads=1)
