"""Mixtures of Gaussians, one component at the origin (DDN-v1 4.2 and G.1): many at once, and a DataModule of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ssl.data.synthetic.base import EpochDraws, SyntheticDataModule

__all__ = ["GaussianMixture", "MixtureDataModule"]


class GaussianMixture:
    """Components with means N(0, I), the first at the origin, equally likely, each of covariance ``variance`` I.

    The component is z0; the noise around its mean is what an augmentation redraws.

    Args:
        components: Number of Gaussians.
        dim: Input dimension.
        variance: Variance of each coordinate within a component.
        runs: Number of independent mixtures.
        seed: Seed of the means.

    Example:
        >>> mixture = GaussianMixture(components=4, dim=6)
        >>> mixture.means.shape
        torch.Size([1, 4, 6])
    """

    def __init__(
        self, components: int = 10, dim: int = 10, variance: float = 0.1, runs: int = 1, seed: int = 0
    ) -> None:
        for name, value in (("components", components), ("dim", dim), ("runs", runs)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        if variance < 0:
            raise ValueError(f"`variance` must not be negative, got {variance}")
        self.components, self.dim, self.variance, self.runs = components, dim, variance, runs
        generator = torch.Generator().manual_seed(seed)
        self.means = torch.randn(runs, components, dim, generator=generator)
        self.means[:, 0] = 0.0

    def sample_component(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw components, ``[runs, n]``."""
        return torch.randint(self.components, (self.runs, n), generator=generator)

    def sample(self, component: Tensor, generator: torch.Generator) -> Tensor:
        """Draw an input of each given component, ``[runs, n, dim]``; called twice, it makes two views."""
        centre = self.means.gather(1, component.unsqueeze(-1).expand(-1, -1, self.dim))
        return centre + self.variance**0.5 * torch.randn(centre.shape, generator=generator)


class MixtureDataModule(SyntheticDataModule):
    """Pairs of draws of one component, every draw fresh. Label: the component.

    Args:
        components: Number of Gaussians; the first sits at the origin.
        dim: Input dimension.
        variance: Variance of each coordinate within a component.
        **kwargs: draws, batch_size, num_views, probe_draws and seed of :class:`SyntheticDataModule`.

    Example:
        >>> data = MixtureDataModule(components=4, dim=6, draws=64, batch_size=16)
        >>> data.num_classes
        4
    """

    def __init__(self, components: int = 10, dim: int = 10, variance: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mixture = GaussianMixture(components, dim, variance, seed=self.seed)
        self.num_classes, self.num_features = components, dim
        self.save_hyperparameters()

    def draw(self, n: int, num_views: int, generator: torch.Generator) -> EpochDraws:
        """See :class:`SyntheticDataModule`."""
        component = self.mixture.sample_component(n, generator)
        return EpochDraws(tuple(self.mixture.sample(component, generator)[0] for _ in range(num_views)), component[0])
