"""Features drawn on a circle, as in RAFT's Fig. 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.pair import Pairing
from lightning_ssl.callbacks._engine.report import log_figure
from lightning_ssl.callbacks.watcher import Watcher
from lightning_ssl.functional import principal_plane
from lightning_ssl.quantities import Quantity


class RepresentationCircle(Watcher):
    r"""Draws the features of a batch on the unit circle: their two leading directions, normalised (RAFT Fig. 5).

    The ring shows the density over angles, the chords join the two views of a sample: aligned features have short
    chords, uniform ones an even ring, collapsed ones are one point. ``circle/explained_variance``, the share of the
    features' mean square in the plane, is logged.

    Args:
        features: Dotted path of the submodule whose outputs are the features.
        pairs: How many pairs of views are joined by chords.
        max_rows: At most that many samples are gathered from all ranks.
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Draw every n-th training step, the first included.
        every_n_epochs: Draw the first step of every n-th epoch.
        held_out: Draw held-out features as well.
        name: Keeps several instances apart: ``circle/<name>/...``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        target: Dotted path of the target network's twin of `features`, for the second view of an online network that
            sees one view only.

    Example:
        >>> circle = RepresentationCircle("projection_head", every_n_steps=1000)
    """

    quantities = (
        Quantity(
            "circle*/explained_variance",
            "share of the circle's plane",
            "The share of the features that the picture shows.",
        ),
    )
    paired = True

    def __init__(
        self,
        features: str = "projector",
        pairs: int = 32,
        max_rows: int = 2048,
        views: int | None = None,
        every_n_steps: int | None = 500,
        every_n_epochs: int | None = None,
        held_out: bool | Mapping[str, Any] = False,
        name: str | None = None,
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__(features, views, pairing, layout, target, every_n_steps, every_n_epochs, held_out, name)
        if pairs < 0 or max_rows < 2:
            raise ValueError(f"`pairs` must not be negative and `max_rows` at least 2, got {pairs} and {max_rows}")
        self.pairs, self.max_rows = pairs, max_rows
        self._angles: list[Tensor] = []

    def key(self, stage: str, quantity: str) -> str:
        return super().key("circle" if stage == "train" else f"circle_{stage}", quantity)

    def measure(self, rows: Tensor) -> dict[str, Tensor | float]:
        rows = rows[: self.max_rows]
        if len(rows) < 2:
            raise ValueError(f"a circle needs at least 2 samples, got {len(rows)}")
        plane, explained = principal_plane(rows.flatten(0, 1))
        self._angles = list(torch.atan2(plane[:, 1], plane[:, 0]).view(len(rows), -1).T.float().cpu())
        return {"explained_variance": explained}

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        angles = self._angles
        log_figure(trainer, self.folder, self.key(stage, "picture"), lambda: draw(angles, self.pairs, step), step)


def draw(angles: list[Tensor], pairs: int, step: int, bandwidth: float = 0.1) -> Figure:
    """The ring of densities and the chords."""
    grid = torch.linspace(-torch.pi, torch.pi, 241)
    every = torch.cat(angles)
    # Von Mises kernels of width `bandwidth`.
    kernel = torch.exp((torch.cos(grid[:, None] - every[None, :]) - 1) / bandwidth**2).mean(dim=1)
    density = kernel / kernel.max().clamp_min(1e-12)
    figure = Figure(figsize=(3.6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.scatter(every.cos(), every.sin(), s=2, color="tab:blue", alpha=0.4)
    radius = 1.05 + 0.35 * density
    axes.plot(radius * grid.cos(), radius * grid.sin(), color="tab:blue", lw=1)
    axes.fill(
        torch.cat([radius * grid.cos(), 1.05 * grid.cos().flip(0)]),
        torch.cat([radius * grid.sin(), 1.05 * grid.sin().flip(0)]),
        color="tab:blue",
        alpha=0.25,
        lw=0,
    )
    if len(angles) > 1:
        for a, b in zip(angles[0][:pairs], angles[1][:pairs], strict=True):
            axes.plot([a.cos(), b.cos()], [a.sin(), b.sin()], color="tab:orange", lw=0.8)
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    axes.axis("off")
    axes.set_title(f"representations, step {step}", fontsize=9)
    return figure
