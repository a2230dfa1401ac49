"""The collapse zoo's runs: healthy ones of every method, and every way to break them; each recorded step by step.

A run is a few hundred steps of a small network, in a plain loop. Every `EVERY` steps what left each place is kept (all
that a verdict may be made of), and at eight moments the kNN accuracy on held-out images; at three of them the converged
linear probe, and features of clean images for the label-free quantities.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ssl import functional
from lightning_ssl.data import Augment, ViewBatch, digits
from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, DirectPred, SimCLR, SimSiam
from lightning_ssl.methods.base import Method, views
from lightning_ssl.nn import SmallConv, TargetNetwork, mlp

EVERY = 5  # steps between observations: the monitor's default
PLACES = ("backbone", "projector", "predictor", "target.projector", "prototypes")


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run of the zoo.

    Attributes:
        family: What is done to which method: runs of a family differ in setting and seed.
        method: The class.
        data: "digits" or "images".
        options: Arguments of the method.
        optimizer: "adam", "adamw" or "sgd".
        lr: Learning rate.
        weight_decay: Of the optimizer.
        batch: Samples a batch.
        steps: Optimizer steps.
        width: Channels of the backbone's first layer.
        norm: The backbone's normalisation.
        seed: Of weights, batches and views.
        cut: From a third of the run on, leave the projector so many dimensions of its output.
        late: From half of the run on, multiply the learning rate by this.
        mispaired: Pair each view with another sample's.
        half: Which half of the zoo it belongs to: 0 chooses thresholds, 1 reports.
    """

    family: str
    method: Callable[..., Method]
    data: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    lr: float = 2e-3
    weight_decay: float = 0.0
    batch: int = 64
    steps: int = 300
    width: int = 16
    norm: str = "batch"
    seed: int = 0
    cut: int = 0
    late: float = 0.0
    mispaired: bool = False
    half: int = 0

    @property
    def name(self) -> str:
        settings = [f"{self.optimizer}{self.lr:g}", f"b{self.batch}", f"w{self.width}{self.norm[0]}", f"s{self.seed}"]
        settings += [f"cut{self.cut}"] if self.cut else []
        mark = zlib.crc32(repr(sorted((k, str(v)) for k, v in self.options.items())).encode()) % 10_000
        return "-".join([self.family.replace(" ", "_").replace("'", "p"), self.data, *settings, f"{mark:04d}"])


