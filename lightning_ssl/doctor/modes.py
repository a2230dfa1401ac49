"""Train and eval mode, randomness that stays on in eval mode, and bfloat16 against float32."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssl._lightning import overrides
from lightning_ssl.doctor.calls import Calls, Held, first_tensor
from lightning_ssl.doctor.isolate import SEED, Ended, Isolation, seed_all
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.steady import Steady
from lightning_ssl.doctor.trial import Fit, Patient, line_of, listed, sampled, step_line, still_dropout
from lightning_ssl.doctor.verdict import compare


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    findings: list[Finding] = isolation.one(_norms, patient)
    more, untold = isolation.one(_random_in_eval, patient)
    findings += more
    try:
        findings += _halves(patient, isolation)
    except Ended as ended:
        untold = "; ".join(filter(None, [untold, f"bfloat16 was not tried to the end: {ended}"]))
    return findings, untold


def _norms(patient: Patient) -> list[Finding]:
    """Two epochs of two steps: which batch normalisations are used in which mode, and learn their statistics."""
    module: Any = patient.module
    norms = {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    }
    fresh = {
        name
        for name, m in norms.items()
        if bool((m.running_mean == 0).all()) and bool((m.running_var == 1).all())  # type: ignore[union-attr]
    }
    used: dict[str, set[bool]] = {name: set() for name in norms}
    moved: set[str] = set()
    within = {"step": False}
    modes: list[dict[str, bool]] = []

    def hook(name: str) -> Any:
        def keep(layer: nn.Module, args: Any) -> None:
            if within["step"]:
                used[name].add(layer.training)

        return keep

    @contextlib.contextmanager
    def around() -> Any:
        modes.append({name: m.training for name, m in module.named_modules()})
        within["step"] = True
        yield
        within["step"] = False

    for name, layer in norms.items():
        layer.register_forward_pre_hook(hook(name))
    before = {name: m.running_mean.clone() for name, m in norms.items()}  # type: ignore[union-attr]
    Fit(patient, 4, patient.steps, around, per_epoch=2).run()
    for name, layer in norms.items():
        if not torch.equal(before[name], layer.running_mean):  # type: ignore[arg-type]
            moved.add(name)
    findings = []
    left = [n for n in modes[0] if n and modes[0][n] and not modes[-1][n]]
    if left:
        findings.append(
            alarm(
                "left_in_eval",
                f"{len(left)} parts are in train mode in the first epoch and in eval mode in the second: "
                f"{listed(left)}",
                "something between the epochs, a probe perhaps, calls eval() and does not call train() again: dropout "
                "is off and batch statistics stand still for the rest of the run",
                "restore the modes that were found, not only those of the LightningModule",
                left[0],
            )
        )
    never = [n for n in norms if used[n] and n not in moved and n in fresh]
    if never:
        how = "in train mode" if True in used[never[0]] else "in eval mode"
        findings.append(
            alarm(
                "statistics_never_updated",
                f"{len(never)} batch normalisations are used {how} in the step, and their running statistics stay at "
                f"mean 0 and variance 1: {listed(never)}",
                "in eval mode, where features are probed and used, they do not normalise at all: other features than "
                "the trained ones"
                if True in used[never[0]]
                else "they do not normalise at all, neither by the batch nor by anything learnt",
                "train mode and a momentum above 0 (None averages all); a target kept in eval mode needs the online "
                "network's buffers, not only its parameters",
                never[0],
            )
        )
    frozen = [n for n in norms if used[n] == {False} and n not in fresh]
    if frozen:
        findings.append(info("frozen_statistics", f"batch normalisations with fixed statistics: {listed(frozen)}"))
    return findings


def _random_in_eval(patient: Patient) -> tuple[list[Finding], str]:
    """The encoder twice on the same input in eval mode; in a process of its own."""
    module: Any = patient.module
    calls = Calls(module)
    found: dict[str, Any] = {}

    def instead(step: Any, batch: Any, args: Any, kwargs: Any) -> Any:
        held = Held(module)
        step(fit.cast(batch), *args, **kwargs)
        entry = next((c for c in calls.made if c.entry and c.grad and c.entered is not None), None)
        held.restore()
        if entry is None:
            return step(batch, *args, **kwargs)
        module.eval()
        runs = [("forward", module)] if overrides(module, "forward") else []
        runs.append((entry.path, module.get_submodule(entry.path)))
        for name, network in runs:
            try:
                outputs = []
                for seed in (SEED, SEED + 1):
                    seed_all(seed)
                    with torch.no_grad(), Steady(steady=False) as mode:
                        outputs.append(first_tensor(network(entry.entered)))
            except Exception:
                continue  # it wants other arguments
            a, b = outputs
            if a is not None and b is not None:
                found[name] = (mode.draws, _differs(a, b))
        held.restore()
        return step(batch, *args, **kwargs)

    fit = Fit(patient, 1, patient.steps[:1], instead=instead)
    fit.run()
    if not found:
        return [], "no network could be called by itself in eval mode"
    for name, (drawn, differs) in found.items():
        if not differs:
            continue
        masks = any("mask" in function.lower() for draw in drawn for function in draw.functions)
        place = drawn[0].where if drawn else name
        text = f"in eval mode {name} gives {differs:.1%} different features for the same input, draw by draw"
        if masks:
            return [info("masked_in_eval", f"{text}: a random mask", where=place)], ""
        return [
            alarm(
                "random_in_eval",
                text,
                "probes and users of the features get noise: functional dropout without training=self.training, or an "
                "augmentation inside the network",
                "let it depend on self.training",
                f"{place}; {type(module).__name__} ({line_of(type(module))})",
            )
        ], ""
    return [info("deterministic_in_eval", f"in eval mode {', '.join(found)} gives the same features each time")], ""


def _differs(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return 1.0
    difference = float((a - b).norm()) / max(float(a.norm()), 1e-12)
    return difference if difference > 1e-4 else 0.0


def _halves(patient: Patient, isolation: Isolation) -> list[Finding]:
    """The gradient in bfloat16 against float32."""
    single = isolation.one(_gradient, patient, "32-true")
    half = isolation.one(_gradient, patient, "bf16-mixed")
    names = [name for name in single if name in half and bool(single[name].isfinite().all())]
    if not names:
        return []
    bad = [name for name in names if not bool(half[name].isfinite().all())]
    chosen = str(patient.options.get("precision", ""))
    where = step_line(patient.module)
    if bad:
        return [
            alarm(
                "half_not_finite",
                f"under bf16-mixed the gradient is not finite, in float32 it is: {listed(bad)}",
                "numbers overflow, or a difference becomes zero, when the loss is computed in half precision",
                "compute the loss in float32: outputs.float(), or torch.autocast(..., enabled=False) around it",
                where,
            )
        ]
    ratio, cosine = compare(half, single, names)
    text = f"bf16-mixed against float32: gradient norm ratio {ratio:.3f}, cosine {cosine:.4f}"
    if cosine < 0.5 and ("bf16" in chosen or "16" in chosen):
        return [
            alarm(
                "half_differs",
                text,
                "most of the gradient is rounding",
                "compute the loss in float32, and look at what is subtracted from what",
                where,
            )
        ]
    return [info("half", text)]


def _gradient(patient: Patient, precision: str) -> dict[str, Tensor]:
    module: Any = patient.module
    still_dropout(module)
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(grad: Tensor) -> None:
            found[name] = found.get(name, 0.0) + sampled(grad)

        return keep

    for name, p in module.named_parameters():
        if p.requires_grad:
            p.register_hook(hook(name))
    Fit(patient, 1, patient.steps[:1], settings={"precision": precision}).run()
    return found
