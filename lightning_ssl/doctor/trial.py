"""A short fit of the examined module by a real Trainer, fed with known batches and watched."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_ssl._lightning import is_a, overrides
from lightning_ssl.doctor.batches import rebuilt
from lightning_ssl.doctor.isolate import place

Hooks = dict[str, Callable[..., Any]]


@dataclass
class Patient:
    """What is examined, and what a first trial has shown of it.

    Args:
        module: The LightningModule.
        datamodule: Its DataModule, if any.
        loader: What the Trainer iterates, if any.
        options: Arguments of the user's Trainer.
        ranks: Number of processes to compare with one.
        length: Batches in an epoch.
        given: Whether one batch was given instead of a loader.
        raw: Some batches as the loader yields them.
        steps: The same as they enter `training_step`, cut to some rows.
        whole: The same, uncut.
        moments: By path, what each batch normalisation normalised by: mean and variance.
        losses: Of the trial's steps.
        device: Where fits on one process run.
    """

    module: Any
    datamodule: Any = None
    loader: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    length: int = 100
    given: bool = False
    raw: list[Any] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    whole: list[Any] = field(default_factory=list)
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    device: str = "cpu"

    @property
    def package(self) -> Any:
        """Which of Lightning's two packages the module is made with."""
        lineage = [cls.__module__ for cls in type(self.module).__mro__]
        twin = any(name.startswith("pytorch_lightning") for name in lineage)
        return importlib.import_module("pytorch_lightning" if twin else "lightning.pytorch")


class Fed:
    """A loader of known batches, over and over."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.length):
            yield self.batches[i % len(self.batches)]


@dataclass
class Fit:
    """One fit: how it runs, and what was seen.

    Args:
        patient: What is examined; changed by the fit, which belongs in a process of its own.
        steps: How many micro-batches to train on.
        feed: What `training_step` gets, over and over, instead of what the loader yields.
        around: A context for each training step.
        hooks: Callback hooks, by name.
        per_epoch: Micro-batches in an epoch.
        settings: Arguments of the Trainer.
        losses: What came of it: the loss of each backward pass.
        entered: What entered each step, if `keep`.
        keep: Whether to keep that.
        real: Whether to iterate the user's own loader.
        ckpt_path: The checkpoint to go on from.
        saver: A further callback, which writes checkpoints.
        watchers: Further callbacks.
        instead: Called with the step, its batch and arguments, instead of the step.
    """

    patient: Patient
    steps: int = 1
    feed: list[Any] | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    hooks: Hooks = field(default_factory=dict)
    per_epoch: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    entered: list[Any] = field(default_factory=list)
    keep: bool = False
    real: bool = False
    ckpt_path: str | None = None
    instead: Callable[..., Any] | None = None
    saver: Any = None
    watchers: list[Any] = field(default_factory=list)

    def cast(self, batch: Any) -> Any:
        """The batch in the precision of the fit."""
        return rebuilt(batch, _doubled if "64" in str(self.settings.get("precision", "")) else _copied)

    def run(self) -> Any:
        """Train; return the Trainer."""
        patient, module = self.patient, self.patient.module
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager")  # hooks and modes see what a compiled module does
        module.training_step = self._wrapped(module.training_step)
        loader: Any = Fed(patient.raw, self.per_epoch or patient.length)
        if self.real and not patient.given:
            loader = patient.loader
        watcher = type("Watcher", (patient.package.Callback,), self._methods())()
        options = dict(patient.options)
        options.update(self.settings)
        theirs = [thing for thing in options.pop("callbacks", None) or [] if acts(thing)]
        given = options.pop("plugins", None)
        if self.saver is not None:
            options["enable_checkpointing"] = True
        settings: dict[str, Any] = {
            "accelerator": patient.device if "devices" not in self.settings else "cpu",
            "devices": 1,
            "max_epochs": 100,
            "default_root_dir": tempfile.mkdtemp(),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "use_distributed_sampler": False,
            **options,
        }
        if given is not None:
            settings["plugins"] = given
        callbacks = [*theirs, *self.watchers, watcher, *([self.saver] if self.saver else [])]
        self._quiet_callbacks(module)
        fitted: dict[str, Any] = {} if loader is None else {"train_dataloaders": loader}
        if patient.datamodule is not None:
            if not self.real:
                patient.datamodule.train_dataloader = lambda: loader
            fitted = {"datamodule": patient.datamodule}
        if self.ckpt_path is not None:
            fitted["ckpt_path"] = self.ckpt_path
            if "weights_only" in inspect.signature(patient.package.Trainer.fit).parameters:
                fitted["weights_only"] = False  # it was written a moment ago
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = patient.package.Trainer(callbacks=callbacks, **settings)
            trainer.fit(module, **fitted)
        return trainer

    def _wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if self.feed is not None:
                batch = self.feed[calls % len(self.feed)]
                batch = self.cast(batch)
            if self.keep:
                self.entered.append(rebuilt(batch, _copied))
            calls += 1
            with self.around():
                if self.instead is not None:
                    return self.instead(step, batch, args, kwargs)
                return step(batch, *args, **kwargs)

        return training_step

    def _methods(self) -> Hooks:
        count = 0
        hooks = dict(self.hooks)
        given_backward = hooks.pop("on_before_backward", None)
        given_end = hooks.pop("on_train_batch_end", None)

        def on_before_backward(_: Any, trainer: Any, module: Any, loss: Tensor) -> None:
            self.losses.append(float(loss.detach()))
            if given_backward is not None:
                given_backward(_, trainer, module, loss)

        def on_train_batch_end(_: Any, trainer: Any, *args: Any) -> None:
            nonlocal count
            count += 1
            if given_end is not None:
                given_end(_, trainer, *args)
            if count >= self.steps:
                trainer.should_stop = True

        return {**hooks, "on_before_backward": on_before_backward, "on_train_batch_end": on_train_batch_end}

    def _quiet_callbacks(self, module: Any) -> None:
        """Leave out what a module brings to write checkpoints or draw bars."""
        if overrides(module, "configure_callbacks"):
            theirs = module.configure_callbacks

            def configure_callbacks() -> Any:
                found = theirs()
                found = found if isinstance(found, (list, tuple)) else [found]
                return [thing for thing in found if acts(thing)]

            module.configure_callbacks = configure_callbacks


def _copied(path: Any, leaf: Any) -> Any:
    """For a step may change its batch in place, or ask for its gradient."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _doubled(path: Any, leaf: Any) -> Any:
    leaf = _copied(path, leaf)
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def acts(callback: Any) -> bool:
    """Whether a callback may change what is trained; those that watch, save or draw are left out."""
    name = type(callback).__name__
    if type(callback).__module__.startswith("lightning_ssl."):
        return name in ("DirectPredictor", "SymmetricPredictor", "PredictorReset")
    builtin = type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    averaging = ("EMAWeightAveraging", "WeightAveraging", "StochasticWeightAveraging")
    if builtin:
        return name in (*averaging, "GradientAccumulationScheduler")
    return not any(is_a(callback, kind) for kind in ("Checkpoint", "ProgressBar", "EarlyStopping"))


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Layers that normalise each sample by the others of its batch; ours have a method for given statistics."""
    return {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm) or hasattr(m, "normalise")}


def record_moments(module: nn.Module, found: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Keep what the batch normalisations normalise by in their first call."""

    def hook(name: str) -> Callable[..., None]:
        def keep(layer: nn.Module, args: Any) -> None:
            x = args[0].detach()
            if name not in found and x.numel() > x.shape[1]:
                axes = [axis for axis in range(x.ndim) if axis != 1]
                variance, mean = torch.var_mean(x.double(), dim=axes, correction=0)
                found[name] = (mean, variance)

        return keep

    for name, layer in batch_norms(module).items():
        layer.register_forward_pre_hook(hook(name))


