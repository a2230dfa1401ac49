"""What the tests run on the pretend device. Imported by the tests, too, in whose process there is no such device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._pytree import tree_leaves

from lightning_ssl import callbacks, functional, methods, metrics
from lightning_ssl.data import ImageDataModule
from lightning_ssl.nn.predictor_actions import DirectPredictorUpdate

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


def all_steps() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Stalls of each method's steps with all callbacks, none due, and of steps at which one callback is due."""
    return {name: plain_steps(name, True) for name in METHODS}, {kind: due_steps(kind)[0] for kind in WATCHERS}


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


def poisoned(what: str, at: int, path: str) -> tuple[str, list[str], bool]:
    """Poison a step of a run that saves every fourth: the error, the checkpoints, and whether these are finite."""
    device = _device()
    model = method("BYOL")

    class Poison(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == at:
                with torch.no_grad():
                    if what == "view":
                        batch.views[1].view(-1)[0].fill_(float("nan"))
                    elif what == "weight":
                        module.projector[0].weight.view(-1)[0].fill_(float("inf"))
                    else:
                        module.backbone.register_forward_hook(lambda m, a, y: y * float("inf"))

    saver = ModelCheckpoint(path, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = device.trainer(callbacks=[Poison(), saver], max_steps=12, enable_checkpointing=True)
    try:
        trainer.fit(model, datamodule=data())
        message = ""
    except FloatingPointError as error:
        message = str(error)
    saved = sorted(Path(path).glob("*.ckpt"))
    states = [torch.load(file, map_location="cpu", weights_only=False)["state_dict"] for file in saved]
    return message, [file.stem for file in saved], all(bool(x.isfinite().all()) for s in states for x in s.values())


def ablations(name: str, options: dict[str, Any], **settings: Any) -> float:
    """A whole run: training, validation, test, prediction; the last loss."""
    device = _device()
    trainer = device.trainer(max_steps=2, limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1)
    model = method(name, **options)
    source = data(**settings)
    trainer.fit(model, datamodule=source)
    loss = float(trainer.callback_metrics["train/loss"])
    trainer.validate(model, datamodule=source, verbose=False)
    trainer.test(model, datamodule=source, verbose=False)
    trainer.predict(model, datamodule=source)
    return loss


def mixing() -> list[str]:
    """What the device refuses, so that the other tests mean something."""
    device = _device()
    there, here, found = torch.ones(3, device=device.DEVICE), torch.ones(3), []
    cases = {
        "mix": lambda: there + here,
        "numpy": lambda: there.numpy(),
        "generator": lambda: torch.rand(3, device=device.DEVICE, generator=torch.Generator()),
    }
    for name, case in cases.items():
        try:
            case()
        except (RuntimeError, TypeError):
            found.append(name)
    before = len(device.events)
    float(there.sum()), there[there > 0], torch.tensor([1.0], device=device.DEVICE), there.cpu()
    return [*found, *(event.kind for event in device.events[before:])]


def functionals() -> list[str]:
    """Names of the functions and metrics that gave on the device what they give on the CPU."""
    device = _device()
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    labels = torch.arange(12) % 3
    F, W = x.T @ x / 12, torch.randn(6, 6)
    calls: dict[str, Any] = {
        "uniformity": lambda f, d: f.uniformity(d(x)),
        "alignment": lambda f, d: f.alignment(d(x), d(y)),
        "effective_rank": lambda f, d: f.effective_rank(d(x)),
        "correlation_loss": lambda f, d: f.correlation_loss(d(x)),
        "principal_plane": lambda f, d: f.principal_plane(d(x))[1],
        "direct_predictor": lambda f, d: f.direct_predictor(d(F)),
        "optimal_predictor": lambda f, d: f.optimal_predictor(d(F), d(W)),
        "predictor_values": lambda f, d: f.predictor_values(d(F), d(W))["commutator_norm"],
        "predictor_values_of_rows": lambda f, d: f.predictor_values_of_rows(d(x), d(y))["asymmetry"],
        "barlow_twins_loss": lambda f, d: f.barlow_twins_loss(d(x), d(y)),
        "info_nce_loss": lambda f, d: f.info_nce_loss(d(x)[:, 0].abs(), d(y).abs(), 0.5),
        "knn_predict": lambda f, d: f.knn_predict(d(x), d(y), d(labels), 3, k=4)[:, 0].float(),
        "fit_linear_probe": lambda f, d: f.fit_linear_probe(d(x), d(labels), 3, 1e-1)[0],
    }
    metric: dict[str, Any] = {
        "Uniformity": (x,),
        "Alignment": (x, y),
        "EffectiveRank": (x,),
        "SecondMoment": (x,),
        "CorrelationBound": (x,),
        "EigenspaceAlignment": (x, y),
    }
    found = []
    for name, call in calls.items():
        here, there = call(functional, lambda t: t), call(functional, lambda t: t.to(device.DEVICE))
        if torch.allclose(here, there.cpu(), rtol=1e-4, atol=1e-5):
            found.append(name)
    for name, rows in metric.items():
        kind = getattr(metrics, name)
        one = kind(num_classes=3) if name == "CorrelationBound" else kind()
        other = (kind(num_classes=3) if name == "CorrelationBound" else kind()).to(device.DEVICE)
        one.update(*rows)
        other.update(*(t.to(device.DEVICE) for t in rows))
        pairs = zip(tree_leaves(one.compute()), tree_leaves(other.compute()), strict=True)
        if all(torch.allclose(a, b.cpu(), rtol=1e-4, atol=1e-5) for a, b in pairs):
            found.append(name)
    return found


def operator_there() -> dict[str, float]:
    """How far the covariance operators' norms on the device are from the CPU's, the largest of any layer."""
    device = _device()
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 12)
    )
    views = [torch.randn(10, 3, 8, 8) for _ in range(2)]
    here = functional.covariance_operator_norms(network, views, directions=6)
    there = functional.covariance_operator_norms(
        network.to(device.DEVICE), [view.to(device.DEVICE) for view in views], directions=6
    )
    off: dict[str, float] = {}
    for layer, norms in here.items():
        for name, one, other in zip(norms._fields, norms, there[layer], strict=True):
            off[name] = max(off.get(name, 0.0), abs(float(other.cpu() / one) - 1))
    return off


