"""What the optimizers hold, what they decay, and where the schedule goes over the run."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_ssl.doctor.isolate import Isolation
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Fit, Patient, child_of, line_of, listed
from lightning_ssl.doctor.twins import called_target, find_twins

CYCLES = ("CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR", "SequentialLR", "ChainedScheduler")


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    return isolation.one(_examine, patient)


def _examine(patient: Patient) -> tuple[list[Finding], str]:
    module: Any = patient.module
    got: set[str] = set()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda grad, name=name: got.add(name) if bool((grad != 0).any()) else None)
    seen: dict[str, Any] = {"rates": []}

    def on_train_batch_start(_: Any, trainer: Any, *args: Any) -> None:
        seen["rates"].append([g["lr"] for o in trainer.optimizers for g in o.param_groups])
        seen["trainer"] = trainer
        seen["started"] = [
            c.scheduler.last_epoch for c in trainer.lr_scheduler_configs if hasattr(c.scheduler, "last_epoch")
        ]

    hooks = {"on_train_batch_start": on_train_batch_start}
    settings = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    length = patient.length
    trainer = Fit(patient, steps=3, feed=patient.steps, hooks=hooks, per_epoch=length, settings=settings).run()
    moved = {n for n, p in module.named_parameters() if not torch.equal(before[n], p.detach())}
    where = f"{type(module).__name__}.configure_optimizers ({line_of(type(module).configure_optimizers)})"
    if not trainer.optimizers:
        return [alarm("no_optimizer", "configure_optimizers returns none", "nothing learns", "return one", where)], ""
    found = _on_members(module, trainer, got, before, where)
    found += _on_movement(trainer, got, moved, seen["rates"], where)
    found += _on_decay(module, trainer, where)
    found += _on_schedule(patient, module, trainer, where)
    if not any(f.severity == "alarm" for f in found):
        groups = [g for o in trainer.optimizers for g in o.param_groups]
        kinds = ", ".join(type(o).__name__ for o in trainer.optimizers)
        rates = listed(sorted({f"{g['lr']:.3g}" for g in groups}))
        found.append(info("optimizer", f"{kinds}: {len(groups)} parameter groups, rates {rates}"))
    return found, ""


def _on_members(module: Any, trainer: Any, got: set[str], before: dict[str, Tensor], where: str) -> list[Finding]:
    findings = []
    counts: dict[int, int] = {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                counts[id(p)] = counts.get(id(p), 0) + 1
    names = {id(p): name for name, p in module.named_parameters()}
    with torch.no_grad():
        now = {name: p.detach().clone() for name, p in module.named_parameters()}
        for name, p in module.named_parameters():
            p.copy_(before[name])
    targets = [twin.target for twin in find_twins(module, got)]
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(now[name])
    missing = [
        name
        for key, name in names.items()
        if key not in counts
        and name in got
        and not any(name.startswith(f"{t}.") for t in targets)
        and not called_target(name)
    ]
    if missing:
        findings.append(
            alarm(
                "in_no_group",
                f"{len(missing)} trainable parameters get gradients and stand in no optimizer: {listed(missing)}",
                "they keep their random beginning for the whole run",
                "add them to the optimizer's parameters; what is added to the module after configure_optimizers ran, "
                "or kept in a plain list, is not in self.parameters()",
                f"{', '.join(sorted({child_of(n) for n in missing}))}; {where}",
            )
        )
    twice = [names.get(key, "?") for key, count in counts.items() if count > 1]
    if twice:
        findings.append(
            alarm(
                "in_two_groups",
                f"{len(twice)} parameters stand in more than one place of the optimizers: {listed(twice)}",
                "each of them moves them: their rate is the sum, their momentum and decay count twice",
                "let each parameter be in one group of one optimizer",
                where,
            )
        )
    strangers = [key for key in counts if key not in names]
    if strangers:
        findings.append(
            info(
                "not_of_the_module",
                f"the optimizers hold {len(strangers)} tensors that are no parameters of the module",
            )
        )
    return findings


def _on_movement(trainer: Any, got: set[str], moved: set[str], rates: list[list[float]], where: str) -> list[Finding]:
    if not got or moved & got:
        return []
    zero = all(rate == 0 for step in rates for rate in step)
    return [
        alarm(
            "nothing_moves",
            "after 3 steps no parameter that gets a gradient has changed"
            + ("; every learning rate is 0" if zero else ""),
            "the run would go through all its epochs and learn nothing",
            "set a rate above 0"
            if zero
            else "let the optimizer hold the module's own parameters and step after "
            "backward: with manual optimization call step() yourself",
            where,
        )
    ]


def _vectors(module: nn.Module) -> dict[int, str]:
    """Biases and the affine parts of norms, by id."""
    found = {}
    for path, part in module.named_modules():
        for name, p in part.named_parameters(recurse=False):
            if p.ndim <= 1 and (name == "bias" or "norm" in type(part).__name__.lower()):
                found[id(p)] = f"{path}.{name}" if path else name
    return found


def _on_decay(module: nn.Module, trainer: Any, where: str) -> list[Finding]:
    vectors = _vectors(module)
    groups = [g for o in trainer.optimizers for g in o.param_groups if g["params"]]
    decayed = [g for g in groups if g.get("weight_decay")]
    free = [g for g in groups if not g.get("weight_decay")]
    caught = [vectors[id(p)] for g in decayed for p in g["params"] if id(p) in vectors and p.requires_grad]
    if not caught:
        return []
    text = f"weight decay acts on {len(caught)} biases and norms: {listed(caught)}"
    why = "it pulls norms' scales and biases to zero, which has nothing to do with the weights' size"
    remedy = "put parameters with fewer than two dimensions into a group with weight_decay=0"
    spared = any(all(p.ndim <= 1 for p in g["params"]) for g in free)
    reversed_ = any(all(p.ndim <= 1 for p in g["params"]) for g in decayed) and any(
        any(p.ndim > 1 for p in g["params"]) for g in free
    )
    if reversed_:
        return [alarm("decay_reversed", f"{text}; the weights themselves are in a group without", why, remedy, where)]
    if spared:
        return [
            alarm("decay_missed", f"{text}, though other ones are spared in a group of their own", why, remedy, where)
        ]
    return [info("decay_on_vectors", text, f"{why}; many recipes (SimSiam, MoCo) do so", remedy, where)]


def _on_schedule(patient: Patient, module: Any, trainer: Any, where: str) -> list[Finding]:
    findings: list[Finding] = []
    known = any(patient.options.get(name) not in (None, -1) for name in ("max_epochs", "max_steps"))
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        name = type(scheduler).__name__
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "optimizer"):
            continue
        if not module.automatic_optimization:
            if scheduler.last_epoch == 0 and config.interval == "step":
                findings.append(_never(name, "manual optimization: nobody calls its step()", where))
            continue
        total = trainer.estimated_stepping_batches
        epochs = trainer.max_epochs if trainer.max_epochs not in (None, -1) else None
        if total == float("inf"):
            continue
        frequency = max(1, config.frequency)
        if config.interval == "step":
            calls = int(total) // frequency
        else:
            calls = max(1, -(-int(total) // max(1, patient.length)) if epochs is None else int(epochs)) // frequency
        path = _path(scheduler, calls)
        findings += _on_path(name, scheduler, path, calls, config.interval, known, patient.length, where)
    return findings


def _path(scheduler: Any, calls: int) -> list[float] | str:
    """The first moving group's rate over the run; a text if the scheduler refuses to go on."""
    groups = scheduler.optimizer.param_groups
    rates: list[list[float]] = [[g["lr"] for g in groups]]
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(1, calls - scheduler.last_epoch):
            try:
                scheduler.step()
            except Exception as error:
                return f"after {call} of {calls} steps it raises {type(error).__name__}: {error}"
            rates.append([g["lr"] for g in groups])
            if time.monotonic() - began > 5:
                break
    columns = list(zip(*rates, strict=True))
    return list(max(columns, key=lambda column: max(column) - min(column)))