class DINO(Method):
    """Match the centred, sharpened assignments of a moving average's to K prototypes (Caron et al. 2021), two views."""

    def __init__(
        self,
        backbone: nn.Module,
        projector_hidden: int = 128,
        projector_dim: int = 64,
        prototypes: int = 64,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        momentum: float = 0.99,
        centring: bool = True,
        optimizer: Any = None,
        scheduler: Any = "constant",
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = mlp([backbone.num_features, projector_hidden, projector_dim])  # type: ignore[list-item]
        self.prototypes = nn.Linear(projector_dim, prototypes, bias=False)
        self.target = TargetNetwork(self.backbone, self.projector)
        self.teacher = copy.deepcopy(self.prototypes).requires_grad_(False)
        self.temperatures, self.momentum, self.centring = (student_temperature, teacher_temperature), momentum, centring
        self.register_buffer("centre", torch.zeros(prototypes))
        self.use_optimizer(optimizer, scheduler, 0)

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x1, x2 = views(batch)
        student = [self.prototypes(F.normalize(self.project(x), dim=1)) / self.temperatures[0] for x in (x1, x2)]
        with torch.no_grad():
            logits = [self.teacher(F.normalize(self.target(x), dim=1)) for x in (x1, x2)]
            teacher = [((z - self.centre) / self.temperatures[1]).softmax(1) for z in logits]
            if self.centring:
                self.centre.lerp_(torch.cat(logits).mean(0), 0.1)  # type: ignore[operator]
        pairs = ((teacher[0], student[1]), (teacher[1], student[0]))
        return {"loss": -sum((t * s.log_softmax(1)).sum(1).mean() for t, s in pairs) / 2}  # type: ignore[dict-item]

    def after_optimizer_step(self) -> None:
        self.target.follow(self.backbone, self.projector, self.momentum)
        with torch.no_grad():
            self.teacher.weight.lerp_(self.prototypes.weight, 1 - self.momentum)


def zoo(images: bool) -> list[Run]:
    """All runs, those of the two halves in turn; settings and seeds of the halves are different."""
    two = {"projector_hidden": 128, "projector_dim": 64}
    wide = {"projector_hidden": 256, "projector_dim": 256}
    ema = {**two, "momentum": 0.98}
    linear = {**two, "momentum": 0.97, "predictor": "linear", "predictor_lr_scale": 10.0}
    siam = {"projector_hidden": 128, "dim": 64, "scheduler": "constant", "projector_layers": 2}
    siam_wide = {"projector_hidden": 512, "dim": 512, "scheduler": "constant"}
    barlow = {"projector_hidden": 128, "dim": 64, "lambd": 0.02, "scheduler": "constant", "warmup_epochs": 0}
    batch_norm = {"predictor_norm": "batch"}
    dino = {"projector_hidden": 128, "projector_dim": 64}
    sgd = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 4e-4}
    fast = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 4e-4}
    mean = {"projector_norm": "detached_mean", "predictor_norm": "detached_mean"}

    # family, method, the settings of half 0, those of half 1; each a pair (options, arguments of Run)
    table: list[
        tuple[str, Any, list[tuple[dict[str, Any], dict[str, Any]]], list[tuple[dict[str, Any], dict[str, Any]]]]
    ]
    table = [
        # Healthy
        ("SimCLR", SimCLR, [(two, {}), ({**two, "tau": 0.2}, {**sgd, "norm": "group"})], [(wide, {"batch": 128})]),
        (
            "BYOL",
            BYOL,
            [(ema, {}), ({**ema, "projector_norm": "none"}, {"lr": 1e-3})],
            [({**wide, "momentum": 0.99}, sgd)],
        ),
        (
            "SimSiam",
            SimSiam,
            [(siam, fast)],
            [(siam_wide, {**sgd, "batch": 128}), ({**siam, "dim": 128}, {"lr": 1e-3})],
        ),
        ("Barlow", BarlowTwins, [(barlow, {})], [({**barlow, "dim": 256}, {"lr": 1e-3, "batch": 128})]),
        (
            "DirectPred",
            DirectPred,
            [({**two, "momentum": 0.97}, sgd)],
            [({**two, "momentum": 0.99}, {**sgd, "lr": 0.03})],
        ),
        ("BYOL linear", BYOL, [(linear, sgd)], [({**linear, "symmetric_predictor": True}, {**sgd, "batch": 128})]),
        ("RAFT", RAFT, [({**ema, **batch_norm}, {})], [({**linear}, sgd)]),
        ("BYOL'", BYOLPrime, [({**ema, **batch_norm}, {})], [({**wide, "momentum": 0.99, **batch_norm}, {"lr": 1e-3})]),
        ("DINO", DINO, [(dino, {})], [({**dino, "prototypes": 128}, {"lr": 1e-3, "batch": 128})]),
        (
            "BYOL fixed target",
            BYOL,
            [({**ema, "momentum": 1.0, "target_init": "independent"}, {})],
            [({**wide, "momentum": 1.0, "target_init": "independent"}, sgd)],
        ),
        # Broken
        (
            "BYOL no predictor",
            BYOL,
            [({**ema, "predictor": "none"}, {}), ({**wide, "predictor": "none", "momentum": 0.99}, sgd)],
            [
                ({**two, "predictor": "none", "momentum": 0.95}, {**sgd, "batch": 128}),
                ({**ema, "predictor": "none", "projector_dim": 128}, {"lr": 1e-3}),
            ],
        ),
        (
            "BYOL' no predictor",
            BYOLPrime,
            [({**ema, "predictor": "none"}, {})],
            [({**wide, "predictor": "none", "momentum": 0.99}, {"lr": 1e-3})],
        ),
        (
            "SimSiam no predictor",
            SimSiam,
            [({**siam, "predictor": "none"}, fast)],
            [({**siam_wide, "predictor": "none"}, {**sgd, "batch": 128})],
        ),
        (
            "SimSiam no stop-gradient",
            SimSiam,
            [({**siam, "stop_gradient": False}, fast), ({**siam, "stop_gradient": False, "dim": 128}, {"lr": 1e-3})],
            [({**siam_wide, "stop_gradient": False}, {**sgd, "batch": 128})],
        ),
        (
            "BYOL no stop-gradient",
            BYOL,
            [({**two, "momentum": 0.0, "stop_gradient": False}, {})],
            [({**wide, "momentum": 0.0, "stop_gradient": False}, sgd)],
        ),
        (
            "BYOL symmetric no EMA",
            BYOL,
            [({**linear, "momentum": 0.0, "symmetric_predictor": True, "predictor_lr_scale": 1.0}, {"lr": 5e-4})],
            [
                (
                    {
                        **linear,
                        "momentum": 0.0,
                        "symmetric_predictor": True,
                        "predictor_lr_scale": 1.0,
                        "projector_dim": 128,
                    },
                    sgd,
                )
            ],
        ),
        ("BYOL detached mean", BYOL, [({**ema, **mean}, {})], [({**wide, "momentum": 0.99, **mean}, {"lr": 1e-3})]),
        (
            "BYOL weight decay",
            BYOL,
            [({**linear}, {**sgd, "weight_decay": 0.1})],
            [({**ema}, {**fast, "weight_decay": 0.2, "batch": 128})],
        ),
        (
            "SimSiam weight decay",
            SimSiam,
            [({**siam}, {**fast, "weight_decay": 0.2})],
            [({**siam, "dim": 128}, {**sgd, "weight_decay": 0.5})],
        ),
        (
            "Barlow lambda 0",
            BarlowTwins,
            [({**barlow, "lambd": 0.0}, {})],
            [({**barlow, "lambd": 0.0, "dim": 256}, {"lr": 1e-3})],
        ),
        ("SimCLR cold", SimCLR, [({**two, "tau": 0.01}, {})], [({**wide, "tau": 0.02}, {"lr": 1e-3})]),
        ("SimCLR hot", SimCLR, [({**two, "tau": 20.0}, {})], [({**wide, "tau": 50.0}, {"lr": 1e-3})]),
        (
            "SimCLR cut",
            SimCLR,
            [({**two, "projector_dim": 512}, {"cut": 16}), (wide, {"cut": 8})],
            [({**two, "projector_dim": 512}, {"cut": 64, "batch": 128}), ({**two, "projector_dim": 512}, {"cut": 4})],
        ),
        ("BYOL cut", BYOL, [({**wide, "momentum": 0.98}, {"cut": 4})], [({**wide, "momentum": 0.98}, {"cut": 16})]),
        ("BYOL no EMA", BYOL, [({**two, "momentum": 0.0}, {})], [({**wide, "momentum": 0.0}, sgd)]),
        (
            "DINO no centring",
            DINO,
            [({**dino, "centring": False}, {})],
            [({**dino, "centring": False, "prototypes": 128}, {"lr": 1e-3})],
        ),
        (
            "DINO no sharpening",
            DINO,
            [({**dino, "teacher_temperature": 1.0}, {})],
            [({**dino, "teacher_temperature": 0.5, "prototypes": 128}, {"lr": 1e-3})],
        ),
        (
            "BYOL late",
            BYOL,
            [({**linear, "predictor_lr_scale": 10.0}, {**sgd, "late": 30.0})],
            [({**ema}, {"late": 100.0})],
        ),
        ("SimSiam late", SimSiam, [(siam, {**sgd, "late": 50.0})], [({**siam, "dim": 128}, {**sgd, "late": 100.0})]),
        (
            "BYOL mispaired",
            BYOL,
            [(ema, {"mispaired": True})],
            [({**wide, "momentum": 0.99}, {**sgd, "mispaired": True})],
        ),
        (
            "SimSiam mispaired",
            SimSiam,
            [(siam, {**fast, "mispaired": True})],
            [({**siam, "dim": 128}, {"lr": 1e-3, "mispaired": True})],
        ),
    ]
    runs = []
    for data in ("digits", "images") if images else ("digits",):
        for family, method, *halves in table:
            for half, settings in enumerate(halves):
                healthy = table.index((family, method, *halves)) < 10
                for i, (options, arguments) in enumerate(settings):
                    for repeat in range(2 if healthy and data == "digits" else 1):
                        seed = 10 * repeat + 2 * i + half + (100 if data == "images" else 0)
                        runs.append(Run(family, method, data, options, seed=seed, half=half, **arguments))
    # A share of every family early on: what is recorded so far is always a sample of all of it.
    return sorted(runs, key=lambda run: zlib.crc32(f"{run.seed}{run.family}{run.name}".encode()))


