"""The covariance operators of a network's layers while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ssl.callbacks._engine.layout import Layout, check_layout
from lightning_ssl.callbacks._engine.observation import Observatory, Spec, observatory
from lightning_ssl.callbacks._engine.pair import Evidence, Pairing, settle
from lightning_ssl.callbacks._engine.places import check_path
from lightning_ssl.callbacks._engine.ranks import ranks_of
from lightning_ssl.callbacks._engine.record import silence
from lightning_ssl.callbacks._engine.replay import WATCHABLE, Calls, Replay
from lightning_ssl.callbacks.diagnostic import as_floats
from lightning_ssl.callbacks.watcher import Watcher
from lightning_ssl.distributed import exchange
from lightning_ssl.functional import pair_weight
from lightning_ssl.functional.covariance_operator import covariance_operator_norms
from lightning_ssl.quantities import Quantity


class CovarianceOperatorNorm(Watcher):
    r"""Logs how much of each layer's learning signal survives augmentation (DDN-v2 Theorems 3-4).

    With :math:`K_l(x)` the transposed Jacobian of the output with respect to the weights of layer l,
    :math:`OP_l = V_x[E_{x'|x} K_l(x')]` is the inter-augmentation operator that drives :math:`W_l`, and
    :math:`E_x[V_{x'|x} K_l(x')]` the intra-augmentation operator that a positive `beta` would turn against it.

    For each watched layer: ``cov_op/<layer>``, the Frobenius norm of the first; ``cov_op_trace/``, its trace;
    ``cov_op_top/``, its leading eigenvalue; ``cov_op_intra/`` and ``cov_op_intra_trace/``, norm and trace of the
    second; ``cov_op_ratio/``, the ratio of the norms; ``cov_op_error/``, the estimate's relative standard error.

    The samples are those that entered the encoder during the step, at most `samples` of them over all ranks, run once
    more before the weights move: with all arguments of the step's own calls, batch normalisations held at the
    statistics that the step normalised by, dropout and the like off. Before anything is logged the outputs are
    compared with those of the step. Directions and sketches are fixed over the run.

    Args:
        layers: Dotted paths of Linear or Conv layers in the encoder or the head; by default all that are called.
        encoder: Dotted path of the submodule the samples enter.
        output: Dotted path of the submodule whose output counts: the encoder itself, a part of it, or a head that
            takes the encoder's features as they are, flattened, pooled, or one of their tokens, as seen in the step.
        samples: How many samples of the batch are used.
        directions: Output directions followed, the cost of the estimate.
        principal: How many of those are principal directions of the outputs.
        exact: Follow all directions and build all rows; for small networks.
        weight: Weigh pairs of samples by this loss's :math:`\xi(r)` (Theorem 4).
        tau: The temperature of `weight`.
        margin: The margin of `weight`.
        seed: Seed of the directions and sketches.
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Log every n-th training step, the first included.
        every_n_epochs: Log the first step of every n-th epoch.
        name: Keeps several instances apart: ``cov_op/<name>/<layer>``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of what leaves `output`; see :class:`Watcher`.
        target: Dotted path of the target network's encoder, whose inputs are the second view where the online one
            sees one view only.

    Example:
        >>> operator = CovarianceOperatorNorm(encoder="backbone", output="projection_head", every_n_steps=1000)
    """

    quantities = (
        Quantity(
            "cov_op/*",
            "inter-augmentation operator",
            "The part of a layer's learning signal that survives augmentation; growth means that the layer learns.",
            "operator",
        ),
        Quantity(
            "cov_op_trace/*",
            "trace of the inter-augmentation operator",
            "The sum of the operator's eigenvalues.",
            "operator",
        ),
        Quantity("cov_op_top/*", "its leading eigenvalue", "The rate at which the strongest mode grows.", "operator"),
        Quantity(
            "cov_op_intra/*",
            "intra-augmentation operator",
            "The part of the signal that changes with the augmentation.",
            "operator",
        ),
        Quantity(
            "cov_op_intra_trace/*",
            "trace of the intra-augmentation operator",
            "The sum of its eigenvalues.",
            "operator",
        ),
        Quantity(
            "cov_op_ratio/*",
            "inter over intra",
            "Signal over nuisance: it grows where the network learns what augmentation leaves alone.",
            "operator",
            better="higher",
        ),
        Quantity(
            "cov_op_error/*",
            "relative error of the estimate",
            "The estimate's relative standard error; raise `directions` where it is above 0.2.",
            "operator",
            better="lower",
        ),
    )
    paired = True

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
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__(
            encoder, views, pairing, None, target, every_n_steps, every_n_epochs, False, name, argument="encoder"
        )
        check_layout(layout)
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
        self.weight, self.tau, self.margin, self.seed = weight, tau, margin, seed
        self._output = Spec(output, "output", layout)

    def begin_run(self) -> None:
        super().begin_run()
        self._between: int | None = None  # what lies between encoder and output, once a replay has confirmed it

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{dict(encoder=self.encoder, output=self.output, name=self.name)}"

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

    def ask(self, watched: Observatory, pl_module: L.LightningModule) -> None:
        watched.want(self._specs["train"], inputs=True, moments=True)
        watched.want(self._output, inputs=True, moments=True)

    def _measured(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> dict[str, Any] | None:
        """Collective: every rank gets all samples and computes the same: a norm is not a mean over ranks."""
        watched, device, ranks = observatory(trainer), pl_module.device, ranks_of(trainer)
        spec, problem = self._specs["train"], None
        between, self._between = self._between, None
        try:
            calls = Calls.of(watched, spec, self._output, between)
        except Exception as error:
            calls, problem = None, error
        if (spec, "train") not in watched.settled:
            evidence = None if calls is None else calls.evidence(watched.batch, spec.declared)
            told = exchange(evidence, device, problem) if ranks > 1 else _alone(evidence, problem)
            reading = settle([Evidence(*found) for found in told if found is not None], spec.declared)
            if reading is None:
                return None
            watched.settled[spec, "train"] = reading
        reading, mine = watched.settled[spec, "train"], None
        try:
            if calls is not None:
                mine = calls.samples(reading, spec.declared, -(-self.samples // ranks))
        except Exception as error:
            problem = error
        found = exchange(mine, device, problem) if ranks > 1 else _alone(mine, problem)
        parts = [part for part in found if part is not None]
        if not parts:
            return None
        rows = watched.reader(self._output)
        context = trainer.precision_plugin.forward_context
        replay = Replay(pl_module, self.encoder, self.output, parts, context, rows)
        weight = partial(pair_weight, loss=self.weight, tau=self.tau, margin=self.margin) if self.weight else None
        with silence(), replay.as_in_the_step() as random:
            if random:
                self.tell(f"{', '.join(random)} draw at random in training and are off here")
            off = None if random else replay.deviation()
            table = replay.table[: self.samples].to(device, non_blocking=True)
            norms = covariance_operator_norms(
                replay.network,
                list(table.unbind(dim=1)),
                self.layers,
                self.directions,
                self.principal,
                self.exact,
                weight,
                self.seed,
            )
        values: dict[str, Any] = {}
        for layer, norm in norms.items():
            values[self.key("cov_op", layer)] = norm.inter_norm
            values[self.key("cov_op_trace", layer)] = norm.inter_trace
            values[self.key("cov_op_top", layer)] = norm.inter_top
            values[self.key("cov_op_intra", layer)] = norm.intra_norm
            values[self.key("cov_op_intra_trace", layer)] = norm.intra_trace
            values[self.key("cov_op_ratio", layer)] = norm.inter_norm / norm.intra_norm.clamp_min(1e-30)
            values[self.key("cov_op_error", layer)] = norm.relative_error
        # Whether it was the step's network is known with the values: nothing waits for it alone.
        floats = as_floats(values if off is None else {**values, "": off})
        if off is not None:
            replay.check(floats.pop(""))
            self._between = None if calls is None else calls.between
        return floats


def _alone(value: Any, problem: Exception | None) -> list[Any]:
    if problem is not None:
        raise problem
    return [value]
