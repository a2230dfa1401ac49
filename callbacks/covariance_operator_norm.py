"""The covariance operators of a network's layers while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_ssl.callbacks._capture import Call, silence, split_views
from lightning_ssl.callbacks._network import KEPT, WATCHABLE, Network, find_glue
from lightning_ssl.callbacks._places import check_path, find_module
from lightning_ssl.callbacks._ranks import agree, gather_rows
from lightning_ssl.callbacks._report import warn_once
from lightning_ssl.callbacks._watcher import Watcher
from lightning_ssl.functional import pair_weight
from lightning_ssl.functional.covariance_operator import covariance_operator_norms


class CovarianceOperatorNorm(Watcher):
    r"""Logs how much of each layer's learning signal survives augmentation (DDN-v2 Theorems 3-4).

    With :math:`K_l(x)` the transposed Jacobian of the output with respect to the weights of layer l,
    :math:`OP_l = V_x[E_{x'|x} K_l(x')]` is the inter-augmentation operator that drives :math:`W_l`, and
    :math:`E_x[V_{x'|x} K_l(x')]` the intra-augmentation operator that a positive `beta` would turn against it.

    For each watched layer: ``cov_op/<layer>``, the Frobenius norm of the first; ``cov_op_trace/``, its trace;
    ``cov_op_top/``, its leading eigenvalue; ``cov_op_intra/`` and ``cov_op_intra_trace/``, norm and trace of the
    second; ``cov_op_ratio/``, the ratio of the norms; ``cov_op_error/``, the estimate's relative standard error.

    The images are those that entered the encoder during the step, at most `samples` of them over all ranks, run once
    more in eval mode before the weights move. Directions and sketches are fixed over the run.

    Args:
        layers: dotted paths of Linear or Conv layers in the encoder or the head; by default all that are called.
        encoder: dotted path of the submodule the images enter.
        output: dotted path of the submodule whose output counts: the encoder itself, a part of it, or a head that
            takes the encoder's features as they are, flattened, pooled, or one of their tokens, as seen in the step.
        samples: how many samples of the batch are used.
        directions: output directions followed, the cost of the estimate.
        principal: how many of those are principal directions of the outputs.
        exact: follow all directions and build all rows; for small networks.
        weight: weigh pairs of samples by this loss's :math:`\xi(r)` (Theorem 4).
        tau: the temperature of `weight`.
        margin: the margin of `weight`.
        seed: seed of the directions and sketches.
        views: how many views a step holds, where calls and batch size do not tell.
        every_n_steps: log every that many training steps, the first included.
        every_n_epochs: log the first step of every that many epochs.
        name: keeps several instances apart: ``cov_op/<name>/<layer>``.
    """

    def __init__(
        self,
        layers: Sequence[str] | None = None,
        encoder: str = "backbone",
        output: str = "projector",
        samples: int = 64,
        directions: int = 8,
        principal: int = 5,
        exact: bool = False,
        weight: Literal["triplet", "nce"] | None = None,
        tau: float = 0.5,
        margin: float = 0.0,
        seed: int = 0,
        views: int | None = None,
        every_n_steps: int | None = 500,
        every_n_epochs: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__({"encoder": encoder}, every_n_steps, every_n_epochs, name, inputs=True, outputs=KEPT)
        if isinstance(layers, str) or (layers is not None and not layers):
            raise ValueError(f"`layers` must be a list of dotted paths or None for all, got {layers!r}")
        if samples < 2:
            raise ValueError(f"`samples` must be at least 2, got {samples}")
        if weight not in (None, "triplet", "nce"):
            raise ValueError(f'`weight` must be "triplet", "nce" or None, got {weight!r}')
        if not 0 <= principal <= directions:
            raise ValueError(f"`principal` must lie between 0 and `directions`={directions}, got {principal}")
        self.layers = None if layers is None else list(layers)
        self.encoder, self.output, self.samples = encoder, output, samples
        self.directions, self.principal, self.exact = directions, principal, exact
        self.weight, self.tau, self.margin, self.seed, self.views = weight, tau, margin, seed, views
        self._images: Tensor | None = None
        self._glue: int | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(encoder=self.encoder, output=self.output, name=self.name)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        check_path(pl_module, self.output, "output")
        for layer in self.layers or []:
            module = check_path(pl_module, layer, "layers")
            if module is not None and not isinstance(module, WATCHABLE):
                raise MisconfigurationException(
                    f"`layers` names {layer!r}, a {type(module).__name__}: only Linear and Conv layers have the "
                    "weights whose covariance operator is meant"
                )
            inside = [path for path in (self.encoder, self.output) if f"{layer}.".startswith(f"{path}.")]
            if not inside:
                raise MisconfigurationException(
                    f"`layers` names {layer!r}, which lies neither in encoder={self.encoder!r} nor in "
                    f"output={self.output!r}"
                )

    def _attach(self, pl_module: L.LightningModule) -> None:
        places = {self.encoder: "encoder", self.output: "output"}
        self._recorder.attach({path: find_module(pl_module, path, argument) for path, argument in places.items()})

    def reset(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._images, self._glue = None, None
        self._quota = -(-self.samples // trainer.world_size)

    def update(self, pl_module: L.LightningModule, calls: dict[str, list[Call]], batch: Any) -> int:
        entered = [call.input for call in calls.get(self.encoder, []) if call.input is not None]
        views = split_views(entered, batch, self.views)
        if not views:
            return 0
        views = [view for view in views if view.shape == views[0].shape]  # of several sizes of crops, the first
        if len(views) < 2:
            raise ValueError(
                f"the covariance operator needs two views of each sample, {self.encoder!r} saw one; pass `views=2` if "
                "a call holds both"
            )
        self._images = torch.stack([view[: self._quota] for view in views], dim=1)  # N x V x ...
        self._glue = find_glue(calls.get(self.encoder, []), calls.get(self.output, []))
        return len(views)

    def compute(self, trainer: L.Trainer, pl_module: L.LightningModule, views: int, stage: str) -> dict[str, float]:
        # Every rank gets all images and computes the same: a norm is not a mean over ranks.
        images = gather_rows(trainer, self._images)
        self._images = None
        if images is None:
            return {}
        glue = agree(trainer, True, -1 if self._glue is None else self._glue)[1]
        network = Network(pl_module, self.encoder, self.output, trainer.precision_plugin.forward_context, glue)
        if glue < 0 and not network.inside:
            warn_once(
                self._who,
                f"the training step does something between {self.encoder!r} and {self.output!r} that is not repeated "
                "here: the operators are those of the second after the first, flattened or pooled as it fits",
            )
        weight = partial(pair_weight, loss=self.weight, tau=self.tau, margin=self.margin) if self.weight else None
        with silence():
            norms = covariance_operator_norms(
                network,
                list(images[: self.samples].unbind(dim=1)),
                self.layers,
                self.directions,
                self.principal,
                self.exact,
                weight,
                self.seed,
            )
        values = {}
        for layer, norm in norms.items():
            values[self.key("cov_op", layer)] = norm.inter_norm
            values[self.key("cov_op_trace", layer)] = norm.inter_trace
            values[self.key("cov_op_top", layer)] = norm.inter_top
            values[self.key("cov_op_intra", layer)] = norm.intra_norm
            values[self.key("cov_op_intra_trace", layer)] = norm.intra_trace
            values[self.key("cov_op_ratio", layer)] = norm.inter_norm / norm.intra_norm.clamp_min(1e-30)
            values[self.key("cov_op_error", layer)] = norm.relative_error
        return {key: float(value) for key, value in values.items()}
