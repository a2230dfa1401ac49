"""Random numbers that are a function of what they are for, not of who draws them or when.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the finaliser of
SplitMix64 as its mixing function, written in 64-bit integer tensor operations: any rank, worker or device that asks for
the parameters of (seed, epoch, sample, view) gets the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
CLEAN = -1  # the "epoch" and "view" of whatever is drawn once per sample and then kept


def _signed(value: int) -> int:
    """The 64-bit two's complement of an integer, which is how torch holds unsigned 64-bit words."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts arithmetically


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def random_bits(index: Tensor, *key: int) -> Tensor:
    """One 64-bit word per sample.

    Args:
        index: Sample positions, [B], int64.
        key: Any further integers the word shall depend on, in order (seed, epoch, view, ...).
    """
    state = torch.zeros((), dtype=torch.int64, device=index.device)
    for part in key:
        state = _mix(state + _signed(part * 2 + 1) + _signed(_GOLDEN))
    return _mix(_mix(state + _signed(_GOLDEN)) + index * _signed(_GOLDEN))


def uniforms(index: Tensor, count: int, *key: int) -> Tensor:
    """`count` independent uniforms on [0, 1) per sample, [B, count], float32 (24 random bits each)."""
    counter = torch.arange(1, count + 1, device=index.device) * _signed(_GOLDEN)
    words = _mix(random_bits(index, *key)[:, None] + counter)
    return _shift(words, 40).to(torch.float32) * 2.0**-24


def permutation(size: int, *key: int) -> Tensor:
    """A random order of range(size), [size]."""
    return torch.argsort(random_bits(torch.arange(size), *key), stable=True)
