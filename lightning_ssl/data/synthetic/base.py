"""What the DataModules of the synthetic models share: whole epochs drawn at once, the same at any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssl.data.batch import ProbeBatch, ViewBatch
from lightning_ssl.data.loader import EpochDataset, ShardLoader, ShardSampler, as_rows
from lightning_ssl.data.module import ShardedDataModule

PROBE_TRAIN, PROBE_TEST = -1, -2


class EpochDraws(NamedTuple):
    """All views of an epoch, each ``[n, features]``, and the labels ``[n]``."""

    views: tuple[Tensor, ...]
    label: Tensor


class SyntheticDataModule(ShardedDataModule):
    """Fresh draws each epoch: a function of (seed, epoch, index), whatever the number of ranks and workers.

    A subclass defines ``draw(n, num_views, generator)``, which makes a whole epoch at once, and sets ``num_classes``
    and ``num_features``, the values of a label and the entries of a view.

    Args:
        draws: Samples an epoch, over all ranks.
        batch_size: Samples a step and process.
        num_views: Views of each sample.
        probe_draws: Labelled samples of each probe split.
        seed: Seed of all draws.
    """

    num_classes: int
    num_features: int
    clean_image = False  # a draw has none

    def __init__(
        self, draws: int = 64_000, batch_size: int = 128, num_views: int = 2, probe_draws: int = 4096, seed: int = 0
    ) -> None:
        super().__init__()
        for name, value in (
            ("draws", draws),
            ("batch_size", batch_size),
            ("num_views", num_views),
            ("probe_draws", probe_draws),
        ):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        if batch_size > draws:
            raise ValueError(
                f"`batch_size` must be at most draws={draws}, got {batch_size}; lower it, or draw more an epoch"
            )
        self.draws, self.batch_size, self.num_views = draws, batch_size, num_views
        self.probe_draws, self.seed = probe_draws, seed

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a view."""
        return (self.num_features,)

    def draw(self, n: int, num_views: int, generator: torch.Generator) -> EpochDraws:
        """Draw ``n`` samples with ``num_views`` views each."""
        raise NotImplementedError

    def epoch_draws(self, epoch: int, num_views: int | None = None) -> EpochDraws:
        """All draws of an epoch (from 0), or of a probe split (negative)."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return self.draw(self.draws if epoch >= 0 else self.probe_draws, num_views or self.num_views, generator)

    def train_dataloader(self) -> ShardLoader:
        return self.resumed(self._loader(_Views(self), even=True))

    def val_dataloader(self) -> ShardLoader:
        return self._loader(_Views(self, PROBE_TEST), even=True)

    def probe_dataloaders(self) -> tuple[ShardLoader, ShardLoader]:
        """Labelled train and test draws as `ProbeBatch`, each rank its own shard, every sample exactly once."""
        return self._loader(_Probe(self, PROBE_TRAIN)), self._loader(_Probe(self, PROBE_TEST))

    def _loader(self, dataset: EpochDataset, even: bool = False) -> ShardLoader:
        sampler = ShardSampler(dataset, *self.shard(), even=even)
        # Every draw is new already, so the order needs no shuffling; but it must know the epoch.
        sampler.reshuffle = True
        batch_size = max(1, min(self.batch_size, len(sampler)))
        return ShardLoader(dataset, sampler=sampler, batch_size=batch_size, drop_last=even)


class _Views(EpochDataset):
    """Batches of an epoch's views; the last epoch is kept."""

    def __init__(self, module: SyntheticDataModule, split: int | None = None) -> None:
        super().__init__()
        self.module, self.split = module, split
        self._held: tuple[int, EpochDraws] | None = None

    def __len__(self) -> int:
        return self.module.draws if self.split is None else self.module.probe_draws

    def __getitems__(self, rows: list[int]) -> ViewBatch:
        epoch = self.epoch if self.split is None else self.split
        if self._held is None or self._held[0] != epoch:
            self._held = epoch, self.module.epoch_draws(epoch)
        draws, index = self._held[1], as_rows(rows)
        return ViewBatch(tuple(v[index] for v in draws.views), draws.label[index], index)


class _Probe(EpochDataset):
    """Labelled single draws."""

    def __init__(self, module: SyntheticDataModule, split: int) -> None:
        super().__init__()
        self.held = module.epoch_draws(split, num_views=1)

    def __len__(self) -> int:
        return len(self.held.label)

    def __getitems__(self, rows: list[int]) -> ProbeBatch:
        index = as_rows(rows)
        return ProbeBatch(self.held.views[0][index], self.held.label[index], index)
