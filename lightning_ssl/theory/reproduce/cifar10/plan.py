"""The file of contrasts: what is compared, in which direction, with which settings, seeds and statistics."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from typing import Any

import yaml

FILE = "cifar10_contrasts.yaml"


@dataclass(frozen=True)
class Contrast:
    """Two settings and what the paper says of them.

    Attributes:
        name: Its name in the file.
        paper: The paper's table.
        claim: What it says.
        first: The setting that the paper has ahead (or, with ``direction: equal``, the one of interest).
        second: The setting it is compared with.
        metric: A key of a run's result.
        direction: "greater", "less", or "equal" within `margin`.
        margin: The difference that counts as none, for "equal".
        published: The paper's two figures, where it has them.
        settings: For a rank correlation: the settings over which it goes, instead of the two.
        against: For a rank correlation: the other metric.
    """

    name: str
    paper: str
    claim: str
    first: str = ""
    second: str = ""
    metric: str = "linear"
    direction: str = "greater"
    margin: float = 0.0
    published: tuple[float, float] | None = None
    settings: tuple[str, ...] = ()
    against: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The settings it needs."""
        return self.settings or (self.first, self.second)


@dataclass(frozen=True)
class Plan:
    """The whole file, for one size.

    Attributes:
        settings: Of each setting the model, as in a config file, and its own sizes.
        contrasts: The contrasts by name.
        seeds: Seeds of every setting.
        size: Images, epochs, batch size and the like.
        fingerprint: Of the file's content: results of another file are never mixed with these.
    """

    settings: Mapping[str, Mapping[str, Any]]
    contrasts: Mapping[str, Contrast]
    seeds: tuple[int, ...]
    size: Mapping[str, Any]
    fingerprint: str = ""
    text: str = field(default="", repr=False)

    def contrast(self, name: str) -> Contrast:
        """A contrast of the file; any other is refused."""
        if name not in self.contrasts:
            raise ValueError(
                f"`contrast` must be one of the registered ones, got {name!r}; {FILE} was written before the test "
                f"images were used and is not added to: {', '.join(self.contrasts)}"
            )
        return self.contrasts[name]

    def setting(self, name: str) -> Mapping[str, Any]:
        """A setting of the file; any other is refused."""
        if name not in self.settings:
            close = difflib.get_close_matches(name, self.settings, n=1, cutoff=0.4)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"`setting` must be one of {FILE}, got {name!r}{hint}; known: {', '.join(self.settings)}")
        return self.settings[name]


def read(full: bool = False, pilot: bool = False, text: str | None = None) -> Plan:
    """Read the file of contrasts.

    Args:
        full: The published size.
        pilot: The seeds and the held-out part of the training images on which settings are chosen.
        text: Another content, for tests.
    """
    if text is None:
        text = (files("lightning_ssl.configs") / FILE).read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    settings = {name: _setting(entry, full) for name, entry in content["settings"].items()}
    contrasts = {name: _contrast(name, entry) for name, entry in content["contrasts"].items()}
    size = content["full" if full else "small"]
    seeds = content["pilot"]["seeds"] if pilot else content["seeds"]
    size = {**size, "held_out": content["pilot"]["held_out"] if pilot else 0}
    plan = Plan(settings, contrasts, tuple(seeds), size, sha256(text.encode()).hexdigest()[:12], text)
    for contrast in contrasts.values():
        for name in contrast.names:
            plan.setting(name)
        if contrast.direction not in ("greater", "less", "equal"):
            raise ValueError(f"`direction` must be greater, less or equal, got {contrast.direction!r}")
    return plan


def _contrast(name: str, entry: Mapping[str, Any]) -> Contrast:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Contrast(name, **fields)


def _setting(entry: Mapping[str, Any], full: bool) -> dict[str, Any]:
    """The model as a config has it, and what of the size this setting has for itself.

    ``full`` in an entry is laid over the arguments of the small size, but for those that it sets to null; ``size`` and
    ``full_size`` over those of the file.
    """
    arguments = {**entry["init_args"], **(entry.get("full", {}) if full else {})}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    model = {"class_path": f"lightning_ssl.methods.{entry['method']}", "init_args": arguments}
    return {"model": model, "size": {**entry.get("size", {}), **(entry.get("full_size", {}) if full else {})}}
