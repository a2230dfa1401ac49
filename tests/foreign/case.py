"""How a configuration is written down: what is watched, with which arguments, and what is true of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.foreign.data import BATCH, Items
from tests.foreign.truth import Call

LIGHTNING, PYTORCH_LIGHTNING = "lightning.pytorch", "pytorch_lightning"
Views = Callable[[list[Tensor]], list[Tensor]]


@dataclass
class Built:
    """What a project brings: its module, what its loaders draw from, perhaps a DataModule."""

    module: Any
    train: Items
    val: Items | None = None
    datamodule: Any = None


@dataclass
class Operator:
    """Where the covariance operator is watched.

    Args:
        encoder: where the views enter.
        output: whose output counts.
        layers: small layers whose operators are compared.
        layout: what the axes of the output are.
        views: from the output's rows of each call to views; by default the case's.
        declared: arguments that the callback needs.
        again: outputs of all views on the twin, for where the step itself does not show them.
        value: whether a value must come, or a warning will do.
        samples: how many samples of the batch are used.
    """

    encoder: str
    output: str
    layers: Sequence[str]
    layout: str | Callable[[Tensor], Tensor] = "NC"
    views: Views | None = None
    declared: dict[str, Any] = field(default_factory=dict)
    again: Callable[[Any, Any], list[Tensor]] | None = None
    value: bool = True
    samples: int = 5


@dataclass
class Probed:
    """What the probes embed.

    Args:
        encoder: where the samples enter.
        features: the inner place whose output counts.
        bank: labelled samples to fit on.
        queries: labelled samples to classify.
        rows: from a module in eval mode and a batch of the loader to the features the probe should see.
        declared: further arguments.
        value: whether a value must come, or a warning will do.
    """

    encoder: str
    bank: Items
    queries: Items
    rows: Callable[[Any, Any], Tensor]
    features: str | None = None
    declared: dict[str, Any] = field(default_factory=dict)
    value: bool = True


@dataclass
class Case:
    """One configuration of somebody's module.

    Args:
        name: the test's id.
        build: makes it, the same each time from the same seed.
        features: the path watched.
        layout: what the axes of its output truly are.
        counts: which of its calls are views: those made with gradients, if nothing else is said.
        views: from the rows of these calls to views of the same samples.
        target: the path whose calls without gradients give further views, appended to `views`' input.
        declared: arguments that the watchers of features get; the case is tried without any as well.
        value: whether a declared watcher must give a value, or a warning will do.
        bare: "value" where the defaults must find it out, "either" where a warning will do, "none" where nothing
            may be logged, "skip" where the defaults mean something else.
        bare_features: another path for the trial without arguments.
        predictor: path of the predictor.
        predictor_keys: those of its quantities that are well defined here; all if empty.
        operator: where the covariance operator is watched.
        probed: what the probes embed.
        held_out: from the rows of a held-out batch's calls to its views; None: nothing is held out.
        package: whose Trainer runs it.
        needs: packages without which it is skipped.
        batch: samples a step.
        ranks: whether it trains the same at any number of ranks: no batch statistics, a loss that is a mean.
        verdict: what the collapse monitor must say at every step.
        says: a text that some warning must hold when the case is tried without arguments.
        slow: whether it belongs to the slow suite.
    """

    name: str
    build: Callable[[], Built]
    features: str = "projector"
    layout: str | Callable[[Tensor], Tensor] = "NC"
    counts: Callable[[list[Call]], list[Call]] = lambda calls: [call for call in calls if call.grad]
    views: Views = lambda rows: rows
    target: str | None = None
    declared: dict[str, Any] = field(default_factory=dict)
    value: bool = True
    bare: str = "value"
    bare_features: str | None = None
    predictor: str | None = None
    predictor_keys: frozenset[str] = frozenset()
    operator: Operator | None = None
    probed: Probed | None = None
    held_out: Views | None = None
    package: str = LIGHTNING
    needs: Sequence[str] = ()
    batch: int = BATCH
    ranks: bool = False
    verdict: float | None = None
    says: str = ""
    slow: bool = False
