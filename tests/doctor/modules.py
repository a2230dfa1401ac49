"""Small right modules in plain torch, each with the mistakes that can be made in it, one at a time."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ssl.distributed import gather_rows, rank, world_size

WIDTH, DIM = 8, 6


def encoder(norm: bool = False) -> nn.Sequential:
    """[N, 3, 8, 8] to [N, 8]."""
    layers: list[nn.Module] = [nn.Conv2d(3, 6, 3, stride=2, padding=1)]
    layers += [nn.BatchNorm2d(6)] if norm else []
    return nn.Sequential(*layers, nn.GELU(), nn.Flatten(), nn.Linear(6 * 16, WIDTH))


def barlow(z1: Tensor, z2: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / z.std(0, correction=0) for z in (z1, z2))
    c = a.T @ b / len(a)
    on = (c.diagonal() - 1).square().sum()
    return on + 0.1 * (c.square().sum() - c.diagonal().square().sum())


def nt_xent(anchors: Tensor, others: Tensor, own: Tensor, positive: Tensor) -> Tensor:
    """Of each anchor against all others but itself."""
    logits = F.normalize(anchors, dim=1) @ F.normalize(others, dim=1).T / 0.2
    logits = logits.masked_fill(F.one_hot(own, logits.shape[1]).bool(), -torch.inf)
    return F.cross_entropy(logits, positive)


def gathered(x: Tensor, how: str) -> Tensor:
    """All ranks' rows, by one of the ways that people write."""
    if world_size() == 1 or how == "none":
        return x
    if how == "exact":
        return gather_rows(x)
    if how == "slice_backward":
        return OwnSlice.apply(x)
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, (x.detach() if how == "detached" else x).contiguous())
    if how in ("own_slice", "detached"):
        parts[rank()] = x
    if how == "dropped":
        return x
    return torch.cat(parts)


class OwnSlice(torch.autograd.Function):
    """A gather whose backward keeps this rank's part and forgets what the other ranks' losses say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(world_size())[rank()].clone()


class Base(L.LightningModule):
    """A backbone, a projector, two views in `batch[0]`."""

    def __init__(self, bug: str = "", norm: bool = False) -> None:
        super().__init__()
        self.bug = bug
        self.backbone = encoder(norm)
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, DIM))

    def embed(self, x: Tensor) -> Tensor:
        h = self.backbone(x)
        if self.bug == "detached_features":
            h = h.detach()
        return self.projector(h)

    def views(self, batch: Any) -> tuple[Tensor, Tensor]:
        x1, x2 = batch[0]
        return (x1, x1) if self.bug == "one_view_twice" else (x1, x2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Barlow(Base):
    """Cross-correlations over all ranks."""

    def __init__(self, gather: str = "exact", bug: str = "", **kwargs: Any) -> None:
        super().__init__(bug, **kwargs)
        self.gather = gather
        if bug == "local_centre":
            self.register_buffer("centre", torch.zeros(DIM))
        if bug == "probe_beside":
            self.probe = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x1, x2 = self.views(batch)
        z1, z2 = self.embed(x1), self.embed(x2)
        if self.gather == "reduced":
            return self.reduced(z1, z2)
        g1, g2 = gathered(z1, self.gather), gathered(z2, self.gather)
        loss = barlow(g1, g2)
        if self.bug == "times_ranks":
            loss = loss * world_size()
        if self.bug == "local_centre":
            self.centre.lerp_(z1.detach().mean(0), 0.1)
        if self.bug == "rank_zero_collective" and rank() == 0 and world_size() > 1:
            dist.all_reduce(loss.detach().clone())
        if self.bug == "none_on_some_ranks" and rank() == 1:
            return None
        if self.bug == "backward_on_some_ranks":
            return loss.detach().requires_grad_() if rank() == 1 else loss
        if self.bug == "probe_beside":
            self.train_probe(x1, batch[1])
        return loss

    def reduced(self, z1: Tensor, z2: Tensor) -> Tensor:
        """The correlations of a rank's rows, summed over ranks without a gradient; the rows have unit variance."""
        if self.bug == "standardised":
            z1, z2 = ((z - z.mean(0)) / z.std(0) for z in (z1, z2))
        c = z1.T @ z2 / len(z1)
        if world_size() > 1:
            c = c / world_size()
            dist.all_reduce(c.data)
        return (c - torch.eye(DIM)).square().sum()

    def train_probe(self, x: Tensor, labels: Tensor) -> None:
        """With an optimizer of its own, on this rank's rows."""
        with torch.no_grad():
            features = self.backbone(x)
        loss = F.cross_entropy(self.probe(features), labels)
        grads = torch.autograd.grad(loss, list(self.probe.parameters()))
        with torch.no_grad():
            for p, g in zip(self.probe.parameters(), grads, strict=True):
                p -= 0.5 * g

    def configure_optimizers(self) -> Any:
        mine = [*self.backbone.parameters(), *self.projector.parameters()]
        return torch.optim.SGD(mine, lr=0.05)


