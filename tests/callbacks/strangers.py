"""LightningModules as other people write them: nothing here knows of this project."""

from __future__ import annotations

import copy
import dataclasses

import lightning.pytorch as L
import torch
from lightly.loss import BarlowTwinsLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import (
    BarlowTwinsProjectionHead,
    BYOLPredictionHead,
    BYOLProjectionHead,
    SimCLRProjectionHead,
    SimSiamPredictionHead,
    SimSiamProjectionHead,
)
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def small_backbone(norm: bool = True) -> nn.Sequential:
    """Ends in [N, 16, 1, 1], like a torchvision ResNet without its classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
    )


class LightlyBYOL(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = small_backbone()
        self.projection_head = BYOLProjectionHead(16, 32, 8)
        self.prediction_head = BYOLPredictionHead(8, 32, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        y = self.backbone(x).flatten(start_dim=1)
        z = self.projection_head(y)
        return self.prediction_head(z)

    def forward_momentum(self, x):
        y = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(y).detach()

    def training_step(self, batch, batch_idx):
        update_momentum(self.backbone, self.backbone_momentum, m=0.99)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
        (x0, x1) = batch[0]
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class LightlySimSiam(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = small_backbone()
        self.projection_head = SimSiamProjectionHead(16, 32, 8)
        self.prediction_head = SimSiamPredictionHead(8, 4, 8)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        f = self.backbone(x).flatten(start_dim=1)
        z = self.projection_head(f)
        p = self.prediction_head(z)
        return z.detach(), p

    def training_step(self, batch, batch_idx):
        (x0, x1) = batch[0]
        z0, p0 = self.forward(x0)
        z1, p1 = self.forward(x1)
        return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class LightlySimCLR(L.LightningModule):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.backbone = small_backbone(norm)
        self.projection_head = SimCLRProjectionHead(16, 16, 8, batch_norm=norm)
        self.criterion = NTXentLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def step(self, batch):
        (x0, x1) = batch[0]
        return self.criterion(self.forward(x0), self.forward(x1))

    def training_step(self, batch, batch_index):
        return self.step(batch)

    def validation_step(self, batch, batch_index):
        self.log("val_loss", self.step(batch), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class LightlyBarlowTwins(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = small_backbone()
        self.projection_head = BarlowTwinsProjectionHead(16, 32, 8)
        self.criterion = BarlowTwinsLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_index):
        (x0, x1) = batch[0]
        return self.criterion(self.forward(x0), self.forward(x1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class DictConcatenated(L.LightningModule):
    """Dict batches, views made inside `training_step`, one call on both, a target call of the same encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"encoder": nn.Sequential(small_backbone(), nn.Flatten()), "head": nn.Linear(16, 8)})
        self.predict = nn.Linear(8, 8, bias=False)

    def training_step(self, batch, batch_idx):
        image = batch["image"]
        views = torch.cat([image + 0.1 * torch.randn_like(image) for _ in range(2)])
        with torch.no_grad():
            target = self.net["head"](self.net["encoder"](views.flip(-1)))
        online = self.predict(self.net["head"](self.net["encoder"](views)))
        return -nn.functional.cosine_similarity(online, target.roll(len(image), 0)).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class ManualTwoOptimizers(L.LightningModule):
    """Encoder and predictor trained in turn; the second optimizer runs the encoder again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backbone = nn.Sequential(small_backbone(), nn.Flatten())
        self.projector = nn.Linear(16, 8)
        self.predictor = nn.Linear(8, 8)

    def _loss(self, batch):
        (x0, x1) = batch[0]
        z0, z1 = self.projector(self.backbone(x0)), self.projector(self.backbone(x1))
        return (self.predictor(z0) - z1.detach()).square().mean() + (self.predictor(z1) - z0.detach()).square().mean()

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self._loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        encoder = [*self.backbone.parameters(), *self.projector.parameters()]
        return torch.optim.SGD(encoder, lr=0.05), torch.optim.SGD(self.predictor.parameters(), lr=0.05)


class Tokens(nn.Module):
    """A tiny transformer: images of any size to [N, 1 + patches, 16], the class token first."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls = nn.Parameter(torch.ones(1, 1, 16))
        self.mix = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())

    def forward(self, x):
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls + patches.mean(dim=1, keepdim=True), patches], dim=1)
        return tokens + self.mix(tokens)


