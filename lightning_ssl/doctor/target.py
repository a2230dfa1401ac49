"""Whether a target network follows: at all, by the stated momentum, once an optimizer step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Fit, Patient, batch_norms, listed
from lightning_ssl.doctor.twins import Twin, find_twins, learning_targets

STATED = re.compile(r"(^|_)(momentum|ema|decay|tau|m)(_|$)")
NOT_STATED = re.compile(r"weight|lr|bn|sgd|batch|temp|step|epoch|adam|optim|warm")


@dataclass
class Move:
    """One change of a target: between which events, in which micro-batch, by which momentum."""

    between: tuple[str, str]
    batch: int
    momentum: float
    misfit: float  # what of the change is no step towards the online network, relative


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    names = learning(patient, isolation)
    twins = [*find_twins(patient.module, names), *learning_targets(patient.module, names)]
    if not twins:
        return [
            info("no_target", "no part of the module is a copy of another that does not learn: no target network")
        ], ""
    findings: list[Finding] = []
    seen = None
    for precision in ("64-true", "32-true"):
        try:
            seen = isolation.one(_follow, patient, twins, precision, 1, False)
            break
        except Ended as ended:
            problem = ended
    if seen is None:
        raise problem
    try:
        gathered = isolation.one(_follow, patient, twins, precision, 2, True)
    except Ended:
        gathered = None  # manual optimization, and modules that accumulate by themselves
    told: dict[str, tuple[Finding, list[str]]] = {}
    for twin in twins:
        for finding in _judged(patient, twin, seen, gathered):
            told.setdefault(finding.kind, (finding, []))[1].append(twin.target)
    for finding, (_, *others) in told.values():
        also = f"; likewise {listed(others)}" if others else ""
        findings.append(replace(finding, seen=f"{finding.seen}{also}"))
    return findings, ""


def learning(patient: Patient, isolation: Isolation) -> set[str]:
    """The names of the parameters that get gradients in the first step."""
    return isolation.one(_learning, patient)


def _learning(patient: Patient) -> set[str]:
    got: set[str] = set()
    for name, p in patient.module.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda grad, name=name: got.add(name))
    Fit(patient, steps=1, feed=patient.steps).run()
    return got


def _follow(patient: Patient, twins: list[Twin], precision: str, accumulate: int, skip: bool) -> dict[str, Any]:
    """Train for some steps, and note each change of a target; in a process of its own."""
    module: Any = patient.module
    moves: dict[str, list[Move]] = {twin.target: [] for twin in twins}
    last: dict[str, tuple[Tensor, Tensor]] = {}
    state: dict[str, Any] = {
        "event": "",
        "batch": 0,
        "steps": [],
        "skipped": None,
        "called": set(),
        "in_optimizer": set(),
    }

    def look(event: str) -> None:
        for twin in twins:
            online, target = twin.read(module)
            if twin.target in last:
                old_online, old = last[twin.target]
                if not torch.equal(old, target):
                    momentum, misfit = fitted(old, target, (old_online, online))
                    moves[twin.target].append(Move((state["event"], event), state["batch"], momentum, misfit))
            last[twin.target] = (online, target)
        state["event"] = event

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        look("batch begins")
        yield
        look("step returns")

    def on_train_start(_: Any, trainer: Any, *args: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # apart, so that following can be measured
            for twin in twins:
                for online, _target in twin.pairs(module):
                    noise = torch.randn(online.shape, generator=generator).to(online)
                    online.add_(noise * 0.1 * (max(float(online.std()), 1e-3) if online.numel() > 1 else 1.0))
        look("training starts")

    def on_before_optimizer_step(_: Any, trainer: Any, module: Any, optimizer: Any) -> None:
        look("optimizer begins")
        members = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        for twin in twins:
            if any(id(p) in members for p in module.get_submodule(twin.target).parameters()):
                state["in_optimizer"].add(twin.target)
        state["steps"].append(state["batch"])

    def on_train_batch_start(_: Any, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if skip and state["batch"] == 2 * accumulate:
            state["skipped"] = state["batch"]
            for optimizer in trainer.optimizers:  # as a gradient scaler does when it meets an overflow
                optimizer.step = lambda closure=None, *args, **kwargs: closure() if closure is not None else None

    def on_train_batch_end(_: Any, trainer: Any, *args: Any) -> None:
        look("batch ends")
        state["batch"] += 1

    for twin in twins:
        for part in module.get_submodule(twin.target).modules():
            part.register_forward_pre_hook(lambda *args, path=twin.target: state["called"].add(path))
    hooks = {
        "on_train_start": on_train_start,
        "on_before_optimizer_step": on_before_optimizer_step,
        "on_train_batch_start": on_train_batch_start,
        "on_train_batch_end": on_train_batch_end,
    }
    settings = {"precision": precision, "accumulate_grad_batches": accumulate}
    if not module.automatic_optimization:
        settings["accumulate_grad_batches"] = 1
    steps = 3 * accumulate + (0 if accumulate > 1 else 1)
    Fit(patient, steps, patient.steps, around, hooks, per_epoch=2 * accumulate, settings=settings).run()
    look("training ends")
    return {
        "moves": moves,
        "steps": state["steps"],
        "skipped": state["skipped"],
        "batches": state["batch"],
        "called": state["called"],
        "in_optimizer": state["in_optimizer"],
        "buffers": {twin.target: _buffers(module, twin) for twin in twins},
    }


def fitted(old: Tensor, new: Tensor, online: tuple[Tensor, ...]) -> tuple[float, float]:
    """The momentum m of new = m old + (1 - m) online that fits best, and the part of the change it leaves."""
    best = (1.0, float("inf"))
    for weights in online:
        way, change = weights - old, new - old
        share = float(change @ way) / max(float(way @ way), 1e-300)
        misfit = float((change - share * way).norm()) / max(float(change.norm()), 1e-300)
        if misfit < best[1]:
            best = (1 - share, misfit)
    return best


def _buffers(module: nn.Module, twin: Twin) -> str:
    """What becomes of the target's batch statistics."""
    a, b = (batch_norms(module.get_submodule(path)) for path in (twin.online, twin.target))
    pairs = [(a[name], b[name]) for name in a if name in b and getattr(a[name], "running_mean", None) is not None]
    if not pairs:
        return ""
    equal = all(torch.equal(x.running_mean, y.running_mean) for x, y in pairs)  # type: ignore[arg-type]
    return "copied from the online network" if equal else "its own"


