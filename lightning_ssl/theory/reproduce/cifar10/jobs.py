"""One run of one setting with one seed: trained, measured, and kept; it goes on where it was killed."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from jsonargparse import ArgumentParser

import lightning_ssl
from lightning_ssl import callbacks, functional
from lightning_ssl.methods.base import Method
from lightning_ssl.runs.checkpoint import RunCheckpoint
from lightning_ssl.theory.reproduce.cifar10.data import CIFAR10
from lightning_ssl.theory.reproduce.cifar10.plan import Plan


def build(model: Mapping[str, Any]) -> Method:
    """A method from its class path and arguments, as the console script makes it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Method, "model")
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    made: Method = instantiate(parser.parse_object({"model": dict(model)})).model
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@cache
def code() -> str:
    """The version that runs: the commit of a checkout, or the release."""
    here = str(Path(__file__).parent)
    try:
        return subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return lightning_ssl.__version__


class History(L.Callback):
    """Everything logged, once an epoch; kept with the checkpoint, so that a killed run has no gap."""

    def __init__(self, told: Callable[[int], None] | None = None) -> None:
        self.rows: list[dict[str, float]] = []
        self.told = told

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        values = {key: round(float(value), 6) for key, value in trainer.callback_metrics.items()}
        self.rows.append({"step": float(trainer.global_step), **values})
        if self.told is not None:
            self.told(trainer.current_epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])


def run_job(
    plan: Plan,
    name: str,
    seed: int,
    folder: Path,
    root: str,
    told: Callable[[int], None] | None = None,
    limits: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a setting with a seed and measure it; the result is also written to ``folder``/result.json.

    Args:
        plan: The file of contrasts.
        name: The setting.
        seed: Seed of weights, order and views.
        folder: Of this job alone.
        root: Of the images.
        told: Called with the epochs done, at the end of each.
        limits: Further arguments of the Trainer.
    """
    began, cpu = time.time(), time.process_time()
    setting = plan.setting(name)
    size = {**plan.size, **setting["size"]}
    L.seed_everything(seed, verbose=False)
    model = build(setting["model"])
    data = CIFAR10(
        root,
        size["images"],
        size["held_out"],
        size.get("test_images"),
        batch_size=size["batch_size"],
        image_size=size["image_size"],
        seed=seed,
        augmentation=size.get("augmentation"),
        clean_image=bool(getattr(model, "clean_weights", False)),
        num_workers=size.get("num_workers", 0),
    )
    history = History(told)
    with _quiet():
        if size["epochs"]:
            saver = RunCheckpoint(dirpath=folder, save_last=True, save_top_k=0, enable_version_counter=False)
            options = {"max_epochs": size["epochs"], "default_root_dir": folder, **(limits or {})}
            trainer = _trainer(size, [*watchers(model, size), history, saver], **options)
            last = folder / "last.ckpt"
            try:
                trainer.fit(model, datamodule=data, ckpt_path=str(last) if last.exists() else None)
            except SystemExit as error:  # Ctrl-C and SIGTERM, after the checkpoint
                raise KeyboardInterrupt from error
        result = measure(model, data, size, limits)
    result |= {"setting": name, "seed": seed, "plan": plan.fingerprint, "code": code(), "history": history.rows}
    result["seconds"], result["cpu_seconds"] = round(time.time() - began, 1), round(time.process_time() - cpu, 1)
    _write(folder / "result.json", json.dumps(result))
    (folder / "last.ckpt").unlink(missing_ok=True)
    return result


def watchers(model: Method, size: Mapping[str, Any]) -> list[L.Callback]:
    """The diagnostics of a run: what the papers say of why."""
    every = size["watch_every"]
    found: list[L.Callback] = [
        callbacks.UniformityAlignment(every_n_steps=every, held_out=False),
        callbacks.EffectiveRank(every_n_steps=every, held_out=False),
        callbacks.CorrelationBound(every_n_steps=every, picture_every=0, held_out=False),
        callbacks.CovarianceOperatorNorm(every_n_steps=size["operator_every"]),
    ]
    if any(True for _ in getattr(model, "predictor", torch.nn.Identity()).parameters()):
        found.append(callbacks.EigenspaceAlignment(every_n_steps=every, picture_every=0))
    return found


def measure(
    model: Method, data: CIFAR10, size: Mapping[str, Any], limits: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Linear probe and kNN of the features; uniformity, alignment, rank, L_cor and L_bound of the projections."""
    found: list[L.Callback] = [
        callbacks.LinearProbe(l2=size["l2"]),
        callbacks.KNNProbe(),
        callbacks.UniformityAlignment(),
        callbacks.EffectiveRank(),
        callbacks.CorrelationBound(picture_every=0),
    ]
    trainer = _trainer(size, found, **{k: v for k, v in (limits or {}).items() if k == "limit_val_batches"})
    values = trainer.validate(model, datamodule=data, verbose=False)[0]
    result: dict[str, Any] = {key.removeprefix("val/"): value for key, value in values.items()}
    result["linear"], result["knn"] = (100 * result.pop(f"{probe}_top1") for probe in ("linear", "knn"))
    return {**result, **modes(model, data)}


@torch.no_grad()
def modes(model: Method, data: CIFAR10) -> dict[str, Any]:
    """Eigenvalues s_j of F and the predictor's values p_j at the end of a run (DirectPred Sec. 3)."""
    predictor = getattr(model, "predictor", None)
    if predictor is None or not any(True for _ in predictor.parameters()):
        return {}
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    model.eval()
    inputs = torch.cat([model.project(view.to(model.device)) for view in batch.views[:2]])
    found = functional.eigenspace_alignment(
        functional.second_moment(inputs), functional.effective_predictor(inputs, model.from_projection(inputs))
    )
    return {"modes": {key: [round(x, 6) for x in value.tolist()] for key, value in found._asdict().items()}}


def _trainer(size: Mapping[str, Any], found: list[L.Callback], **options: Any) -> L.Trainer:
    options = {"limit_val_batches": size.get("limit_val_batches", 1.0), **options}
    if "max_epochs" in options:
        options["limit_val_batches"] = 0  # no image of the test split is seen in training
    trainer = L.Trainer(
        accelerator=size.get("accelerator", "cpu"),
        devices=1,
        logger=False,
        enable_checkpointing=any(isinstance(callback, RunCheckpoint) for callback in found),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=found,
        **options,
    )
    # Other installed packages may add callbacks of theirs to everybody's trainers.
    own = ("lightning.", "lightning_ssl.")
    trainer.callbacks = [callback for callback in trainer.callbacks if type(callback).__module__.startswith(own)]  # type: ignore[attr-defined]
    return trainer


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write(path: Path, text: str) -> None:
    """Aside and renamed: an interruption leaves the old file or the new one."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether this process has the job to itself; the claim ends with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "claim").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