def leading_pairs() -> list[tuple[float, float, float]]:
    """For matrices of several spectra: how far u, v and u^T A v on the device are from those of a decomposition."""
    from lightning_ssl.functional.estimate import leading_pair

    device = _device()
    found = []
    for spectrum in ([3.0, 1.0, 0.5], [1.0, 0.9999, 0.5], [1e-12, 1e-15, 0.0], [1e200, 1e199, 1.0]):
        u, v = (torch.linalg.qr(torch.randn(9, 3, dtype=torch.float64))[0] for _ in range(2))
        matrix = u @ torch.tensor(spectrum, dtype=torch.float64).diag() @ v.T
        left, right = (x.cpu() for x in leading_pair(matrix.to(device.DEVICE)))
        found.append(
            (
                1 - abs(float(left @ u[:, 0])),
                1 - abs(float(right @ v[:, 0])),
                float(left @ matrix @ right) / spectrum[0] - 1,
            )
        )
    return found


def direct_root() -> tuple[float, float]:
    """How far the predictor that DirectPred sets on the device is from the CPU's, and how far it moved."""
    device = _device()
    update, other = DirectPredictorUpdate(), DirectPredictorUpdate()
    here, there = torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False)
    there.load_state_dict(here.state_dict())
    there = there.to(device.DEVICE)
    before = here.weight.detach().clone()
    for step in range(3):
        rows = torch.randn(10, 16, generator=torch.Generator().manual_seed(step))
        update.update(rows)
        other.update(rows.to(device.DEVICE))
        update.step(here)
        other.step(there)
    return float((here.weight - there.weight.cpu()).abs().max()), float((here.weight - before).abs().max())
