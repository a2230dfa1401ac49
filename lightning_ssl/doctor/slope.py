"""Whether a gradient is the slope of the loss: what no backward pass is needed for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.doctor.calls import Held
from lightning_ssl.doctor.isolate import SEED, Isolation, seed_all
from lightning_ssl.doctor.steady import Steady
from lightning_ssl.doctor.trial import Fit, Patient, hold_norms, sampled, still_dropout

Settings = Callable[[Patient, int, int], dict[str, Any]]


def slope(
    patient: Patient, isolation: Isolation, shares: list[Any], direction: dict[str, Tensor], join: Settings
) -> float | None:
    """The slope of the ranks' mean loss along a direction, from two losses; None if it could not be measured.

    Args:
        patient: What is examined.
        isolation: How processes run.
        shares: What each rank trains on; one process if there is one.
        direction: By parameter, what :func:`sampled` gave of it.
        join: Makes a process one of several, and returns the Trainer's settings for that.
    """
    outcomes = isolation.several(_slope, len(shares), patient, shares, direction, join)
    values = [outcome.value for outcome in outcomes]
    return None if any(value is None for value in values) else sum(values) / len(values)


def _slope(
    rank: int,
    note: Callable[[Any], None],
    patient: Patient,
    shares: list[Any],
    direction: dict[str, Tensor],
    join: Settings,
) -> float | None:
    module: Any = patient.module
    hold_norms(module, patient.moments)
    still_dropout(module)
    settings: dict[str, Any] = {"precision": "64-true"}
    if len(shares) > 1:
        settings.update(join(patient, rank, len(shares)))
    found: list[float] = []

    def instead(step: Any, batch: Any, args: Any, kwargs: Any) -> Any:
        held = Held(module)
        size = sum(float(sampled(p).square().sum()) for n, p in module.named_parameters() if n in direction) ** 0.5
        length = sum(float(d.square().sum()) for d in direction.values()) ** 0.5
        small = 1e-5 * size / max(length, 1e-300)
        for sign in (1.0, -1.0):
            with torch.no_grad():
                for name, p in module.named_parameters():
                    if name in direction:
                        flat = p.detach().view(-1)
                        flat[:: max(1, len(flat) // 4096)] += sign * small * direction[name].to(flat)
            seed_all(SEED)
            with Steady():
                value = step(fit.cast(batch), *args, **kwargs)
            value = value.get("loss") if isinstance(value, dict) else value
            if isinstance(value, Tensor):
                found.append(float(value.detach()) / (2 * sign * small))
            held.restore()
        return step(batch, *args, **kwargs)

    fit = Fit(patient, 1, [shares[rank]], instead=instead, settings=settings)
    fit.run()
    return sum(found) if len(found) == 2 and module.automatic_optimization else None
