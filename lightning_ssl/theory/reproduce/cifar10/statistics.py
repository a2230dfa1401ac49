"""Paired differences over seeds: mean, interval, sign-flip permutation test, and the verdict that follows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr, t

from lightning_ssl.theory.reproduce.cifar10.plan import Contrast
from lightning_ssl.theory.reproduce.report import LEVEL


class Outcome(NamedTuple):
    """What the seeds say of a contrast.

    Attributes:
        values: The difference (or rank correlation) of each seed.
        mean: Their mean.
        low: Lower end of its 95 % interval, by Student's t over the seeds.
        high: Upper end.
        p: Of the claim: one-sided sign flips in its direction; two-sided for "equal", where it is of a difference.
        verdict: "confirmed", "not confirmed" or "reversed".
    """

    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    p: float
    verdict: str


def sign_flip_test(values: Sequence[float], alternative: str = "greater") -> float:
    """The exact p of a mean as large, over all 2^n signs of paired differences.

    Args:
        values: The differences, at most 20.
        alternative: "greater", "less" or "two-sided".
    """
    x = np.asarray(values, dtype=float)
    if not 1 <= len(x) <= 20:
        raise ValueError(f"`values` must be 1 to 20 differences, got {len(x)}")
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(x))))
    sums, seen = signs @ x, x.sum()
    slack = 1e-9 * max(1.0, np.abs(x).sum())  # sums of the same numbers in another order are the same
    if alternative == "two-sided":
        return float((np.abs(sums) >= abs(seen) - slack).mean())
    sums, seen = (sums, seen) if alternative == "greater" else (-sums, -seen)
    return float((sums >= seen - slack).mean())


def interval(values: Sequence[float], level: float = 1 - LEVEL) -> tuple[float, float]:
    """Student's interval of the mean of paired differences; unbounded for one."""
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        return -float("inf"), float("inf")
    half = float(t.ppf((1 + level) / 2, len(x) - 1)) * x.std(ddof=1) / np.sqrt(len(x))
    return float(x.mean() - half), float(x.mean() + half)


def judge(contrast: Contrast, values: Sequence[float]) -> Outcome:
    """Mean, interval, p and verdict of a contrast's values, one for each seed.

    "greater" and "less" are confirmed where the one-sided p is at most .05, and reversed where that of the opposite
    claim is. "equal" is confirmed where the interval lies within the margin, and reversed where it lies outside.
    """
    low, high = interval(values)
    mean = float(np.mean(values))
    if contrast.direction == "equal":
        p = sign_flip_test(values, "two-sided")
        inside = -contrast.margin <= low and high <= contrast.margin
        outside = low > contrast.margin or high < -contrast.margin
        verdict = "confirmed" if inside else "reversed" if outside else "not confirmed"
    else:
        p = sign_flip_test(values, contrast.direction)
        opposite = sign_flip_test(values, "less" if contrast.direction == "greater" else "greater")
        verdict = "confirmed" if p <= LEVEL else "reversed" if opposite <= LEVEL else "not confirmed"
    return Outcome(tuple(float(v) for v in values), mean, low, high, p, verdict)


def paired_values(
    contrast: Contrast, results: Mapping[tuple[str, int], Mapping[str, Any]], seeds: Sequence[int]
) -> dict[int, float]:
    """The contrast's value for each seed of which all its settings are there.

    That is first - second, or for a contrast over several settings the rank correlation of its two metrics over them.
    """
    found = {}
    for seed in seeds:
        rows = [results.get((name, seed)) for name in contrast.names]
        kept = [row for row in rows if row is not None]
        if len(kept) < len(rows):
            continue
        if contrast.settings:
            x, y = ([float(row[key]) for row in kept] for key in (contrast.against, contrast.metric))
            found[seed] = float(spearmanr(x, y).statistic) if len(set(x)) > 1 and len(set(y)) > 1 else 0.0
        else:
            found[seed] = float(kept[0][contrast.metric]) - float(kept[1][contrast.metric])
    return found


def false_discovery(p: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg's adjusted p of several tests, in the order given."""
    x = np.asarray(p, dtype=float)
    order = x.argsort()
    adjusted = x[order] * len(x) / np.arange(1, len(x) + 1)
    adjusted = np.minimum.accumulate(adjusted[::-1])[::-1].clip(max=1.0)
    result = np.empty_like(adjusted)
    result[order] = adjusted
    return [float(v) for v in result]
