"""Uniformity and alignment of any submodule's features while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.pair import Pairing
from lightning_ssl.callbacks.watcher import Watcher
from lightning_ssl.functional import alignment, uniformity
from lightning_ssl.quantities import Quantity


class UniformityAlignment(Watcher):
    r"""Logs where the features lie on the sphere (RAFT Defs 2.1-2.2).

    ``train/alignment`` is :math:`E \|\hat x - \hat y\|^\alpha` over the two views of a sample (over all pairs of views
    where there are more); ``train/uniformity`` is :math:`\log E\, e^{-t \|\hat x_i - \hat x_j\|^2}` over pairs of
    different samples of one view, averaged over the views. The same under ``val/`` and ``test/`` for held-out data;
    alignment only where a step shows two views.

    Args:
        features: Dotted path of the submodule whose outputs are the features.
        alpha: Alignment's exponent.
        t: Uniformity's inverse width.
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Log every n-th training step, the first included.
        every_n_epochs: Log the first step of every n-th epoch.
        held_out: Log validation and test features as well.
        name: Keeps several instances apart: ``train/<name>/uniformity``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        target: Dotted path of the target network's twin of `features`, for the second view of an online network that
            sees one view only.

    Example:
        >>> watch = UniformityAlignment("projection_head", every_n_steps=10)
    """

    quantities = (
        Quantity(
            "*/uniformity",
            "uniformity (0 = collapsed)",
            "How evenly features cover the sphere: 0 when all are one point, lower is more even.",
            better="lower",
            healthy="below -1 and falling, or level",
            collapsed="rising to 0",
            form="{:.2f}",
            headline=True,
        ),
        Quantity(
            "*/alignment",
            "alignment of views",
            "The squared distance between views of one sample; near 0 together with uniformity near 0 is collapse.",
            better="lower",
            healthy="well below 2, above 0",
            collapsed="0, together with uniformity at 0",
            form="{:.3f}",
            headline=True,
        ),
    )
    paired = True

    def __init__(
        self,
        features: str = "projector",
        alpha: float = 2.0,
        t: float = 2.0,
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
        for argument, value in (("alpha", alpha), ("t", t)):
            if not value > 0:
                raise ValueError(f"`{argument}` must be positive, got {value}")
        self.alpha, self.t = alpha, t

    def measure(self, rows: Tensor) -> dict[str, Tensor | float]:
        views = rows.unbind(dim=1)
        values: dict[str, Tensor | float] = {"uniformity": torch.stack([uniformity(x, self.t) for x in views]).mean()}
        if pairs := list(combinations(views, 2)):
            values["alignment"] = torch.stack([alignment(x, y, self.alpha) for x, y in pairs]).mean()
        return values