class Contrast(Base):
    """NT-Xent of this rank's anchors against all ranks' rows."""

    def __init__(self, gather: str = "exact", bug: str = "", **kwargs: Any) -> None:
        super().__init__(bug, **kwargs)
        self.gather = gather
        self.temperature = 0.2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x1, x2 = self.views(batch)
        if self.bug == "neighbours_paired":
            z = self.embed(torch.cat([x1, x2]))
            z1, z2 = z[0::2], z[1::2]
        else:
            z1, z2 = self.embed(x1), self.embed(x2)
        if self.bug == "reversed_pairs":
            z2 = z2.flip(0)
        if self.bug == "zero_loss":
            return 0 * (z1 - z2).sum()
        if self.bug == "square_root":
            return (z1 - z1.detach()).square().sum(1).sqrt().mean() + nt_xent_both(z1, z2, self.gather)
        if self.bug == "no_positives":
            return sum((1 - z.std(0)).clamp_min(0).sum() + z.mean() ** 2 for z in (z1, z2))  # type: ignore[return-value]
        loss = nt_xent_both(z1, z2, self.gather)
        if self.bug == "divided_by_all":
            loss = loss * len(z1) / (len(z1) * world_size())
        return -loss if self.bug == "sign" else loss


def nt_xent_both(z1: Tensor, z2: Tensor, gather: str) -> Tensor:
    n = len(z1)
    others = torch.cat([gathered(z1, gather), gathered(z2, gather)])
    total = len(others) // 2
    own = torch.arange(n) + (rank() * n if total > n else 0)
    one = nt_xent(z1, others, own, own + total)
    return (one + nt_xent(z2, others, own + total, own)) / 2


class Siamese(Base):
    """BYOL: a predictor, and a target that follows."""

    def __init__(self, bug: str = "", momentum: float = 0.9, norm: bool = False) -> None:
        super().__init__(bug, norm)
        self.momentum = momentum
        self.predictor = nn.Linear(DIM, DIM)
        self.target = nn.ModuleDict(
            {"backbone": copy.deepcopy(self.backbone), "projector": copy.deepcopy(self.projector)}
        )
        if bug not in ("target_learns", "target_in_optimizer"):
            self.target.requires_grad_(False)
        if bug == "thawed":
            self.backbone[0].requires_grad_(False)
        if bug == "counter":
            self.steps = 0
        if bug == "target_in_eval":
            self.target.eval()

    def on_train_start(self) -> None:
        if self.bug == "thawed":
            self.backbone.requires_grad_(True)
        if self.bug == "target_in_eval":
            self.target.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x1, x2 = self.views(batch)
        z1, z2 = self.embed(x1), self.embed(x2)
        p1, p2 = (z1, z2) if self.bug == "no_predictor" else (self.predictor(z1), self.predictor(z2))
        with torch.set_grad_enabled(self.bug == "target_learns"):
            t1, t2 = (self.target["projector"](self.target["backbone"](x)) for x in (x1, x2))
        if self.bug == "micro_batch":
            self.follow()
        return -F.cosine_similarity(p1, t2).mean() - F.cosine_similarity(p2, t1).mean()

    @torch.no_grad()
    def follow(self) -> None:
        momentum = self.momentum
        if self.bug == "swapped":
            momentum = 1 - momentum
        if self.bug == "counter":
            self.steps += 1
            momentum = 1 - (1 - momentum) / self.steps
        online = [*self.backbone.parameters(), *self.projector.parameters()]
        for t, o in zip(self.target.parameters(), online, strict=True):
            if self.bug == "never_moves":
                t = momentum * t + (1 - momentum) * o
            else:
                t.lerp_(o, 1 - momentum)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.bug != "micro_batch":
            self.follow()
        if self.bug == "twice":
            self.follow()


