"""How exactly products are computed, whatever the run allows its networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Compute on given tensors at full precision, without gradients, inside or outside inference mode or autocast."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), exact_products():
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside, products of single-precision matrices and convolutions are in single precision: no TF32, no bfloat16.

    Example:
        >>> torch.set_float32_matmul_precision("high")
        >>> with exact_products():
        ...     print(torch.get_float32_matmul_precision())
        highest
        >>> torch.set_float32_matmul_precision("highest")
    """
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    if convolutions:
        torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)
        if convolutions:
            torch.backends.cudnn.allow_tf32 = convolutions
