"""What a trainer's ranks have in common."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Strategies that cut a module's parameters (or its forward) into pieces no single rank sees; of FSDP2's pieces
# (ModelParallelStrategy) each rank can gather the whole.
_SHARDING = {"FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy"}


def refuse_sharded(trainer: Any, callback: object) -> None:
    """Raise under a strategy that shards parameters."""
    names = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    if names & _SHARDING:
        raise MisconfigurationException(
            f"{type(callback).__name__} reads whole weights and features, which {type(trainer.strategy).__name__} "
            "splits over ranks; use strategy='ddp', ModelParallelStrategy (FSDP2), or leave this callback out"
        )


def ranks_of(trainer: Any) -> int:
    """How many ranks train together (a process group may exist for other reasons)."""
    together = trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
    return trainer.world_size if together else 1


def all_ranks_evaluate(trainer: Any, pl_module: object) -> bool:
    """Lightning leaves a rank with an empty loader out of the evaluation hooks, where this switch allows one."""
    sources = [pl_module, getattr(trainer, "datamodule", None)]
    allowed = any(getattr(source, "allow_zero_length_dataloader_with_multiple_devices", False) for source in sources)
    return not (allowed and ranks_of(trainer) > 1)
