"""What a collapse monitor finds, as plain data: for the log, the checkpoint, the summary, the report and a sweep."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Literal, get_args

Kind = Literal["healthy", "partial", "dimensional", "complete", "prototype"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Grade(IntEnum):
    """How bad it is; the value of ``collapse/verdict``."""

    HEALTHY = 0
    PARTIAL = 1
    DIMENSIONAL = 2
    COMPLETE = 3


GRADES: dict[str, Grade] = {
    "healthy": Grade.HEALTHY,
    "partial": Grade.PARTIAL,
    "dimensional": Grade.DIMENSIONAL,
    "complete": Grade.COMPLETE,
    "prototype": Grade.COMPLETE,  # assignments that say nothing of a sample are as good as a point
}


@dataclass(frozen=True)
class Evidence:
    """A number that a verdict rests on.

    Attributes:
        quantity: Its name: ``std``, ``rank``, ``alive``, ``noise``, ...
        value: What it is now.
        start: What it was when the run began.
        threshold: What it was compared with.

    Example:
        >>> str(Evidence("std", 0.08, 0.9, 0.15))
        'std 0.08 (0.9 at the start, threshold 0.15)'
    """

    quantity: str
    value: float
    start: float | None = None
    threshold: float | None = None

    def __str__(self) -> str:
        more = [f"{self.start:.3g} at the start"] if self.start is not None else []
        more += [f"threshold {self.threshold:.3g}"] if self.threshold is not None else []
        return f"{self.quantity} {self.value:.3g}" + (f" ({', '.join(more)})" if more else "")


@dataclass(frozen=True)
class Forecast:
    """A collapse to come, while every threshold still says healthy.

    Attributes:
        kind: Of what kind.
        step: When it is expected.
        earliest: The early end of what the past allows.
        latest: The late end; None where it is open.
        basis: "trend", or "dynamics": the predictor's modes against the boundary of the basin.

    Example:
        >>> str(Forecast("complete", 400, 300, 600, "trend"))
        'complete collapse expected about step 400 (300 to 600), from the trend'
    """

    kind: Kind
    step: int
    earliest: int
    latest: int | None
    basis: Literal["trend", "dynamics"]

    def __str__(self) -> str:
        until = f" to {self.latest}" if self.latest is not None else " or later"
        return f"{self.kind} collapse expected about step {self.step} ({self.earliest}{until}), from the {self.basis}"


@dataclass(frozen=True)
class PlaceVerdict:
    """What is true of one watched place.

    Attributes:
        place: Its dotted path.
        kind: "healthy", "partial", "dimensional", "complete" or "prototype".
        step: When it was looked at last.
        since: When the verdict turned to what it is; None while it never did.
        evidence: What it rests on.
        cause: What is likely behind it, as far as the evidence goes; may be empty.
        remedy: What to try; may be empty.
        forecast: A collapse to come, if one can be seen.
        main: Whether it is what the loss sees, which the whole verdict follows.

    Example:
        >>> PlaceVerdict("projector", "complete", step=120, since=100).grade
        <Grade.COMPLETE: 3>
    """

    place: str
    kind: Kind = "healthy"
    step: int = 0
    since: int | None = None
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    remedy: str = ""
    forecast: Forecast | None = None
    main: bool = True

    @property
    def grade(self) -> Grade:
        return GRADES[self.kind]

    def __str__(self) -> str:
        name = "healthy" if self.kind == "healthy" else f"{self.kind} collapse"
        words = f"{name} of {self.place!r} at step {self.step}" if self.grade else f"{self.place!r} is healthy"
        words += f": {', '.join(str(e) for e in self.evidence)}" if self.evidence else ""
        for more in (self.cause, self.remedy, str(self.forecast or "")):
            words += f"; {more}" if more else ""
        return words


@dataclass(frozen=True)
class Turn:
    """A change of the verdict: at which step, of which place, from which kind to which, and in words.

    Example:
        >>> Turn(100, "projector", "healthy", "complete").after
        'complete'
    """

    step: int
    place: str
    before: str
    after: str
    words: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a monitor finds of a run: one verdict for each watched place, those the loss sees first.

    Attributes:
        places: Those verdicts.
        turns: Every change so far, in order; forecasts are among them, as ``"forecast"``.
        stopped: The kind of collapse that ended the run; empty while none did.

    Example:
        >>> verdict = Verdict((PlaceVerdict("projector", "complete", 120, 100), PlaceVerdict("backbone", step=120)))
        >>> verdict.kind, int(verdict.grade), verdict.to_dict()["places"][0]["since"]
        ('complete', 3, 100)
        >>> Verdict.from_dict(verdict.to_dict()) == verdict
        True
    """

    places: tuple[PlaceVerdict, ...] = ()
    turns: tuple[Turn, ...] = field(default=())
    stopped: str = ""

    @property
    def worst(self) -> PlaceVerdict:
        """Of the places that the loss sees."""
        main = [place for place in self.places if place.main]
        return max(main, key=lambda place: place.grade) if main else PlaceVerdict("")

    @property
    def kind(self) -> Kind:
        return self.worst.kind

    @property
    def grade(self) -> Grade:
        return self.worst.grade

    @property
    def forecast(self) -> Forecast | None:
        """The first collapse to come, if one can be seen and none has been found."""
        seen = [place.forecast for place in self.places if place.forecast is not None]
        return min(seen, key=lambda forecast: forecast.step) if seen and not self.grade else None

    def __str__(self) -> str:
        if not self.grade:
            return "healthy" + (f"; {self.forecast}" if self.forecast else "")
        return "; ".join(str(place) for place in self.places if place.grade)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for checkpoints that load without unpickling."""
        places = [{**asdict(place), "grade": int(place.grade)} for place in self.places]
        for place in places:
            place["evidence"] = list(place["evidence"])
        forecast = None if self.forecast is None else asdict(self.forecast)
        return {
            "kind": self.kind,
            "grade": int(self.grade),
            "forecast": forecast,
            "places": places,
            "turns": [asdict(turn) for turn in self.turns],
            "stopped": self.stopped,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        places = []
        for place in data["places"]:
            known = {key: value for key, value in place.items() if key != "grade"}
            known["evidence"] = tuple(Evidence(**item) for item in known["evidence"])
            known["forecast"] = None if known["forecast"] is None else Forecast(**known["forecast"])
            places.append(PlaceVerdict(**known))
        return cls(tuple(places), tuple(Turn(**turn) for turn in data["turns"]), data["stopped"])
