"""What makes a device fast and is nobody's method: memory layout, TF32."""

from __future__ import annotations

from typing import Any, Literal, get_args

import lightning.pytorch as L
import torch

Products = Literal["highest", "high", "medium"]


class DeviceOptions(L.Callback):
    """Sets how a fit uses its device; what is exact by design (augmentation, diagnostics) stays exact.

    Args:
        channels_last: Keep images and filters with their channels last, as tensor cores want them.
        matmul_precision: Of single-precision products and convolutions in the networks: "highest", "high" (TF32) or
            "medium".

    Example:
        >>> options = DeviceOptions(channels_last=True, matmul_precision="high")
    """

    def __init__(self, channels_last: bool = False, matmul_precision: Products = "highest") -> None:
        super().__init__()
        if matmul_precision not in get_args(Products):
            raise ValueError(
                f"`matmul_precision` must be one of {', '.join(get_args(Products))}, got {matmul_precision!r}"
            )
        self.channels_last, self.matmul_precision = channels_last, matmul_precision
        self._before: tuple[Any, bool] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._before is None:
            self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.matmul_precision != "highest"
        if self.channels_last:
            pl_module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before[0])
            torch.backends.cudnn.allow_tf32 = self._before[1]
            self._before = None
