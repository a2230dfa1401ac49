"""The outputs and the loss before training, beside what a healthy start looks like."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.doctor.batches import count_rows
from lightning_ssl.doctor.calls import Calls, Held
from lightning_ssl.doctor.isolate import SEED, Isolation, seed_all
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Fit, Patient, step_line
from lightning_ssl.functional import effective_rank


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    seen = isolation.one(_start, patient)
    findings: list[Finding] = []
    untold = ""
    where = step_line(patient.module)
    for path, x in seen["outputs"]:
        findings += on_outputs(path, x)
    if not seen["outputs"]:
        untold = "no network of the step gives one row a sample"
    losses = [loss for loss in seen["losses"] if loss is not None]
    if not losses:
        return findings, untold or "the step returns no loss, and makes no backward pass"
    first = losses[0]
    if not math.isfinite(first):
        findings.append(
            alarm(
                "loss_not_finite",
                f"the first loss is {first}",
                "nothing can be learnt from it",
                "see `gradients`",
                where,
            )
        )
    elif first == 0 and seen["independent"] in (0, None):
        findings.append(
            alarm(
                "loss_zero",
                "the first loss is exactly 0, also for independent outputs",
                "there is nothing to minimise",
                "look at masks, weights and reductions of the loss",
                where,
            )
        )
    else:
        findings.append(info("loss", _on_loss(patient, first, seen["independent"])))
    return findings, untold


def on_outputs(path: str, x: Tensor) -> list[Finding]:
    """Rank, norm and spread of the outputs of a network."""
    x = x.double()
    n, d = x.shape
    if not bool(x.isfinite().all()):
        return []  # told by `gradients`
    norm = float(x.norm(dim=1).mean())
    centred = x - x.mean(dim=0)
    spread = float(centred.norm() / max(float(x.norm()), 1e-300))
    if norm == 0 or spread < 1e-6:
        what = "zero" if norm == 0 else "the same for each sample"
        return [
            alarm(
                "constant_output",
                f"{path} gives {what} before training: mean norm {norm:.3g}, relative spread {spread:.2g}",
                "the loss sees no difference between samples, and no gradient can tell them apart: collapsed from the "
                "first step",
                "look at its initialisation, at dead activations, and at what enters it",
                path,
            )
        ]
    rank = float(effective_rank(centred))
    cosines = torch.nn.functional.normalize(x, dim=1)
    similar = float((cosines @ cosines.T).sum() - n) / (n * (n - 1))
    text = (
        f"{path}: {n} outputs of {d} numbers, effective rank {rank:.1f} of {min(n - 1, d)}, mean norm {norm:.3g}, mean "
        f"cosine of two samples {similar:.2f}"
    )
    if similar > 0.999:
        text += "; nearly parallel, which a contrastive loss can undo and one without negatives may not"
    return [info("outputs", text, where=path)]


def _on_loss(patient: Patient, first: float, independent: float | None) -> str:
    text = f"the first loss is {first:.5g}"
    if independent is not None:
        text += f"; with independent random outputs in place of the last network's it is {independent:.5g}"
    n = count_rows(patient.steps[0]) or 0
    for name, value in (("2N - 1", 2 * n - 1), ("N", n), ("2N - 2", 2 * n - 2)):
        if value > 1 and abs(first - math.log(value)) < 0.1 * math.log(value):
            text += f"; ln({name}) = {math.log(value):.4g} is what InfoNCE starts near"
            break
    if -1.05 < first < -0.8:
        text += "; a mean cosine this near to -1 has little left to gain: views or outputs are nearly equal"
    return text


def _start(patient: Patient) -> dict[str, Any]:
    module: Any = patient.module
    calls = Calls(module)
    n = count_rows(patient.steps[0]) or 0
    outputs: list[tuple[str, Tensor]] = []
    values: list[float | None] = []
    independent: list[float] = []

    def loss_of(value: Any, before: int) -> float | None:
        value = value.get("loss") if isinstance(value, dict) else value
        if isinstance(value, Tensor):
            return float(value.detach())
        return sum(fit.losses[before:]) if len(fit.losses) > before else None

    def instead(step: Any, batch: Any, args: Any, kwargs: Any) -> Any:
        held, before = Held(module), len(fit.losses)
        values.append(loss_of(step(fit.cast(batch), *args, **kwargs), before))
        with_rows = [
            c for c in calls.made if c.left is not None and c.grad and c.left.ndim == 2 and len(c.left) >= max(4, n)
        ]
        learnt = [c for c in with_rows if any(True for _ in module.get_submodule(c.path).parameters())]
        for path in dict.fromkeys(c.path for c in learnt):
            outputs.append((path, next(c.left for c in learnt if c.path == path and c.left is not None)))
        if learnt and module.automatic_optimization:
            last = module.get_submodule(learnt[-1].path)
            seed_all(SEED)

            def noise(part: Any, inputs: Any, output: Any) -> Any:
                return (
                    output + output.detach().std() * 10 * torch.randn_like(output)
                    if isinstance(output, Tensor)
                    else output
                )

            handle = last.register_forward_hook(noise)
            found = loss_of(step(fit.cast(batch), *args, **kwargs), len(fit.losses))
            handle.remove()
            if found is not None:
                independent.append(found)
        held.restore()
        return step(batch, *args, **kwargs)

    fit = Fit(patient, 1, patient.steps[:1], instead=instead)
    fit.run()
    return {"outputs": outputs[:6], "losses": values, "independent": independent[0] if independent else None}