def stated(module: Any) -> dict[str, float]:
    """Numbers in [0, 1] that a module or its hyperparameters call momentum, decay, tau or the like."""
    found: dict[str, float] = {}
    places: list[tuple[str, Mapping[str, Any]]] = [("", vars(module)), ("hparams.", dict(module.hparams))]
    for path, part in module.named_modules():
        if path and not isinstance(part, nn.modules.batchnorm._BatchNorm):
            places.append((f"{path}.", vars(part)))
    for prefix, values in places:
        for name, value in values.items():
            if not isinstance(value, float) or not 0 <= value <= 1:
                continue
            if STATED.search(name.lower()) and not NOT_STATED.search(name.lower()):
                found[prefix + name] = value
    return found


def _judged(patient: Patient, twin: Twin, seen: dict[str, Any], gathered: dict[str, Any] | None) -> list[Finding]:
    where = f"{twin.target}, which follows {twin.online}"
    said = stated(patient.module)
    moves: list[Move] = seen["moves"][twin.target]
    findings: list[Finding] = []
    strayed = [move for move in moves if move.misfit > 0.05]
    if twin.target in seen["in_optimizer"] and strayed and twin.copied:
        how = f"and moves, but not towards {twin.online}: {strayed[0].misfit:.0%} of a change has another direction"
        findings.append(
            alarm(
                "target_in_optimizer",
                f"{twin.target} follows {twin.online}, and stands in the optimizer with requires_grad=True, {how}",
                "gradients, decay or momentum move the target beside its moving average",
                "leave its parameters out of the optimizer, or set requires_grad_(False) on them",
                where,
            )
        )
        return findings
    if not moves:
        if 1.0 in said.values():
            return [info("target_fixed", f"{twin.target} never moves, as a momentum of 1 says", where=where)]
        if twin.target not in seen["called"]:
            return [
                info("copy_unused", f"{twin.target} is a copy of {twin.online}; the step neither calls nor moves it")
            ]
        return [
            alarm(
                "target_never_moves",
                f"in {seen['batches']} steps {twin.target} did not change, while {twin.online} learns",
                "the online network is pulled to its own random beginning, for ever",
                "call the update of the moving average once an optimizer step, on the parameters that are trained: "
                "it must change them in place (lerp_, copy_), not names bound to them",
                where,
            )
        ]
    by_batch: dict[int, list[Move]] = {}
    for move in moves:
        by_batch.setdefault(move.batch, []).append(move)
    followed = [move for move in moves if move.misfit <= 0.05]
    if not followed:
        return [info("target_moves", f"{twin.target} moves, but not by a moving average of {twin.online}", where=where)]
    momenta = [move.momentum for move in followed]
    measured = sorted(momenta)[len(momenta) // 2]
    findings += _on_momentum(twin, measured, momenta, said, where)
    most = max(len(mine) for batch, mine in by_batch.items() if batch < seen["batches"])
    if most > 1:
        findings.append(
            alarm(
                "target_moves_twice",
                f"{twin.target} moves {most} times in one step: "
                + listed([" to ".join(move.between) for move in moves[:most]]),
                f"its effective momentum is {measured:.4g} to the power {most}",
                "update it in one place",
                where,
            )
        )
    if gathered is not None and not findings:
        findings += _on_accumulation(patient, twin, gathered, where)
    if not any(finding.severity == "alarm" for finding in findings):
        text = f"{twin.target} follows {twin.online} with momentum {measured:.6g}, once a step"
        kept = seen["buffers"][twin.target]
        text += f"; its batch-norm statistics are {kept}" if kept else ""
        if twin.target in seen["in_optimizer"]:
            text += "; it stands in the optimizer with requires_grad=True, which moves it as soon as it gets a gradient"
        findings.append(info("target_follows", text, where=where))
    return findings


def _on_momentum(
    twin: Twin, measured: float, momenta: list[float], said: dict[str, float], where: str
) -> list[Finding]:
    def near(a: float, b: float) -> bool:
        return abs(a - b) <= 0.02 * min(max(1 - b, 1e-4), max(b, 1e-4)) + 1e-9

    def matches(value: float) -> bool:
        return any(near(m, value) for m in momenta)

    named = ", ".join(f"{name}={value:g}" for name, value in said.items())
    if not said or any(matches(value) for value in said.values()):
        if not said and 1e-6 < measured <= 0.1:
            return [_swapped(twin, measured, "no momentum is stated", where)]
        return []
    for name, value in said.items():
        if matches(1 - value) and value > 0.5:
            return [_swapped(twin, measured, f"{name} is {value:g}", where)]
        for power in (2, 3, 4):
            if 0.3 < value < 1 and matches(value**power):
                return [
                    alarm(
                        "target_moves_twice",
                        f"{twin.target} keeps {measured:.6g} of itself in a step, which is {name}={value:g} to the "
                        f"power {power}",
                        f"it is updated {power} times a step",
                        "update it once an optimizer step, in one place",
                        where,
                    )
                ]
    low = min(said.values())
    if low <= measured <= 1:
        return []  # a schedule between the stated value and 1
    return [
        info("momentum_differs", f"{twin.target} follows with momentum {measured:.6g}; stated is {named}", where=where)
    ]


def _swapped(twin: Twin, measured: float, said: str, where: str) -> Finding:
    return alarm(
        "momentum_swapped",
        f"{twin.target} keeps only {measured:.4g} of itself in a step; {said}",
        "the two weights of the moving average are most likely exchanged: the target is the online network of a step "
        "ago, and averages nothing",
        "target = momentum * target + (1 - momentum) * online; with lerp_, the weight is 1 - momentum",
        where,
    )


def _on_accumulation(patient: Patient, twin: Twin, gathered: dict[str, Any], where: str) -> list[Finding]:
    moves: list[Move] = gathered["moves"][twin.target]
    stepped = set(gathered["steps"])
    skipped = gathered["skipped"]
    idle = [move for move in moves if move.batch not in stepped and (skipped is None or move.batch < skipped)]
    before = [move for move in moves if skipped is None or move.batch < skipped]
    findings: list[Finding] = []
    per_step = len(before) / max(1, len([s for s in stepped if skipped is None or s < skipped]))
    given = patient.options.get("accumulate_grad_batches", 1)
    if idle and per_step > 1.4 and patient.module.automatic_optimization:
        texts = (
            f"with accumulate_grad_batches=2, {twin.target} moves {per_step:.3g} times an optimizer step: with each "
            "micro-batch",
            "accumulation then changes the method: the effective momentum is the stated one to the power of the number "
            "of micro-batches",
            "update it after an optimizer step: in optimizer_step, a hook of the optimizer "
            "(register_step_post_hook), or where trainer.global_step has changed",
            where,
        )
        if isinstance(given, int) and given > 1:
            findings.append(alarm("target_moves_per_micro_batch", *texts))
        else:
            findings.append(info("target_moves_per_micro_batch", *texts))
    if skipped is not None and any(move.batch >= skipped for move in moves):
        findings.append(
            info(
                "target_moves_when_skipped",
                f"{twin.target} moves in steps that a gradient scaler skips (16-bit AMP after an overflow), too",
                where=where,
            )
        )
    return findings
