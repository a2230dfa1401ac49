"""No silent wrong number: whatever a step looks like, a logged value is the true one, or there is a warning."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.foreign import data, truth
from tests.foreign.case import Built, Case
from tests.foreign.runs import catch, compare, ours, watch
from tests.foreign.zoo_plain import pull, stranger

LAYOUTS = ("NC", "NCHW", "NHWC", "NLC", "NCL", "LNC")
INSIDE = 9  # numbers of a sample


class Shaped(nn.Module):
    """Samples [n, 9] to features of a given layout."""

    def __init__(self, layout: str, channels: int, length: int) -> None:
        super().__init__()
        self.layout, self.channels, self.length = layout, channels, length
        positions = {"NC": 1, "NCHW": 2 * length, "NHWC": 2 * length}.get(layout, length)
        self.net = nn.Sequential(nn.Linear(INSIDE, 16), nn.Tanh(), nn.Linear(16, channels * positions))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x).view(len(x), self.channels, -1)
        if self.layout == "NC":
            return y.flatten(1)
        if self.layout in ("NCHW", "NHWC"):
            y = y.unflatten(2, (2, -1))
            return y if self.layout == "NCHW" else y.permute(0, 2, 3, 1)
        return {"NLC": y.mT, "NCL": y, "LNC": y.permute(2, 0, 1)}[self.layout]


def last_layer(layout: str, kind: str, channels: int) -> nn.Module:
    """What the watched place ends in: a layer that tells its layout, one that does not, or nothing."""
    if kind == "telling":
        if layout == "NCHW":
            return nn.Conv2d(channels, channels, 1)
        if layout == "NCL":
            return nn.Conv1d(channels, channels, 1)
        if layout == "LNC":
            return nn.TransformerEncoderLayer(channels, 1, 8, dropout=0.0)
        if layout == "NLC":
            return nn.TransformerEncoderLayer(channels, 1, 8, dropout=0.0, batch_first=True)
    if kind == "norm" and layout in ("NC", "NHWC", "NLC", "LNC"):
        return nn.LayerNorm(channels)
    return {"norm": nn.Tanh(), "telling": nn.Tanh(), "plain": nn.Identity()}[kind]


class Draw:
    """One step drawn at random."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.seed = seed
        self.layout = dice.choice(LAYOUTS)
        self.order = dice.choice(["calls", "blocked", "interleaved"])
        self.views = dice.choice([1, 2, 2, 2, 3])
        self.n = dice.choice([4, 6, 8, 12])
        # Sizes that coincide are what makes axes hard to tell apart.
        self.channels = dice.choice([5, 7, self.n, 2 * self.n])
        self.length = dice.choice([2, 3, 5, self.n, self.views * self.n])
        self.last = dice.choice(["telling", "norm", "plain"])
        self.batch = dice.choice(["tuple", "dict", "nested", "tensor"])
        self.labels = dice.random() < 0.6
        self.unrelated = dice.choice([None, None, "half", "rows", "one"])
        self.inside = dice.random() < 0.4
        self.noise = dice.choice([0.05, 0.3, 1.0, 5.0])
        self.neighbours = dice.random() < 0.2
        self.clean = dice.choice([None, None, None, "no_grad", "grad"])
        if self.clean == "grad" and self.views == 1:
            self.clean = (
                "no_grad"  # two calls, one of them with a gradient: that is also what a stopped branch looks like
            )
        self.head = dice.choice(["linear", "mlp", "none"])
        self.telling = dice.choice(["nothing", "nothing", "layout", "pairing", "everything"])

    def __repr__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in vars(self).items())

    def images(self) -> Tensor:
        """[batches, n, 9]: with `neighbours`, samples come in twos that are nearly the same."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(data.STEPS, self.n, INSIDE, generator=generator)
        if self.neighbours:
            x = x[:, ::2].repeat_interleave(2, dim=1) + 0.05 * x
        return x

    def augmented(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[n, views, 9]."""
        noise = torch.randn(len(x), self.views, INSIDE, generator=generator)
        return x[:, None] + self.noise * noise

    def batches(self) -> data.Items:
        generator = torch.Generator().manual_seed(self.seed + 1)
        found: list[Any] = []
        for x in self.images():
            stacked = x if self.inside else self.augmented(x, generator)
            extra: dict[str, Tensor] = {"label": torch.arange(self.n) % 4} if self.labels else {}
            if self.unrelated is not None:
                rows = {"half": self.n // 2, "rows": self.views * self.n, "one": 1}[self.unrelated]
                extra["table"] = torch.randn(rows, 3, generator=generator)
            if self.batch == "tensor":
                found.append(stacked)
            elif self.batch == "tuple":
                found.append((stacked if self.inside else list(stacked.unbind(1)), *extra.values()))
            elif self.batch == "dict":
                found.append({"x": stacked, **extra})
            else:
                found.append(
                    {"meta": extra, "inputs": {"views": [stacked] if self.inside else list(stacked.unbind(1))}}
                )
        return data.Items(found)

    def entering(self, batch: Any) -> tuple[Tensor, Tensor]:
        """From a batch to the views [n, views, 9] and the clean samples."""
        if self.batch == "tensor":
            found = batch
        elif self.batch == "tuple":
            found = batch[0]
        elif self.batch == "dict":
            found = batch["x"]
        else:
            found = batch["inputs"]["views"][0] if self.inside else batch["inputs"]["views"]
        if self.inside:
            return self.augmented(found), found
        stacked = torch.stack(found, dim=1) if isinstance(found, list) else found
        return stacked, stacked.mean(dim=1)

    def build(self) -> Built:
        torch.manual_seed(self.seed)
        backbone = nn.Sequential(
            Shaped(self.layout, self.channels, self.length), last_layer(self.layout, self.last, self.channels)
        )
        heads = {
            "linear": nn.Linear(self.channels, 6),
            "mlp": nn.Sequential(nn.Linear(self.channels, 8), nn.ReLU(), nn.Linear(8, 6)),
            "none": nn.Identity(),
        }

        def encode(module: Any, x: Tensor) -> Tensor:
            return module.projector(truth.rows_of(module.backbone(x), self.layout))

        def step(module: Any, batch: Any) -> Tensor:
            views, clean = self.entering(batch)
            if self.clean is not None:
                with torch.set_grad_enabled(self.clean == "grad"):
                    encode(module, clean)
            if self.order == "calls":
                z = [encode(module, view) for view in views.unbind(1)]
            elif self.order == "blocked":
                z = list(encode(module, torch.cat(views.unbind(1))).chunk(self.views))
            else:
                z = list(encode(module, views.flatten(0, 1)).unflatten(0, (-1, self.views)).unbind(1))
            if len(z) == 1:
                return pull(z[0], views[:, 0, :1])
            return sum((pull(a, b) for a, b in pairwise(z)), torch.zeros(()))

        return Built(stranger({"backbone": backbone, "projector": heads[self.head]}, step), self.batches())

    def case(self) -> Case:
        declared: dict[str, Any] = {}
        if self.telling in ("layout", "everything"):
            declared["layout"] = self.layout
        if self.telling in ("pairing", "everything"):
            declared |= {"views": self.views}
            if self.views > 1:
                declared["pairing"] = self.order
        order = {
            "calls": lambda rows: rows,
            "blocked": lambda rows: truth.blocked(rows[0], self.views),
            "interleaved": lambda rows: truth.interleaved(rows[0], self.views),
        }[self.order]

        def counts(calls: list[Any]) -> list[Any]:
            return calls[1:] if self.clean == "grad" else [call for call in calls if call.grad]

        return Case(
            f"draw_{self.seed}",
            self.build,
            "backbone",
            self.layout,
            counts=counts,
            views=order,
            declared=declared,
            value=self.telling == "everything",
            bare="either",
            batch=0,
        )


def check(seed: int) -> None:
    draw = Draw(seed)
    case = draw.case()
    watched = watch(case)
    problems = compare(case, catch(case), watched, bare=False)
    assert not problems, "\n".join([repr(draw), *problems, "warnings:", *ours(watched)])


@pytest.mark.parametrize("seed", range(40))
def test_no_silent_wrong_number(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(40, 150), *range(1000, 1300)])
def test_no_silent_wrong_number_in_many_draws(seed):
    check(seed)
