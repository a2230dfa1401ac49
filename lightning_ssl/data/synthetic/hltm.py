"""Hierarchical latent tree models: many independent trees drawn at once, and a DataModule of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.data.synthetic.base import EpochDraws, SyntheticDataModule

__all__ = ["HLTM", "HLTMDataModule"]


def latent_position(name: str, branching: int = 2) -> tuple[int, int]:
    """Level and index of a latent named by its path from the root.

    Example:
        >>> latent_position("s010"), latent_position("root")
        ((3, 2), (0, 0))
    """
    if name in ("root", "s", "z0"):
        return 0, 0
    digits = name[1:]
    if not name.startswith("s") or not digits.isdigit() or any(int(d) >= branching for d in digits):
        raise ValueError(
            f"`latent` must be a path, got {name!r}; write 'root' or 's' and one digit below {branching} a level, "
            "like 's010'"
        )
    return len(digits), int(digits, branching)


class HLTM:
    r"""Complete latent trees with a given or random polarity on each edge (DDN-v2 Sec. 6 and C.2).

    A binary symmetric edge copies its parent with probability :math:`(1 + \rho_{\mu\nu})/2` (Eq. 14). With
    ``states`` > 2 the tree is transition-regularised (Def. 3):
    :math:`P_{\mu\nu} = \frac{1}{m} 1 1^T + \rho_{\mu\nu} (\Pi_{\mu\nu} - \frac{1}{m} 1 1^T)` with a permutation
    :math:`\Pi`, which for two states is the binary symmetric tree. Resampling the tree under a fixed root is
    the augmentation.

    Args:
        depth: Levels of edges; the tree has ``branching ** depth`` leaves.
        lower: Polarities are drawn from U[lower, upper], one number or one per run.
        upper: Upper end of that range.
        runs: Number of independent trees.
        states: Values of each latent, 2 for the binary symmetric tree.
        branching: Children of a node.
        signed: Multiply each polarity by a random sign (for ``states`` > 2: draw random permutations).
        root_polarity: P(z0=1) - P(z0=0) of a binary root; a root of more states is uniform.
        seed: Seed of the polarities.

    Shapes:
        A latent level is ``[runs, branching ** level, n]`` (uint8): samples are the last axis.

    Example:
        >>> tree = HLTM(depth=3, lower=0.9, runs=2)
        >>> levels = tree.sample(5, torch.Generator().manual_seed(0))
        >>> [tuple(z.shape) for z in levels]
        [(2, 1, 5), (2, 2, 5), (2, 4, 5), (2, 8, 5)]
    """

    def __init__(
        self,
        depth: int = 5,
        lower: float | Sequence[float] = 0.7,
        upper: float = 1.0,
        runs: int = 1,
        states: int = 2,
        branching: int = 2,
        signed: bool = True,
        root_polarity: float = 0.0,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("depth", depth, 1),
            ("runs", runs, 1),
            ("states", states, 2),
            ("branching", branching, 2),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}; a tree needs a root and leaves")
        lowers = torch.as_tensor(lower, dtype=torch.float64).reshape(-1)
        if lowers.numel() not in (1, runs):
            raise ValueError(f"`lower` must be one number, or one a run ({runs}), got {lowers.numel()}")
        least_polarity = -1.0 / (states - 1)
        if lowers.min() < least_polarity or upper > 1 or lowers.max() > upper:
            raise ValueError(
                f"`lower` and `upper` must satisfy {least_polarity:.3g} <= lower <= upper <= 1, got {lower}, {upper}; "
                "a polarity is 2 P(child=1 | parent=1) - 1, in [-1, 1] for two states"
            )
        if not -1 <= root_polarity <= 1:
            raise ValueError(f"`root_polarity` must lie in [-1, 1], got {root_polarity}; it is P(z0=1) - P(z0=0)")
        generator = torch.Generator().manual_seed(seed)
        self.depth, self.runs, self.states, self.branching = depth, runs, states, branching
        self.root_polarity = root_polarity
        self.polarity: list[Tensor] = []  # level l, from 0: edges into level l + 1, [runs, branching ** (l + 1)]
        self.permutation: list[
            Tensor
        ] = []  # the same edges, [runs, nodes, states]: where each state of the parent goes
        for level in range(1, depth + 1):
            shape = (runs, branching**level)
            rho = lowers[:, None] + (upper - lowers[:, None]) * torch.rand(
                shape, generator=generator, dtype=torch.float64
            )
            if signed and states == 2:
                rho = rho * (2.0 * torch.randint(2, shape, generator=generator) - 1)
            order = torch.rand(*shape, states, generator=generator) if signed and states > 2 else torch.arange(states)
            self.polarity.append(rho)
            self.permutation.append(order.expand(*shape, states).argsort(-1))

    @classmethod
    def from_polarities(cls, polarities: Sequence[Tensor], root_polarity: float = 0.0) -> HLTM:
        """A binary symmetric tree of given polarities, ``[runs, branching ** level]`` for each level from 1."""
        if not polarities:
            raise ValueError("`polarities` must hold a tensor for each level below the root, got none")
        polarities = [p.to(torch.float64) for p in polarities]
        runs, branching = polarities[0].shape
        for level, rho in enumerate(polarities, start=1):
            if tuple(rho.shape) != (runs, branching**level):
                raise ValueError(
                    f"`polarities[{level - 1}]` must have shape {(runs, branching**level)}, got {tuple(rho.shape)}"
                )
            if rho.abs().max() > 1:
                raise ValueError(f"`polarities[{level - 1}]` must lie in [-1, 1] (Eq. 14), got {rho.abs().max():.3g}")
        tree = cls(len(polarities), runs=runs, branching=branching, signed=False, root_polarity=root_polarity)
        tree.polarity = list(polarities)
        return tree

    @property
    def leaves(self) -> int:
        """Number of visible variables."""
        return self.branching**self.depth

    def transition(self, level: int) -> Tensor:
        """P(child | parent) of the edges into ``level`` (from 1), ``[runs, nodes, parent state, child state]``."""
        rho, order = self.polarity[level - 1][..., None, None], self.permutation[level - 1]
        follow = torch.nn.functional.one_hot(order, self.states).to(rho)
        return 1 / self.states + rho * (follow - 1 / self.states)

    def root_polarities(self, name: str) -> Tensor:
        """rho_{0 mu}: the product of the polarities on the path from the root to a latent, ``[runs]`` (Eq. 177)."""
        level, index = latent_position(name, self.branching)
        rho = torch.ones(self.runs, dtype=torch.float64)
        for l in range(level, 0, -1):
            rho, index = rho * self.polarity[l - 1][:, index], index // self.branching
        return rho

    def sample_root(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw roots, ``[runs, 1, n]``."""
        if self.states > 2:
            return torch.randint(self.states, (self.runs, 1, n), generator=generator, dtype=torch.uint8)
        return (torch.rand(self.runs, 1, n, generator=generator) < (1 + self.root_polarity) / 2).to(torch.uint8)

    def sample(self, n: int, generator: torch.Generator, root: Tensor | None = None) -> list[Tensor]:
        """Draw whole trees, under the given roots (an augmentation of those samples) or fresh ones.

        Returns:
            Levels 0 (root) to ``depth`` (leaves), each ``[runs, branching ** level, n]`` uint8.
        """
        if n < 1:
            raise ValueError(f"`n` must be at least 1, got {n}")
        levels = [self.sample_root(n, generator) if root is None else root]
        draw = self._flips if self.states == 2 else self._jumps
        for offset in draw(n, generator):
            parent = levels[-1].unsqueeze(2)  # [runs, nodes, 1, n], broadcast over the children
            if self.states == 2:
                child = parent ^ offset.unflatten(1, (-1, self.branching))
                levels.append(child.flatten(1, 2))
            else:
                parent = parent.expand(-1, -1, self.branching, -1).flatten(1, 2)
                child = (parent + offset) % self.states
                levels.append(self.permutation[len(levels) - 1].to(torch.uint8).gather(2, child.long()))
        return levels

    def _flips(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Which binary edges flip: 16 random bits each, four to a 64-bit draw, all levels in one comparison."""
        if getattr(self, "_threshold", None) is None:
            rho = torch.cat(self.polarity, dim=1)
            # The sign is a certain flip; what is left has probability (1 - |rho|) / 2 <= 1/2, so that it fits int16.
            self._threshold = ((1 - rho.abs()) / 2 * 65536).round().sub(32768).to(torch.int16).unsqueeze(-1)
            self._inverted = (rho < 0).to(torch.uint8).unsqueeze(-1)
        edges = self._threshold.shape[1]
        words = torch.empty((self.runs * edges * n + 3) // 4, dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        bits = words.view(torch.int16)[: self.runs * edges * n].view(self.runs, edges, n)
        flips = (bits < self._threshold).view(torch.uint8) ^ self._inverted
        return list(flips.split([self.branching**level for level in range(1, self.depth + 1)], dim=1))

    def _jumps(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Offsets added to the parent's state before the permutation: 0 keeps it, the others are equally likely."""
        offsets = []
        for rho in self.polarity:
            stay = 1 / self.states + rho * (1 - 1 / self.states)
            u = torch.rand(*rho.shape, n, generator=generator)
            other = torch.randint(1, self.states, u.shape, generator=generator, dtype=torch.uint8)
            offsets.append(torch.where(u < stay[..., None], torch.zeros_like(other), other))
        return offsets

    def observe(self, leaves: Tensor, values: str = "01", dtype: torch.dtype = torch.float32) -> Tensor:
        """What a network sees of the leaves, ``[runs, features, n]``: 0/1, +-1, or one-hot groups of ``states``."""
        if values == "onehot":
            return torch.nn.functional.one_hot(leaves.long(), self.states).movedim(-1, 2).flatten(1, 2).to(dtype)
        if values == "01" and self.states == 2:
            return leaves.to(dtype)
        if values == "+-1" and self.states == 2:
            return leaves.to(dtype).mul_(2).sub_(1)
        known = "'01', '+-1' or 'onehot'" if self.states == 2 else f"'onehot' (there are {self.states} states)"
        raise ValueError(f"`values` must be {known}, got {values!r}")


class HLTMDataModule(SyntheticDataModule):
    """Pairs of leaves under one root of a random tree, every draw fresh (DDN-v2 D.1).

    The label is the root z0. Views are ``[batch, features]`` floats, a function of (seed, epoch, index) alone.

    Args:
        depth: Levels of edges.
        lower: Polarities are drawn from U[lower, 1].
        states: Values of each latent.
        branching: Children of a node.
        signed: Random signs (permutations) on the edges.
        values: What the network sees: "01", "+-1" or "onehot".
        **kwargs: draws, batch_size, num_views, probe_draws and seed of :class:`SyntheticDataModule`.

    Example:
        >>> data = HLTMDataModule(depth=3, lower=0.8, draws=64, batch_size=16)
        >>> data.num_features
        8
    """

    def __init__(
        self,
        depth: int = 5,
        lower: float = 0.7,
        states: int = 2,
        branching: int = 2,
        signed: bool = True,
        values: str = "01",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tree = HLTM(depth, lower, states=states, branching=branching, signed=signed, seed=self.seed)
        self.tree.observe(torch.zeros(1, self.tree.leaves, 1, dtype=torch.uint8), values)  # refuse a bad `values` now
        self.values, self.num_classes = values, states
        self.num_features = self.tree.leaves * (states if values == "onehot" else 1)
        self.save_hyperparameters()

    def draw(self, n: int, num_views: int, generator: torch.Generator) -> EpochDraws:
        """See :class:`SyntheticDataModule`."""
        root = self.tree.sample_root(n, generator)
        views = [self.tree.sample(n, generator, root)[-1] for _ in range(num_views)]
        seen = tuple(self.tree.observe(v, self.values)[0].T.contiguous() for v in views)
        return EpochDraws(seen, root[0, 0].long())