class Queued(Base):
    """MoCo: keys of a momentum encoder and a queue of older ones."""

    def __init__(self, bug: str = "") -> None:
        super().__init__(bug)
        self.key_encoder = nn.Sequential(copy.deepcopy(self.backbone), copy.deepcopy(self.projector)).requires_grad_(
            False
        )
        start = F.normalize(torch.randn(32, DIM), dim=1)
        if bug == "listed_queue":
            self.memory = {"keys": start}
        elif bug == "plain_queue":
            self.queue = start
        else:
            self.register_buffer("queue", start, persistent=bug != "lost_queue")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x1, x2 = self.views(batch)
        with torch.no_grad():
            for k, q in zip(
                self.key_encoder.parameters(), [*self.backbone.parameters(), *self.projector.parameters()], strict=True
            ):
                k.lerp_(q, 0.01)
            keys = F.normalize(self.key_encoder(x2), dim=1)
        q = F.normalize(self.embed(x1), dim=1)
        queue = self.memory["keys"] if self.bug == "listed_queue" else self.queue
        logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ queue.to(q).clone().T], dim=1) / 0.2
        queue = torch.cat([keys, queue[: -len(keys)].to(q)])
        if self.bug == "listed_queue":
            self.memory["keys"] = queue
        else:
            self.queue = queue
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.bug == "refuses_its_own":
            self.start = checkpoint["start"]


class Optimized(Contrast):
    """Optimizers and schedules."""

    def __init__(self, bug: str = "", **kwargs: Any) -> None:
        super().__init__(bug=bug, gather="none", norm=True)
        if bug in ("two_optimizers", "no_step"):
            self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        found = self.optimizers()
        found = found if isinstance(found, list) else [found]
        for optimizer in found:
            optimizer.zero_grad()
        self.manual_backward(loss)
        if self.bug != "no_step":
            for optimizer in found:
                optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        bug = self.bug
        if bug == "forgotten_projector":
            return torch.optim.SGD(self.backbone.parameters(), lr=0.05)
        if bug == "two_optimizers":
            first = torch.optim.SGD(self.parameters(), lr=0.05)
            return [first, torch.optim.SGD(self.projector.parameters(), lr=0.05)]
        if bug == "no_step":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        if bug == "zero_rate":
            return torch.optim.SGD(self.parameters(), lr=0.0)
        named = list(self.named_parameters())
        if bug == "decay_missed":  # spares biases, forgets the norms
            spared = [p for n, p in named if n.endswith("bias") and p.ndim == 1]
            ids = {id(p) for p in spared}
            rest = [p for _, p in named if id(p) not in ids]
            return torch.optim.SGD([{"params": rest, "weight_decay": 1e-4}, {"params": spared}], lr=0.05)
        if bug == "decay_reversed":
            vectors, weights = [p for _, p in named if p.ndim < 2], [p for _, p in named if p.ndim > 1]
            return torch.optim.SGD([{"params": vectors, "weight_decay": 1e-4}, {"params": weights}], lr=0.05)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if bug == "cosine_in_steps":
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20 * 50)]
        if bug == "cosine_in_epochs":
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [scheduler]


class Moded(Contrast):
    """Train and eval mode."""

    def __init__(self, bug: str = "") -> None:
        super().__init__(bug=bug, gather="none", norm=True)
        if bug == "still_norm":
            self.backbone[1].momentum = 0.0
        if bug == "constant_output":
            nn.init.zeros_(self.projector[2].weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.backbone(x)
        return F.dropout(h, 0.3) if self.bug == "functional_dropout" else h

    def embed(self, x: Tensor) -> Tensor:
        z = self.projector(self(x))
        if self.bug == "half_overflow":
            z = z * (1 + 1e-4)
            scale = (z.to(torch.float32) - z.to(torch.float32).round(decimals=3)).abs()
            return z / (scale.amax() > 0 if z.dtype == torch.float32 else 0 * scale.amax())
        return z

    def on_train_epoch_end(self) -> None:
        if self.bug == "left_in_eval":
            self.backbone.eval()
