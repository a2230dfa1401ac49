"""What the tests run on the pretend device. Imported by the tests, too, in whose process there is no such device."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as L
import torch

from lightning_ssl import callbacks, methods
from lightning_ssl.data import ImageDataModule

METHODS: dict[str, dict[str, Any]] = {
    "SimCLR": {},
    "BYOL": {},
    "SimSiam": {"projector_hidden": 64, "dim": 32},
    "DirectPred": {},
    "BarlowTwins": {"projector_hidden": 64, "dim": 32, "warmup_epochs": 0},
    "RAFT": {},
    "BYOLPrime": {},
}
WATCHERS: dict[str, dict[str, Any]] = {
    "UniformityAlignment": {},
    "CorrelationBound": {},
    "EffectiveRank": {},
    "CollapseMonitor": {},
    "RepresentationCircle": {},
    "EigenspaceAlignment": {},
    "CovarianceOperatorNorm": {"samples": 8},
}
PROBES = {"KNNProbe": {"k": 5}, "LinearProbe": {}}


def _device() -> Any:
    from tests.pretend import device

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return device


def method(name: str, **options: Any) -> L.LightningModule:
    return getattr(methods, name)(backbone="small_conv", **{**METHODS[name], **options})


def data(**options: Any) -> ImageDataModule:
    return ImageDataModule("digits", **{"batch_size": 16, **options})


def _fit(model: L.LightningModule, watching: list[L.Callback], steps: int, **settings: Any) -> Any:
    """What each step did."""
    device = _device()
    marks = device.Steps()
    source = settings.pop("datamodule", None) or data()
    device.trainer(callbacks=[*watching, marks], max_steps=steps, **settings).fit(model, datamodule=source)
    return marks.steps


def _stalls(events: Any, ours: bool = True) -> str:
    device = _device()
    return device.told([event for event in device.stalls(events) if bool(event.ours) == ours])


class NotDue(L.Callback):
    """Lets the run's callbacks think that they have looked at its first step."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, callbacks.Diagnostic):
                callback._last_step = callback._last_epoch = 0


def plain_steps(name: str, with_callbacks: bool = False, first_due: bool = False, **options: Any) -> list[str]:
    """The stalls of each of our steps; with callbacks, all there are at their defaults, none due after the first."""
    watching: list[L.Callback] = []
    if with_callbacks:
        every = {**WATCHERS, **PROBES}
        if name in ("SimCLR", "BarlowTwins"):
            every.pop("EigenspaceAlignment")
        watching = [getattr(callbacks, kind)(**settings) for kind, settings in every.items()]
        watching.append(callbacks.RunReport(html=False))
        watching += [] if first_due else [NotDue()]
    steps = _fit(method(name, **options), watching, 5, logger=False)
    return [_stalls(step) for step in steps[1:]]


def acting_steps(kind: str, **options: Any) -> list[str]:
    action = getattr(callbacks, kind)(**options)
    return [_stalls(step) for step in _fit(method("BYOL", predictor="linear"), [action], 4)[1:]]


def due_steps(kind: str, predictor: str = "mlp") -> tuple[list[str], int]:
    """The stalls of steps at which one callback is due, and of how many keys it made values."""
    watcher = getattr(callbacks, kind)(every_n_steps=1, **WATCHERS[kind])
    device = _device()
    marks = device.Steps()
    trainer = device.trainer(callbacks=[watcher, marks], max_steps=4)
    trainer.fit(method("BYOL", predictor=predictor), datamodule=data())
    keys = [key for key in trainer.logged_metrics if not key.startswith("train/loss")]
    return [_stalls(step) for step in marks.steps[1:]], len(keys)


def bar_steps() -> tuple[list[str], list[str]]:
    """Ours and Lightning's own stalls where there is a progress bar."""
    steps = _fit(method("BYOL"), [], 4, enable_progress_bar=True)[1:]
    return [_stalls(step) for step in steps], [_stalls(step, ours=False) for step in steps]
