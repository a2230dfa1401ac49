"""Modules cut into pieces by FSDP2 (`fully_shard`), trained by Lightning's ModelParallelStrategy on gloo ranks."""

from __future__ import annotations

import os
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.callbacks.harness import ddp_trainer, trainer

Cut = Literal["parts", "layers"]


def sharded(cls: type[L.LightningModule], cut: Cut, *args: Any, **kwargs: Any) -> L.LightningModule:
    """An instance whose parts, or all of whose layers with weights, are cut when the Trainer says so."""

    class Sharded(cls):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            if getattr(self, "_is_cut", False):
                return
            self._is_cut = True
            for part in self.children():
                if cut == "layers":
                    for layer in part.modules():
                        if isinstance(layer, (nn.Linear, nn.Conv2d)) and layer is not part:
                            fully_shard(layer, mesh=mesh)
                if any(True for _ in part.parameters()):
                    fully_shard(part, mesh=mesh)

    Sharded.__name__ = Sharded.__qualname__ = cls.__name__
    return Sharded(*args, **kwargs)


def rank_trainer(rank: int, world_size: int, how: str, callbacks: list[L.Callback], **kwargs: Any) -> L.Trainer:
    """A Trainer of the process group that is there already: under DDP, or in pieces."""
    if how == "ddp":
        return ddp_trainer(rank, world_size, callbacks, **kwargs)
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="29500"
    )
    strategy = ModelParallelStrategy(
        data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    return trainer(callbacks, devices=world_size, strategy=strategy, **kwargs)
