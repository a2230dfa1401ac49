"""The examination: a first trial, then each check in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_ssl._lightning import is_a
from lightning_ssl.doctor import gradients, optimizer, target
from lightning_ssl.doctor import ranks as ranks_check
from lightning_ssl.doctor.batches import trimmed
from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.report import Finding, Report, Result, alarm
from lightning_ssl.doctor.trial import Fit, Patient, record_moments, step_line

Check = Callable[[Patient, Isolation], tuple[list[Finding], str]]
CHECKS: dict[str, Check] = {
    "ranks": ranks_check.check,
    "gradients": gradients.check,
    "target": target.check,
    "optimizer": optimizer.check,
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
    raw: list[Any] = []
    length = 100
    if patient.loader is not None:
        try:
            length = len(patient.loader)
        except TypeError:
            length = 100
        for batch in patient.loader:
            raw.append(batch)
            if len(raw) == TRIAL_STEPS:
                break
    elif patient.given:
        raw = patient.raw
    patient.raw, patient.length = raw, max(1, length)
    moments: dict[str, Any] = {}
    record_moments(patient.module, moments)
    fit = Fit(patient, steps=TRIAL_STEPS, keep=True)
    fit.run()
    return {"raw": raw, "length": patient.length, "whole": fit.entered, "moments": moments, "losses": fit.losses}