def _on_path(
    name: str, scheduler: Any, path: list[float] | str, calls: int, interval: str, known: bool, length: int, where: str
) -> list[Finding]:
    unit = "step" if interval == "step" else "epoch"
    if isinstance(path, str):
        return [_early(name, path, where)] if known else []
    peak = max(path)
    if peak <= 0 or len(path) < 4:
        return []
    horizon = getattr(scheduler, "T_max", None) if name == "CosineAnnealingLR" else None
    over = f"{name} is stepped once an {unit}" if unit == "epoch" else f"{name} is stepped once a {unit}"
    over += f", {calls} times in this run"
    if known:
        if (peak - min(path)) / peak < 1e-3:
            extra = f", and T_max is {horizon}" if horizon else ""
            return [_never(name, f"{over}{extra}: the rate stays at {path[0]:.4g} from first to last", where)]
        if horizon and calls < 0.1 * horizon:
            return [_never(name, f"{over}, and T_max is {horizon}: the rate ends at {path[-1]:.4g}", where)]
    elif horizon and interval == "epoch" and horizon >= 20 * max(1000, length):
        return [_never(name, f"{over.partition(',')[0]}, and T_max is {horizon} of them", where)]
    low = min(path)
    bottom = path.index(low)
    reach = len(path) if known else min(len(path), length)
    if (
        horizon
        and interval == "step"
        and name not in CYCLES
        and bottom < 0.9 * reach
        and (known or bottom < length / 2)
    ):
        later = path[bottom:reach]
        if later and max(later) > low + 0.1 * (peak - low):
            return [_early(name, f"{over}; it is down at {low:.3g} after {bottom}, and then rises again", where)]
    if horizon and known and bottom < 0.9 * len(path) and max(path[bottom:]) > low + 0.1 * (peak - low):
        return [_early(name, f"{over}; it is down at {low:.3g} after {bottom}, and then rises again", where)]
    silent = 1 + max(i for i, rate in enumerate(path) if rate > 1e-3 * peak)
    judged = known or (interval == "step" and silent < length / 2)
    if judged and name not in CYCLES and silent < 0.6 * len(path):
        return [_early(name, f"{over}; from number {silent} on the rate is {path[-1]:.3g}, peak {peak:.3g}", where)]
    return []


def _never(name: str, text: str, where: str) -> Finding:
    return alarm(
        "schedule_never_moves",
        text,
        f"{name} was meant to lower the rate, and does not",
        'give its length in the unit it is stepped in: {"scheduler": ..., "interval": "step"} is once a step, the '
        "default is once an epoch",
        where,
    )


def _early(name: str, text: str, where: str) -> Finding:
    return alarm(
        "schedule_ends_early",
        text,
        f"{name} has come to its end long before the run has: the rest is trained with a wrong rate, or none",
        "give its length in the unit it is stepped in (trainer.estimated_stepping_batches is the number of steps)",
        where,
    )