# Data -----------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Images as bytes, their classes, and how views are made of them."""

    train: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor
    augment: Callable[[Tensor], list[Tensor]]
    clean: Callable[[Tensor], Tensor]


def digits_data() -> Data:
    """The embedded digits; a view is drawn anew, the image to be probed keeps its place, turn and colours."""
    (train, labels), (test, test_labels) = digits.load(True), digits.load(False)

    def draw(x: Tensor, uniforms: Tensor) -> Tensor:
        return (digits.render(x, 16, digits.Nuisance(), uniforms) - 0.5) * 4

    def clean(x: Tensor) -> Tensor:
        return draw(x, torch.rand(len(x), 10, generator=torch.Generator().manual_seed(0)))

    def augment(x: Tensor) -> list[Tensor]:
        return [draw(x, torch.rand(len(x), 10)) for _ in range(2)]

    return Data(train, labels, test, test_labels, augment, clean)


def image_data(folder: Path, each: int = 500) -> Data:
    """`each` images of every class of an image folder with `train` and `test`, read once into one file beside it."""
    cached = folder / f"zoo_{each}.pt"
    if not cached.exists():
        from torchvision.datasets import ImageFolder

        parts = []
        for split, count in (("train", each), ("test", each // 5)):
            data = ImageFolder(str(folder / split))
            chosen = [i for c in range(len(data.classes)) for i in np.flatnonzero(np.array(data.targets) == c)[:count]]
            pixels = torch.stack([torch.from_numpy(np.array(data[i][0])) for i in chosen]).permute(0, 3, 1, 2)
            parts += [pixels.contiguous(), torch.tensor([data.targets[i] for i in chosen])]
        torch.save(parts, cached)
    scale: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    clean = Augment("none", num_views=1, **scale)
    return Data(*torch.load(cached, weights_only=True), Augment("cifar10", **scale), lambda x: clean(x)[0])


# Recording ------------------------------------------------------------------------------------------------------------


def record(run: Run, data: Data) -> dict[str, np.ndarray]:
    """Train, and keep what was seen."""
    torch.manual_seed(run.seed)
    model = run.method(SmallConv(width=run.width, norm=run.norm), optimizer=_optimizer(run), **run.options)
    optimizer = model.configure_optimizers()
    tape = Tape(model)
    moments = sorted({round(run.steps * i / 8) for i in range(9)})
    batches = _batches(run, data)
    for step in range(run.steps):
        if step in moments:
            tape.probe(run, data, step, full=step in (0, moments[4]))
        batch = next(batches)
        due = step % EVERY == 0
        with tape.listening(due):
            loss = model.losses(batch)["loss"]
        if not bool(loss.isfinite()):
            break
        optimizer.zero_grad()
        loss.backward()
        if due:
            tape.note(step, float(loss.detach()), optimizer)
        if run.late and step == run.steps // 2:
            for group in optimizer.param_groups:
                group["lr"] *= run.late
        optimizer.step()
        if run.cut and step >= run.steps // 3:
            _cut(model, run)
    tape.probe(run, data, step + 1, full=True)
    return tape.arrays()


def _optimizer(run: Run) -> Callable[[Any], torch.optim.Optimizer]:
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    more = {"momentum": 0.9} if run.optimizer == "sgd" else {}
    return lambda params: kinds[run.optimizer](params, lr=run.lr, weight_decay=run.weight_decay, **more)


def _batches(run: Run, data: Data) -> Iterator[ViewBatch]:
    while True:
        order = torch.randperm(len(data.train))
        for rows in order[: len(order) // run.batch * run.batch].view(-1, run.batch):
            first, second = data.augment(data.train[rows])
            if run.mispaired:
                second = second.roll(1, 0)
            yield ViewBatch((first, second), data.labels[rows], rows)


@torch.no_grad()
def _cut(model: Method, run: Run) -> None:
    """Leave the projector's last layer a subspace of `cut` dimensions, drawn once, at any angle."""
    layer = [part for part in model.projector.modules() if isinstance(part, nn.Linear)][-1]
    generator = torch.Generator().manual_seed(run.seed)
    basis = torch.linalg.qr(torch.randn(layer.out_features, run.cut, generator=generator))[0]
    layer.weight.copy_(basis @ (basis.T @ layer.weight))
    if layer.bias is not None:
        layer.bias.copy_(basis @ (basis.T @ layer.bias))


class Tape:
    """What is kept of a run."""

    def __init__(self, model: Method) -> None:
        self.model = model
        self.kept: dict[str, list[Any]] = {}
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.places = [path for path in PLACES if _has(model, path)]
        self.previous: Tensor | None = None

    def _add(self, key: str, value: Any) -> None:
        self.kept.setdefault(key, []).append(np.asarray(value))

    @contextmanager
    def listening(self, due: bool) -> Iterator[None]:
        """Keep what enters and leaves each place, on a step that is due."""
        self.calls = {path: [] for path in self.places}
        hooks = []
        for path in self.places if due else ():
            hooks.append(self.model.get_submodule(path).register_forward_hook(partial(self._heard, path)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _heard(self, path: str, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.calls[path].append((args[0].detach().clone(), output.detach().clone()))

    @torch.no_grad()
    def note(self, step: int, loss: float, optimizer: torch.optim.Optimizer) -> None:
        self._add("step", step)
        self._add("loss", loss)
        self._add("lr", optimizer.param_groups[0]["lr"])
        for part in ("backbone", "projector", "predictor"):
            if hasattr(self.model, part):
                params = list(getattr(self.model, part).parameters())
                norms = [float(sum(p.square().sum() for p in params)) ** 0.5] if params else [0.0]
                norms.append(float(sum(p.grad.square().sum() for p in params if p.grad is not None)) ** 0.5)
                self._add(f"weights/{part}", norms)
        for path in self.places:
            outputs = [out for _, out in self.calls[path]][:2]
            if len(outputs) == 2:
                self._note_place(path, outputs)
        if (
            "predictor" in self.places
            and self.calls["predictor"]
            and any(True for _ in self.model.predictor.parameters())
        ):
            inputs = torch.cat([x for x, _ in self.calls["predictor"]]).double()
            outputs = torch.cat([y for _, y in self.calls["predictor"]]).double()
            if inputs.shape[1] <= 128:
                weight = functional.effective_predictor(inputs, outputs)
                found = functional.eigenspace_alignment(functional.second_moment(inputs), weight)
                self._add("modes", torch.stack(list(found)).float().numpy())

    def _note_place(self, path: str, outputs: list[Tensor]) -> None:
        x = torch.stack(outputs, 1).double()  # [N, 2, d]
        norms = x.norm(dim=2, keepdim=True)
        unit = x / norms.clamp_min(1e-300)
        self._add(f"{path}/alignment", (unit[:, 0] - unit[:, 1]).square().sum(1).mean())
        self._add(
            f"{path}/norms",
            [norms.mean(), norms.std(), x.flatten(0, 1).var(0).sum(), x.flatten(0, 1).mean(0).square().sum()],
        )
        rows = unit.flatten(0, 1)
        mean = rows.mean(0)
        centred = rows - mean
        self._add(f"{path}/rows", len(rows))
        self._add(f"{path}/mean", mean.float())
        scale = centred.abs().max().clamp_min(1e-30)
        factor = centred if len(rows) <= rows.shape[1] else torch.linalg.qr(centred, mode="r")[1]
        scale = factor.abs().max().clamp_min(1e-30)
        self._add(f"{path}/scale", float(scale))
        self._add(f"{path}/factor", (factor / scale).to(torch.float16).numpy())
        between = rows.view(-1, 2, rows.shape[1]).mean(1) - mean
        self._add(f"{path}/between", between.square().sum() / max(len(between) - 1, 1))
        if path == "prototypes":
            p = (x / self.model.temperatures[0]).softmax(2)  # type: ignore[operator, index]
            entropy = _entropy
            used = p.flatten(0, 1).mean(0)
            share = len(p.flatten(0, 1).argmax(1).unique()) / min(p.shape[2], p.shape[0] * 2)
            self._add("assignments", [entropy(used), entropy(p).mean(), share, math.log(p.shape[2])])

    # Probes -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def probe(self, run: Run, data: Data, step: int, full: bool) -> None:
        model = copy.deepcopy(self.model)
        norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        state = torch.get_rng_state()
        torch.manual_seed(0)
        bank = torch.randperm(len(data.train))[:1000]
        images, tests = data.clean(data.train[bank]), data.clean(data.test[:1000])
        for norm in norms:  # the statistics of the weights as they are
            norm.reset_running_stats()
            norm.momentum = None  # type: ignore[assignment]
        model.train()
        model.projector(model.backbone(images))
        model.eval()
        features, tested = model.backbone(images), model.backbone(tests)
        labels, answers = data.labels[bank], data.test_labels[:1000]
        self._add("knn_step", step)
        unit = F.normalize(features, dim=1), F.normalize(tested, dim=1)
        constant = bool((features.std(0).max() < 1e-12) | ~features.isfinite().all())
        ranked = None if constant else functional.knn_predict(unit[1], unit[0], labels, 10, k=20)
        self._add("knn", 0.1 if ranked is None else (ranked[:, 0] == answers).double().mean())
        if full:
            fitted = None if constant else functional.fit_linear_probe(features.double(), labels, 10, 1e-3)
            right = 0.1
            if fitted is not None:
                right = float(((tested.double() @ fitted.weight.T + fitted.bias).argmax(1) == answers).double().mean())
            self._add("probe_step", step)
            self._add("linear", right)
            projected = model.projector(features)
            many = [model.backbone(view) for _ in range(4) for view in data.augment(data.train[bank[:150]])]
            for name, x in (("backbone", features), ("projector", projected)):
                self._add(f"clean/{name}", x.float().numpy())
            self._add("views/backbone", torch.stack(many, 1).float().numpy())
            self._add("views/projector", torch.stack([model.projector(x) for x in many], 1).float().numpy())
        torch.set_rng_state(state)

    def arrays(self) -> dict[str, np.ndarray]:
        return {key: np.stack(values) for key, values in self.kept.items()}


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp_min(1e-30).log()).sum(-1)


def _has(model: nn.Module, path: str) -> bool:
    try:
        return not isinstance(model.get_submodule(path), nn.Identity)
    except AttributeError:
        return False
