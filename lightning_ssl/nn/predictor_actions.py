"""What the papers do to a predictor besides training it: set it from F, symmetrise it, reset it.

Each piece needs a predictor and nothing else, so that methods and drop-in callbacks share it. All act in place, on
every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_ssl.distributed import all_reduce_sum, broadcast, is_in_pieces, put_, to_pieces, whole
from lightning_ssl.functional import direct_predictor, optimal_predictor
from lightning_ssl.functional.roots import relative_root
from lightning_ssl.nn.partitioned import PartitionedLinear

PredictorInit = Literal["default", "xavier", "identity", "uniform", "positive"]
"""How a predictor's weights start, anew or for the first time; see `reset_parameters_`."""


def linear_of(predictor: nn.Module, action: str) -> nn.Linear:
    """The one square linear map in a predictor; anything else is refused, naming what needed it."""
    linears = [m for m in predictor.modules() if isinstance(m, nn.Linear)]
    if len(linears) != 1 or linears[0].in_features != linears[0].out_features:
        shapes = [(m.in_features, m.out_features) for m in linears]
        raise ValueError(
            f"{action} needs a predictor with one square nn.Linear, got {type(predictor).__name__} with linear layers "
            f'of (in, out) sizes {shapes}; use predictor="linear"'
        )
    return linears[0]


@torch.no_grad()
def symmetrize_(predictor: nn.Module) -> None:
    """Replace the weight by its symmetric part, W <- (W + W^T)/2 (DirectPred Sec. 4)."""
    to_pieces(predictor)
    weight = linear_of(predictor, "symmetrising").weight
    full = whole(weight)
    put_(weight, (full + full.T) / 2)


@torch.no_grad()
def symmetrize_two_layers_(predictor: nn.Module) -> None:
    """Make a two-layer predictor its own mirror image, W_1 <- (W_1 + W_2^T)/2 and W_2 <- W_1^T (DirectPred Table 3).

    Biases and normalisation stay as they are.
    """
    linears = [m for m in predictor.modules() if isinstance(m, nn.Linear)]
    shapes = [(m.in_features, m.out_features) for m in linears]
    if len(linears) != 2 or shapes[0] != shapes[1][::-1]:
        raise ValueError(
            f"symmetrising two layers needs linear layers of sizes (d, h) and (h, d), got {type(predictor).__name__} "
            f"with linear layers of (in, out) sizes {shapes}"
        )
    to_pieces(predictor)
    first, second = linears
    mean = (whole(first.weight) + whole(second.weight).T) / 2
    put_(first.weight, mean)
    put_(second.weight, mean.T)


@torch.no_grad()
def reset_parameters_(
    predictor: nn.Module, init: PredictorInit = "default", init_range: float | None = None, seed: int = 0
) -> None:
    """Draw the predictor anew; the draw is a function of `seed` alone, so that all ranks agree.

    Args:
        predictor: Any module.
        init: "default", every layer's own initialisation; "xavier", Glorot's uniform (DDN-v1 Table 5); "identity", for
            one square linear layer; "uniform", weights from [-init_range, init_range]; "positive", from [0, init_range]
            (DDN-v1 Tables 7-10). All but the first set biases to 0. Normalisation layers go back to their start.
        init_range: The range of "uniform" and "positive".
        seed: Seed of the draw; for repeated resets, vary it (by the epoch, say).
    """
    if init not in get_args(PredictorInit):
        raise ValueError(f"`init` must be one of {', '.join(get_args(PredictorInit))}, got {init!r}")
    if init in ("uniform", "positive") and not (init_range is not None and init_range > 0):
        raise ValueError(f"init={init!r} needs a positive `init_range`, got {init_range}")
    to_pieces(predictor)
    # On the CPU: the device's generator is left alone and the draw is the same on any device.
    with _drawn_on_cpu(predictor), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in predictor.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        if init == "identity":
            nn.init.eye_(linear_of(predictor, "identity initialisation").weight)
        for module in predictor.modules():
            if not isinstance(module, nn.Linear):
                continue
            if init == "xavier":
                nn.init.xavier_uniform_(module.weight)
            elif init in ("uniform", "positive") and init_range is not None:
                nn.init.uniform_(module.weight, -init_range if init == "uniform" else 0.0, init_range)
            if init != "default" and module.bias is not None:
                nn.init.zeros_(module.bias)


