"""What every callback that looks at a run shares: when it is due, what it logs under which keys, what it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_ssl.callbacks._engine.places import check_path
from lightning_ssl.callbacks._engine.ranks import refuse_sharded
from lightning_ssl.quantities import Quantity


class Diagnostic(L.Callback):
    """A callback that looks at named submodules every so often and logs what it finds.

    The base of :class:`Watcher`, which sees training steps, and :class:`Probe`, which embeds labelled data.

    Args:
        places: Argument name -> dotted path of the submodule it names.
        every_n_steps: Look at every n-th step, the first included.
        every_n_epochs: Look once every n epochs.
        name: Keeps the keys of several instances apart: ``train/<name>/...``.

    Example:
        >>> class WeightNorm(Diagnostic):  # a base of one's own for what reads weights; for features: Watcher, Probe
        ...     quantities = (Quantity("train/weight_norm", "norm of the weights", "Weight decay pulls it down."),)
        >>> watch = WeightNorm({"predictor": "predictor"}, every_n_steps=100, every_n_epochs=None, name=None)
    """

    quantities: ClassVar[tuple[Quantity, ...]] = ()

    def __init__(
        self, places: Mapping[str, str], every_n_steps: int | None, every_n_epochs: int | None, name: str | None
    ) -> None:
        super().__init__()
        for argument, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{argument}` must be a positive integer or None, got {value!r}")
        if every_n_steps is None and every_n_epochs is None:
            raise ValueError("`every_n_steps` or `every_n_epochs` must be given: both are None")
        self.places = dict(places)
        self.every_n_steps, self.every_n_epochs, self.name = every_n_steps, every_n_epochs, name
        self._label = name
        self._warned: set[str] = set()
        self.begin_run()

    def begin_run(self) -> None:
        """Forget an earlier run: a callback may be used in several. What a checkpoint holds comes after this."""
        self._last_step: int | None = None
        self._last_epoch: int | None = None
        self._looks = 0  # observations of training so far

    # Names ------------------------------------------------------------------------------------------------------------

    def key(self, stage: str, quantity: str) -> str:
        """The key that a quantity is logged under."""
        return f"{stage}/{self._label}/{quantity}" if self._label else f"{stage}/{quantity}"

    @property
    def state_key(self) -> str:
        # Without the interval: a run may go on with another one.
        return f"{type(self).__qualname__}{dict(places=self.places, name=self.name)}"

    def warn(self, message: str, detail: object = "") -> None:
        """Warn on rank 0, once a run for each message, with the detail of its first time."""
        if message not in self._warned:
            self._warned.add(message)
            rank_zero_warn(f"{self._who}: {message}{detail}")

    def tell(self, message: str) -> None:
        """Say something on rank 0 that is no cause for worry, once a run."""
        if message not in self._warned:
            self._warned.add(message)
            rank_zero_info(f"{self._who}: {message}")

    @property
    def _who(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.places.items())})"

    # Life -------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        refuse_sharded(trainer, self)
        self._warned.clear()
        if stage == "fit" and trainer.global_step == 0:
            self.begin_run()
        self._choose_label(trainer.callbacks)  # type: ignore[attr-defined]
        for argument, path in self.places.items():
            check_path(pl_module, path, argument)

    def _choose_label(self, callbacks: Iterable[L.Callback]) -> None:
        """Without a name, instances of one class that would share their keys take their places for a name."""
        self._label = self.name
        same = [other for other in callbacks if type(other) is type(self) and other.name == self.name]  # type: ignore[attr-defined]
        if len(same) > 1:
            if self.name is not None or any(o is not self and o.places == self.places for o in same):  # type: ignore[attr-defined]
                raise MisconfigurationException(
                    f"two {type(self).__name__} callbacks would log under the same keys; give each its own `name=`"
                )
            self._label = "_".join(self.places.values())

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._last_step, "last_epoch": self._last_epoch, "looks": self._looks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_step, self._last_epoch = state_dict["last_step"], state_dict["last_epoch"]
        self._looks = state_dict.get("looks", 0)

    # When -------------------------------------------------------------------------------------------------------------

    def _is_due(self, step: int, epoch: int | None = None) -> bool:
        """Once for each interval begun: of a step's micro-batches the first, and never skipped by a stride."""
        n, m = self.every_n_steps, self.every_n_epochs
        due = n is not None and (self._last_step is None or step // n > self._last_step // n)
        if epoch is not None and m is not None:
            due |= self._last_epoch is None or epoch // m > self._last_epoch // m
        return due


def as_floats(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Numbers for a logger; tensors cross to the host together."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    wide = torch.float32 if any(value.device.type == "mps" for value in tensors.values()) else torch.float64
    numbers = (
        torch.stack([value.detach().to(wide).reshape(()) for value in tensors.values()]).tolist() if tensors else []
    )
    found = dict(zip(tensors, numbers, strict=True))
    return {key: found[key] if key in found else float(value) for key, value in values.items()}