def hold_norms(module: nn.Module, moments: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Let the batch normalisations use given statistics instead of the batch's; return their names."""
    held = []
    for name, layer in batch_norms(module).items():
        if name not in moments:
            continue
        held.append(name)
        layer.forward = functools.partial(_normalised, layer, *moments[name])  # type: ignore[method-assign]
    return held


def _normalised(layer: Any, mean: Tensor, variance: Tensor, x: Tensor) -> Tensor:
    mean, variance = mean.to(x), variance.to(x)
    if hasattr(layer, "normalise"):
        return layer.normalise(x, mean, variance)
    return nn.functional.batch_norm(x, mean, variance, layer.weight, layer.bias, False, 0.0, layer.eps)


def still_dropout(module: nn.Module) -> list[str]:
    """Switch off dropout and its kind for good; return the names of the layers."""
    found = []
    for name, layer in module.named_modules():
        kind = type(layer).__name__.lower()
        if isinstance(layer, _DropoutNd) or any(w in kind for w in ("droppath", "stochasticdepth")):
            layer.forward = _same  # type: ignore[method-assign]
            found.append(name)
        elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) and layer.dropout:
            layer.dropout = 0.0
            found.append(name)
    return found


def _same(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def sampled(x: Tensor, most: int = 4096) -> Tensor:
    """Some entries of a tensor, evenly spaced, in double precision."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, len(flat) // most)].double().cpu().clone()


def line_of(thing: Any) -> str:
    """The file and line of a function or class."""
    try:
        thing = inspect.unwrap(thing)
        return place(inspect.getsourcefile(thing) or "", inspect.getsourcelines(thing)[1])
    except (TypeError, OSError, ValueError):
        return getattr(thing, "__qualname__", "")


def step_line(module: Any) -> str:
    return f"{type(module).__name__}.training_step ({line_of(type(module).training_step)})"


def child_of(name: str) -> str:
    """The part of the LightningModule that a parameter belongs to."""
    return name.partition(".")[0]


def listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
