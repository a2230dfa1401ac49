"""A forecast from the theory of linear predictors: the measured modes, carried on by the flow they obey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl.callbacks.eigenspace_alignment import linear_weight
from lightning_ssl.callbacks.verdict import Forecast
from lightning_ssl.functional import eigenspace_alignment, second_moment
from lightning_ssl.functional.modes import ModeDynamics

LEFT = 0.05  # of the features' strength: below it they have collapsed
MOST_DIMENSIONS = 512  # that modes are taken of


@dataclass(frozen=True)
class Rates:
    """What the optimizer says: step size (with momentum's gain), alpha_p, and the two weight decays."""

    step: float
    alpha_p: float
    eta: float
    eta_p: float


def rates_of(trainer: Any, pl_module: nn.Module, predictor: nn.Module) -> Rates | None:
    """The rates, where the theory holds: plain SGD, and a loss on outputs that are not normalised (`normalize`)."""
    if getattr(pl_module, "normalize", None) is not False or len(trainer.optimizers) != 1:
        return None
    optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
    if type(optimizer) is not torch.optim.SGD:
        return None
    own = {id(p) for p in predictor.parameters()}
    mine = [group for group in optimizer.param_groups if any(id(p) in own for p in group["params"])]
    rest = [group for group in optimizer.param_groups if any(id(p) not in own for p in group["params"])]
    if not mine or not rest or not rest[0]["lr"] > 0 or any(group["lr"] != rest[0]["lr"] for group in rest):
        return None
    gain = 1 / (1 - rest[0]["momentum"])
    scale = mine[0]["lr"] / rest[0]["lr"]
    return Rates(rest[0]["lr"] * gain, scale, rest[0]["weight_decay"], mine[0]["weight_decay"] * scale)


def modes_of(predictor: nn.Module, inputs: Tensor, views: int) -> tuple[Tensor, Tensor, float] | None:
    """Strengths s_j and predictor values p_j of the modes, and the augmentation's variance relative to the data's."""
    weight = linear_weight(predictor)
    if weight is None or weight.shape[0] != weight.shape[1] or inputs.shape[1] > MOST_DIMENSIONS or views < 2:
        return None
    found = eigenspace_alignment(second_moment(inputs), weight.detach().to(inputs))
    pairs = inputs.view(-1, views, inputs.shape[1])
    within = pairs.var(dim=1).sum(dim=1).mean()
    between = (inputs.square().sum(dim=1).mean() - within).clamp_min(1e-12)
    return found.eigenvalues, found.predictor_values, float(within / between)


def carried_on(
    strengths: Tensor, predictor_values: Tensor, sigma2: float, rates: Rates, step: int, steps: int
) -> Forecast | None:
    """Where the modes end if the flow goes on for `steps`; None unless nearly all of their strength is lost.

    Each mode follows DirectPred's Eqs. 11-12 with tau = 1 from its measured (p_j, s_j): below the boundary of the basin
    of attraction it decays. The early and the late end are those of predictor values a tenth lower and higher.
    """
    flow = ModeDynamics(1 + sigma2, 1.0, rates.alpha_p, None, rates.eta, rates.eta_p)
    times = torch.linspace(0, rates.step * steps, 65, dtype=torch.float64)
    s = (strengths.cpu().double() / (1 + sigma2)).clamp_min(0)
    p = predictor_values.cpu().double()
    when: list[int | None] = []
    for factor in (1.0, 0.9, 1.1):
        total = flow.solve(factor * p, s, times, freeze_tau=True).s.sum(dim=1)
        gone = (total < LEFT * total[0]).nonzero()
        when.append(step + round(float(times[gone[0, 0]]) / rates.step) if len(gone) else None)
    if when[0] is None or when[1] is None:
        return None
    return Forecast("complete", when[0], min(when[0], when[1]), when[2], "dynamics")
