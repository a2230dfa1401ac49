"""Whether a predictor's eigenspaces follow those of its inputs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_ssl.callbacks._engine.observation import Seen
from lightning_ssl.callbacks._engine.places import check_path, find_module
from lightning_ssl.callbacks._engine.report import log_figure, write_file
from lightning_ssl.callbacks.watcher import Watcher, precise
from lightning_ssl.distributed import whole
from lightning_ssl.functional import balance_residual, predictor_values_of_rows
from lightning_ssl.quantities import Quantity

MAX_HISTORY = 2000  # observations kept


class EigenspaceAlignment(Watcher):
    r"""Logs how the predictor W stands to :math:`F = E[f f^T]` of what enters it (DirectPred Sec. 3).

    With :math:`F u_j = s_j u_j` and :math:`p_j = u_j^T W u_j`, over all rows of all views of a step:
    ``predictor/alignment_mean`` and ``predictor/alignment_weighted`` (by :math:`s_j`) of the cosines
    :math:`\cos(u_j, W u_j)`, ``predictor/commutator_norm`` :math:`\|FW - WF\| / (\|F\| \|W\|)`,
    ``predictor/asymmetry`` :math:`\|W - W^T\| / \|W\|`, ``predictor/smallest_symmetric_value`` (the smallest
    eigenvalue of W's symmetric part), ``predictor/eigenvalue_max`` and ``predictor/eigenvalue_min`` of F; where the
    layer before is linear, ``predictor/balance_residual``
    :math:`\|V V^T - W^T W / \alpha_p\|_F / \|V V^T\|_F` with V that layer's weight (Theorem 1).

    A predictor with hidden layers takes part by its effective linear map, fitted by least squares.

    The spectra over time go to ``<log folder>/predictor_spectra.npz`` with arrays ``step [T]``, ``eigenvalues``,
    ``predictor_values`` and ``cosines`` ``[T, d]`` (of the past every other observation is dropped where there are
    more than 2000; a step of N < d rows has N modes, and the others are 0); the cloud of :math:`(p_j, s_j)` with the
    invariant parabola :math:`s = p^2 / \alpha_p` is drawn.

    Args:
        predictor: Dotted path of the predictor.
        previous: Dotted path of the linear layer before it; by default the last layer of ``projector`` or
            ``projection_head`` beside the predictor, if that is linear.
        predictor_lr_scale: :math:`\alpha_p`, the predictor's learning rate relative to the encoder's.
        intercept: Fit an intercept with the effective linear map.
        every_n_steps: Log every n-th training step, the first included.
        every_n_epochs: Log the first step of every n-th epoch.
        picture_every: Draw the cloud every n-th observation; 0 never does.
        name: Keeps several instances apart: ``predictor/<name>/alignment_mean``.

    Example:
        >>> watch = EigenspaceAlignment("prediction_head", every_n_steps=200)
    """

    quantities = (
        Quantity(
            "predictor/alignment_weighted",
            "eigenspace alignment",
            "How well F's eigenvectors, by their weight, are the predictor's: 1 is perfect; it climbs while it learns.",
            "predictor",
            better="higher",
            healthy="climbing to 1",
            form="{:.3f}",
            headline=True,
        ),
        Quantity(
            "predictor/alignment_mean",
            "eigenspace alignment, unweighted",
            "The same, each eigenvector counted once.",
            "predictor",
            better="higher",
        ),
        Quantity(
            "predictor/commutator_norm",
            "commutator of F and W",
            "0 when predictor and features share their eigenspaces.",
            "predictor",
            better="lower",
        ),
        Quantity("predictor/asymmetry", "asymmetry of W", "0 for a symmetric predictor, 2 at most.", "predictor"),
        Quantity(
            "predictor/smallest_symmetric_value",
            "smallest eigenvalue of W's symmetric part",
            "Below 0 some modes are turned around and shrink.",
            "predictor",
        ),
        Quantity(
            "predictor/eigenvalue_max", "largest eigenvalue of F", "The strongest mode of the features.", "predictor"
        ),
        Quantity(
            "predictor/eigenvalue_min",
            "smallest eigenvalue of F",
            "The weakest mode; near 0 beside a large largest one, dimensions have collapsed.",
            "predictor",
        ),
        Quantity(
            "predictor/balance_residual",
            "imbalance of predictor and encoder",
            "Weight decay drives it to 0 (Theorem 1).",
            "predictor",
            better="lower",
        ),
    )
    prefix = "predictor"
    wants_inputs = True

    def __init__(
        self,
        predictor: str = "predictor",
        previous: str | None = None,
        predictor_lr_scale: float = 1.0,
        intercept: bool = False,
        every_n_steps: int | None = 100,
        every_n_epochs: int | None = None,
        picture_every: int = 20,
        name: str | None = None,
    ) -> None:
        super().__init__(
            predictor, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs, name=name, argument="predictor"
        )
        if not predictor_lr_scale > 0:
            raise ValueError(f"`predictor_lr_scale` must be positive, got {predictor_lr_scale}")
        if picture_every < 0:
            raise ValueError(f"`picture_every` must not be negative, got {picture_every}")
        self.predictor, self.previous, self.intercept = predictor, previous, intercept
        self.predictor_lr_scale, self.picture_every = predictor_lr_scale, picture_every

    def begin_run(self) -> None:
        super().begin_run()
        self._steps: list[int] = []
        self._spectra: list[Tensor] = []  # each [3, d]: s_j, p_j, cosines

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        module = check_path(pl_module, self.predictor, "predictor")
        if module is not None:
            check_predictor(module, self.predictor)
        if self.previous is not None:
            check_path(pl_module, self.previous, "previous")

    def check_places(self, pl_module: L.LightningModule) -> None:
        super().check_places(pl_module)
        check_predictor(find_module(pl_module, self.predictor, "predictor"), self.predictor)
        if self.previous is not None and self._previous_weight(pl_module) is None:
            raise MisconfigurationException(f"`previous` names {self.previous!r}, which does not end in an nn.Linear")

    def observe(self, trainer: L.Trainer, pl_module: L.LightningModule, seen: Seen, stage: str) -> dict[str, Any]:
        weight = linear_weight(find_module(pl_module, self.predictor, "predictor"))
        if seen.inputs is None:
            raise ValueError(f"what enters {self.predictor!r} has not one row for each that leaves it")
        inputs, dim = precise(seen.inputs), seen.inputs.shape[1]
        if weight is None:
            values = predictor_values_of_rows(inputs, precise(seen.rows), intercept=self.intercept)
        else:
            weight = precise(whole(weight))
            values = predictor_values_of_rows(inputs, W=weight)
        spectra = torch.stack([values[name] for name in ("eigenvalues", "predictor_values", "cosines")])
        spectra = nn.functional.pad(spectra, (0, dim - spectra.shape[1]))  # without a row a mode is 0
        logged = {
            "alignment_mean": values["cosine_mean"],
            "alignment_weighted": values["cosine_weighted"],
            "commutator_norm": values["commutator_norm"],
            "asymmetry": values["asymmetry"],
            "smallest_symmetric_value": values["smallest_symmetric_value"],
            "eigenvalue_max": spectra[0, 0],
            "eigenvalue_min": spectra[0, -1],
        }
        before = None if weight is None else self._previous_weight(pl_module)
        if weight is not None and before is not None and len(before) == dim:
            logged["balance_residual"] = balance_residual(precise(whole(before)), weight, self.predictor_lr_scale)
        numbers = torch.cat([torch.stack([x.to(spectra) for x in logged.values()]), spectra.flatten()]).cpu()
        self._steps.append(int(self._due or 0))
        self._spectra.append(numbers[len(logged) :].view(3, dim).float())
        if len(self._steps) > MAX_HISTORY:  # thin the past, so that a long run needs no more memory
            self._steps, self._spectra = self._steps[::2], self._spectra[::2]
        return {self.key("predictor", name): float(x) for name, x in zip(logged, numbers, strict=False)}

    def _previous_weight(self, pl_module: L.LightningModule) -> Tensor | None:
        around = self.predictor.rpartition(".")[0]
        beside = [f"{around}.{name}" if around else name for name in ("projector", "projection_head")]
        for path in [self.previous] if self.previous is not None else beside:
            try:
                leaves = _leaves(pl_module.get_submodule(path))
            except AttributeError:
                continue
            if leaves and isinstance(leaves[-1], nn.Linear):
                return leaves[-1].weight.detach()
        return None

    # Pictures and files --------------------------------------------------------------------------------------------

    @property
    def spectra_file(self) -> str:
        """The name of the file of spectra in the run's folder."""
        return f"{self._label}_spectra.npz" if self._label else "predictor_spectra.npz"

    def report(self, trainer: L.Trainer, step: int, stage: str) -> None:
        # Often while there is little to write, then ever less often: in all, a few times the final size is written.
        if len(self._steps) % max(1, len(self._steps) // 20) == 0:
            self._write(trainer)
        if self._spectra and self.draws(stage, self.picture_every):
            s, p, _ = self._spectra[-1]
            key = self.key("predictor", "spectrum")
            log_figure(trainer, self.folder, key, lambda: draw(s, p, self.predictor_lr_scale, step), step)

    def _write(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero or self.folder is None or not self._spectra:
            return
        s, p, cosines = torch.stack(self._spectra, dim=1).numpy()
        arrays = {"step": np.asarray(self._steps), "eigenvalues": s, "predictor_values": p, "cosines": cosines}
        write_file(trainer, self.folder / self.spectra_file, lambda file: np.savez_compressed(file, **arrays))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        spectra = torch.stack(self._spectra) if self._spectra else None
        return {**super().state_dict(), "steps": list(self._steps), "spectra": spectra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps = list(state_dict["steps"])
        self._spectra = [] if state_dict["spectra"] is None else list(state_dict["spectra"].cpu())


def check_predictor(module: nn.Module, path: str) -> None:
    """Refuse what cannot have eigenspaces in common with its inputs."""
    if not any(True for _ in module.parameters()):
        raise MisconfigurationException(
            f"`predictor` names {path!r} ({type(module).__name__}), which has no weights; name the predictor itself"
        )
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if linears and linears[0].in_features != linears[-1].out_features:
        raise MisconfigurationException(
            f"`predictor` names {path!r}, which maps {linears[0].in_features} dimensions to "
            f"{linears[-1].out_features}; only a map from a space to itself has eigenspaces to compare"
        )


def linear_weight(predictor: nn.Module) -> Tensor | None:
    """W of a predictor that is one linear layer, whatever wraps it; None for any other."""
    leaves = [leaf for leaf in _leaves(predictor) if not isinstance(leaf, (nn.Identity, nn.Dropout))]
    return leaves[0].weight if len(leaves) == 1 and isinstance(leaves[0], nn.Linear) else None


def _leaves(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if not any(True for _ in part.children())]


def draw(s: Tensor, p: Tensor, predictor_lr_scale: float, step: int) -> Figure:
    """The cloud of (p_j, s_j), the invariant parabola, and the parabola through the cloud."""
    figure = Figure(figsize=(4, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(p, s, s=8, color="tab:blue", label="modes $(p_j, s_j)$")
    grid = torch.linspace(min(0.0, float(p.min())), max(float(p.max()), 1e-6), 100)
    top = float(s.max()) * 1.1
    invariant = grid**2 / predictor_lr_scale
    axes.plot(grid[invariant <= top], invariant[invariant <= top], "k--", lw=1, label=r"$s = p^2/\alpha_p$")
    scale = float((s * p**2).sum() / (p**4).sum().clamp_min(1e-12))
    axes.plot(grid, scale * grid**2, color="tab:orange", lw=1, label=rf"$s = {scale:.2g}\,p^2$ (fit)")
    axes.set(xlabel="$p_j$", ylabel="$s_j$", ylim=(-0.02 * top, top))
    axes.set_title(f"predictor and F, step {step}", fontsize=9)
    axes.legend(fontsize=7)
    return figure
