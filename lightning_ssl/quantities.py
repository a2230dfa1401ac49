"""What is logged, declared once: summary, report, dashboard and documentation are made from these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

SECTIONS = {
    "learning": "What the features are worth, and the loss.",
    "geometry": "Where the features lie.",
    "predictor": "Whether the predictor's eigenspaces follow the features'.",
    "operator": "The covariance operator, layer by layer.",
    "health": "Signs of collapse.",
}


@dataclass(frozen=True)
class Quantity:
    """What a callback logs, said once: summary, report, dashboard and documentation are made from it.

    Attributes:
        key: The key without an instance's name: ``train/uniformity``; ``*`` stands for any stage or layer.
        title: What it is, in a few words.
        read: One sentence on how to read it.
        section: Where it belongs: learning, geometry, predictor, operator or health.
        better: Which way is better, if one is.
        healthy: Where healthy runs lie, in words; empty where that depends.
        unit: Its unit; empty for a plain number.
        form: How it is printed.
        headline: Whether the summary at the end of a run shows it.
        best: Whether its best value over a run means something; of a geometry it does not, a collapse may be "best".
        collapsed: Where collapsed runs lie, in words; empty where it does not tell.

    Example:
        >>> median = Quantity("*/median_norm", "median feature norm", "Falls if weight decay is too strong.")
        >>> median.matches("train/median_norm")
        True
    """

    key: str
    title: str
    read: str
    section: Literal["learning", "geometry", "predictor", "operator", "health"] = "geometry"
    better: Literal["higher", "lower", ""] = ""
    healthy: str = ""
    unit: str = ""
    form: str = "{:.3g}"
    headline: bool = False
    best: bool = False
    collapsed: str = ""

    def matches(self, key: str) -> bool:
        """Whether a logged key is this quantity's, whatever the instance's name in it.

        Example:
            >>> Quantity("*/uniformity", "uniformity", "").matches("val/projector/uniformity")
            True
        """
        mine, its = self.key.split("/"), key.split("/")
        return len(its) >= len(mine) and fnmatch(its[0], mine[0]) and fnmatch(its[-1], mine[-1])


LOSSES = (
    Quantity(
        "*/loss",
        "training loss",
        "What is minimised; of itself it does not tell whether the features are worth anything.",
        "learning",
        better="lower",
        form="{:.3f}",
        headline=True,
        best=True,
    ),
    Quantity("*/*_loss", "a part of the loss", "One of the terms that are minimised.", "learning", "lower", best=True),
)


def declared(owners: Iterable[Any]) -> tuple[Quantity, ...]:
    """All that some callbacks and modules declare, each once, in the order of the sections; losses are known."""
    found = [*LOSSES, *(quantity for owner in owners for quantity in getattr(owner, "quantities", ()))]
    return tuple(sorted(dict.fromkeys(found), key=lambda quantity: list(SECTIONS).index(quantity.section)))


def find(key: str, quantities: Iterable[Quantity]) -> Quantity | None:
    """The quantity that a logged key is of, if one was declared."""
    return next((quantity for quantity in quantities if quantity.matches(key)), None)
