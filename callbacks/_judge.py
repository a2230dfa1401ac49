"""The rules of the verdict: from what is seen of a place, observation by observation, to its kind of collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_ssl.callbacks.verdict import Evidence, Forecast, Kind, PlaceVerdict


@dataclass(frozen=True)
class Look:
    """What one observation shows of a place.

    Attributes:
        step: When.
        deviation: Root of the total variance of the unit features: 1 spread over the sphere, 0 one point.
        participation: Participation ratio of their covariance, not bounded by the batch.
        rank: Exponential of the entropy of their variance over directions, of the last few batches.
        alive: How many directions have any variance.
        limit: How many a batch can show: dimensions, rows, the width before the last linear layer.
        noise: The share of the variance that is between views of one sample; NaN where views are not known.
        plain: The participation ratio of the batch as it is.
        std: The mean over dimensions of the deviation in units of 1/√d; dead dimensions lower it, too.
        rows: Of how many rows rank and live dimensions are.
    """

    step: int
    deviation: float
    participation: float
    rank: float
    alive: float
    limit: float
    noise: float = math.nan
    plain: float = math.nan
    std: float = math.nan
    rows: float = math.inf


@dataclass(frozen=True)
class Rules:
    """The thresholds; where they come from is in docs/callbacks.md.

    Attributes:
        complete: Deviation below which features are one point.
        dimensional: Rank of the variance below which they are flat.
        lost: Deviation below which they are one point where views of one sample are as far apart as samples.
        noisy: Participation ratio below which they are flat in that case.
        noise: The share of the variance between views from which that is the case.
        partial: The share of the most live dimensions so far below which dimensions were lost.
        narrow: The share of the possible dimensions below which features that never opened up are too few.
        patience: Observations in a row before a verdict turns.
        opening: Observations that a network has for opening up.
    """

    complete: float = 0.15
    dimensional: float = 2.75
    lost: float = 0.17
    noisy: float = 2.4
    noise: float = 0.85
    partial: float = 0.5
    narrow: float = 0.25
    patience: int = 2
    opening: int = 12


@dataclass
class Judge:
    """The verdict on one place.

    Args:
        place: Its path.
        rules: The thresholds.
        main: Whether it is what the loss sees; elsewhere a small deviation is no collapse by itself.
    """

    place: str
    rules: Rules = field(default_factory=Rules)
    main: bool = True

    def __post_init__(self) -> None:
        self.verdict = PlaceVerdict(self.place, main=self.main)
        self.first: Look | None = None
        self.most_alive = 0.0
        self.count = 0
        self.recent: list[dict[str, Any]] = []  # the last observations, each with what it made suspect

    def see(self, look: Look, facts: Mapping[str, Any] | None = None) -> PlaceVerdict:
        """Take an observation, and say what is now true."""
        self.first = self.first or look
        self.count += 1
        self.most_alive = max(self.most_alive, look.alive)
        kind, evidence = self._suspect(look)
        self.recent = [*self.recent, {**asdict(look), "kind": kind}][-max(24, self.rules.patience) :]
        before = self.verdict
        if self._settled(kind, look):
            since = before.since if before.kind == kind else look.step
            cause, remedy = explain(kind, look, self.first, facts or {})
            self.verdict = PlaceVerdict(
                self.place, kind, look.step, since, tuple(evidence), cause, remedy, main=self.main
            )
        elif kind == "healthy" and before.kind != "healthy":
            self.verdict = PlaceVerdict(self.place, "healthy", look.step, look.step, main=self.main)
        else:
            self.verdict = replace(before, step=look.step)
        coming = self._trend(look) if self.main and self.verdict.kind == "healthy" else None
        self.verdict = replace(self.verdict, forecast=coming)
        return self.verdict

    def _trend(self, look: Look) -> Forecast | None:
        """A collapse to come if the last observations go on; None where they do not tell.

        A straight line through the logarithm of the deviation (or rank): steeper than six of its standard errors and
        not levelling off, fallen to half of the start or less, the threshold no further ahead than the run has come,
        and views of one sample no closer than other samples: a run that learns something brings them together.
        """
        assert self.first is not None
        last = self.recent[-TREND:]
        if len(last) < TREND or not look.noise > self.rules.noise:  # NaN, too
            return None
        ahead = float(max(self.count, 2 * TREND))
        step = (last[-1]["step"] - last[0]["step"]) / (TREND - 1)
        rules = self.rules
        for kind, name, threshold in (
            ("complete", "deviation", rules.lost),
            ("dimensional", "rank", rules.dimensional),
        ):
            now, start = getattr(look, name), getattr(self.first, name)
            if not threshold < now < start / 2:
                continue
            curve = [math.log(max(seen[name], 1e-12)) for seen in last]
            slope, error = _line(curve)
            if slope > -6 * error or slope >= -1e-9 or _line(curve[TREND // 2 :])[0] > 0.8 * slope:
                continue
            needed = math.log(now / threshold)
            when, soon, late = needed / -slope, needed / (-slope + 2 * error), needed / (-slope - 2 * error)
            if when <= ahead:
                at, earliest, latest = (look.step + round(step * x) for x in (when, soon, late))
                return Forecast(kind, at, earliest, latest, "trend")  # type: ignore[arg-type]
        return None

    def _suspect(self, look: Look) -> tuple[Kind, list[Evidence]]:
        assert self.first is not None
        rules, first = self.rules, self.first
        complete = rules.complete if self.main else rules.complete / 10
        point = max(min(complete, first.deviation / 2), complete / 20)
        if look.deviation < point:
            return "complete", [Evidence("deviation", look.deviation, first.deviation, point)]
        noisy = look.noise > rules.noise
        lost = min(rules.lost, first.deviation / 2)
        if self.main and noisy and look.deviation < lost:
            return "complete", [
                Evidence("deviation", look.deviation, first.deviation, lost),
                Evidence("noise", look.noise, first.noise, rules.noise),
            ]
        # So few rows or dimensions have no more: that is not the network's doing.
        flat = min(rules.dimensional, look.limit / 2)
        if look.rank < flat:
            return "dimensional", [Evidence("rank", look.rank, first.rank, flat)]
        if noisy and look.participation < min(rules.noisy, look.limit / 2):
            return "dimensional", [
                Evidence("participation", look.participation, first.participation, rules.noisy),
                Evidence("noise", look.noise, first.noise, rules.noise),
            ]
        half = rules.partial * self.most_alive
        if look.alive < half and look.rows > self.most_alive:  # fewer rows would show fewer
            return "partial", [Evidence("alive", look.alive, first.alive, half)]
        if self.count > rules.opening and look.alive < rules.narrow * look.limit and not self._opens(look):
            return "partial", [Evidence("alive", look.alive, first.alive, rules.narrow * look.limit)]
        return "healthy", []

    def _opens(self, look: Look) -> bool:
        """Whether rank or deviation has been growing: a network may be born with few dimensions and open up."""
        if len(self.recent) < 5:
            return False
        before = self.recent[-5]
        return look.rank > 1.05 * before["rank"] or look.deviation > 1.1 * before["deviation"]

    def _settled(self, kind: Kind, look: Look) -> bool:
        """Whether what is suspected has been so for long enough, and is not about to pass."""
        if kind == "healthy":
            return False
        last = self.recent[-self.rules.patience :]
        if len(last) < self.rules.patience or any(seen["kind"] == "healthy" for seen in last):
            return False
        # A slow start levels off and opens up again; a collapse goes on.
        if kind == "complete":
            change = look.deviation / max(self.recent[-2:][0]["deviation"], 1e-12)
            complete = self.rules.complete if self.main else self.rules.complete / 10
            sure = look.deviation < complete / 2 or look.noise > self.rules.noise
            return change <= (1.1 if sure else 0.9)
        if kind == "dimensional":
            noise = sum(seen["noise"] for seen in self.recent[-4:]) / len(self.recent[-4:])
            # While views come together, a young network may be flat for a while, and open up.
            if noise < self.rules.noise and (self.count <= self.rules.opening or self._opens(look)):
                return False
            return look.rank <= 1.1 * self.recent[-2:][0]["rank"]
        return True

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        first = None if self.first is None else asdict(self.first)
        return {"first": first, "most_alive": self.most_alive, "count": self.count, "recent": list(self.recent)}

    def restore(self, state: dict[str, Any], verdict: PlaceVerdict) -> None:
        self.first = None if state["first"] is None else Look(**state["first"])
        self.most_alive, self.count = state["most_alive"], state["count"]
        self.recent, self.verdict = list(state["recent"]), verdict


TREND = 8  # observations that a trend is taken of


def _line(values: list[float]) -> tuple[float, float]:
    """Slope of the straight line through equally spaced values, and its standard error."""
    n = len(values)
    times = [i - (n - 1) / 2 for i in range(n)]
    square = sum(t * t for t in times)
    mean = sum(values) / n
    slope = sum(t * y for t, y in zip(times, values, strict=True)) / square
    rest = sum((y - mean - slope * t) ** 2 for t, y in zip(times, values, strict=True))
    return slope, math.sqrt(rest / (n - 2) / square)


def explain(kind: Kind, look: Look, first: Look, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The likely cause in words and a remedy, as far as the evidence goes."""
    if facts.get("weights", 1.0) < 0.3:
        decay = f" ({facts['decay']:g})" if facts.get("decay") else ""
        return (
            f"the weights shrank to {facts['weights']:.2g} of their size at the start: weight decay{decay} is likely "
            "stronger than the gradient",
            "lower the weight decay",
        )
    if facts.get("rate", 1.0) > 3:
        return f"the learning rate is {facts['rate']:.3g} times what it was", "lower the learning rate, or warm it up"
    if kind == "partial":
        return (
            "dimensions were lost while the others go on",
            "look at the layer before for dead units, and at what changed at that step",
        )
    if facts.get("target") and facts.get("predictor") is False:
        return "there is a target network and no predictor before the loss", "put a predictor on the online branch"
    if look.noise > 0.9:
        return (
            "views of one sample are as far apart as different samples",
            "look for a missing predictor, stop-gradient or negatives; check that views of one sample are paired, "
            "and that the augmentation leaves something in common",
        )
    if kind == "dimensional":
        return (
            "views agree, along a few directions only",
            "look for a missing stop-gradient, a missing or too weak decorrelation or repulsion, an extreme "
            "temperature, a batch too small for the dimension",
        )
    return "", "look for a missing predictor, stop-gradient or negatives"