class MultiCrop(L.LightningModule):
    """In the style of DINO: crops of two sizes in one call each, then the head on all of them; a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Tokens()
        self.head = nn.Linear(16, 8)
        self.teacher = copy.deepcopy(nn.Sequential(self.student, nn.Flatten(0, 1), self.head)).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        views = batch[0]
        large, small = torch.cat(views), torch.cat([view[..., :4, :4] for view in views])
        with torch.no_grad():
            target = self.teacher(large).view(len(large), -1, 8)[:, 0].softmax(dim=1)
        online = self.head(torch.cat([self.student(large)[:, 0], self.student(small)[:, 0]]))
        return -(target.repeat(2, 1) * online.log_softmax(dim=1)).sum(dim=1).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclasses.dataclass
class Boxed:
    hidden: Tensor
    pooled: Tensor


class Boxing(nn.Module):
    """Returns a dataclass, as some libraries' encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Tokens()
        self.pooler = nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.trunk(x)
        return Boxed(hidden, self.pooler(hidden[:, 0]).tanh())


class BoxedEncoder(L.LightningModule):
    """Names that a callback might use itself: `encoder` and `output`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.output, self.predict = Boxing(), nn.Linear(16, 8), nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        z0, z1 = (self.output(self.encoder(x).pooled) for x in batch[0])
        return (self.predict(z0) - z1.detach()).square().mean() + (self.predict(z1) - z0.detach()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Pairs(Dataset):
    """Two noisy views of an image of one of four classes, its class and its file's name, as lightly's datasets do."""

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (size,), generator=generator)
        prototypes = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        self.images = prototypes[self.labels] + 0.5 * torch.randn(size, 3, 8, 8, generator=generator)
        self.noise = 0.3 * torch.randn(size, 2, 3, 8, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[list[Tensor], int, str]:
        return [self.images[i] + noise for noise in self.noise[i]], int(self.labels[i]), f"{i}.png"


class Labelled(Dataset):
    """The clean images of `Pairs`."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.pairs = Pairs(size, seed)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.pairs.images[i], int(self.pairs.labels[i])


class Dicts(Labelled):
    def __getitem__(self, i: int) -> dict[str, Tensor | int]:
        image, label = super().__getitem__(i)
        return {"image": image, "label": label}


class Attributes(Labelled):
    """Four attributes a sample, of which its class is one."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(i)
        return image, torch.tensor([float(label == k or (i + k) % 3 == 0) for k in range(4)])


class Values(Labelled):
    """Two numbers a sample, of its image."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image, _ = super().__getitem__(i)
        return image, torch.stack([image.mean(), image.std()])


def loader(dataset: Dataset, batch_size: int = 16, **kwargs) -> DataLoader:
    return DataLoader(dataset, batch_size=batch_size, **kwargs)


class MeanLoss(L.LightningModule):
    """No batch statistics and a loss that is a mean over samples: the same training at any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(small_backbone(norm=False), nn.Flatten())
        self.projector = nn.Linear(16, 8)
        self.predictor = nn.Linear(8, 8, bias=False)

    def step(self, batch):
        (x0, x1) = batch[0]
        z0, z1 = self.projector(self.backbone(x0)), self.projector(self.backbone(x1))
        cosine = nn.functional.cosine_similarity
        return -(cosine(self.predictor(z0), z1.detach()) + cosine(self.predictor(z1), z0.detach())).mean()

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        self.step(batch)

    def test_step(self, batch, batch_idx):
        self.step(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ordered_loader(dataset: Dataset, batch_size: int, rank: int, world_size: int) -> DataLoader:
    """Train batches that hold the same samples at any number of ranks; Lightning's own sampler would shuffle."""
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=False) if world_size > 1 else None
    return DataLoader(dataset, batch_size=batch_size // world_size, sampler=sampler)
