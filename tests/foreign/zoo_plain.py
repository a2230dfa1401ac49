"""Modules written by hand in plain torch: each does one thing that somebody does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.foreign import data
from tests.foreign.case import LIGHTNING, PYTORCH_LIGHTNING, Built, Case, Operator, Probed
from tests.foreign.truth import blocked, interleaved


def convolutions(norm: bool = False, dropout: float = 0.0, pool: bool = True) -> nn.Sequential:
    """Images [N, 3, 16, 16] to [N, 8], or to the map [N, 8, 4, 4] before it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 6, 3, stride=2, padding=1)]
    layers += [nn.BatchNorm2d(6)] if norm else []
    layers += [nn.ReLU(inplace=True), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True)]
    layers += [nn.Dropout(dropout)] if dropout else []
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if pool else []
    return nn.Sequential(*layers)


def stranger(
    parts: dict[str, nn.Module], step: Callable[..., Any], package: str = LIGHTNING, adam: bool = False, **methods: Any
) -> Any:
    """A LightningModule of these parts whose training step is `step(self, batch)`."""
    base = importlib.import_module(package).LightningModule

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return step(self, batch)

    def configure_optimizers(self: Any) -> Any:
        if adam:
            return torch.optim.Adam(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.05)

    body = {"training_step": training_step, "configure_optimizers": configure_optimizers, **methods}
    module = type("Stranger", (base,), body)()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def pull(first: Tensor, second: Tensor) -> Tensor:
    return -cosine_similarity(first, second).mean()


def predicted(self: Any, z0: Tensor, z1: Tensor) -> Tensor:
    return pull(self.predictor(z0), z1.detach()) + pull(self.predictor(z1), z0.detach())


def heads() -> dict[str, nn.Module]:
    return {"projector": nn.Linear(8, 6), "predictor": nn.Linear(6, 6, bias=False)}


CLEAN = (data.labelled(24, seed=5), data.labelled(16, seed=6))


def embedded(encoder: str = "backbone", **kwargs: Any) -> Probed:
    """The probes on clean images that go straight into the encoder."""
    return Probed(encoder, *CLEAN, rows=lambda module, batch: module.get_submodule(encoder)(batch[0]), **kwargs)


def small_operator(layers: tuple[str, ...] = ("backbone.0", "projector"), **kwargs: Any) -> Operator:
    return Operator("backbone", "projector", layers, **kwargs)


# Calls ---------------------------------------------------------------------------------------------------------------


def _both(self: Any, batch: Any) -> tuple[Tensor, Tensor]:
    z0, z1 = (self.projector(self.backbone(x)) for x in batch[0])
    return z0, z1


def _validate(self: Any, batch: Any, batch_idx: int) -> None:
    predicted(self, *_both(self, batch))


def two_calls(package: str = LIGHTNING, norm: bool = False, dropout: float = 0.0) -> Built:
    parts = {"backbone": convolutions(norm, dropout), **heads()}
    module = stranger(parts, lambda self, b: predicted(self, *_both(self, b)), package, validation_step=_validate)
    return Built(module, data.pairs(), data.pairs(12, seed=3))


def three_views() -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        z = [self.projector(self.backbone(x)) for x in batch[0]]
        return pull(z[0], z[1]) + pull(z[1], z[2])

    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.pairs(views=3))


def feature_map() -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        z0, z1 = (self.projector(self.backbone(x).mean((2, 3))) for x in batch[0])
        return predicted(self, z0, z1)

    return Built(stranger({"backbone": convolutions(pool=False), **heads()}, step), data.pairs())


def manual(optimizers: int) -> Built:
    def step(self: Any, batch: Any) -> None:
        found = self.optimizers()
        for optimizer in found if isinstance(found, list) else [found]:
            loss = predicted(self, *_both(self, batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self: Any) -> Any:
        encoder = [*self.backbone.parameters(), *self.projector.parameters()]
        groups = [encoder, list(self.predictor.parameters())] if optimizers == 2 else [list(self.parameters())]
        return [torch.optim.SGD(group, lr=0.05) for group in groups]

    module = stranger({"backbone": convolutions(), **heads()}, step, configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    return Built(module, data.pairs())


def clean_first(grad: bool) -> Built:
    """A clean image goes through the encoder first, for a number that the author watches; it is not in the loss."""

    def step(self: Any, batch: Any) -> Tensor:
        clean, first, second = batch[0]
        with torch.set_grad_enabled(grad):
            self.watched = float(self.projector(self.backbone(clean)).std())
        return predicted(self, self.projector(self.backbone(first)), self.projector(self.backbone(second)))

    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.pairs(views=3))


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def wrapped() -> Built:
    """The step calls the child, not the wrapper."""

    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *(self.projector(self.wrapper.net(x)) for x in batch[0]))

    return Built(stranger({"wrapper": Wrapper(convolutions()), **heads()}, step), data.pairs())


