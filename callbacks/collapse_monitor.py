"""A verdict on collapse while there is time to stop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_ssl.callbacks._dynamics import carried_on, modes_of, rates_of
from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.observation import Observatory, Seen, Spec, observatory
from lightning_ssl.callbacks._engine.pair import Pairing
from lightning_ssl.callbacks._engine.places import check_path
from lightning_ssl.callbacks._engine.ranks import ranks_of
from lightning_ssl.callbacks._engine.report import alert, write_file
from lightning_ssl.callbacks._judge import Judge, Look, PrototypeJudge, Rules, facts_of
from lightning_ssl.callbacks.verdict import GRADES, Forecast, Grade, Turn, Verdict
from lightning_ssl.callbacks.watcher import Watcher, precise
from lightning_ssl.functional import prototype_use, spread, unbiased_participation, variance_shape
from lightning_ssl.quantities import Quantity

PREDICTORS = ("predictor", "prediction_head")
BESIDE = ("backbone", "predictor", "target.projector")  # what is watched as well, where it is there
SPECTRUM_EVERY = 4  # observations: eigenvalues, and the other places, are looked at less often
MOST_ROWS = 512  # of the last batches, that eigenvalues are taken of


class CollapseMonitor(Watcher):
    r"""A verdict on the features of a run: healthy, partial, dimensional or complete collapse, and what is to come.

    Watches the projector, which is what the loss sees: a BatchNorm backbone keeps its own features spread even while
    they collapse behind it; and beside it, less often, the backbone, the predictor and the target, where there are any,
    each with a verdict of its own. Logs ``collapse/verdict`` (0 healthy, 1 partial, 2 dimensional, 3 complete or
    prototype collapse), and of the l2-normalised features: ``collapse/deviation``, the root of their total variance (1
    spread over the sphere, 0 one point); ``collapse/std``, the mean over dimensions of their deviation in units of
    :math:`1/\sqrt d`; ``collapse/rank``, the participation ratio :math:`(\mathrm{tr}\, C)^2 / \mathrm{tr}\, C^2` of
    their covariance C in the batch; ``collapse/variance_rank``, the exponential of the entropy of the variance over its
    principal directions, and ``collapse/alive``, how many directions have any variance, both of the last few batches;
    and ``collapse/noise``, the share of the variance that is between views of one sample.

    Complete collapse: the deviation is below `complete` and still falling by a tenth an observation, or below half of
    that, or below 0.17 while views of one sample are as far apart as different samples; and below half of where the
    network started: one without normalisation layers may start narrow and open up. Dimensional: the variance lies in
    fewer than `dimensional` directions. Partial: half of the dimensions that were alive are dead, or most never came
    alive. Any has to hold for `patience` observations in a row.

    :attr:`verdict` is the finding as plain data (:class:`Verdict`); a turn of it is a warning, an alert of W&B, and a
    line of ``collapse.json`` in the run's folder.

    Args:
        features: Dotted path of the submodule whose outputs are watched.
        complete: The deviation below which features count as one point.
        dimensional: The rank of the variance below which features count as flat (half the dimension, where that is
            less).
        patience: Observations in a row before the verdict turns.
        stop: End training (`trainer.should_stop`) at a collapse of this kind or worse: "partial", "dimensional" or
            "complete" (True is "complete").
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Look every n-th training step, the first included.
        every_n_epochs: Look at the first step of every n-th epoch.
        name: Keeps several instances apart: ``collapse/<name>/verdict``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        target: Dotted path of the target network's twin of `features`, for the second view of an online network that
            sees one view only.
        also: Dotted paths of further places; by default those of ``backbone``, ``predictor`` and ``target.projector``
            beside `features` that exist.
        prototypes: Dotted path of the layer that scores prototypes (DINO, SwAV), for a verdict on their use.
        temperature: What those scores are divided by before the softmax.
        on_verdict: Called with the :class:`Verdict` at each turn, on every rank.

    Example:
        >>> monitor = CollapseMonitor("projection_head", stop="dimensional")
        >>> monitor.verdict.kind
        'healthy'
    """

    quantities = (
        Quantity(
            "collapse/verdict",
            "verdict: 0 healthy, 1 partial, 2 dimensional, 3 complete collapse",
            "0 while features stay spread; 1 when dimensions die, 2 when few are left, 3 when all is one point.",
            "health",
            better="lower",
            healthy="0",
            form="{:.0f}",
        ),
        Quantity(
            "collapse/deviation",
            "deviation of what the loss sees",
            "1 when features are spread around the sphere's centre, 0 when they are one point.",
            "health",
            better="higher",
            healthy="0.3 to 1",
        ),
        Quantity(
            "collapse/std",
            "spread of what the loss sees",
            "The same, dimension by dimension: dead dimensions lower it, too.",
            "health",
            better="higher",
            healthy="0.3 to 1",
        ),
        Quantity(
            "collapse/rank",
            "participation ratio",
            "The number of dimensions that most of the batch's variance is in.",
            "health",
            better="higher",
        ),
        Quantity(
            "collapse/variance_rank",
            "effective rank of the variance",
            "Over how many directions the variance is shared; healthy runs fall from their start and stay above 3.",
            "health",
            better="higher",
            healthy="above 3",
        ),
        Quantity(
            "collapse/alive",
            "live dimensions",
            "Directions with any variance, of the last few batches; a sudden fall is dimensions dying.",
            "health",
            better="higher",
            form="{:.0f}",
        ),
        Quantity(
            "collapse/noise",
            "share of variance between views",
            "1 when views of one sample are as far apart as different samples; falls while a run learns.",
            "health",
            better="lower",
            healthy="falling below 0.8",
        ),
    )
    prefix = "collapse"

    def __init__(
        self,
        features: str = "projector",
        complete: float = 0.15,
        dimensional: float = 2.75,
        patience: int = 2,
        stop: bool | Literal["partial", "dimensional", "complete"] = False,
        views: int | None = None,
        every_n_steps: int | None = 5,
        every_n_epochs: int | None = None,
        name: str | None = None,
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
        also: Sequence[str] | None = None,
        prototypes: str | None = None,
        temperature: float = 0.1,
        on_verdict: Callable[[Verdict], None] | None = None,
    ) -> None:
        if not 0 < complete < 1:
            raise ValueError(f"`complete` must lie in (0, 1), got {complete}")
        if not dimensional > 1:
            raise ValueError(f"`dimensional` must be above 1, the least rank there is, got {dimensional}")
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, got {patience}")
        if not isinstance(stop, bool) and stop not in ("partial", "dimensional", "complete"):
            raise ValueError(f'`stop` must be a bool, "partial", "dimensional" or "complete", got {stop!r}')
        if not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}")
        self.complete, self.dimensional, self.patience, self.stop = complete, dimensional, patience, stop
        self.also, self.prototypes, self.temperature, self.on_verdict = also, prototypes, temperature, on_verdict
        self._main = features
        super().__init__(features, views, pairing, layout, target, every_n_steps, every_n_epochs, False, name)
        for argument, path in [("also", path) for path in also or ()] + (
            [("prototypes", prototypes)] if prototypes else []
        ):
            if not isinstance(path, str) or path == features:
                raise ValueError(f"`{argument}` must name submodules other than `features`, got {path!r}")

    def begin_run(self) -> None:
        super().begin_run()
        self._judges: dict[str, Judge] = {}
        self._prototypes: PrototypeJudge | None = None
        self._windows: dict[str, list[Tensor]] = {}  # unit rows of the last observations
        self._shapes: dict[str, tuple[float, float]] = {}  # rank and live dimensions, when last looked at
        self._facts: dict[str, Any] = {}
        self._told: dict[str, str] = {}  # place -> the kind last announced
        self._turns: list[Turn] = []
        self._stopped = ""
        self._coming: Forecast | None = None  # by the dynamics

    @property
    def verdict(self) -> Verdict:
        """What is found of the run so far."""
        places = [judge.verdict for judge in self._judges.values()]
        if self._prototypes is not None:
            places.append(self._prototypes.verdict)
        ordered = sorted(places, key=lambda place: (not place.main, -place.grade))
        return Verdict(tuple(ordered), tuple(self._turns), self._stopped)

    # Places -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        for argument, path in [("also", path) for path in self.also or ()] + [("prototypes", self.prototypes)]:
            if path is not None:
                check_path(pl_module, path, argument)

    def _beside(self, pl_module: L.LightningModule) -> dict[str, Spec]:
        """The other places, by their paths: those named, or those of the usual names that are there."""
        around = self.features.rpartition(".")[0]
        usual = [f"{around}.{name}" if around else name for name in BESIDE]
        paths = list(self.also) if self.also is not None else [path for path in usual if _is_there(pl_module, path)]
        found = {path: Spec(path, "also", grad=not _frozen(pl_module, path)) for path in paths if path != self.features}
        if self.prototypes is not None:
            found[self.prototypes] = Spec(self.prototypes, "prototypes")
        return found

    def ask(self, watched: Observatory, pl_module: L.LightningModule) -> None:
        super().ask(watched, pl_module)
        if self._looks_closer:
            for path, spec in self._beside(pl_module).items():
                watched.want(spec, inputs=_name(path) in PREDICTORS)

    @property
    def _looks_closer(self) -> bool:
        return (self._looks - 1) % SPECTRUM_EVERY == 0

    # An observation ---------------------------------------------------------------------------------------------------

    def observe(self, trainer: L.Trainer, pl_module: L.LightningModule, seen: Seen, stage: str) -> dict[str, Any]:
        closer = self._looks_closer
        step = int(self._due or 0)
        parts = {self.features: self._numbers(self.features, seen.rows, seen.views, closer)}
        scores: Tensor | None = None
        if closer:
            watched = observatory(trainer)
            for path, spec in self._beside(pl_module).items():
                try:
                    other = watched.rows(spec, pl_module.device, ranks_of(trainer))
                except ValueError as error:
                    self.tell(f"{path!r} is not watched: {error}")
                    continue
                if other is not None and path == self.prototypes:
                    scores = torch.stack(list(prototype_use(precise(other.rows), self.temperature))[:3])
                    self._prototypes = self._prototypes or PrototypeJudge(path, other.rows.shape[1])
                elif other is not None and len(other.rows) > 2:
                    parts[path] = self._numbers(path, other.rows, other.views, True)
                    if _name(path) in PREDICTORS:
                        self._coming = self._carried_on(trainer, pl_module, path, other, step)
            self._facts = facts_of(trainer, pl_module, self.features, self._facts)
        found = torch.cat([*parts.values(), scores]) if scores is not None else torch.cat(list(parts.values()))
        numbers = found.tolist()  # one crossing to the host
        for i, path in enumerate(parts):
            self._judge(path, step, numbers[_NUMBERS * i : _NUMBERS * (i + 1)], pl_module)
        if scores is not None and self._prototypes is not None:
            self._prototypes.see(step, *numbers[-3:])
        main = self._judges[self.features]
        if main.verdict.kind == "healthy" and main.verdict.forecast is None and self._coming is not None:
            main.verdict = replace(main.verdict, forecast=self._coming)
        return self._logged(parts)

    def _carried_on(
        self, trainer: L.Trainer, pl_module: L.LightningModule, path: str, seen: Seen, step: int
    ) -> Forecast | None:
        """What the theory says is to come, where its assumptions hold; see `_dynamics`."""
        predictor = pl_module.get_submodule(path)
        rates = rates_of(trainer, pl_module, predictor)
        if rates is None or seen.inputs is None or seen.views is None:
            return None
        modes = modes_of(predictor, precise(seen.inputs), seen.views.shape[1])
        total = trainer.estimated_stepping_batches
        ahead = int(min(total, 2 * step + 200) - step) if total > 0 else 2 * step + 200
        return None if modes is None or ahead < 1 else carried_on(*modes, rates, step, ahead)

    def measure(self, rows: Tensor) -> dict[str, Tensor | float]:
        """The verdict on rows alone: what `observe` does with the features of a step."""
        self._looks += 1
        numbers = self._numbers(self.features, rows, None, True).tolist()
        self._judge(self.features, self._looks, numbers, None)
        logged = self._logged([self.features])
        return {key.rpartition("/")[2]: value for key, value in logged.items()}

    def _numbers(self, path: str, rows: Tensor, views: Tensor | None, closer: bool) -> Tensor:
        """Deviations, participation (plain, unbiased), rank, live dimensions, noise; rows behind them, rows, d."""
        rows = precise(rows)
        found = spread(rows)
        unit = torch.nn.functional.normalize(rows, dim=1)
        nan = found.std.new_full((), float("nan"))
        rank = alive = nan
        window = [*self._windows.get(path, []), unit.float()]
        while len(window) > 1 and sum(len(x) for x in window[1:]) >= min(2 * unit.shape[1], MOST_ROWS):
            window = window[1:]
        self._windows[path] = window
        if closer or path not in self._shapes or min(unit.shape) <= 64:
            shape = variance_shape(precise(torch.cat(window)[-max(MOST_ROWS, len(unit)) :]))
            rank, alive = shape.rank, shape.alive.to(rows.dtype)
        noise = nan
        if views is not None and views.shape[1] > 1:
            pairs = torch.nn.functional.normalize(precise(views), dim=2)
            within = pairs.var(dim=1).sum(dim=1).mean()
            noise = within / unit.var(dim=0).sum().clamp_min(1e-300)
        participation = unbiased_participation(unit) if len(unit) > 2 else found.participation
        sizes = [rows.new_full((), float(size)) for size in (sum(len(x) for x in window), *unit.shape)]
        deviation = found.centred.square().sum(dim=1).mean().sqrt()
        return torch.stack([deviation, found.std, found.participation, participation, rank, alive, noise, *sizes])

    def _judge(self, path: str, step: int, numbers: list[float], pl_module: L.LightningModule | None) -> None:
        deviation, std, plain, participation, rank, alive, noise, seen, rows, dim = numbers
        if not math.isfinite(std):
            raise ValueError(f"{path!r} has non-finite rows; find where they come from")
        if rank == rank:
            self._shapes[path] = rank, alive
        rank, alive = self._shapes[path]
        width = _width(pl_module, path) if pl_module is not None else dim
        limit = min(dim, rows - 1, width)
        rules = Rules(self.complete, self.dimensional, patience=self.patience)
        judge = self._judges.setdefault(path, Judge(path, rules, path == self.features))
        judge.see(Look(step, deviation, participation, rank, alive, limit, noise, plain, std, seen), self._facts)

    def _logged(self, paths: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for path in paths:
            judge = self._judges[path]
            last = judge.recent[-1]
            names = {
                "deviation": "deviation",
                "std": "std",
                "rank": "plain",
                "variance_rank": "rank",
                "alive": "alive",
                "noise": "noise",
            }
            own = {name: last[field] for name, field in names.items() if last[field] == last[field]}
            if path == self.features:
                values |= {self.key("collapse", "verdict"): float(self.verdict.grade)}
                values |= {self.key("collapse", name): value for name, value in own.items()}
            else:
                kept = {
                    "verdict": float(judge.verdict.grade),
                    **{name: own[name] for name in ("deviation", "variance_rank")},
                }
                values |= {self.key(f"collapse/{path}", name): value for name, value in kept.items()}
        if self._prototypes is not None and len(paths) > 1:
            values |= {self.key("collapse", name): value for name, value in self._prototypes.logged().items()}
        return values

    # Told where people look -------------------------------------------------------------------------------------------

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        turned = False
        for place in self.verdict.places:
            before = self._told.get(place.place, "healthy")
            after: str = place.kind
            if after == "healthy" and place.forecast is not None:
                after = "forecast"
            if after == before:
                continue
            self._told[place.place] = after
            self._turns.append(Turn(step, place.place, before, after, str(replace(place, step=step))))
            turned = True
            worse = GRADES.get(after, Grade.HEALTHY) > GRADES.get(before, Grade.HEALTHY) or after == "forecast"
            words = f"{self._turns[-1].words} (epoch {trainer.current_epoch})"
            (rank_zero_warn if worse and place.main else rank_zero_info)(words)
            if place.main:
                alert(trainer, f"collapse: {after}", words, worse)
        limit = self.stop if isinstance(self.stop, str) else "complete" if self.stop else ""
        if limit and not self._stopped and self.verdict.grade >= GRADES[limit]:
            self._stopped, trainer.should_stop = self.verdict.kind, True
            turned = True
        if turned:
            self._write(trainer)
            if self.on_verdict is not None:
                self.on_verdict(self.verdict)

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and self.folder is not None:
            name = f"collapse_{self._label}.json" if self._label else "collapse.json"
            text = json.dumps(self.verdict.to_dict(), indent=1)
            write_file(trainer, self.folder / name, lambda file: file.write(text.encode()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._judges:
            self._write(trainer)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "report": self.verdict.to_dict(),
            "judges": {path: judge.state() for path, judge in self._judges.items()},
            "prototypes": None if self._prototypes is None else self._prototypes.state(),
            "windows": {path: list(rows) for path, rows in self._windows.items()},
            "shapes": {path: list(shape) for path, shape in self._shapes.items()},
            "facts": dict(self._facts),
            "told": dict(self._told),
            "coming": None if self._coming is None else asdict(self._coming),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "report" not in state_dict:  # of a release that knew one place and three verdicts: begin anew
            return
        verdict = Verdict.from_dict(state_dict["report"])
        self._turns, self._stopped = list(verdict.turns), verdict.stopped
        found = {place.place: place for place in verdict.places}
        rules = Rules(self.complete, self.dimensional, patience=self.patience)
        for path, state in state_dict["judges"].items():
            self._judges[path] = Judge(path, rules, path == self.features)
            self._judges[path].restore(state, found[path])
        if state_dict["prototypes"] is not None:
            self._prototypes = PrototypeJudge.restored(state_dict["prototypes"], found)
        self._windows = {path: list(rows) for path, rows in state_dict["windows"].items()}
        self._shapes = {path: (shape[0], shape[1]) for path, shape in state_dict["shapes"].items()}
        self._facts, self._told = dict(state_dict["facts"]), dict(state_dict["told"])
        coming = state_dict.get("coming")
        self._coming = None if coming is None else Forecast(**coming)


_NUMBERS = 10  # of a place


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _is_there(pl_module: nn.Module, path: str) -> bool:
    try:
        return not isinstance(pl_module.get_submodule(path), nn.Identity)
    except AttributeError:
        return False


def _frozen(pl_module: nn.Module, path: str) -> bool:
    """Whether a place is of a target network, whose calls have no gradients."""
    parameters = list(pl_module.get_submodule(path).parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _width(pl_module: nn.Module, path: str) -> float:
    """How many dimensions the last linear layer of a place can have: no more than enter it, and its bias."""
    linears = [part for part in pl_module.get_submodule(path).modules() if isinstance(part, nn.Linear)]
    return float(linears[-1].in_features) if linears else float("inf")