def facts_of(trainer: Any, pl_module: nn.Module, features: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the module and its optimizer tell of a collapse's cause; what it was at the start is kept."""
    names = {name.rpartition(".")[2]: part for name, part in pl_module.named_modules()}
    heads = [part for name, part in names.items() if name in ("predictor", "prediction_head", "prediction")]
    place = pl_module.get_submodule(features)
    norms = [p.detach().square().sum() for p in place.parameters() if p.requires_grad]
    size = float(torch.stack(norms).sum().sqrt()) if norms else 0.0
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rate = max((float(group.get("lr", 0.0)) for group in groups), default=0.0)
    facts = dict(known) or {"first_size": size, "most_rate": rate, "raised": 1.0}
    if facts["most_rate"] and rate > 3 * facts["most_rate"]:
        facts["raised"] = rate / facts["most_rate"]
    facts["most_rate"] = max(facts["most_rate"], rate)
    return {
        **facts,
        "target": any(name in names for name in ("target", "teacher", "momentum_encoder", "backbone_momentum")),
        "predictor": any(True for head in heads for _ in head.parameters()) if heads else None,
        "weights": size / facts["first_size"] if facts["first_size"] else 1.0,
        "decay": max((float(group.get("weight_decay", 0.0)) for group in groups), default=0.0),
        "rate": facts["raised"],
    }


@dataclass
class PrototypeJudge:
    """The verdict on how a softmax over K prototypes is used.

    Args:
        place: The path of the layer that scores them.
        number: K.
        patience: Observations in a row before the verdict turns.
    """

    place: str
    number: int
    patience: int = 2

    def __post_init__(self) -> None:
        self.verdict = PlaceVerdict(self.place)
        self.first: list[float] | None = None
        self.recent: list[list[float]] = []

    def see(self, step: int, mean_entropy: float, entropy: float, used: float) -> PlaceVerdict:
        """Take an observation: entropy of the mean assignment, mean entropy of an assignment, share in use."""
        most = math.log(self.number)
        self.first = self.first or [mean_entropy, entropy, used]
        self.recent = [*self.recent, [mean_entropy, entropy, used]][-max(8, self.patience) :]
        last = self.recent[-self.patience :]
        # One prototype takes all; or every assignment is the mean one, whatever the sample.
        one = all(m < ONE_PROTOTYPE * most for m, _, _ in last)
        same = all(m - h < SAME_ASSIGNMENT * most for m, h, _ in last) and len(self.recent) > 3
        kind: Kind = "prototype" if len(last) == self.patience and (one or same) else "healthy"
        if kind == self.verdict.kind:
            self.verdict = replace(self.verdict, step=step)
        else:
            self.verdict = PlaceVerdict(self.place, kind, step, step, *self._words(one, most))
            self.verdict = self.verdict if kind != "healthy" else PlaceVerdict(self.place, kind, step, step)
        return self.verdict

    def _words(self, one: bool, most: float) -> tuple[tuple[Evidence, ...], str, str]:
        assert self.first is not None
        m, h, used = self.recent[-1]
        if one:
            evidence = Evidence("mean_assignment_entropy", m, self.first[0], ONE_PROTOTYPE * most)
            cause = "nearly all samples are assigned to the same prototypes"
            return (
                (evidence, Evidence("used", used, self.first[2])),
                cause,
                "centre the teacher's scores, or balance them",
            )
        gain = Evidence("assignment_information", m - h, self.first[0] - self.first[1], SAME_ASSIGNMENT * most)
        cause = "every sample is assigned alike: the assignments say nothing of the sample"
        return (
            (gain, Evidence("assignment_entropy", h, self.first[1])),
            cause,
            "lower the teacher's temperature (sharpen)",
        )

    def logged(self) -> dict[str, float]:
        names = ("mean_assignment_entropy", "assignment_entropy", "prototypes_used")
        return dict(zip(names, self.recent[-1], strict=True)) if self.recent else {}

    def state(self) -> dict[str, Any]:
        return {"place": self.place, "number": self.number, "first": self.first, "recent": self.recent}

    @classmethod
    def restored(cls, state: dict[str, Any], found: Mapping[str, PlaceVerdict]) -> PrototypeJudge:
        judge = cls(state["place"], state["number"])
        judge.first, judge.recent = state["first"], [list(seen) for seen in state["recent"]]
        judge.verdict = found[judge.place]
        return judge


ONE_PROTOTYPE = 0.5  # of ln K: what the entropy of the mean assignment falls below
SAME_ASSIGNMENT = 0.0005  # of ln K: what an assignment tells of its sample, at least
