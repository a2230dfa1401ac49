"""Matrix products in single precision by the fastest library that torch was built with."""

from __future__ import annotations

import torch
from torch import Tensor

_fast: bool | None = None  # whether oneDNN's product is there and right; looked at once


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of matrices, outside the graph.

    On processors torch takes products of float32 from MKL, which leaves half the width of AVX-512 unused where the
    vendor is not its own; oneDNN, in the same package, does not. Both round in single precision. It keeps a program of
    some hundred kilobytes for each shape that it has met, up to a thousand of them: let there be few.

    Example:
        >>> times_transposed(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
        tensor([[11., 17.]])
    """
    plain = a.device.type != "cpu" or a.dtype != torch.float32 or not (_dense(a) and _dense(b))
    return a @ b.T if plain or not _has_fast_product() else _by_onednn(a, b)


def _dense(x: Tensor) -> bool:
    """Whether it is a whole matrix or one turned: columns cut out of another cost oneDNN a hundred times as long."""
    return x.numel() > 0 and (x.is_contiguous() or x.T.is_contiguous())


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")  # type: ignore[no-any-return]


def _has_fast_product() -> bool:
    """The operator is torch's own, for compiled graphs: it is asked for one product before it is trusted."""
    global _fast
    if _fast is None:
        a, b = torch.arange(32.0).view(4, 8), torch.arange(24.0).view(3, 8)
        try:
            _fast = torch.backends.mkldnn.is_available() and torch.equal(_by_onednn(a, b), a @ b.T)
            _fast = _fast and torch.equal(_by_onednn(a.T, b[:, :4]), a.T @ b[:, :4].T)
        except (AttributeError, RuntimeError, NotImplementedError):
            _fast = False
    return _fast
