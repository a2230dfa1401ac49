"""What is true of the zoo's runs, and what the monitor's rules say of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._zoo import EVERY, Run
from lightning_ssl.callbacks._judge import Judge, Look, PrototypeJudge, Rules
from lightning_ssl.callbacks.collapse_monitor import MOST_ROWS, SPECTRUM_EVERY
from lightning_ssl.functional.spread import variance_shape_of


@dataclass
class Seen:
    """A run as the judges see it: looks by place, prototype use, and the probes."""

    run: Run
    looks: dict[str, list[Look]]
    assignments: np.ndarray | None
    knn_step: np.ndarray
    knn: np.ndarray
    linear: np.ndarray
    end: dict[str, float]


def load(run: Run, file: Path) -> Seen:
    """Read a recording, and compute what the monitor would have seen; kept beside the recording."""
    kept = file.with_suffix(".looks.pt")
    if kept.exists():
        looks, rest = torch.load(kept, weights_only=False)
    else:
        with np.load(file) as arrays:
            looks = {"projector": _looks(arrays, "projector", run)}
            rest = [arrays.get(key) for key in ("assignments", "knn_step", "knn", "linear")]
            rest.append(_end(arrays))
        torch.save((looks, rest), kept)
    return Seen(run, looks, *rest)


def _looks(arrays: Any, place: str, run: Run) -> list[Look]:
    """As `CollapseMonitor._numbers`, from the sums that were kept instead of rows."""
    factor, scale, mean, rows = (arrays[f"{place}/{key}"] for key in ("factor", "scale", "mean", "rows"))
    dim = mean.shape[1]
    found, shape = [], (math.nan, math.nan)
    every = 1 if place == "projector" else SPECTRUM_EVERY
    width = _width(run, place, dim)
    for t in range(0, len(rows), every):
        n = float(rows[t])
        f = torch.from_numpy(factor[t].astype(np.float64)) * float(scale[t])
        C = f.T @ f
        trace = float(C.trace()) / (n - 1)
        square = float(C.square().sum()) / (n - 1) ** 2
        m = n - 1
        corrected = m * m / ((m - 1) * (m + 2)) * (square - trace * trace / m)
        participation = trace**2 / max(corrected, trace**2 / dim, 1e-300)
        deviation = math.sqrt(trace * m / n)
        window = [t]
        while sum(rows[k] for k in window) < min(2 * dim, MOST_ROWS) and window[0] - every >= 0:
            window.insert(0, window[0] - every)
        total = float(sum(rows[k] for k in window))
        if t % SPECTRUM_EVERY == 0 or min(n, dim) <= 64 or not found:
            S = torch.zeros(dim, dim, dtype=torch.float64)
            mu = torch.zeros(dim, dtype=torch.float64)
            for k in window:
                g = torch.from_numpy(factor[k].astype(np.float64)) * float(scale[k])
                c = torch.from_numpy(mean[k].astype(np.float64))
                S += g.T @ g + float(rows[k]) * torch.outer(c, c)
                mu += float(rows[k]) * c
            values = torch.linalg.eigvalsh(S / total - torch.outer(mu, mu) / total**2).clamp_min(0)
            values = values[-int(min(total, dim)) :]
            seen = variance_shape_of(values, dim)
            shape = float(seen.rank), float(seen.alive)
        noise = float(arrays[f"{place}/alignment"][t]) / 2 / max(trace, 1e-300)
        limit = min(dim, n - 1, width)
        found.append(Look(t * EVERY, deviation, participation, *shape, limit, noise, rows=total))
    return found


def _width(run: Run, place: str, dim: int) -> float:
    if place.endswith("projector"):
        return float(run.options.get("projector_hidden", dim))
    return math.inf


def _end(arrays: Any) -> dict[str, float]:
    """The projector on a thousand clean images, before and after: deviation, and rank of the variance."""
    found = {}
    for name, i in (("start", 0), ("end", -1)):
        x = torch.from_numpy(arrays["clean/projector"][i].astype(np.float64))
        if not bool(x.isfinite().all()):
            found |= {f"{name}_std": 0.0, f"{name}_rank": 0.0, f"{name}_alive": 0.0}
            continue
        unit = torch.nn.functional.normalize(x, dim=1)
        unit = unit - unit.mean(0)
        values = torch.linalg.eigvalsh(unit.T @ unit / len(unit)).clamp_min(0)
        shape = variance_shape_of(values, x.shape[1], 1e-6)
        found |= {
            f"{name}_std": float(values.sum().sqrt()),
            f"{name}_rank": float(shape.rank),
            f"{name}_alive": float(shape.alive),
        }
    return found


def truth(seen: Seen) -> str:
    """What is true of a run, by its end state on clean images and the probes; the monitor has no part in it.

    "complete": the deviation of the unit features is below a tenth of an even spread's and half of the start's, or
    below a quarter of the start's and kNN lost five points;
    "dimensional": their variance has a rank below 3 (of what the loss sees), or below a fifth of the start's and the
    probes lost; "partial": fewer than half of the dimensions that had any variance still do; "prototype": assignments
    carry less than a hundredth of the possible information, or have less than a quarter of the possible entropy, and
    kNN gained less than five points. Else
    "healthy" where kNN or the linear probe gained a point over the untrained network and neither lost two, and
    "neither" in between.
    """
    end, last = seen.end, seen.assignments
    knn, linear = seen.knn[-2:].mean() - seen.knn[0], seen.linear[-1] - seen.linear[0]
    if last is not None and knn < 0.05:
        mean, entropy, _, most = last[-3:].mean(0)
        if mean < 0.25 * most or mean - entropy < 0.01 * most:
            return "prototype"
    if end["end_std"] < min(0.1, end["start_std"] / 2) or (end["end_std"] < end["start_std"] / 4 and knn < -0.05):
        return "complete"
    if end["end_alive"] < end["start_alive"] / 2:
        return "dimensional" if end["end_rank"] < 3 else "partial"
    if end["end_rank"] < 3 or (end["end_rank"] < end["start_rank"] / 5 and max(knn, linear) < 0):
        return "dimensional"
    if max(knn, linear) > 0.01 and min(knn, linear) > -0.02:
        return "healthy"
    return "neither"


@dataclass
class Said:
    """What the rules say of a run: the kind at the end, the kinds at every observation, the first flag and forecast."""

    kind: str
    kinds: list[str]
    flagged: int | None
    forecast: int | None
    wrong_forecasts: int = 0


def judge(seen: Seen, rules: Rules, places: tuple[str, ...] = ("projector",)) -> Said:
    kinds: list[str] = []
    forecast: int | None = None
    judges = {place: Judge(place, rules, place == "projector") for place in places if place in seen.looks}
    prototypes = None
    if seen.assignments is not None:
        prototypes = PrototypeJudge("prototypes", round(math.exp(seen.assignments[0, 3])))
    spoken = 0
    for t, look in enumerate(seen.looks["projector"]):
        verdict = judges["projector"].see(look)
        kind = verdict.kind
        if prototypes is not None and t % SPECTRUM_EVERY == 0:
            assert seen.assignments is not None
            prototypes.see(look.step, *seen.assignments[t][:3])
        if prototypes is not None and prototypes.verdict.kind != "healthy":
            kind = prototypes.verdict.kind
        kinds.append(kind)
        if verdict.forecast is not None and kind == "healthy":
            spoken += 1
            forecast = look.step if forecast is None else forecast
    flagged = next((EVERY * t for t, kind in enumerate(kinds) if kind != "healthy"), None)
    return Said(kinds[-1], kinds, flagged, forecast, spoken)


def deadline(seen: Seen) -> float:
    """When a flag is still in time: until kNN is two points below its start; a quarter of the run if it never rises."""
    if not (seen.knn > seen.knn[0] + 0.01).any():
        return seen.run.steps / 4
    fallen = seen.knn_step[seen.knn < seen.knn[0] - 0.02]
    begun = seen.run.steps / 3 if seen.run.cut else seen.run.steps / 2 if seen.run.late else 0.0
    fallen = fallen[fallen > begun]  # what was broken later
    return float(fallen[0]) if len(fallen) else math.inf
