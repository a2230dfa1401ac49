"""BYOL': the upper bound of BYOL's loss that RAFT takes apart."""

from __future__ import annotations

from lightning_ssl.methods.raft import RAFT


class BYOLPrime(RAFT):
    """Minimise alpha ‖p̂₁ − p̂₂‖² + beta ½(‖p̂₁ − ẑ₁‖² + ‖p̂₂ − ẑ₂‖²) (RAFT Eq. 7).

    All arguments are :class:`RAFT`'s; the one difference is the sign of the cross-model loss.

    Example:
        >>> model = BYOLPrime(backbone="small_conv", predictor="linear")
    """

    sign = 1.0
