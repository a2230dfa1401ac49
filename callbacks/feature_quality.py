"""What features are worth without labels: RankMe, LiDAR and their kin, streamed over many steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_ssl._lightning import logging_step
from lightning_ssl.callbacks._engine.layout import Layout
from lightning_ssl.callbacks._engine.observation import Observatory, Seen, Spec, observatory
from lightning_ssl.callbacks._engine.pair import Pairing
from lightning_ssl.callbacks._engine.places import check_path, find_module
from lightning_ssl.callbacks._engine.ranks import ranks_of
from lightning_ssl.callbacks._engine.report import log_for_callbacks, log_now
from lightning_ssl.callbacks.diagnostic import Diagnostic, as_floats
from lightning_ssl.callbacks.watcher import Watcher, precise
from lightning_ssl.functional import mode_growth, target_lag
from lightning_ssl.metrics import FeatureQuality as Metric
from lightning_ssl.metrics import PrototypeUse as Prototypes
from lightning_ssl.quantities import Quantity


def _quantity(name: str, title: str, read: str, better: Any = "", healthy: str = "") -> Quantity:
    return Quantity(f"*/{name}", title, read, better=better, healthy=healthy)


class FeatureQuality(Watcher):
    """Logs RankMe, LiDAR, alpha-ReQ and other label-free quantities of the features of many steps together.

    ``train/rankme``, ``train/lidar`` (where views are known), ``train/alpha_req``, ``train/spectrum_area``,
    ``train/stable_rank``, ``train/wasserstein_uniformity``, ``train/sliced_gaussianity``, each as its paper defines it
    (see the functions of these names), of all rows of `window` observations: no batch bounds them. From the second
    window on ``train/mode_growth_top`` and ``train/mode_growth_median``, the growth rate a step of the largest and of
    the median eigenvalue of F = E[f f^T], and ``train/modes_growing``, the share of those that grow. Under ``val/`` and
    ``test/`` of the whole of held-out data.

    Sums are kept, not rows: an observation costs N d², a window d³.

    Args:
        features: Dotted path of the submodule whose outputs are the features.
        window: Observations whose rows are taken together.
        directions: Random directions of the sliced Gaussianity.
        views: How many views of a sample a step holds; by default as the calls and the batch show.
        every_n_steps: Look every n-th training step, the first included; logged every `window` looks.
        every_n_epochs: Look at the first step of every n-th epoch.
        held_out: Log validation and test features as well.
        name: Keeps several instances apart: ``train/<name>/rankme``.
        pairing: How views lie: "calls", "blocked", "interleaved", or a function; see :class:`Watcher`.
        layout: The axes of the features: "NCHW", "NHWC", "NLC", "NCL", "LNC", or a function; see :class:`Watcher`.
        target: Dotted path of the target network's twin of `features`, for the second view of an online network that
            sees one view only.

    Example:
        >>> watch = FeatureQuality("backbone", window=20)
    """

    quantities = (
        _quantity("rankme", "RankMe", "The effective rank of the features of many batches.", "higher"),
        _quantity(
            "lidar", "LiDAR", "The effective rank of what tells samples apart, in units of their views.", "higher"
        ),
        _quantity(
            "alpha_req", "alpha-ReQ", "How fast the spectrum falls; large means few dimensions.", healthy="near 1"
        ),
        _quantity("spectrum_area", "area under the cumulative spectrum", "1/2 spread evenly, 1 on a line.", "lower"),
        _quantity("stable_rank", "stable rank", "All variance over that of the strongest direction.", "higher"),
        _quantity(
            "wasserstein_uniformity",
            "Wasserstein uniformity",
            "0 uniform on the sphere, 1.4 one point; unlike uniformity it sees lost dimensions.",
            "lower",
        ),
        _quantity(
            "sliced_gaussianity",
            "sliced Gaussianity (SIGReg)",
            "About 1 for an isotropic Gaussian of unit variance, growing with the rows for anything else.",
            "lower",
        ),
        _quantity("mode_growth_top", "growth of the largest mode", "A step's growth rate of F's largest eigenvalue."),
        _quantity("mode_growth_median", "growth of the median mode", "Of the median one: negative, most modes decay."),
        _quantity("modes_growing", "share of modes that grow", "Modes rise one after another while a run learns."),
    )

    def __init__(
        self,
        features: str = "projector",
        window: int = 10,
        directions: int = 64,
        views: int | None = None,
        every_n_steps: int | None = 10,
        every_n_epochs: int | None = None,
        held_out: bool | Mapping[str, Any] = False,
        name: str | None = None,
        pairing: Pairing | None = None,
        layout: Layout | None = None,
        target: str | None = None,
    ) -> None:
        if window < 1 or directions < 1:
            raise ValueError(f"`window` and `directions` must be at least 1, got {window} and {directions}")
        self.window, self.directions = window, directions
        super().__init__(features, views, pairing, layout, target, every_n_steps, every_n_epochs, held_out, name)

    def begin_run(self) -> None:
        super().begin_run()
        self._metric = Metric(self.directions, sync_on_compute=False)  # a look has all ranks' rows already
        self._seen = 0
        self._modes: Tensor | None = None
        self._modes_step = 0

    def observe(self, trainer: L.Trainer, pl_module: L.LightningModule, seen: Seen, stage: str) -> dict[str, Any]:
        rows = precise(seen.rows if seen.views is None or seen.views.shape[1] < 2 else seen.views)
        if stage != "train":
            metric = Metric(self.directions, sync_on_compute=False).to(rows.device)
            metric.update(rows)
            return self._named(metric.compute(), stage)
        self._metric.to(rows.device).update(rows)
        self._seen += 1
        if self._seen < self.window:
            return {}
        values = self._metric.compute()
        step = int(self._due or 0)
        modes = values["modes"]
        if self._modes is not None and len(self._modes) == len(modes) and step > self._modes_step:
            rates = mode_growth(self._modes.to(modes), modes, step - self._modes_step)
            values |= {"mode_growth_top": rates[0], "mode_growth_median": rates.median()}
            values["modes_growing"] = (rates > 0).double().mean()
        self._modes, self._modes_step, self._seen = modes, step, 0
        self._metric.reset()
        return self._named(values, stage)

    def _named(self, values: Mapping[str, Tensor], stage: str) -> dict[str, Any]:
        return {self.key(stage, name): value for name, value in values.items() if name != "modes"}

    def state_dict(self) -> dict[str, Any]:
        sums = {name: getattr(self._metric, name) for name in self._metric._reductions}
        own = {"sums": sums, "seen": self._seen, "modes": self._modes, "modes_step": self._modes_step}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for name, value in state_dict["sums"].items():
            setattr(self._metric, name, value)
        self._metric._update_count = state_dict["seen"]
        self._seen, self._modes = state_dict["seen"], state_dict["modes"]
        self._modes_step = state_dict["modes_step"]


class PrototypeUse(Watcher):
    """Logs how a softmax over K prototypes is used: DINO, SwAV, any layer that scores them.

    ``train/mean_assignment_entropy`` (ln K when all prototypes share, 0 when one has all), ``train/assignment_entropy``
    (ln K when an assignment says nothing), ``train/prototypes_used`` (the share that is some row's first choice) and,
    with `teacher`, ``train/teacher_kl``, the mean KL of the teacher's assignments from the student's, each of the rows
    of `window` observations together.

    Args:
        prototypes: Dotted path of the layer whose outputs are the scores ``[N, K]``.
        temperature: What they are divided by.
        teacher: Dotted path of the teacher's layer, called on the same views in the same order.
        teacher_temperature: What its scores are divided by.
        window: Observations whose rows are taken together.
        every_n_steps: Look every n-th training step, the first included.
        every_n_epochs: Look at the first step of every n-th epoch.
        name: Keeps several instances apart: ``train/<name>/prototypes_used``.

    Example:
        >>> watch = PrototypeUse("head.last_layer", temperature=0.1)
    """

    quantities = (
        _quantity(
            "mean_assignment_entropy", "entropy of the mean assignment", "Near 0: one prototype has all.", "higher"
        ),
        _quantity("assignment_entropy", "mean entropy of an assignment", "Stuck at ln K: it says nothing."),
        _quantity("prototypes_used", "share of prototypes in use", "Falls when prototypes die.", "higher"),
        _quantity("teacher_kl", "KL of teacher from student", "0 when they agree, be it on nothing."),
    )

    def __init__(
        self,
        prototypes: str = "prototypes",
        temperature: float = 0.1,
        teacher: str | None = None,
        teacher_temperature: float = 0.04,
        window: int = 10,
        every_n_steps: int | None = 10,
        every_n_epochs: int | None = None,
        name: str | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}")
        self.temperature, self.teacher_temperature = temperature, teacher_temperature
        self.prototypes, self.teacher, self.window = prototypes, teacher, window
        super().__init__(
            prototypes, None, None, None, None, every_n_steps, every_n_epochs, False, name, argument="prototypes"
        )

    def begin_run(self) -> None:
        super().begin_run()
        self._metric = Prototypes(self.temperature, self.teacher_temperature, sync_on_compute=False)
        self._seen = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.teacher is not None:
            check_path(pl_module, self.teacher, "teacher")

    def ask(self, watched: Observatory, pl_module: L.LightningModule) -> None:
        super().ask(watched, pl_module)
        if self.teacher is not None:
            watched.want(Spec(self.teacher, "teacher", grad=False))

    def observe(self, trainer: L.Trainer, pl_module: L.LightningModule, seen: Seen, stage: str) -> dict[str, Any]:
        teacher = None
        if self.teacher is not None:
            spec = Spec(self.teacher, "teacher", grad=False)
            other = observatory(trainer).rows(spec, pl_module.device, ranks_of(trainer))
            teacher = None if other is None or other.rows.shape != seen.rows.shape else precise(other.rows)
        self._metric.to(seen.rows.device).update(precise(seen.rows), teacher)
        self._seen += 1
        if self._seen < self.window:
            return {}
        values = self._metric.compute()
        self._seen = 0
        self._metric.reset()
        values["prototypes_used"] = values.pop("used")
        return {self.key(stage, name): value for name, value in values.items() if not bool(value.isnan())}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sums": self._metric.sums, "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._metric.sums, self._seen = state_dict["sums"], state_dict["seen"]
        self._metric._update_count = self._seen


class TargetLag(Diagnostic):
    """Logs ``train/target_lag``: how many updates a moving-average target is behind the online network.

    The distance of their weights over the size of the last update; m / (1 - m) for steady updates at momentum m. Near 0
    the target is the online network; growing without end, it stands still.

    Args:
        online: Dotted path of the online network.
        target: Dotted path of its twin: parameters of the same names and shapes.
        every_n_steps: Log every n-th training step, the first included.
        every_n_epochs: Log the first step of every n-th epoch.
        name: Keeps several instances apart: ``train/<name>/target_lag``.

    Example:
        >>> watch = TargetLag("student.backbone", "teacher.backbone", every_n_steps=200)
    """

    quantities = (
        _quantity("target_lag", "target's lag", "Updates that the target is behind; near 0 it is the online network."),
    )

    def __init__(
        self,
        online: str = "backbone",
        target: str = "target.backbone",
        every_n_steps: int | None = 50,
        every_n_epochs: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__({"online": online, "target": target}, every_n_steps, every_n_epochs, name)
        self._before: list[Tensor] | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        online, target = (find_module(pl_module, path, name) for name, path in self.places.items())
        shapes = [{name: p.shape for name, p in module.named_parameters()} for module in (online, target)]
        if shapes[0] != shapes[1]:
            raise MisconfigurationException(
                f"`target` must name the twin of `online`, got {self.places['target']!r}, whose parameters differ from "
                f"those of {self.places['online']!r}"
            )

    def _weights(self, pl_module: L.LightningModule, argument: str) -> list[Tensor]:
        return [p.detach() for p in find_module(pl_module, self.places[argument], argument).parameters()]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = logging_step(trainer)
        if self._is_due(step, trainer.current_epoch):
            self._last_step, self._last_epoch, self._looks = step, trainer.current_epoch, self._looks + 1
            self._before = [p.clone() for p in self._weights(pl_module, "online")]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        before, self._before = self._before, None
        online = self._weights(pl_module, "online")
        update = torch.stack([(a - b).abs().max() for a, b in zip(online, before, strict=True)]).max()
        lag = target_lag(online, self._weights(pl_module, "target"), before)
        values = as_floats({self.key("train", "target_lag"): lag, "update": update})
        if values.pop("update") > 0:  # no step was taken: accumulation
            log_for_callbacks(pl_module, values)
            log_now(trainer, values, int(self._last_step or 0))
