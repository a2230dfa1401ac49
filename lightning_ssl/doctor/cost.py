"""Time and memory of a step, where they go, and what callbacks would add."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from lightning_ssl.callbacks import EffectiveRank, UniformityAlignment
from lightning_ssl.doctor.batches import count_rows
from lightning_ssl.doctor.calls import Calls
from lightning_ssl.doctor.draws import own_loader
from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.report import Finding, info
from lightning_ssl.doctor.trial import Fit, Patient

STEPS = 5


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    seen = isolation.one(_timed, patient, None)
    step = seen["step"]
    shares = {name: seconds / step for name, seconds in seen["parts"].items()}
    told = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1])[:5])
    rows = seen["rows"]
    findings = [
        info(
            "step",
            f"a step on {rows} rows takes {1000 * step:.1f} ms on one CPU thread (median of {STEPS - 1}): {told}; the "
            f"process holds {seen['memory']:.0f} MB at most, {seen['grown']:.0f} MB of it since the first step; the "
            f"module has {seen['parameters']:,} parameters",
        )
    ]
    untold = ""
    if not patient.given:
        try:
            drawn = isolation.one(_drawn, patient)
            text = f"a batch takes the loader {1000 * drawn:.1f} ms"
            slow = drawn > 2 * step
            findings.append(info("loader", text + ("; more than the step on the CPU" if slow else "")))
        except Ended as ended:
            untold = f"the loader was not timed: {ended}"
    if seen["features"] is not None:
        try:
            watched = isolation.one(_timed, patient, seen["features"])["step"]
            added = max(0.0, watched - step)
            findings.append(
                info(
                    "callbacks",
                    f"UniformityAlignment and EffectiveRank on {seen['features']} add {1000 * added:.1f} ms to a step "
                    f"they look at; at every 50th, {added / 50 / step:.2%}",
                )
            )
        except Ended as ended:
            untold = f"callbacks were not timed: {ended}"
    return findings, untold


def _timed(patient: Patient, features: str | None) -> dict[str, Any]:
    module: Any = patient.module
    marks: list[tuple[str, float]] = []
    forward: dict[str, float] = {}
    began: dict[str, float] = {}

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    calls = None if features else Calls(module)
    for name, part in module.named_children():
        part.register_forward_pre_hook(lambda m, a, name=name: began.__setitem__(name, time.perf_counter()))
        part.register_forward_hook(lambda m, a, o, name=name: _add(forward, name, time.perf_counter() - began[name]))

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        mark("forward")
        yield
        mark("rest of forward")

    hooks = {
        "on_train_batch_start": lambda _, *args: mark("begin"),
        "on_before_backward": lambda _, *args: mark("backward"),
        "on_after_backward": lambda _, *args: mark("optimizer and hooks"),
        "on_train_batch_end": lambda _, *args: mark("end"),
    }
    options: list[Any] = []
    if features is not None:
        options = [UniformityAlignment(features, every_n_steps=1), EffectiveRank(features, every_n_steps=1)]
    start = _memory()
    fit = Fit(patient, STEPS, patient.steps, around, hooks)
    fit.watchers = options
    fit.run()
    steps = _between(marks)
    whole = sorted(sum(step.values()) for step in steps[1:])
    parts: dict[str, float] = {}
    for step in steps[1:]:
        for name, seconds in step.items():
            _add(parts, name, seconds / len(steps[1:]))
    inner = {f"forward of {name}": seconds / STEPS for name, seconds in forward.items()}
    parts.pop("forward", None)
    last = None
    if calls is not None:
        made = [c for c in calls.made if c.left is not None and c.grad and c.left.ndim == 2 and not c.entry]
        made = [c for c in made if next(module.get_submodule(c.path).parameters(), None) is not None]
        last = made[-1].path if made else None
    return {
        "step": whole[len(whole) // 2],
        "parts": {**parts, **inner},
        "memory": _memory(),
        "grown": _memory() - start,
        "parameters": sum(p.numel() for p in module.parameters()),
        "features": last,
        "rows": count_rows(patient.steps[0]),
    }


def _between(marks: list[tuple[str, float]]) -> list[dict[str, float]]:
    """The seconds between marks, by the earlier one's name, step by step."""
    steps: list[dict[str, float]] = []
    for (name, then), (_, now) in pairwise(marks):
        if name == "begin":
            steps.append({})
        if steps and name not in ("end", "begin"):
            _add(steps[-1], name, now - then)
    return steps


def _add(table: dict[str, float], name: str, value: float) -> None:
    table[name] = table.get(name, 0.0) + value


def _memory() -> float:
    """The most that this process has held, in MB."""
    import resource  # not everywhere

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _drawn(patient: Patient) -> float:
    iterator = iter(own_loader(patient))
    times = []
    for _ in range(4):
        began = time.perf_counter()
        if next(iterator, None) is None:
            break
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] if times else 0.0
