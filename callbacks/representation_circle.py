"""Features drawn on a circle, as in RAFT's Fig. 5."""

from __future__ import annotations

import lightning.pytorch as L
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_ssl.callbacks._ranks import gather_rows
from lightning_ssl.callbacks._report import log_figure
from lightning_ssl.callbacks._watcher import FeatureWatcher
from lightning_ssl.functional import principal_plane


class RepresentationCircle(FeatureWatcher):
    r"""Draws the features of a batch on the unit circle: PCA to two dimensions, then normalisation (RAFT Fig. 5).

    The ring shows the density over angles, the chords join the two views of a sample: aligned features have short
    chords, uniform ones an even ring. ``circle/explained_variance``, the share of variance in the plane, is logged.

    Args:
        features: dotted path of the submodule whose outputs are the features.
        pairs: how many pairs of views are joined by chords.
        max_rows: at most that many samples are gathered from all ranks.
        views: how many views a step holds, where calls and batch size do not tell.
        every_n_steps: draw every that many training steps, the first included.
        every_n_epochs: draw the first step of every that many epochs.
        held_out: draw held-out features as well.
        name: keeps several instances apart: ``circle/<name>/...``.
    """

    def __init__(
        self,
        features: str = "projector",
        pairs: int = 32,
        max_rows: int = 2048,
        views: int | None = None,
        every_n_steps: int | None = 500,
        every_n_epochs: int | None = None,
        held_out: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(features, views, every_n_steps, every_n_epochs, held_out, name)
        if pairs < 0 or max_rows < 2:
            raise ValueError(f"`pairs` must not be negative and `max_rows` at least 2, got {pairs} and {max_rows}")
        self.pairs, self.max_rows = pairs, max_rows
        self._kept: list[Tensor] = []
        self._angles: list[Tensor] = []

    def reset(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._kept = []
        self._quota = -(-self.max_rows // trainer.world_size)

    def take(self, views: list[Tensor]) -> None:
        room = self._quota - sum(len(kept) for kept in self._kept)
        if room > 0:
            self._kept.append(torch.stack([view[:room] for view in views], dim=1))  # N x V x d

    def compute(self, trainer: L.Trainer, pl_module: L.LightningModule, views: int, stage: str) -> dict[str, float]:
        rows = gather_rows(trainer, torch.cat(self._kept) if self._kept else None)
        self._kept = []
        if rows is None or len(rows) < 2:
            raise ValueError(f"a circle needs at least 2 samples, got {0 if rows is None else len(rows)}")
        plane, explained = principal_plane(rows.flatten(0, 1))
        self._angles = list(torch.atan2(plane[:, 1], plane[:, 0]).view(len(rows), -1).T.float().cpu())
        prefix = "circle" if stage == "train" else f"circle_{stage}"
        return {self.key(prefix, "explained_variance"): float(explained)}

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        angles = self._angles
        prefix = "circle" if stage == "train" else f"circle_{stage}"
        log_figure(trainer, self.folder, self.key(prefix, "picture"), lambda: draw(angles, self.pairs, step), step)


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
