"""SimCLR with the contrastive losses of DDN-v2: plain, extended (beta) and exact."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ssl import functional
from lightning_ssl.distributed import rank
from lightning_ssl.methods.base import Method, Schedule, views
from lightning_ssl.nn import (
    HeadInit,
    add_gradient_noise_,
    build_backbone,
    gather_rows,
    init_head_,
    mix_weights_,
    mlp,
    num_features,
)
from lightning_ssl.rng import random_bits

CHUNK = 2**24  # distances that are held at a time; what is above is made in pieces, and again for the gradient
Loss = Literal["simple", "triplet", "nce", "exact_simple", "exact_triplet", "exact_nce"]


class SimCLR(Method):
    """Contrast each view with its twin and with other samples' views, of all ranks.

    Every view is an anchor once. With r = ½‖x − y‖² on l2-normalised outputs and all negatives, loss "nce" is the
    NT-Xent loss. Defaults are DDN-v2's recipe for CIFAR-10.

    Args:
        backbone: A name (see `build_backbone`) or a module.
        stem: "cifar" or "imagenet", for ResNets.
        projector_hidden: Width of the projector.
        projector_dim: Output dimension d.
        projector_norm: Normalisation in the projector, see `build_norm`.
        projector_last_norm: Likewise of its output; SimCLR's own projector has "batch" there, with a scale but no
            shift.
        projector_bias: Whether the projector's layers have biases.
        norm_affine: Whether the projector's batch norms have affine parts; DDN's have none.
        head_init: How the projector starts: "default", or "normal" with deviation 0.01, SimCLR's own (`init_head_`).
        zero_init_residual: Start a ResNet's residual branches at zero.
        loss: "simple", "triplet", "nce", or with "exact_", the loss of Eq. 7 with weights from un-augmented images.
        beta: The extended losses of Sec. 4.2: adds beta r+ (see `beta_form`).
        beta_form: For loss "nce": "table", (L + beta r+ / tau) / (1 + beta), which is behind Table 3, or "text",
            L + beta r+, as the other losses have it.
        tau: Temperature.
        margin: The triplet loss's r_0.
        negatives: "all", or the number H of negatives an anchor has, drawn each step by (seed, step).
        normalize: L2-normalise the outputs.
        gradient_noise: Eta of Table 2's noise; 0 is none.
        noise_on: "gradient" adds the noise at each step (the paper); "weight" mixes it into the weights once an epoch.
        exact_weights: Distances the exact losses take their weights from: "clean" (the paper) or "augmented".
        joint_weights: Whether exact_nce's weights share one partition function over the negatives (Eq. 80); otherwise
            each pair has its own (Eqs. 6-7, and Table 2).
        seed: Seed of negatives and noise.
        optimizer: From parameters to an optimizer.
        scheduler: "constant", "cosine", or from an optimizer to a scheduler.
        warmup_epochs: Linear warmup, for "constant" and "cosine".

    Example:
        >>> model = SimCLR(backbone="small_conv", loss="nce", tau=0.5)
        >>> exact = SimCLR(backbone="small_conv", loss="exact_nce", negatives=16)
    """

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        stem: Literal["cifar", "imagenet"] = "cifar",
        projector_hidden: int = 512,
        projector_dim: int = 128,
        projector_norm: str = "batch",
        loss: Loss = "nce",
        beta: float = 0.0,
        tau: float = 0.5,
        margin: float = 1.0,
        negatives: Literal["all"] | int = "all",
        normalize: bool = True,
        gradient_noise: float = 0.0,
        noise_on: Literal["gradient", "weight"] = "gradient",
        exact_weights: Literal["clean", "augmented"] = "clean",
        joint_weights: bool = False,
        seed: int = 0,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=0.01),
        scheduler: Schedule | LRSchedulerCallable = "constant",
        warmup_epochs: float = 0.0,
        zero_init_residual: bool = False,
        projector_last_norm: str = "none",
        projector_bias: bool = True,
        norm_affine: bool = False,
        beta_form: Literal["table", "text"] = "table",
        head_init: HeadInit = "default",
    ) -> None:
        super().__init__()
        self.keep_hyperparameters()
        if beta_form not in ("table", "text") or (beta_form == "table" and beta <= -1):
            raise ValueError(
                f'`beta_form` must be "table" or "text", and with "table" `beta` above -1; got {beta_form!r} and {beta}'
            )
        if loss.removeprefix("exact_") not in ("simple", "triplet", "nce"):
            raise ValueError(f"`loss` must be simple, triplet or nce, or one of these after exact_; got {loss!r}")
        if tau <= 0 or gradient_noise < 0:
            raise ValueError(f"`tau` must be positive and `gradient_noise` not negative, got {tau}, {gradient_noise}")
        if negatives != "all" and (not isinstance(negatives, int) or negatives < 1):
            raise ValueError(f'`negatives` must be "all" or a positive number, got {negatives!r}')
        if exact_weights not in ("clean", "augmented") or noise_on not in ("gradient", "weight"):
            raise ValueError(
                "`exact_weights` must be clean or augmented, `noise_on` gradient or weight, got "
                f"{exact_weights!r} and {noise_on!r}"
            )
        self.kind: Any = loss.removeprefix("exact_")
        self.exact = loss.startswith("exact_")
        self.beta_form: Literal["table", "text"] = beta_form
        self.beta, self.tau, self.margin, self.negatives, self.normalize = beta, tau, margin, negatives, normalize
        self.gradient_noise, self.noise_on, self.seed = gradient_noise, noise_on, seed
        self.clean_weights = self.exact and exact_weights == "clean"
        self.joint = joint_weights and self.kind == "nce"
        self.backbone = build_backbone(backbone, stem, zero_init_residual)
        self.projector = mlp(
            [num_features(self.backbone), projector_hidden, projector_dim],
            projector_norm,
            projector_last_norm,
            last_bias=projector_bias,
            bias=projector_bias,
            affine=norm_affine,
            last_affine="scale" if norm_affine else False,
        )
        init_head_(self.projector, head_init)
        self.use_optimizer(optimizer, scheduler, warmup_epochs)

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x1, x2 = views(batch)
        z1, z2 = self._embed(x1), self._embed(x2)
        clean = self._embed_clean(batch) if self.clean_weights else None
        with torch.autocast(z1.device.type, enabled=False):
            return {"loss": self._contrast(z1, z2, clean)}

    def _contrast(self, z1: Tensor, z2: Tensor, clean: Tensor | None) -> Tensor:
        counts = self.counts(z1)
        total, start, anchors = sum(counts), sum(counts[: rank()]), 2 * len(z1)
        self._check_negatives(total)
        every = gather_rows(torch.stack([z1, z2], dim=1), counts)  # N x 2 x d, all ranks, in one collective
        others = every.transpose(0, 1).flatten(0, 1)  # 2N x d
        views, r_pos = torch.cat([z1, z2]), functional.squared_distance(z1, z2).repeat(2)
        cleans = None if clean is None else (clean.repeat(2, 1), gather_rows(clean, counts))
        step = max(1, CHUNK // (2 * total))
        if step >= anchors:
            return self._contrast_part(views, r_pos, others, cleans, slice(0, anchors), start, total)
        parts = []
        for first in range(0, anchors, step):
            part = slice(first, min(first + step, anchors))
            loss = checkpoint(
                self._contrast_part,
                *(views, r_pos, others, cleans, part, start, total),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            parts.append(loss * ((part.stop - part.start) / anchors))
        return torch.stack(parts).sum()

    def _contrast_part(
        self,
        views: Tensor,
        r_pos: Tensor,
        others: Tensor,
        cleans: tuple[Tensor, Tensor] | None,
        part: slice,
        start: int,
        total: int,
    ) -> Tensor:
        """The mean loss of some of this rank's 2n anchors; without collectives."""
        rows, r_pos = len(views) // 2, r_pos[part]
        r_neg = _distances(views[part], others)  # c x 2N
        if self.negatives == "all" and self.kind == "nce" and not self.exact:
            own = self._samples(rows, start, part, views.device)
            same = torch.arange(2 * total, device=views.device) % total == own
            return functional.info_nce_loss(
                r_pos, r_neg.masked_fill(same, math.inf), self.tau, self.beta, self.beta_form
            )
        choice = self._choose_negatives(rows, start, total, views.device, part)  # c x H
        r_neg = r_neg.gather(1, choice)
        if not self.exact:
            if self.kind == "nce":
                return functional.info_nce_loss(r_pos, r_neg, self.tau, self.beta, self.beta_form)
            if self.kind == "simple":
                return functional.simple_contrastive_loss(r_pos, r_neg, self.beta)
            return functional.soft_triplet_loss(r_pos, r_neg, self.margin, self.tau) + self.beta * r_pos.mean()
        r_clean = r_neg
        if cleans is not None:
            r_clean = _distances(cleans[0][part], cleans[1]).repeat(1, 2).gather(1, choice)
        loss = functional.exact_contrastive_loss(r_pos, r_neg, r_clean, self.kind, self.tau, self.margin, self.joint)
        return loss + self.beta * r_pos.mean()

    def _check_negatives(self, total: int) -> int:
        """How many negatives an anchor has of so many samples on all ranks."""
        available = 2 * (total - 1)
        if available < 1 or (self.negatives != "all" and self.negatives > available and self.training):
            raise ValueError(
                f"`negatives`={self.negatives!r}, but a batch of {total} samples (over all ranks) leaves an anchor "
                f"{available} negatives; raise the batch size or lower `negatives`"
            )
        return available

    @staticmethod
    def _samples(rows: int, start: int, part: slice, device: torch.device | None) -> Tensor:
        """The samples of some of this rank's 2n anchors, [c, 1]."""
        return torch.arange(part.start, part.stop, device=device)[:, None] % rows + start

    def _choose_negatives(
        self, rows: int, start: int, total: int, device: torch.device | None = None, part: slice | None = None
    ) -> Tensor:
        """Columns of the negatives of (some of) this rank's 2n anchors among the 2N views, [c, H]; the same on any
        ranks and devices."""
        available = self._check_negatives(total)
        part = part or slice(0, 2 * rows)
        own = self._samples(rows, start, part, device)
        columns = torch.arange(available, device=device)
        if self.negatives == "all":
            rank_of_column = columns.expand(len(own), -1)
        else:
            second = torch.arange(part.start, part.stop, device=device)[:, None] >= rows
            anchors = own + second * total
            keys = random_bits(anchors * available + columns, self.seed, self.global_step)
            rank_of_column = keys.topk(min(self.negatives, available), dim=1).indices
        # Numbers among the 2(N - 1) allowed columns become columns: step over the two views of the own sample.
        columns = rank_of_column + (rank_of_column >= own).long()
        return columns + (columns >= total + own).long()

    def _embed(self, x: Tensor) -> Tensor:
        z = self.project(x)
        return F.normalize(z, dim=1) if self.normalize else z

    @torch.no_grad()
    def _embed_clean(self, batch: Any) -> Tensor:
        if batch.image is None:
            raise ValueError(
                "the exact losses take their weights from clean images, and the batch has none (`image` is None): set "
                'clean_image=True in the DataModule, or exact_weights="augmented" here'
            )
        return self._embed(batch.image)

    def setup(self, stage: str) -> None:
        """Refuse before the first step what the DataModule cannot serve."""
        data = getattr(self.trainer, "datamodule", None)
        if stage == "fit" and data is not None:
            self._check_data(data)
        super().setup(stage)

    def _check_data(self, data: Any) -> None:
        if self.clean_weights and getattr(data, "clean_image", True) is False:
            raise MisconfigurationException(
                "the exact losses need clean images: set clean_image=True in the DataModule, or exact_weights="
                '"augmented" here'
            )
        batch_size = getattr(data, "batch_size", None)
        if isinstance(batch_size, int) and self.negatives != "all":
            try:
                self._check_negatives(batch_size * self.trainer.world_size)
            except ValueError as error:
                raise MisconfigurationException(str(error)) from error

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.gradient_noise and self.noise_on == "gradient":
            add_gradient_noise_(self.parameters(), self.gradient_noise, self.seed * 1_000_003 + self.global_step)

    def on_train_epoch_start(self) -> None:
        if self.gradient_noise and self.noise_on == "weight":
            mix_weights_(self.parameters(), self.gradient_noise, self.seed * 1_000_003 + self.current_epoch)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """½‖x_i − y_j‖² of all pairs, [n, N], without building [n, N, d]."""
    norms = 0.5 * (x.square().sum(1)[:, None] + y.square().sum(1))
    return (norms - x @ y.T).clamp_min(0)
