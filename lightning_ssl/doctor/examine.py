"""The examination: a first trial, then each check in processes of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from lightning_ssl._lightning import is_a
from lightning_ssl.doctor import cost, gradients, modes, optimizer, pairing, resume, start, target, views
from lightning_ssl.doctor import ranks as ranks_check
from lightning_ssl.doctor.batches import trimmed
from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.report import Finding, Report, Result, alarm
from lightning_ssl.doctor.trial import Fed, Fit, Patient, record_moments, step_line

Check = Callable[[Patient, Isolation], tuple[list[Finding], str]]
CHECKS: dict[str, Check] = {
    "ranks": ranks_check.check,
    "views": views.check,
    "pairing": pairing.check,
    "gradients": gradients.check,
    "target": target.check,
    "optimizer": optimizer.check,
    "resume": resume.check,
    "modes": modes.check,
    "start": start.check,
    "cost": cost.check,
}


def examine(
    module: Any,
    data: Any = None,
    ranks: int = 2,
    checks: Sequence[str] | None = None,
    trainer: Mapping[str, Any] | None = None,
    limit: float = 60.0,
    rows: int = 32,
) -> Report:
    patient = admit(module, data, ranks, trainer)
    isolation = Isolation(limit)
    report = Report(type(module).__name__)
    began = time.monotonic()
    try:
        found = isolation.one(first_trial, patient)
    except Ended as ended:
        report.results.append(Result("step", [alarm("step_fails", str(ended), "", "")], "", True, time.monotonic()-began))
        return report
    patient = replace(patient, **found, steps=[trimmed(batch, rows) for batch in found["whole"]])
    for name in checks or CHECKS:
        began = time.monotonic()
        result = Result(name)
        try:
            result.findings, result.untold = CHECKS[name](patient, isolation)
        except Ended as ended:
            result.untold, result.ended = str(ended), True
        result.seconds = time.monotonic() - began
        report.results.append(result)
    return report


def admit(module, data, ranks, trainer):
    patient = Patient(module, options=dict(trainer or {}), ranks=ranks)
    if is_a(data, "LightningDataModule"):
        patient.datamodule = data
    elif isinstance(data, (list, tuple, dict, torch.Tensor)):
        patient.raw = [data]
        patient.given = True
    else:
        patient.loader = data
    return patient


TRIAL_STEPS = 3


def first_trial(patient: Patient) -> dict[str, Any]:
    """Train as the user would for some steps; return what the loader gave and what the steps got."""
    found: dict[str, Any] = {"raw": list(patient.raw), "length": 100}

    def first_of(loader: Any) -> Any:
        if isinstance(loader, (list, tuple, dict)):
            combined = __import__(f"{patient.package.__name__}.utilities", fromlist=["CombinedLoader"])
            loader = combined.CombinedLoader(loader, "max_size_cycle")
            found["raw"] = [batch for batch, _, _ in islice(iter(loader), TRIAL_STEPS)]
        else:
            found["raw"] = list(islice(iter(loader), TRIAL_STEPS))
        if not found["raw"]:
            raise ValueError("the loader yields no batch")
        with contextlib.suppress(TypeError):
            found["length"] = max(1, len(loader))
        return Fed(found["raw"], found["length"])

    moments: dict[str, Any] = {}
    record_moments(patient.module, moments)
    fit = Fit(patient, steps=TRIAL_STEPS, keep=True, real=True)
    if patient.datamodule is not None:
        theirs = patient.datamodule.train_dataloader
        patient.datamodule.train_dataloader = lambda: first_of(theirs())
    elif patient.given:
        fit.real = False
    elif patient.loader is not None:
        patient.loader = first_of(patient.loader)
    else:
        own = patient.module.train_dataloader
        patient.module.train_dataloader = lambda: first_of(own())
    fit.run()
    return {**found, "whole": fit.entered, "moments": moments, "losses": fit.losses}
