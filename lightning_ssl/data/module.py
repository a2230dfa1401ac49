"""What our DataModules share: this process' shard, and the place in the epoch from which a resumed run goes on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ssl._lightning import recount_batches
from lightning_ssl.data.loader import ShardLoader


class ShardedDataModule(L.LightningDataModule):
    """A DataModule that keeps, in the checkpoint, where training stands in the epoch.

    Lightning puts the loaders of a resumed run back to their places, too, but not if the module asks for the run's
    length (`trainer.estimated_stepping_batches`) while it makes its optimizers: the loaders are then set up before
    their places are read. The DataModule's own state is read before that, so that it holds for any module.

    The place is a number of samples: a run may go on at another number of ranks, exactly if the samples of a step, of
    all ranks together, stay as many. If they do not, it goes on at the same sample and warns.

    A subclass passes the loader it trains from through :meth:`resumed`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._resume: dict[str, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples have been trained on; empty outside of a fit."""
        # The loader that the Trainer iterates: others may have been made on the side.
        loader = None if self.trainer is None else self.trainer.train_dataloader
        return {"train": loader.state_dict()} if isinstance(loader, ShardLoader) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the loaders that are made from now on start there, until training has begun."""
        self._resume = state_dict.get("train")
        if self._resume is not None and self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._recount(self._resume)

    def _recount(self, place: dict[str, int]) -> None:
        """Let the Trainer count on in steps of the present size, where the checkpoint's have another."""
        loader: Any = self.train_dataloader()
        before, now = place.get("global_batch"), loader.global_batch
        if before in (None, now):
            return
        assert self.trainer is not None
        batches, whole = loader.count(place["samples"], self.trainer.limit_train_batches)  # type: ignore[attr-defined]
        recount_batches(self.trainer, batches, whole)
        rank_zero_warn(
            f"the run goes on with {now} samples a step, on {loader.sampler.num_replicas} process(es), where it had "
            f"{before}: behind sample {place['samples']} of epoch {place['epoch']}, of which {whole} steps make one "
            "now. Nothing is scaled: learning rate and momentum stay as configured, and schedules count steps. For the "
            f"same run set `batch_size` to {before} divided by the number of processes"
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer is not None and self.trainer.training:
            self._resume = None
        return batch

    def resumed(self, loader: ShardLoader) -> ShardLoader:
        """The loader, put where the checkpoint left off."""
        loader.untrained = self._untrained_batches
        if self._resume is not None:
            loader.load_state_dict(self._resume)
        return loader

    def shard(self) -> tuple[int, int]:
        """This process' rank and the number of processes, from the Trainer if there is one."""
        if self.trainer is not None and (kwargs := self.trainer.distributed_sampler_kwargs) is not None:
            return kwargs["rank"], kwargs["num_replicas"]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def _untrained_batches(self) -> int:
        """1 in the middle of a step, as when an exception ends it, else 0."""
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)