def checkpointed(reentrant: bool) -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        z0, z1 = (
            self.projector(checkpoint(self.backbone, x.requires_grad_(), use_reentrant=reentrant)) for x in batch[0]
        )
        return predicted(self, z0, z1)

    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.pairs())


def few_rows() -> Built:
    """Four rows in all: one view of four samples."""

    def step(self: Any, batch: Any) -> Tensor:
        return pull(self.projector(self.backbone(batch[0][0])), batch[0][1].flatten(1)[:, :6])

    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.pairs(12))


# Batches -------------------------------------------------------------------------------------------------------------


def dict_batch() -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        views = batch["views"]
        return predicted(self, *(self.projector(self.backbone(views[key])) for key in ("a", "b")))

    items = [{"views": {"a": a, "b": b}, "meta": {"label": label}} for (a, b), label, _ in data.pairs().items]
    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.Items(items))


@dataclass
class Boxed:
    features: Tensor
    maps: Tensor


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = convolutions(pool=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        maps = self.trunk(x)
        return {"loss": None, "found": {"boxed": Boxed(maps.mean((2, 3)), maps)}}


def nested_outputs() -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *(self.projector(self.backbone(x)["found"]["boxed"].features) for x in batch[0]))

    return Built(stranger({"backbone": Boxing(), **heads()}, step), data.pairs())


def unrelated_rows() -> Built:
    """One view of 8 rows; a table of 4 rows, which has nothing to do with them, travels in the batch."""

    def step(self: Any, batch: Any) -> Tensor:
        z = self.projector(self.backbone(batch["image"]))
        return pull(z, batch["image"].flatten(1)[:, :6]) + 0 * batch["table"].sum()

    clean, labels = data.samples(24, (3, 16, 16))
    batches = [
        {"image": clean[i : i + 8], "table": torch.randn(4, 5), "label": labels[i : i + 8]} for i in range(0, 24, 8)
    ]
    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.Items(batches))


def unlabelled() -> Built:
    """A batch that is one tensor [N, 2, ...] and nothing else."""

    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *(self.projector(self.backbone(x)) for x in batch.unbind(1)))

    items = [views for views, _ in data.stacked().items]
    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.Items(items))


# One call on several views -------------------------------------------------------------------------------------------


def one_call(order: str, inside: bool = False, noise: float = 0.3) -> Built:
    """Both views in one call, one after the other or interleaved; from the batch, or made in the step."""

    def step(self: Any, batch: Any) -> Tensor:
        if inside:
            views = [batch[0] + noise * torch.randn_like(batch[0]) for _ in range(2)]
        else:
            views = list(batch[0].unbind(1))
        x = torch.cat(views) if order == "blocked" else torch.stack(views, dim=1).flatten(0, 1)
        z = self.projector(self.backbone(x))
        z0, z1 = z.chunk(2) if order == "blocked" else (z[0::2], z[1::2])
        return predicted(self, z0, z1)

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.projector(self.backbone(batch[0]))

    items = data.labelled(36) if inside else data.stacked(noise=noise)
    module = stranger({"backbone": convolutions(), **heads()}, step, validation_step=validation_step)
    return Built(module, items, data.labelled(12, seed=3))


def no_views() -> Built:
    """Two rows a sample that are not views of it: an anchor and something else."""

    def step(self: Any, batch: Any) -> Tensor:
        z = self.projector(self.backbone(batch[0].flatten(0, 1)))
        return pull(z, batch[0].flatten(0, 1).flatten(1)[:, :6])

    clean, labels = data.samples(72, (3, 16, 16))
    items = [(clean[2 * i : 2 * i + 2].clone(), int(labels[i])) for i in range(36)]
    return Built(stranger({"backbone": convolutions(), **heads()}, step), data.Items(items))


# What happens to a batch on its way ----------------------------------------------------------------------------------

RAW = tuple(
    data.Items([(64 * x + 128 + 40 * x.flip(0), y) for x, y in items.items]) for items in CLEAN
)  # raw pixels; channels mixed, so that neighbours change with the normalisation


