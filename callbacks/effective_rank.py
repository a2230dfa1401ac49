"""How many dimensions the features use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.pair import Pairing
from lightning_ssl.callbacks.watcher import Watcher
from lightning_ssl.functional import effective_rank, spread
from lightning_ssl.quantities import Quantity


class EffectiveRank(Watcher):
    r"""Logs ``train/effective_rank``, ``train/alive_dimensions`` and ``train/feature_std``.

    The effective rank is the exponential of the entropy of the normalised singular values of the features (not
    centred), over all views. A dimension is alive when the standard deviation of the l2-normalised features along it
    exceeds a hundredth of :math:`1/\sqrt d`, the value at which all dimensions share the sphere; ``feature_std`` is
    the mean of those deviations in units of it: 1 when spread, 0 when collapsed. Under ``val/`` and ``test/`` for
    held-out data.

    Args:
        features: Dotted path of the submodule whose outputs are the features.
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Log every n-th training step, the first included.
        every_n_epochs: Log the first step of every n-th epoch.
        held_out: Log validation and test features as well.
        name: Keeps several instances apart: ``train/<name>/effective_rank``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        target: Dotted path of the target network's twin of `features`, for the second view of an online network that
            sees one view only.

    Example:
        >>> watch = EffectiveRank("backbone", every_n_steps=100)
    """

    quantities = (
        Quantity(
            "*/effective_rank",
            "effective rank",
            "How many dimensions the batch's features use; at most the number of rows.",
            better="higher",
            collapsed="falling to a few, or to 1",
            form="{:.1f}",
            headline=True,
        ),
        Quantity(
            "*/alive_dimensions",
            "share of live dimensions",
            "The share of output units that still vary; falling means that dimensions die.",
            "health",
            better="higher",
            healthy="near 1",
            collapsed="falling to 0",
        ),
        Quantity(
            "*/feature_std",
            "spread of the features",
            "1 when features are spread over the sphere, 0 when they are one point.",
            "health",
            better="higher",
            healthy="0.5 to 1",
            collapsed="near 0",
        ),
    )

    def __init__(
        self,
        features: str = "projector",
        views: int | None = None,
        every_n_steps: int | None = 50,
        every_n_epochs: int | None = None,
        held_out: bool | Mapping[str, Any] = True,
        name: str | None = None,
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__(features, views, pairing, layout, target, every_n_steps, every_n_epochs, held_out, name)

    def measure(self, rows: Tensor) -> dict[str, Tensor | float]:
        found = spread(rows)
        return {
            "effective_rank": effective_rank(rows) if bool(rows.any()) else 0.0,
            "alive_dimensions": found.alive,
            "feature_std": found.std,
        }
