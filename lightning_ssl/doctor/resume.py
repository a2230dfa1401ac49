"""Save, load, one more step: is it the step that would have followed?"""

from __future__ import annotations

import importlib
import tempfile
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ssl.doctor.isolate import SEED, Ended, Isolation, seed_all
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Fit, Patient, listed


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        path = f"{folder}/one.ckpt"
        straight = isolation.one(_train, patient, path, False)
        twice = isolation.one(_train, patient, f"{folder}/two.ckpt", False)
        if straight["end"].keys() != twice["end"].keys() or _apart(straight["end"], twice["end"], 1e-6):
            return [], "two runs from the same beginning differ: the module draws random numbers of its own"
        if not straight["saved"]:
            return [], "no checkpoint could be written after the first step"
        try:
            resumed = isolation.one(_train, patient, path, True)
        except Ended as ended:
            return [
                alarm(
                    "cannot_resume",
                    f"a checkpoint that was just saved cannot be resumed from: {ended}",
                    "an interrupted run is lost",
                    "let state_dict, on_save_checkpoint and on_load_checkpoint, and the networks built in __init__, "
                    "agree with each other",
                )
            ], ""
    return _judged(straight, resumed), ""


def _train(patient: Patient, path: str, resume: bool) -> dict[str, Any]:
    """Two epochs of one step each; the checkpoint is written between them, or resumed from."""
    module: Any = patient.module
    seen: dict[str, Any] = {"saved": False, "begin": {}, "losses": []}
    checkpoint = importlib.import_module(f"{patient.package.__name__}.callbacks").Checkpoint

    def on_train_epoch_end(_: Any, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0 and not resume:
            trainer.save_checkpoint(path)
            seen["saved"] = True

    def on_train_batch_start(_: Any, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 1:
            seen["begin"] = everything(module, trainer)
            seed_all(SEED + 1)

    def instead(step: Any, batch: Any, args: Any, kwargs: Any) -> Any:
        epoch = module.trainer.current_epoch
        return step(fit.cast(patient.steps[epoch % len(patient.steps)]), *args, **kwargs)

    # Of Lightning's own kind: it runs after the module's hooks, as ModelCheckpoint does.
    saver = type("Saver", (checkpoint,), {"on_train_epoch_end": on_train_epoch_end})()
    hooks = {"on_train_batch_start": on_train_batch_start}
    settings = {"max_epochs": patient.options.get("max_epochs") or 100, "accumulate_grad_batches": 1}
    fit = Fit(patient, 1 if resume else 2, instead=instead, hooks=hooks, per_epoch=1, settings=settings)
    fit.saver = saver
    fit.ckpt_path = path if resume else None
    trainer = fit.run()
    return {**seen, "end": everything(module, trainer), "losses": fit.losses[-1:]}


def everything(module: Any, trainer: Any) -> dict[str, Any]:
    """By name, all that a module and its optimizers hold: parameters, buffers, attributes, moments, rates."""
    found: dict[str, Any] = {f"parameter {n}": p.detach().clone() for n, p in module.named_parameters()}
    saved = module.state_dict()
    for name, buffer in module.named_buffers():
        kind = "buffer" if name in saved else "non-persistent buffer"
        found[f"{kind} {name}"] = buffer.detach().clone()
    usual = _lightnings()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in usual or name.startswith("__"):
                continue
            kept = _plain(value)
            if kept is not None:
                found[f"attribute {path}.{name}" if path else f"attribute {name}"] = kept
    for number, optimizer in enumerate(trainer.optimizers):
        state = optimizer.state_dict()
        for key, values in state["state"].items():
            for name, value in values.items():
                found[f"optimizer {number} state {key} {name}"] = _plain(value)
        for key, group in enumerate(state["param_groups"]):
            found[f"optimizer {number} group {key} lr"] = float(group["lr"])
    return found


def _lightnings() -> set[str]:
    import lightning.pytorch as L

    return set(vars(L.LightningModule())) | {"training_step", "configure_callbacks", "train_dataloader", "forward"}


def _plain(value: Any, depth: int = 0) -> Any:
    """Data that can be compared, copied; None for everything else."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, nn.Module) and depth:
        return [_plain(p) for p in value.parameters()]
    if isinstance(value, (list, tuple, deque, dict)) and depth < 3 and len(value) <= 4096:
        items = value.values() if isinstance(value, dict) else value
        kept = [_plain(item, depth + 1) for item in items]
        return kept if any(item is not None for item in kept) else None
    return None


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return False
        if a.is_floating_point():
            scale = float(a.abs().max()) if a.numel() else 0.0
            return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tolerance * max(1e-12, abs(a)) or a != a
    return type(a) is type(b)


def _apart(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[str]:
    return [name for name in a if name not in b or not _same(a[name], b[name], tolerance)]


def _judged(straight: dict[str, Any], resumed: dict[str, Any]) -> list[Finding]:
    lost = _apart(straight["begin"], resumed["begin"], 1e-6)
    after = _apart(straight["end"], resumed["end"], 1e-5)
    matters = [n for n in after if n.startswith(("parameter", "buffer")) or n.endswith(" lr")]
    loss = not all(_same(a, b, 1e-5) for a, b in zip(straight["losses"], resumed["losses"], strict=False))
    named = [n for n in lost if not n.startswith("optimizer")]
    declared = bool(lost) and all(n.startswith("non-persistent") for n in lost)
    if declared and (matters or loss):
        return [
            info(
                "not_resumed_as_declared",
                f"the step after save and load is not the one that would have followed: {listed(named)} are declared "
                "not to be saved (persistent=False), and begin anew",
                "a resumed run has another queue or centre for a while; packages like lightly choose that",
                "register them with persistent=True to go on where the run stopped",
                listed(named),
            )
        ]
    if matters or loss:
        moved = f"{len(matters)} parameters, buffers and rates differ" if matters else "the loss differs"
        missing = listed(named or lost) if lost else "nothing that the module or its optimizers hold: a global"
        return [
            alarm(
                "not_resumed",
                f"the step after save and load is not the one that would have followed: {moved} "
                f"({listed(matters, 2) or 'loss'}); missing from the checkpoint: {missing}",
                "a run that is interrupted goes on as another one, without a word",
                "register tensors as persistent buffers, and save counters and the like in on_save_checkpoint (or "
                "torch.nn.Module.get_extra_state) and load them again",
                listed(named or lost),
            )
        ]
    findings = [info("resumes", "save, load, one more step: equal to not having stopped")]
    if named:
        findings.append(
            info(
                "not_in_checkpoint",
                f"not in the checkpoint, without effect on the next step: {listed(named)}",
            )
        )
    findings.append(
        info(
            "random_state",
            "Lightning's checkpoints hold no state of the random generators: a resumed run draws other augmentations "
            "and dropout masks than an uninterrupted one",
        )
    )
    return findings
