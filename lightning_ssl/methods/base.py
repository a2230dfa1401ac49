"""What the methods share: steps, logging, optimizer and schedule. A method adds its networks and its loss."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_ssl._lightning import shows_bar
from lightning_ssl.distributed import agree, all_reduce_sum, rank_weight, row_counts, world_size
from lightning_ssl.nn.backbones import check_input, num_features
from lightning_ssl.nn.finite import FiniteWatch, first_non_finite
from lightning_ssl.nn.optim import warmup_cosine

Schedule = Literal["constant", "cosine"]
READ_EVERY = 50  # steps, on a device for which the host would have to wait: whether their losses were finite


class Method(L.LightningModule):
    """A self-supervised method on batches with fields `views`, `label`, `index` and `image`.

    A subclass sets `backbone` and `projector` (and `predictor`, `target`), defines :meth:`losses`, and calls
    :meth:`use_optimizer`. It calls each online network once for each view.
    """

    backbone: nn.Module
    projector: nn.Module
    predictor: nn.Module
    lr_floor = 0.0  # what scheduler "cosine" ends at, relative to the peak
    loss_is_global = False  # True where `losses` returns the loss of all ranks' rows, not the mean over its own
    _even_rows = 0  # rows of each training step on each rank, where the loader sees to it
    _seen: dict[str, Tensor] | None = None  # outputs of the step's networks

    def __init__(self) -> None:
        super().__init__()
        self._finite = FiniteWatch()

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """The entry "loss", which is minimised, and any further scalars to log; means over this rank's rows."""
        raise NotImplementedError

    def after_optimizer_step(self) -> None:
        """Called after each step the optimizer really took: not for micro-batches, nor steps skipped under AMP."""

    def forward(self, x: Tensor) -> Tensor:
        """Backbone features, [N, num_features]."""
        return self.backbone(x)

    def project(self, x: Tensor) -> Tensor:
        """Projector outputs, [N, d], in single precision at least: losses do not run in half precision."""
        features = self._made("backbone", self.backbone(x))
        z = self._made("projector", self.projector(features))
        return z.to(torch.promote_types(z.dtype, torch.float32))

    def from_projection(self, z: Tensor) -> Tensor:
        """The predictor's outputs, likewise; where its weights are in half precision, so is what enters it."""
        dtypes = [p.dtype for p in self.predictor.parameters() if p.is_floating_point()]
        if dtypes and not torch.is_autocast_enabled(z.device.type):
            z = z.to(dtypes[0])
        p = self._made("predictor", self.apply_predictor(z))
        return p.to(torch.promote_types(p.dtype, torch.float32))

    def apply_predictor(self, z: Tensor) -> Tensor:
        return self.predictor(z)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = len(views(batch)[0])
        self._seen = {}
        values = self._weighted_losses(batch)
        # One small collective: the mean over ranks, for the log and for all ranks to stop together.
        means = all_reduce_sum(torch.stack([v.detach().float() for v in values.values()])) / world_size()
        self._check_finite(batch, means)
        bar = shows_bar(self)
        for name, mean in zip(values, means.unbind(), strict=True):
            self.log(f"train/{name}", mean, prog_bar=bar and name == "loss", batch_size=rows)
        return values["loss"]

    # --- finite losses ---

    def _made(self, name: str, x: Tensor) -> Tensor:
        """Remember what a network gave in this step, for :class:`FiniteWatch`."""
        if self._seen is not None and self.training and isinstance(x, Tensor) and x.device.type != "cpu":
            self._seen[f"the output of {name} (call {sum(name in key for key in self._seen)})"] = x
        return x

    def _check_finite(self, batch: Any, means: Tensor) -> None:
        inputs = [*((f"views[{i}]", x) for i, x in enumerate(batch.views)), ("image", batch.image)]
        if means.device.type == "cpu":  # the host has the numbers: no need to wait, nor to go on
            if not means.isfinite().all():
                culprit = first_non_finite(self, inputs, lambda: self._run_networks(batch))
                raise FloatingPointError(
                    f"non-finite loss at step {self.global_step} (epoch {self.current_epoch}): the first non-finite "
                    f"quantity is {culprit}; no weight was changed by this step. Lower the learning rate, clip "
                    "gradients or check the data, and resume from the last checkpoint"
                )
            return
        seen, self._seen = self._seen, None
        given = {f"the input {name}": x for name, x in inputs if x is not None and x.is_floating_point()}
        weights = {f"the parameter {name}": p for name, p in self.named_parameters()}
        self._finite.note(self.global_step, self.current_epoch, means, {**given, **weights, **(seen or {})})
        if self._finite.pending >= READ_EVERY:
            self.raise_if_not_finite()

    def raise_if_not_finite(self) -> None:
        """Wait for the device to say whether all losses so far were finite; asked before each checkpoint."""
        found = self._finite.read()
        if found is not None:
            raise FloatingPointError(
                f"non-finite loss at step {found.step} (epoch {found.epoch}): the first non-finite quantity is "
                f"{found.culprit}; seen at step {self.global_step}, no checkpoint was written since. Lower the "
                "learning rate, clip gradients or check the data, and resume from the last checkpoint"
            )

    def on_train_epoch_end(self) -> None:
        self.raise_if_not_finite()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.raise_if_not_finite()

    # --- rows of a step ---

    def on_train_start(self) -> None:
        """Learn once whether each step has as many rows on all ranks, which saves asking for them in each step."""
        rows = getattr(self.trainer.train_dataloader, "even_rows", 0)
        _, most = agree(True, rows, self.device)
        even, _ = agree(rows == most, 0, self.device)
        self._even_rows = most if even else 0

    def counts(self, x: Tensor) -> list[int]:
        """How many rows each rank holds of a step; without a collective where the loader deals evenly."""
        if self.training and self._even_rows and len(x) == self._even_rows:
            return [len(x)] * world_size()
        return row_counts(len(x), x.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_held_out("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch.views) > 1:
            self._log_held_out("test", batch)
        else:  # a clean image has no loss: the call is for the callbacks that watch the projector
            self.project(batch.views[0])

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        image = batch.views[0] if batch.image is None else batch.image
        return {"features": self(image), "label": batch.label, "index": batch.index}

    def _log_held_out(self, stage: str, batch: Any) -> None:
        rows = len(views(batch)[0])
        if rows * world_size() < 2:
            return  # the last sample of a split alone: nothing to contrast or correlate it with
        for name, value in self._weighted_losses(batch).items():
            self.log(f"{stage}/{name}", value, on_step=False, on_epoch=True, sync_dist=True, batch_size=rows)

    def _weighted_losses(self, batch: Any) -> dict[str, Tensor]:
        values = self.losses(batch)
        if self.loss_is_global:
            return values
        rows = batch.views[0]
        if self.training and self._even_rows and len(rows) == self._even_rows:
            return values
        weight = rank_weight(len(rows), rows.device)
        return {name: value * weight for name, value in values.items()}

    def _run_networks(self, batch: Any) -> None:
        """All networks on all views, without the loss."""
        for x in batch.views:
            z = self.project(x)
            if hasattr(self, "predictor"):
                self.from_projection(z)
            if hasattr(self, "target"):
                self.target(x)  # type: ignore[operator]

    def setup(self, stage: str) -> None:
        """Refuse data that the backbone cannot take, before anything else is done."""
        shape = getattr(getattr(self.trainer, "datamodule", None), "input_shape", None)
        if shape is not None:
            try:
                check_input(self.backbone, shape, num_features(self.backbone))
            except ValueError as error:
                raise MisconfigurationException(str(error)) from None

    # --- optimizer ---

    def use_optimizer(
        self, optimizer: OptimizerCallable, scheduler: Schedule | LRSchedulerCallable, warmup_epochs: float
    ) -> None:
        if not callable(scheduler) and scheduler not in ("constant", "cosine"):
            raise ValueError(f'`scheduler` must be "constant", "cosine" or a callable, got {scheduler!r}')
        if warmup_epochs < 0 or (warmup_epochs and callable(scheduler)):
            raise ValueError(
                f'`warmup_epochs` must be 0 or more, and goes with scheduler "constant" or "cosine"; got '
                f"warmup_epochs={warmup_epochs} and scheduler={scheduler!r}"
            )
        self.optimizer, self.scheduler, self.warmup_epochs = optimizer, scheduler, warmup_epochs

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer gets; a group's `lr_scale` multiplies its rate, `fixed_lr` exempts it from schedules."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def split_parameters(
        self, encoder: dict[str, Any] | None = None, predictor: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Groups for backbone with projector and for the predictor, with the options of each."""
        groups = [
            {"params": [*self.backbone.parameters(), *self.projector.parameters()], **(encoder or {})},
            {"params": list(self.predictor.parameters()), **(predictor or {})},
        ]
        return [group for group in groups if group["params"]]

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameter_groups())
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1.0)
        optimizer.register_step_post_hook(self._on_optimizer_stepped)
        if callable(self.scheduler):
            scheduler = self.scheduler(optimizer)
            config = {"scheduler": scheduler}
            if hasattr(scheduler, "monitor"):  # LightningCLI's ReduceLROnPlateau
                config["monitor"] = scheduler.monitor
            return {"optimizer": optimizer, "lr_scheduler": config}
        if self.scheduler == "constant" and not self.warmup_epochs:
            return optimizer
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ValueError(f"scheduler={self.scheduler!r} needs the run's length: set max_epochs or max_steps")
        warmup = 0
        if self.warmup_epochs:
            self.trainer.fit_loop.setup_data()  # until then the length of an epoch is unknown
            steps_per_epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
            warmup = self._fitted_warmup(round(self.warmup_epochs * steps_per_epoch), int(total))
        scheduler = warmup_cosine(optimizer, int(total), warmup, self.scheduler == "cosine", self.lr_floor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _fitted_warmup(self, warmup: int, total: int) -> int:
        if warmup < total:
            return warmup
        shorter = total // 10
        rank_zero_warn(
            f"`warmup_epochs`={self.warmup_epochs:g} makes {warmup} steps of warmup, but the run has only {total}: the "
            f"rate warms up over the first tenth of the run ({shorter} steps) instead; set `warmup_epochs` to choose"
        )
        return shorter

    def _on_optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The scaler does not call a skipping optimizer at all, but a fused one, which skips by itself.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not found_inf.any():
            self.after_optimizer_step()

    # --- persistence ---

    def keep_hyperparameters(self) -> None:
        """Save the constructor's plain arguments; called first in `__init__`.

        Modules and callables are left out, so that checkpoints load with ``weights_only=True``: pass them to
        ``load_from_checkpoint`` again. Under LightningCLI they are saved as their configuration.
        """
        frame = inspect.currentframe().f_back  # type: ignore[union-attr]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's warning on modules, which go in the next line
            self.save_hyperparameters(frame=frame)
        not_plain = [name for name, value in self.hparams.items() if callable(value)]
        for name in not_plain:
            self.hparams.pop(name)
        self.save_hyperparameters(ignore=not_plain, frame=frame)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the default optimizer, a lambda: what starts processes by spawning pickles the module."""
        state = dict(super().__getstate__())
        for name in ("optimizer", "scheduler"):
            if state.get(name) is self._default(name):
                state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in ("optimizer", "scheduler"):
            self.__dict__.setdefault(name, self._default(name))

    def _default(self, name: str) -> Any:
        parameter = inspect.signature(type(self).__init__).parameters.get(name)
        return parameter.default if parameter else None


def views(batch: Any) -> tuple[Tensor, Tensor]:
    """The batch's first two views."""
    found = getattr(batch, "views", None)
    if found is None or len(found) < 2:
        got = type(batch).__name__ if found is None else f"{len(found)} view"
        raise ValueError(
            f"a method needs a batch whose field `views` holds two views of each sample, got {got}; use "
            "lightning_ssl.data's modules, or a loader that yields objects with `views`, `label`, `index`, `image`"
        )
    return found[0], found[1]