@contextmanager
def _drawn_on_cpu(module: nn.Module) -> Iterator[None]:
    """Inside, a module's tensors are whole ones on the CPU; what then stands in them is put in their places."""
    fresh: dict[int, tuple[Tensor, Tensor]] = {}
    tables: list[Any] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    places = [(table, name, x) for table in tables for name, x in table.items() if x is not None]
    try:
        for table, name, x in places:
            if id(x) not in fresh:  # some are shared
                own = torch.empty(x.shape, dtype=x.dtype) if is_in_pieces(x) else x.detach().to("cpu", copy=True)
                fresh[id(x)] = x, nn.Parameter(own, x.requires_grad) if isinstance(x, nn.Parameter) else own
            table[name] = fresh[id(x)][1]  # type: ignore[assignment]
        yield
    finally:
        for table, name, x in places:
            table[name] = x  # type: ignore[assignment]
    for x, drawn in fresh.values():
        put_(x, drawn.detach().to(x.device, non_blocking=True))


class DirectPredictorUpdate:
    r"""Sets a linear predictor from a moving average of its inputs' second moment (DirectPred Eqs. 18-19).

    :math:`\hat F \leftarrow \rho \hat F + (1 - \rho) E_B[f f^T]`, uncentred, over all rows of a step on all ranks.
    Call :meth:`update` with each batch of predictor inputs (every view, every micro-batch), then :meth:`step` once
    after the optimizer step.

    The averages are plain tensors here, not buffers of any module; :meth:`state_dict` is their checkpoint entry.

    Args:
        rho: Weight of the past in the average; 0 uses the last batch alone.
        eps: The boost of small eigenvalues, relative to the largest.
        freq: Set the predictor every `freq`-th step; in between the optimizer trains it. The averages move each step.
        shift: The constant c of Table 7, relative to the largest eigenvalue.
        partitions: Number of random hyperplanes. 0: one F, for a linear predictor. Otherwise one F for each side of
            each hyperplane, for a :class:`PartitionedLinear` of as many, in which each row uses its own sides' maps.
        mode: "direct" (Eq. 18) or "optimal" (Table 1), which solves for the least-squares symmetric predictor and
            needs the targets as well.
        reg: The ridge of "optimal", relative to F's mean eigenvalue.

    Example:
        >>> predictor = nn.Linear(4, 4, bias=False)
        >>> update = DirectPredictorUpdate(rho=0.3, eps=0.1)
        >>> update.update(torch.randn(32, 4))
        >>> update.step(predictor)  # whether it was set in this step
        True
        >>> torch.allclose(predictor.weight, predictor.weight.T, atol=1e-6)
        True
    """

    def __init__(
        self,
        rho: float = 0.3,
        eps: float = 0.1,
        freq: int = 1,
        shift: float = 0.0,
        partitions: int = 0,
        mode: Literal["direct", "optimal"] = "direct",
        reg: float = 1e-3,
    ) -> None:
        if not 0 <= rho < 1:
            raise ValueError(f"`rho` must lie in [0, 1), got {rho}; 0 uses the last batch alone")
        if eps < 0 or reg < 0:
            raise ValueError(f"`eps` and `reg` must not be negative, got {eps} and {reg}")
        if freq < 1 or partitions < 0:
            raise ValueError(f"`freq` must be at least 1 and `partitions` at least 0, got {freq} and {partitions}")
        if shift >= 1:
            raise ValueError(f"`shift` must be below 1 (the largest eigenvalue in these units), got {shift}")
        if mode not in ("direct", "optimal"):
            raise ValueError(f'`mode` must be "direct" or "optimal", got {mode!r}')
        self.rho, self.eps, self.freq, self.shift = rho, eps, freq, shift
        self.partitions, self.mode, self.reg = partitions, mode, reg
        self.steps = 0
        self.F: Tensor | None = None  # [parts, d, d]
        self.M: Tensor | None = None  # [parts, d, d], "optimal" only
        self.seen: Tensor | None = None  # [parts], whether a part has had rows yet
        self._sums: Tensor | None = None  # [1 or 2, parts, d, d], of the current step on this rank
        self._counts: Tensor | None = None  # [parts]

    @torch.no_grad()
    def update(self, inputs: Tensor, targets: Tensor | None = None, sides: Tensor | None = None) -> None:
        """Add a batch of predictor inputs.

        Args:
            inputs: Rows, [N, d].
            targets: What they should predict, [N, d]; mode "optimal" only.
            sides: On which side of each hyperplane each row lies, [partitions, N] bool; with `partitions` only.
        """
        if self.mode == "optimal" and (targets is None or targets.shape != inputs.shape):
            got = None if targets is None else tuple(targets.shape)
            raise ValueError(f'mode="optimal" needs `targets` shaped as the inputs {tuple(inputs.shape)}, got {got}')
        if (sides is not None) != bool(self.partitions) or (
            sides is not None and sides.shape != (self.partitions, len(inputs))
        ):
            got = None if sides is None else tuple(sides.shape)
            raise ValueError(
                f"`sides` must be {(self.partitions, len(inputs)) if self.partitions else None} for "
                f"partitions={self.partitions}, got {got}"
            )
        f = _precise(inputs.detach())  # N x d
        # parts x N: below and above of each hyperplane in turn, as PartitionedLinear has them; one part without any.
        side = f.new_ones(1, len(f)) if sides is None else torch.stack([~sides, sides], dim=1).flatten(0, 1).to(f)
        weighted = side[:, :, None] * f  # parts x N x d
        sums = [weighted.mT @ f]
        if self.mode == "optimal":
            assert targets is not None
            cross = weighted.mT @ _precise(targets.detach())
            sums.append((cross + cross.mT) / 2)
        stacked, counts = torch.stack(sums), side.sum(dim=1)
        self._sums = stacked if self._sums is None else self._sums + stacked
        self._counts = counts if self._counts is None else self._counts + counts

    @torch.no_grad()
    def step(self, predictor: nn.Module) -> bool:
        """Move the averages by what :meth:`update` collected, and set the predictor when due; return whether it was.

        A collective: all ranks call it, each having called :meth:`update`.
        """
        to_pieces(predictor)
        weight = self._weight_of(predictor)
        if self._sums is None or self._counts is None:
            raise RuntimeError(
                "step() without update(): no predictor inputs were seen; is the module in training mode?"
            )
        both = all_reduce_sum(torch.cat([self._sums.flatten(), self._counts]))  # in one collective
        sums, counts = both[: -len(self._counts)].view_as(self._sums), both[-len(self._counts) :]
        self._sums = self._counts = None
        moments = sums / counts.clamp_min(1)[:, None, None]
        present = counts > 0
        if self.F is None or self.seen is None:
            self.F, self.M, self.seen = moments[0], moments[-1] if self.mode == "optimal" else None, present
        else:
            # A part's first rows start its average; a part without rows keeps what it has.
            rho = self.seen.to(moments)[:, None, None] * self.rho
            keep = rho.masked_fill(~present[:, None, None], 1.0)
            self.F = keep * self.F.to(moments) + (1 - keep) * moments[0]
            if self.M is not None:
                self.M = keep * self.M.to(moments) + (1 - keep) * moments[1]
            self.seen = self.seen.to(present.device) | present
        self.steps += 1
        if self.steps % self.freq:
            return False
        # Broadcast: equal F on all ranks need not give bitwise equal eigenvectors. A part not yet seen keeps its start.
        old = whole(weight)
        parts = old.view(-1, *old.shape[-2:])
        parts = torch.where(self.seen.to(old.device)[:, None, None], self._predictors(parts).to(old), parts)
        put_(weight, broadcast(parts).view_as(old))
        return True

    def _predictors(self, old: Tensor) -> Tensor:
        """The predictor of each part, [parts, d, d]; of one without rows, whatever."""
        assert self.F is not None and self.seen is not None
        if self.M is None and not self.shift and self.F.device.type != "cpu":
            # Without an eigensolver, for whose end the host would wait in each step.
            return relative_root(self.F) + self.eps * torch.eye(
                self.F.shape[-1], dtype=self.F.dtype, device=self.F.device
            )
        return torch.stack([self._predictor(k) if seen else old[k] for k, seen in enumerate(self.seen.tolist())])

    def _predictor(self, part: int) -> Tensor:
        assert self.F is not None
        F = self.F[part]
        if self.M is None:
            return direct_predictor(F, self.eps, self.shift)
        return optimal_predictor(F, self.M[part], self.reg * float(F.diagonal().mean()))

    def _weight_of(self, predictor: nn.Module) -> Tensor:
        if not self.partitions:
            return linear_of(predictor, "DirectPred").weight
        if not isinstance(predictor, PartitionedLinear) or predictor.partitions != self.partitions:
            raise ValueError(
                f"partitions={self.partitions} sets a PartitionedLinear of as many hyperplanes, got {predictor}"
            )
        return predictor.weight

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "F": self.F, "M": self.M, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.F, self.M, self.seen = state["F"], state["M"], state["seen"]


def _precise(x: Tensor) -> Tensor:
    """Double precision where the device has it: the small eigenvalues are what the method is about."""
    return x.float() if x.device.type == "mps" else x.double()
