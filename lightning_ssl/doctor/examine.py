"""The examination: a first trial, then each check in processes of its own."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssl._lightning import is_a
from lightning_ssl.doctor import cost, gradients, modes, optimizer, pairing, ranks, resume, start, target, views
from lightning_ssl.doctor.batches import trimmed
from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.report import Finding, Report, Result, alarm
from lightning_ssl.doctor.trial import Fed, Fit, Patient, record_moments, step_line

Check = Callable[[Patient, Isolation], tuple[list[Finding], str]]
_CHECKS: dict[str, Check] = {
    "ranks": ranks.check,
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
CHECKS = tuple(_CHECKS)
"""The names of the checks, in their order."""
TRIAL_STEPS = 3


def examine(
    module: Any,
    data: Any = None,
    ranks: int = 2,
    checks: Sequence[str] | None = None,
    trainer: Mapping[str, Any] | None = None,
    limit: float = 60.0,
    rows: int = 32,
    device: str = "cpu",
    say: Callable[[str], None] | None = None,
) -> Report:
    """Look for the silent bugs of self-supervised code in anybody's LightningModule, before the first epoch.

    The module is trained for some steps, by a real Trainer, in processes of their own: the one at hand is never
    changed, and a hang, a crash or a lack of memory ends one check with a word.

    Args:
        module: The LightningModule, of `lightning` or `pytorch_lightning`, as `Trainer.fit` would get it.
        data: Its DataModule, its training loader, or one batch; None if the module has a `train_dataloader`.
        ranks: Number of processes that are compared with one.
        checks: Which checks to run, of `CHECKS`; all if None.
        trainer: What the run's Trainer gets: `max_epochs`, `accumulate_grad_batches`, `precision`, `callbacks` and the
            like. Without it, what depends on the run's length or settings is not judged.
        limit: Seconds that each process of a check may take.
        rows: How many rows of a batch the checks use.
        device: "cpu", or where the processes that are not compared over ranks run.
        say: Called with the name of each check before it begins.

    Returns:
        The report: `healthy`, `findings()`, `to_dict()`; printing it shows it.

    Example:
        >>> from lightning_ssl.doctor import CHECKS, examine
        >>> report = examine(module, loader, checks=["ranks"])  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
    """
    chosen = _chosen(checks)
    patient = _admit(module, data, ranks, trainer, device)
    if limit <= 0 or rows < 4:
        raise ValueError(f"`limit` must be above 0 and `rows` at least 4, got {limit} and {rows}")
    isolation = Isolation(limit, device)
    report = Report(type(module).__name__)
    began = time.monotonic()
    if say is not None:
        say("first steps")
    try:
        found = isolation.one(first_trial, patient)
    except Ended as ended:
        result = Result("step", [_fails(module, str(ended))], ended=True, seconds=time.monotonic() - began)
        report.results.append(result)
        for name in chosen:
            report.results.append(Result(name, untold="the module does not train; see `step`", ended=True))
        return report
    patient = replace(patient, **found, steps=[trimmed(batch, rows) for batch in found["whole"]])
    for name in chosen:
        if say is not None:
            say(name)
        report.results.append(_checked(name, patient, isolation))
    return report


def assert_healthy(
    module: Any, data: Any = None, checks: Sequence[str] | None = None, complete: bool = True, **kwargs: Any
) -> Report:
    """Raise with the whole report if :func:`examine` finds something wrong: a test for other people's CI.

    Args:
        module: As for :func:`examine`.
        data: As for :func:`examine`.
        checks: As for :func:`examine`.
        complete: Whether a check that a hang, a crash or its time limit ended is a failure, too.
        kwargs: As for :func:`examine`.

    Raises:
        AssertionError: Something is wrong.

    Example:
        >>> from lightning_ssl.doctor import assert_healthy
        >>> assert_healthy(module, loader, checks=["ranks", "target"])  # doctest: +SKIP
    """
    report = examine(module, data, checks=checks, **kwargs)
    if not report.healthy or (complete and report.ended):
        raise AssertionError(str(report))
    return report


def _checked(name: str, patient: Patient, isolation: Isolation) -> Result:
    began, result = time.monotonic(), Result(name)
    try:
        result.findings, result.untold = _CHECKS[name](patient, isolation)
    except Ended as ended:
        result.untold, result.ended = f"the examined module ended this check: {ended}", True
    except Exception as error:  # a check that stumbles over what a module does must not take the others with it
        result.untold, result.ended = f"the check itself failed: {type(error).__name__}: {error}", True
    result.seconds = time.monotonic() - began
    return result


def _fails(module: Any, text: str) -> Finding:
    return alarm(
        "step_fails",
        f"the module does not train for {TRIAL_STEPS} steps with this data: {text}",
        "nothing else can be said about it",
        "mend this first; `limit` sets how long it may take",
        step_line(module),
    )


def _chosen(checks: Sequence[str] | None) -> list[str]:
    chosen = list(CHECKS if checks is None else [checks] if isinstance(checks, str) else checks)
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown or not chosen:
        raise ValueError(f"`checks` must name some of {', '.join(CHECKS)}; got {chosen}")
    return chosen


def _admit(module: Any, data: Any, ranks: int, trainer: Mapping[str, Any] | None, device: str) -> Patient:
    if not is_a(module, "LightningModule"):
        raise TypeError(f"`module` must be a LightningModule, got {type(module).__name__}")
    if not isinstance(ranks, int) or ranks < 2:
        raise ValueError(f"`ranks` must be a whole number of at least 2, got {ranks!r}")
    if trainer is not None and not isinstance(trainer, Mapping):
        raise TypeError(f"`trainer` must be a dict of arguments for the Trainer, got {type(trainer).__name__}")
    patient = Patient(module, options=_kept(trainer or {}), ranks=ranks, device=device)
    if is_a(data, "LightningDataModule"):
        patient.datamodule = data
    elif _loads(data):
        patient.loader = data
    elif isinstance(data, (Tensor, Mapping, list, tuple)) or is_dataclass(data):
        patient.raw, patient.given = [data], True
    elif data is not None and hasattr(data, "__iter__"):
        patient.loader = data
    elif data is not None:
        raise TypeError(f"`data` must be a DataModule, a loader or a batch, got {type(data).__name__}")
    elif not callable(getattr(module, "train_dataloader", None)):
        raise ValueError("`data` is missing: pass a DataModule, a loader or a batch")
    return patient


# Where and how long a run is, what it writes and how it is started are the doctor's own.
_OWN = {
    "accelerator", "devices", "num_nodes", "strategy", "logger", "default_root_dir", "enable_checkpointing", "profiler",
    "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "fast_dev_run", "overfit_batches", "barebones", "max_time",
    "log_every_n_steps", "val_check_interval", "check_val_every_n_epoch", "inference_mode", "detect_anomaly",
    "sync_batchnorm", "model_registry", "reload_dataloaders_every_n_epochs", "benchmark", "min_epochs", "min_steps",
}  # fmt: skip


def _kept(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments that matter to a check."""
    kept = {name: value for name, value in trainer.items() if name not in _OWN and value is not None}
    callbacks = kept.get("callbacks", [])
    kept["callbacks"] = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    return kept


def _loads(data: Any) -> bool:
    """Whether something is a DataLoader, or a list or dict of some."""
    if isinstance(data, (list, tuple)) and data and not isinstance(data[0], Tensor):
        return all(isinstance(one, DataLoader) for one in data)
    if isinstance(data, Mapping) and data:
        return all(isinstance(one, DataLoader) for one in data.values())
    return isinstance(data, DataLoader)


def first_trial(patient: Patient) -> dict[str, Any]:
    """Train as the user would for some steps; return what the loader gave and what the steps got."""
    found: dict[str, Any] = {"raw": list(patient.raw), "length": 100}

    def first_of(loader: Any) -> Any:
        if isinstance(loader, (list, tuple, dict)):
            combined = importlib.import_module(f"{patient.package.__name__}.utilities.combined_loader")
            loader = combined.CombinedLoader(loader, "max_size_cycle")
            found["raw"] = [batch for batch, _, _ in islice(iter(loader), TRIAL_STEPS)]
        else:
            found["raw"] = list(islice(iter(loader), TRIAL_STEPS))
        if not found["raw"]:
            raise ValueError("the loader yields no batch")
        with contextlib.suppress(TypeError, NotImplementedError):
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