def _normal(x: Tensor) -> Tensor:
    return torch.tanh((x - 128) / 64 - torch.tensor([0.5, -0.5, 1.0]).view(3, 1, 1))


def normalising_module(package: str = LIGHTNING) -> Built:
    def on_after_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        image = batch[0]
        return [[_normal(x) for x in image] if isinstance(image, list) else _normal(image), *batch[1:]]

    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *_both(self, batch))

    parts = {"backbone": convolutions(), **heads()}
    module = stranger(parts, step, package, on_after_batch_transfer=on_after_batch_transfer)
    items = [([64 * x + 128 for x in views], label, name) for views, label, name in data.pairs().items]
    return Built(module, data.Items(items))


def normalising_datamodule(package: str = LIGHTNING) -> Built:
    """As torchgeo's DataModules do: augmented and normalised in training, normalised only in validation."""
    base = importlib.import_module(package).LightningDataModule
    clean = data.labelled(36)

    class Images(base):  # type: ignore[misc, valid-type]
        def train_dataloader(self) -> DataLoader:
            return data.loader(data.Items([{"image": 64 * x + 128, "label": y} for x, y in clean.items]))

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if isinstance(batch, dict):
                image = _normal(batch["image"])
                if self.trainer.training:
                    views = [image + 0.3 * torch.randn_like(image) for _ in range(2)]
                    return {**batch, "views": views}
                return {**batch, "image": image}
            if self.trainer.training:
                raise RuntimeError("a clean batch was handed over as one to train on")
            return [_normal(batch[0]), *batch[1:]]

    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *(self.projector(self.backbone(x)) for x in batch["views"]))

    module = stranger({"backbone": convolutions(), **heads()}, step, package)
    return Built(module, data.Items([]), datamodule=Images())


# Series --------------------------------------------------------------------------------------------------------------

SERIES = (7, 4)  # length and channels


