"""Which parameters get gradients, which should, and where the first number that is not finite arises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl.doctor.batches import tensors
from lightning_ssl.doctor.isolate import Isolation
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Fit, Patient, child_of, listed, step_line
from lightning_ssl.doctor.twins import find_twins, learning_targets

STEPS = 3


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    seen = isolation.one(_watch, patient)
    findings: list[Finding] = list(seen["findings"])
    if not seen["stepped"] and not findings:
        return findings, "no backward pass was made in the first steps"
    silent: dict[str, list[str]] = seen["silent"]
    if silent:
        baseline = isolation.one(_loss_with, patient, [])
        for part, names in list(silent.items())[:4]:
            changed = isolation.one(_loss_with, patient, names)
            findings.append(_on_silent(patient, part, names, part in seen["wholly"], baseline, changed))
    if not any(f.severity == "alarm" for f in findings):
        findings.append(info("gradients_flow", f"{seen['got']} of {seen['all']} trainable parameters get gradients"))
    return findings, ""


def _on_silent(
    patient: Patient, part: str, names: list[str], wholly: bool, baseline: list[float], changed: list[float]
) -> Finding:
    # More than rounding: a bias before a batch normalisation moves the loss by that.
    felt = any(abs(a - b) > 1e-4 * max(1e-3, abs(a)) for a, b in zip(baseline, changed, strict=False))
    where = f"{part}; {step_line(patient.module)}"
    if felt:
        return alarm(
            "cut_off",
            f"the loss depends on {part} (changing its weights moves it from {baseline[0]:.6g} to {changed[0]:.6g}), "
            f"but {len(names)} of its trainable parameters never get a gradient: {listed(names)}",
            "they stand in the optimizer, and never learn",
            "look for detach, no_grad, .data, .item or numpy between these weights and the loss",
            where,
        )
    text = f"{len(names)} trainable parameters in the optimizer have no part in the loss: {listed(names)}"
    if wholly:
        return alarm(
            "never_used",
            f"{text}; that is all of {part}",
            "a network was built and handed to the optimizer, but the step does not use it",
            "use it in the training step, or leave it out of the optimizer",
            where,
        )
    return info("partly_unused", text, "plain DDP stops at parameters without gradients", where=where)


def _watch(patient: Patient) -> dict[str, Any]:
    module: Any = patient.module
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    got: set[str] = set()
    alive: set[str] = set()
    places: list[str] = []
    seen: dict[str, Any] = {"stepped": 0}

    def hook(name: str) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            got.add(name)
            if name not in alive and bool((grad != 0).any()):
                alive.add(name)
            if not places and not bool(grad.isfinite().all()):
                places.append(f"the gradient of {name}; the forward pass and the loss are finite")

        return keep

    def on_train_batch_start(_: Any, trainer: Any, *args: Any) -> None:
        if "trains" in seen:
            return
        for name, p in module.named_parameters():
            if p.requires_grad:
                p.register_hook(hook(name))
        seen["trains"] = []
        seen["all"] = sum(p.requires_grad for p in module.parameters())

    def on_before_optimizer_step(_: Any, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        members = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # As it is now: prototypes and last layers are often frozen for the first epoch, within the step.
        seen["trains"] += [
            n for n, p in module.named_parameters() if id(p) in members and p.requires_grad and n not in seen["trains"]
        ]

    def on_before_backward(_: Any, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        seen["stepped"] += 1
        if not bool(loss.isfinite().all()) and not places:
            places.append(f"the loss itself ({float(loss):.3g}); every layer's output is finite")

    for name, layer in module.named_modules():
        if name:
            layer.register_forward_hook(_finite_hook(name, places))
    for path, x in tensors(patient.steps[0]):
        if x.is_floating_point() and not x.isfinite().all():
            places.append(f"the batch, at {path}")
    # As they are before the first step: twins begin equal.
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    hooks = {
        "on_train_batch_start": on_train_batch_start,
        "on_before_backward": on_before_backward,
        "on_before_optimizer_step": on_before_optimizer_step,
    }
    settings = {"gradient_clip_val": None}
    Fit(patient, steps=STEPS, feed=patient.steps, hooks=hooks, settings=settings).run()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(before[name])
    findings = []
    if places:
        findings.append(
            alarm(
                "non_finite",
                f"numbers that are not finite arise in the first {STEPS} steps; the first is {places[0]}",
                "one such number in the gradient makes all weights NaN",
                "look at this place: a square root or norm of zero, a logarithm, a division by a spread of zero, an "
                "exponential of a large number; add an epsilon inside, or clamp",
                f"{places[0]}; {step_line(module)}",
            )
        )
    learning = alive if not places else got
    for twin in learning_targets(module, learning):
        findings.append(
            alarm(
                "target_gradient",
                f"{twin.target} is a copy of {twin.online}, named a target, and gets gradients",
                "the loss then pulls both branches together instead of one towards the other: the way to collapse "
                "that the target is there to close",
                f"call {twin.target} under torch.no_grad(), and set requires_grad_(False) on it",
                twin.target,
            )
        )
    thawed = sorted(frozen & alive)
    if thawed:
        findings.append(
            alarm(
                "frozen_gradient",
                f"{len(thawed)} parameters that were frozen when the module was built get gradients: {listed(thawed)}",
                "something (train, requires_grad_, toggle_optimizer, a hook) thaws them before the first step",
                "freeze them after it, or where it runs",
                ", ".join(sorted({child_of(name) for name in thawed})),
            )
        )
    targets = [twin.target for twin in find_twins(module, learning)]
    silent, wholly = _dead_parts(module, seen.get("trains", []), learning, targets)
    return {
        "findings": findings,
        "stepped": seen["stepped"],
        "silent": {} if places else silent,
        "wholly": wholly,
        "got": len(got),
        "all": seen.get("all", 0),
    }


def _finite_hook(name: str, places: list[str]) -> Callable[..., None]:
    def look(layer: nn.Module, args: Any, output: Any) -> None:
        looks = not places and isinstance(output, Tensor) and output.is_floating_point()
        if looks and not bool(output.detach().isfinite().all()):
            places.append(f"the output of {name} ({type(layer).__name__})")

    return look


def _dead_parts(
    module: nn.Module, trains: list[str], learning: set[str], targets: list[str]
) -> tuple[dict[str, list[str]], set[str]]:
    """The trained parameters that never got a gradient, by the largest part that has none, and which are children."""
    dead = [n for n in trains if n not in learning and not any(n.startswith(f"{t}.") for t in targets)]
    parts: dict[str, list[str]] = {}
    wholly = set()
    for name in dead:
        path = name.split(".")
        for depth in range(1, len(path) + 1):
            part = ".".join(path[:depth])
            mine = [n for n in trains if n == part or n.startswith(f"{part}.")]
            if not any(n in learning for n in mine):
                parts.setdefault(part, []).append(name)
                if depth == 1:
                    wholly.add(part)
                break
    return parts, wholly


def _loss_with(patient: Patient, names: list[str]) -> list[float]:
    """The losses of a step when these parameters are changed."""
    module: Any = patient.module
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name in names:
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.add_(noise * (p.std() if p.numel() > 1 and p.std() > 0 else 0.1))
    fit = Fit(patient, steps=1, feed=patient.steps[:1])
    fit.run()
    return fit.losses
