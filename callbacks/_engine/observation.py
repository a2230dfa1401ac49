"""One trainer, one observation: whoever asks for a place at a step gets the same record, exchanged once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ssl.callbacks._engine.layout import Layout, puts_sequences_first, rows_of, settle
from lightning_ssl.callbacks._engine.pair import Declared, Evidence, Reading, gather_evidence, sample_rows
from lightning_ssl.callbacks._engine.pair import settle as settle_views
from lightning_ssl.callbacks._engine.places import find_module
from lightning_ssl.callbacks._engine.record import Call, Place, Recorder, first_tensor, leading_sizes
from lightning_ssl.distributed import deal, exchange


class Spec(NamedTuple):
    """A place, and what is declared of it; those who agree in all of it share one exchange."""

    path: str
    argument: str = "features"
    layout: Layout | None = None
    declared: Declared = Declared()
    target: str | None = None
    grad: bool = True  # False: a target network's place, whose calls without gradients are its views


@dataclass
class Seen:
    """The rows of all ranks, in the order in which samplers deal samples.

    Attributes:
        rows: Features of all views, ``[M, d]``.
        views: The same by sample and view, ``[N, V, d]``; None in doubt.
        inputs: What entered with each of `rows`, if asked for.
        doubt: Why there are no views, for people.
    """

    rows: Tensor
    views: Tensor | None
    inputs: Tensor | None = None
    doubt: str = ""


class Observatory:
    """What one trainer's steps showed."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.exchanges = 0
        self.settled: dict[tuple[Spec, str], Reading] = {}
        self._layouts: dict[tuple[str, Layout | None, str], str] = {}
        self._asking: set[int] = set()
        self._step: Hashable = None
        self.batch: Any = None
        self._stage = ""
        self._scouting = False
        self._root: nn.Module | None = None
        self._places: dict[str, Place] | None = None
        self._joined: dict[Hashable, Seen | Exception | None] = {}
        self._held: dict[Spec, list[dict[str, Any]]] = {}
        self._failed: dict[Spec, Exception] = {}

    # A step ---------------------------------------------------------------------------------------------------------

    def begin(self, who: object, root: nn.Module, stage: str, step: Hashable, batch: Any) -> None:
        """Somebody wants to see the batch about to run; those who ask for the same one share it."""
        if self._step != (stage, step):
            self.clear()
            self._step, self._stage, self.batch, self._root = (stage, step), stage, batch, root
        self._asking.add(id(who))

    def want(self, spec: Spec, inputs: bool = False, moments: bool = False) -> None:
        assert self._root is not None
        first = (spec, self._stage) not in self.settled and not callable(spec.declared.pairing)
        unknown = spec.layout is None and (spec.path, None, self._stage) not in self._layouts
        module = find_module(self._root, spec.path, spec.argument)
        self.recorder.want(spec.path, module, inputs or first, moments)
        if spec.target is not None:
            self.recorder.want(spec.target, find_module(self._root, spec.target, "target"), inputs or first)
        if unknown and not self._scouting:
            self._scouting = True
            self.recorder.scout(self._root)

    def called_inside(self, path: str) -> list[str]:
        """The outermost parts of a place that were called in a step that was scouted."""
        return self.recorder.layouts.called(path)

    def end(self, who: object) -> None:
        """Nobody keeps what all have seen."""
        self._asking.discard(id(who))
        if not self._asking:
            self.clear()

    def clear(self) -> None:
        self.recorder.stop()
        self._asking, self._step, self.batch, self._places = set(), None, None, None
        self._root, self._scouting, self._joined = None, False, {}

    @property
    def places(self) -> dict[str, Place]:
        """What the step did; the first who asks takes the hooks off."""
        if self._places is None:
            self._places = self.recorder.stop()
        return self._places

    def rows(self, spec: Spec, device: torch.device, ranks: int) -> Seen | None:
        """Collective where there are several ranks: the place's rows of all of them; None where it was not called."""
        if spec not in self._joined:
            problem: Exception | None = None
            mine: list[dict[str, Any]] = []
            try:
                mine = [part] if (part := self._own(spec)) is not None else []
            except Exception as error:
                problem = error
            self._joined[spec] = self._join(spec, self._stage, mine, problem, device, ranks)
        return _raised(self._joined[spec])

    # Held-out data: kept batch by batch, exchanged once ------------------------------------------------------------

    def hold(self, spec: Spec, own: tuple[int, int] | None) -> None:
        """Keep this rank's rows of an evaluation batch; `own`: of so many samples, so many are no repetitions."""
        if ("held", spec) in self._joined:
            return
        self._joined["held", spec] = None
        try:
            part = self._own(spec)
            if part is not None:
                self._held.setdefault(spec, []).append({**part, "own": own})
        except Exception as error:
            self._failed.setdefault(spec, error)

    def held_rows(self, spec: Spec, stage: str, device: torch.device, ranks: int) -> Seen | None:
        """Collective: all that was held of a place, by all ranks."""
        key = ("all", spec)
        if key not in self._joined:
            mine, problem = self._held.pop(spec, []), self._failed.pop(spec, None)
            self._joined[key] = self._join(spec, stage, mine, problem, device, ranks)
        return _raised(self._joined[key])

    def begin_holding(self, who: object) -> None:
        """Somebody wants to see an evaluation."""
        if not self._asking:
            self.clear()
            self._held, self._failed = {}, {}
        self._asking.add(id(who))

    def begin_batch(self, who: object, root: nn.Module, stage: str, step: Hashable, batch: Any) -> None:
        """An evaluation batch is about to run."""
        if self._step != (stage, step):
            self.recorder.stop()
            self._step, self._stage, self.batch, self._root = (stage, step), stage, batch, root
            self._places, self._scouting, self._joined = None, False, {}

    # From calls to rows ---------------------------------------------------------------------------------------------

    def _own(self, spec: Spec) -> dict[str, Any] | None:
        """This rank's rows, and what tells how views lie in them; without collectives."""
        place = self.places[spec.path]
        calls = place.views() if self._stage == "train" and spec.grad else place.calls
        calls = [call for call in calls if call.left is not None and call.left.ndim and call.left.numel()]
        doubt = self._stage == "train" and place.in_doubt() and spec.declared.pairing is None
        online = len(calls)
        if spec.target is not None and online == 1:
            calls = calls + [call for call in self.places[spec.target].calls if call.left is not None]
        if not calls:
            return None
        rows = [self.rows_of(call, spec) for call in calls]
        entered = [call.entered for call in calls]
        part: dict[str, Any] = {"rows": torch.cat(rows), "doubt": doubt}
        part["evidence"] = gather_evidence(entered, [len(x) for x in rows], self.batch, spec.declared, online)
        if place.inputs and online == len(calls):
            inputs = [x.flatten(1) for x in entered if x is not None and x.ndim > 1]
            if sum(len(x) for x in inputs) == len(part["rows"]) and len({x.shape[1] for x in inputs}) == 1:
                part["inputs"] = torch.cat(inputs)
        return part

    def reader(self, spec: Spec) -> Callable[[Any], Tensor]:
        """From what leaves a place to rows, as it was settled for training."""
        if callable(spec.layout):
            return spec.layout
        layout = self._layouts.get((spec.path, spec.layout, "train"), spec.layout or "NC")

        def read(output: Any) -> Tensor:
            x = first_tensor(output)
            assert x is not None
            return rows_of(x, layout)

        return read

    def rows_of(self, call: Call, spec: Spec) -> Tensor:
        """What left one call of a place, as rows."""
        x = call.left
        assert x is not None and self._root is not None
        if callable(spec.layout):
            rows = spec.layout(x if isinstance(call.output, Tensor) else call.output)
            if not isinstance(rows, Tensor) or rows.ndim != 2:
                raise ValueError(f"`layout` must return rows [N, d], got {getattr(rows, 'shape', type(rows))}")
            return rows
        key = spec.path, spec.layout, self._stage
        if key not in self._layouts or len(self._layouts[key]) != max(2, x.ndim):
            layout = spec.layout
            if layout is None:
                sequences = puts_sequences_first(self._root)
                layout = settle(x, call.layout, leading_sizes(self.batch), sequences, call.entered)
            elif len(layout) != x.ndim:
                raise ValueError(f"`layout={layout!r}` has {len(layout)} axes, features have shape {tuple(x.shape)}")
            self._layouts[key] = layout
        return rows_of(x, self._layouts[key])

    def _join(
        self,
        spec: Spec,
        stage: str,
        mine: list[dict[str, Any]],
        problem: Exception | None,
        device: torch.device,
        ranks: int,
    ) -> Seen | Exception | None:
        """Collective: pair all ranks' rows, the same way on each; what goes wrong is returned, the same on each."""
        try:
            if ranks > 1:
                self.exchanges += 1
                parts = exchange(mine, device, problem)
            elif problem is not None:
                raise problem
            else:
                parts = [mine]
            return self._paired(spec, stage, [part for part in parts if part])
        except torch.distributed.DistError:
            raise
        except Exception as error:
            return error

    def _paired(self, spec: Spec, stage: str, ranks: list[list[dict[str, Any]]]) -> Seen | None:
        every = [batch for batches in ranks for batch in batches]
        if not every:
            return None
        inputs = all("inputs" in batch for batch in every)
        try:
            if any(batch["doubt"] for batch in every):
                raise ValueError(
                    "of three or more calls one only has a part in the loss: it cannot be told which are views; "
                    "pass `pairing=`, a function that takes the views from the list of calls"
                )
            reading = self.settled.get((spec, stage))
            if reading is None:
                reading = settle_views([Evidence(*batch["evidence"]) for batch in every], spec.declared)
            assert reading is not None
            views, entered = (
                deal([torch.cat([_samples(batch, reading, spec, name) for batch in batches]) for batches in ranks])
                if name == "rows" or inputs
                else None
                for name in ("rows", "inputs")
            )
        except ValueError as error:
            if stage != "train":
                raise
            flat, entered = (
                deal([torch.cat([batch[name] for batch in batches]) for batches in ranks])
                if name == "rows" or inputs
                else None
                for name in ("rows", "inputs")
            )
            assert flat is not None
            return Seen(flat, None, entered, str(error))
        assert views is not None
        self.settled[spec, stage] = reading
        return Seen(views.flatten(0, 1), views, None if entered is None else entered.flatten(0, 1))


def _samples(batch: dict[str, Any], reading: Reading, spec: Spec, name: str) -> Tensor:
    """A batch's rows by sample and view, ``[N, V, d]``, without repetitions."""
    rows: Tensor = batch[name]
    ids = sample_rows(reading, Evidence(*batch["evidence"]).rows, spec.declared, rows.device)
    samples, own = batch.get("own") or (-1, 0)
    return rows[(ids[:own] if len(ids) == samples else ids).to(rows.device)]


def _raised(result: Seen | Exception | None) -> Seen | None:
    if isinstance(result, Exception):
        raise result
    return result


_observatories: weakref.WeakKeyDictionary[Any, Observatory] = weakref.WeakKeyDictionary()


def observatory(trainer: Any) -> Observatory:
    """The observatory that all callbacks of a trainer share."""
    return _observatories.setdefault(trainer, Observatory())