class Readout(nn.Module):
    """A recurrent encoder whose last state is what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.transpose(0, 1))[1][0][-1]


def recurrent(batch_first: bool) -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        z = []
        for x in batch[0]:
            states, _ = self.backbone(x if batch_first else x.transpose(0, 1))
            z.append(self.projector(states[:, -1] if batch_first else states[-1]))
        return predicted(self, *z)

    parts = {"backbone": nn.LSTM(4, 8, batch_first=batch_first), **heads()}
    return Built(stranger(parts, step), data.pairs(shape=SERIES))


def readout() -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *_both(self, batch))

    return Built(stranger({"backbone": Readout(), **heads()}, step), data.pairs(shape=SERIES))


def series(last: str) -> Built:
    """A convolutional network on series [N, C, L]; it ends in a convolution or in something that does not tell."""

    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *(self.projector(self.backbone(x).mean(2)) for x in batch[0]))

    layers: list[nn.Module] = [nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 8, 3)]
    layers += [nn.GELU()] if last == "gelu" else []
    return Built(stranger({"backbone": nn.Sequential(*layers), **heads()}, step), data.pairs(shape=(4, 12)))


class MaskedMean(nn.Module):
    """A transformer over [N, L, 4] that needs to be told what is padding; [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        tokens = self.layer(self.embed(x), src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(2).to(tokens.dtype)
        return (tokens * kept).sum(dim=1) / kept.sum(dim=1)


def _padded() -> data.Items:
    items = []
    for i, (views, label, _) in enumerate(data.pairs(shape=SERIES).items):
        padding = torch.arange(SERIES[0]) >= 3 + i % 5
        items.append(([view + 3 * padding[:, None] for view in views], padding, label))
    return data.Items(items)


def masked_module(keyword: bool) -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        views, padding, _ = batch
        found = [self.backbone(x, padding=padding) if keyword else self.backbone(x, padding) for x in views]
        return predicted(self, *(self.projector(features) for features in found))

    return Built(stranger({"backbone": MaskedMean(), **heads()}, step), _padded())


def masked_transformer() -> Built:
    """Torch's own encoder, sequence first as it comes, with a mask."""

    def step(self: Any, batch: Any) -> Tensor:
        views, padding, _ = batch
        z = []
        for x in views:
            tokens = self.backbone(self.embed(x).transpose(0, 1), src_key_padding_mask=padding)
            z.append(self.projector(tokens[0]))
        return predicted(self, *z)

    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parts = {"embed": nn.Linear(4, 8), "backbone": encoder, **heads()}
    return Built(stranger(parts, step), _padded())


CASES = [
    Case(
        "two_calls",
        two_calls,
        predictor="predictor",
        operator=small_operator(("backbone.0", "backbone.2", "projector")),
        probed=embedded(),
        held_out=lambda rows: rows,
        ranks=True,
    ),
    Case(
        "two_calls_pl",
        lambda: two_calls(PYTORCH_LIGHTNING),
        predictor="predictor",
        operator=small_operator(),
        probed=embedded(),
        held_out=lambda rows: rows,
        package=PYTORCH_LIGHTNING,
        needs=["pytorch_lightning"],
        ranks=True,
    ),
    Case(
        "batch_norm",
        lambda: two_calls(norm=True),
        predictor="predictor",
        operator=small_operator(),
        probed=embedded(),
        held_out=lambda rows: rows,
    ),
    Case("batch_norm_inner", lambda: two_calls(norm=True), "backbone.1", "NCHW", declared={"layout": "NCHW"}),
    Case(
        "dropout",
        lambda: two_calls(dropout=0.3),
        predictor="predictor",
        operator=small_operator(),
        probed=embedded(),
        held_out=lambda rows: rows,
    ),
    Case("three_views", three_views, operator=small_operator(), ranks=True),
    Case("feature_map", feature_map, "backbone", "NCHW", declared={"layout": "NCHW"}, bare="either", ranks=True),
    Case("manual", lambda: manual(1), predictor="predictor", operator=small_operator(), ranks=True),
    Case(
        "two_optimizers",
        lambda: manual(2),
        counts=lambda calls: calls[:2],
        predictor="predictor",
        operator=small_operator(),
        ranks=True,
    ),
    Case(
        "clean_first",
        lambda: clean_first(True),
        counts=lambda calls: calls[1:],
        operator=small_operator(),
        bare="either",
    ),
    Case("clean_first_no_grad", lambda: clean_first(False), operator=small_operator()),
    Case(
        "wrapped",
        wrapped,
        "wrapper.net",
        bare_features="wrapper",
        bare="none",
        declared={},
        says="wrapper.net",
        operator=Operator("wrapper.net", "projector", ("wrapper.net.0", "projector")),
    ),
    Case(
        "checkpointed",
        lambda: checkpointed(False),
        "backbone",
        predictor="predictor",
        operator=small_operator(
            again=lambda twin, batch: [twin.projector(twin.backbone(x.detach())) for x in batch[0]]
        ),
    ),
    Case(
        "checkpointed_reentrant",
        lambda: checkpointed(True),
        "backbone",
        counts=lambda calls: calls[:2],
        predictor="predictor",
        operator=small_operator(
            again=lambda twin, batch: [twin.projector(twin.backbone(x.detach())) for x in batch[0]], value=False
        ),
        bare="either",
    ),
    Case("few_rows", few_rows, batch=4, bare="either", verdict=0.0),
    Case("dict_batch", dict_batch, predictor="predictor", operator=small_operator(), ranks=True),
    Case(
        "nested_outputs",
        nested_outputs,
        "backbone",
        predictor="predictor",
        operator=small_operator(("backbone.trunk.0", "projector")),
        probed=Probed(
            "backbone", *CLEAN, rows=lambda module, batch: module.backbone(batch[0])["found"]["boxed"].features
        ),
    ),
    Case("unrelated_rows", unrelated_rows, bare="either", batch=0),
    Case("unlabelled", unlabelled, operator=small_operator(), ranks=True),
    Case(
        "blocked",
        lambda: one_call("blocked"),
        views=lambda rows: blocked(rows[0]),
        declared={"pairing": "blocked", "views": 2, "held_out": {"views": 1}},
        bare="either",
        operator=small_operator(declared={"pairing": "blocked", "views": 2}),
        predictor="predictor",
        held_out=lambda rows: rows,
        ranks=True,
    ),
    Case(
        "interleaved",
        lambda: one_call("interleaved"),
        views=lambda rows: interleaved(rows[0]),
        declared={"pairing": "interleaved", "views": 2, "held_out": {"views": 1}},
        bare="either",
        operator=small_operator(declared={"pairing": "interleaved", "views": 2}),
        predictor="predictor",
        held_out=lambda rows: rows,
        ranks=True,
    ),
    Case(
        "declared_by_function",
        lambda: one_call("interleaved"),
        views=lambda rows: interleaved(rows[0]),
        declared={"pairing": lambda calls: [calls[0][0::2], calls[0][1::2]], "held_out": False},
        bare="either",
    ),
    Case(
        "only_views_declared",
        lambda: one_call("interleaved"),
        views=lambda rows: interleaved(rows[0]),
        declared={"views": 2},
        value=False,
        bare="either",
        operator=small_operator(declared={"views": 2}, value=False),
        held_out=lambda rows: rows,
    ),
    Case(
        "augmented_inside_blocked",
        lambda: one_call("blocked", inside=True),
        views=lambda rows: blocked(rows[0]),
        declared={"pairing": "blocked", "views": 2, "held_out": {"views": 1}},
        bare="either",
        operator=small_operator(declared={"pairing": "blocked", "views": 2}),
        held_out=lambda rows: rows,
    ),
    Case(
        "augmented_inside_interleaved",
        lambda: one_call("interleaved", inside=True),
        views=lambda rows: interleaved(rows[0]),
        declared={"pairing": "interleaved", "views": 2, "held_out": {"views": 1}},
        bare="either",
        operator=small_operator(declared={"pairing": "interleaved", "views": 2}),
        held_out=lambda rows: rows,
    ),
    Case(
        "augmented_beyond_recognition",
        lambda: one_call("interleaved", inside=True, noise=20.0),
        views=lambda rows: interleaved(rows[0]),
        declared={"pairing": "interleaved", "views": 2, "held_out": {"views": 1}},
        bare="either",
        operator=small_operator(declared={"pairing": "interleaved", "views": 2}),
        held_out=lambda rows: rows,
    ),
    Case("no_views", no_views, bare="either"),
    Case(
        "normalising_module",
        normalising_module,
        probed=Probed("backbone", *RAW, rows=lambda module, batch: module.backbone(_normal(batch[0]))),
        operator=small_operator(),
        ranks=True,
    ),
    Case(
        "normalising_module_pl",
        lambda: normalising_module(PYTORCH_LIGHTNING),
        probed=Probed("backbone", *RAW, rows=lambda module, batch: module.backbone(_normal(batch[0]))),
        package=PYTORCH_LIGHTNING,
        needs=["pytorch_lightning"],
    ),
    Case(
        "normalising_datamodule",
        normalising_datamodule,
        probed=Probed("backbone", *RAW, rows=lambda module, batch: module.backbone(_normal(batch[0]))),
        operator=small_operator(),
    ),
    Case(
        "probe_inside",
        lambda: two_calls(norm=True),
        probed=Probed(
            "backbone",
            *CLEAN,
            features="backbone.3",
            rows=lambda module, batch: module.backbone[:4](batch[0]).mean((2, 3)),
        ),
    ),
    Case(
        "recurrent",
        lambda: recurrent(False),
        "backbone",
        "LNC",
        declared={"layout": "LNC"},
        predictor="predictor",
        operator=Operator("backbone", "projector", ("projector",), value=False),
        ranks=True,
    ),
    Case(
        "recurrent_batch_first",
        lambda: recurrent(True),
        "backbone",
        "NLC",
        declared={"layout": "NLC"},
        bare="either",
        predictor="predictor",
        operator=Operator("backbone", "projector", ("projector",), value=False),
        ranks=True,
    ),
    Case("readout", readout, "backbone", predictor="predictor", operator=small_operator(("projector",)), ranks=True),
    Case(
        "series",
        lambda: series("conv"),
        "backbone",
        "NCL",
        declared={"layout": "NCL"},
        operator=small_operator(("backbone.0", "backbone.2", "projector")),
        ranks=True,
    ),
    Case(
        "series_gelu",
        lambda: series("gelu"),
        "backbone",
        "NCL",
        declared={"layout": "NCL"},
        bare="either",
        operator=small_operator(),
        ranks=True,
    ),
    Case(
        "masked_positional",
        lambda: masked_module(False),
        predictor="predictor",
        operator=small_operator(("backbone.embed", "backbone.layer.linear1", "projector")),
    ),
    Case(
        "masked_keyword",
        lambda: masked_module(True),
        "backbone",
        predictor="predictor",
        operator=small_operator(("backbone.layer.linear2", "projector")),
    ),
    Case(
        "masked_transformer",
        masked_transformer,
        "backbone",
        "LNC",
        declared={"layout": "LNC"},
        bare="either",
        predictor="predictor",
        operator=Operator(
            "backbone",
            "backbone",
            ("backbone.layers.0.linear1",),
            layout="LNC",
            declared={"layout": "LNC"},
            value=False,
        ),
    ),
]
