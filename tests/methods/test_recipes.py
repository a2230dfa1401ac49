"""The six methods' own recipes, each held to a written specification with its public source.

Sources: SimCLR, google-research/simclr (model_util.py, data_util.py, lars_optimizer.py, run.py); BYOL,
deepmind-research/byol (utils/networks.py, configs/byol.py, utils/augmentations.py); SimSiam, facebookresearch/simsiam
(simsiam/builder.py, main_simsiam.py); Barlow Twins, facebookresearch/barlowtwins (main.py); DirectPred,
facebookresearch/luckmatters (ssl/real-dataset: config/byol_config.yaml, models/mlp_head.py, data/transforms.py); RAFT
has no public code: Appendix B of its paper.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from lightning_ssl.data.augment import Augmentation, preset
from lightning_ssl.nn import LARS, warmup_cosine
from lightning_ssl.runs.cli import shipped

# A head as a list: Linear(in, out, bias), BN(affine: "both", "scale" or "none"), ReLU.
Layers = list[tuple[Any, ...]]


@dataclass
class Recipe:
    """What the public source says."""

    config: str
    processes: int  # that the config is meant for
    projector: Layers
    predictor: Layers
    zero_init: bool
    init: str  # of the heads' linear layers
    optimizer: type
    settings: dict[str, float]
    rate: float  # for the whole batch
    batch: int
    groups: list[dict[str, Any]]
    schedule: tuple[str, float, float]  # name, epochs of warmup, floor
    views: tuple[Augmentation, ...]
    attributes: dict[str, Any] = field(default_factory=dict)


def linear(n_in: int, n_out: int, bias: bool) -> tuple[Any, ...]:
    return ("Linear", n_in, n_out, bias)


SIMCLR_VIEW = Augmentation(
    crop_scale=(0.08, 1.0), flip=0.5, jitter=0.8, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2,
    grayscale=0.2, blur=0.5, blur_sigma=(0.1, 2.0), blur_kernel=0.1,
)  # fmt: skip
MILD = {"jitter": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1, "grayscale": 0.2}
BYOL_VIEWS = (Augmentation(**MILD, blur=1.0, solarize=0.0), Augmentation(**MILD, blur=0.1, solarize=0.2))
LARS_SETTINGS = {"momentum": 0.9, "weight_decay": 1e-6, "trust": 1e-3}

RECIPES = {
    "SimCLR": Recipe(
        config="imagenet/simclr.yaml",
        processes=8,
        projector=[
            linear(2048, 2048, False), ("BN", "both"), ("ReLU",),
            linear(2048, 128, False), ("BN", "scale"),
        ],
        predictor=[],
        zero_init=True,
        init="normal",
        optimizer=LARS,
        settings={**LARS_SETTINGS, "vector_lr_scale": 1.0},
        rate=0.3 * 1024 / 256,
        batch=1024,
        groups=[{}],
        schedule=("cosine", 10, 0.0),
        views=(SIMCLR_VIEW,),
        attributes={"tau": 0.1, "normalize": True, "negatives": "all", "kind": "nce", "beta": 0.0},
    ),
    "BYOL": Recipe(
        config="imagenet/byol.yaml",
        processes=8,
        projector=[linear(2048, 4096, True), ("BN", "both"), ("ReLU",), linear(4096, 256, False)],
        predictor=[linear(256, 4096, True), ("BN", "both"), ("ReLU",), linear(4096, 256, False)],
        zero_init=True,
        init="lecun",
        optimizer=LARS,
        settings={**LARS_SETTINGS, "vector_lr_scale": 1.0},
        rate=0.45 * 1024 / 256,  # the preset of its shorter runs, as are weight decay and momentum
        batch=1024,
        groups=[{}, {"lr_scale": 1.0}],
        schedule=("cosine", 10, 0.0),
        views=BYOL_VIEWS,
        attributes={"momentum": 0.99, "momentum_schedule": "cosine", "normalize": True, "stop_gradient": True},
    ),
    "SimSiam": Recipe(
        config="imagenet/simsiam.yaml",
        processes=8,
        projector=[
            linear(2048, 2048, False), ("BN", "both"), ("ReLU",),
            linear(2048, 2048, False), ("BN", "both"), ("ReLU",),
            linear(2048, 2048, False), ("BN", "none"),
        ],
        predictor=[linear(2048, 512, False), ("BN", "both"), ("ReLU",), linear(512, 2048, True)],
        zero_init=True,
        init="default",
        optimizer=torch.optim.SGD,
        settings={"momentum": 0.9, "weight_decay": 1e-4},
        rate=0.05 * 512 / 256,
        batch=512,
        groups=[{}, {"fixed_lr": True}],
        schedule=("cosine", 0, 0.0),
        views=(Augmentation(crop_scale=(0.2, 1.0), brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, blur=0.5),),
        attributes={"stop_gradient": True},
    ),
    "BarlowTwins": Recipe(
        config="imagenet/barlow_twins.yaml",
        processes=8,
        projector=[
            linear(2048, 8192, False), ("BN", "both"), ("ReLU",),
            linear(8192, 8192, False), ("BN", "both"), ("ReLU",),
            linear(8192, 8192, False),
        ],
        predictor=[],
        zero_init=True,
        init="default",
        optimizer=LARS,
        settings={**LARS_SETTINGS, "vector_lr_scale": 0.0048 / 0.2},
        rate=0.2 * 1024 / 256,
        batch=1024,
        groups=[{}],
        schedule=("cosine", 10, 1e-3),
        views=BYOL_VIEWS,
        attributes={"lambd": 0.0051},
    ),
    "DirectPred": Recipe(
        config="stl10/directpred.yaml",
        processes=1,
        projector=[linear(512, 512, True), ("BN", "none"), ("ReLU",), linear(512, 128, True)],
        predictor=[linear(128, 128, False)],
        zero_init=False,
        init="default",
        optimizer=torch.optim.SGD,
        settings={"momentum": 0.9, "weight_decay": 4e-4},
        rate=0.03,
        batch=128,
        groups=[{}, {"lr_scale": 1.0}],
        schedule=("constant", 0, 0.0),
        views=(Augmentation(**{**vars(SIMCLR_VIEW), "blur": 1.0}),),
        attributes={
            "momentum": 0.996, "momentum_schedule": "constant", "normalize": True,
            "direct.rho": 0.3, "direct.eps": 0.1, "direct.freq": 1, "direct.partitions": 0,
        },
    ),
    "RAFT": Recipe(
        config="cifar10/raft.yaml",
        processes=1,
        projector=[linear(512, 512, True), ("BN", "both"), ("ReLU",), linear(512, 128, True)],
        predictor=[linear(128, 512, True), ("ReLU",), linear(512, 128, True)],
        zero_init=False,
        init="default",
        optimizer=torch.optim.Adam,
        settings={"weight_decay": 0.0, "betas": (0.9, 0.999)},
        rate=3e-4,
        batch=128,
        groups=[{}, {"lr_scale": 1.0}],
        schedule=("constant", 0, 0.0),
        views=(SIMCLR_VIEW,),
        attributes={"momentum": 0.996, "align_weight": 1.0, "cross_model_weight": 1.0, "tangential": False, "sign": -1},
    ),
}  # fmt: skip


def import_path(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def build(config: str, **overrides: Any) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """The method of a shipped config, its optimizer, and the config's data section."""
    written = yaml.safe_load(shipped(config).read_text())
    options = {**written["model"]["init_args"], **overrides}
    entry = options.pop("optimizer")
    make = import_path(entry["class_path"])
    model = import_path(written["model"]["class_path"])(
        optimizer=lambda parameters: make(parameters, **entry["init_args"]), **options
    )
    return model, model.optimizer(model.parameter_groups()), written["data"]["init_args"]


def layers_of(head: nn.Module | None) -> Layers:
    described: Layers = []
    for layer in [] if head is None else head.modules():
        if isinstance(layer, nn.Linear):
            described.append(linear(layer.in_features, layer.out_features, layer.bias is not None))
        elif isinstance(layer, nn.BatchNorm1d):
            assert layer.momentum == 0.1 and layer.eps == 1e-5
            shift = layer.affine and layer.bias.requires_grad
            described.append(("BN", "both" if shift else "scale" if layer.affine else "none"))
        elif isinstance(layer, nn.ReLU):
            described.append(("ReLU",))
        else:
            assert isinstance(layer, nn.Sequential), layer
    return described


def check_init(head: nn.Module, init: str) -> None:
    """By its weights: all of them lie within the distribution's range, and spread as it does."""
    for layer in head.modules():
        if not isinstance(layer, nn.Linear):
            continue
        bound = layer.in_features**-0.5
        deviation, largest = {
            "default": (bound / 3**0.5, bound), "normal": (0.01, 0.07), "lecun": (0.8796 * bound, 2 * bound)
        }[init]  # fmt: skip
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.03)
        assert float(layer.weight.abs().max()) <= largest * (1 + 1e-6)
        if layer.bias is not None and init != "default":
            assert float(layer.bias.abs().max()) == 0


def views_of(augmentation: Any) -> tuple[Augmentation, ...]:
    return preset(augmentation) if isinstance(augmentation, str) else (Augmentation(**augmentation),)


def check(recipe: Recipe, **overrides: Any) -> None:
    torch.manual_seed(0)
    model, optimizer, data = build(recipe.config, **overrides)
    # Layers.
    assert layers_of(model.projector) == recipe.projector
    assert layers_of(getattr(model, "predictor", None)) == recipe.predictor
    if hasattr(model, "target"):
        copy = {key: value.shape for key, value in model.target.projector.state_dict().items()}
        assert copy == {key: value.shape for key, value in model.projector.state_dict().items()}
    # Initialisation.
    blocks = [b for b in model.backbone.modules() if hasattr(b, "downsample")]
    last = [getattr(b, "bn3", getattr(b, "bn2", None)) for b in blocks]
    assert blocks and all(bool((norm.weight == 0).all()) == recipe.zero_init for norm in last)
    check_init(model.projector, recipe.init)
    if recipe.predictor:
        check_init(model.predictor, recipe.init)
    # Optimizer and its groups: every trained parameter once, heads where the recipe has them.
    assert type(optimizer) is recipe.optimizer
    for key, value in recipe.settings.items():
        assert all(group[key] == pytest.approx(value) for group in optimizer.param_groups), key
    assert len(optimizer.param_groups) == len(recipe.groups)
    for group, expected in zip(optimizer.param_groups, recipe.groups, strict=True):
        assert group["lr"] == pytest.approx(recipe.rate)
        assert {key: group.get(key) for key in expected} == expected
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    assert len(trained) == len({id(p) for p in trained})
    assert {id(p) for p in trained} == {id(p) for p in model.parameters() if p.requires_grad}
    if len(recipe.groups) == 2:
        assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in model.predictor.parameters()]
    # Schedule.
    assert (model.scheduler, model.warmup_epochs, model.lr_floor) == recipe.schedule
    # Data.
    assert data["batch_size"] * recipe.processes == recipe.batch
    assert views_of(data["augmentation"]) == recipe.views
    for name, value in recipe.attributes.items():
        found: Any = model
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_its_public_source(name: str) -> None:
    check(RECIPES[name])


WRONG: dict[str, list[dict[str, Any]]] = {
    "SimCLR": [{"projector_last_norm": "none"}, {"norm_affine": False}, {"head_init": "default"}, {"warmup_epochs": 0}],
    "BYOL": [{"projector_bias": True}, {"predictor_bias": True}, {"zero_init_residual": False}, {"momentum": 0.996}],
    "SimSiam": [{"projector_layers": 2}, {"zero_init_residual": False}, {"fixed_predictor_lr": False}],
    "BarlowTwins": [{"lambd": 0.005}, {"projector_bias": True}, {"lr_floor": 0.0}],
    "DirectPred": [{"norm_affine": True}, {"predictor_bias": True}, {"partitions": 2}, {"scheduler": "cosine"}],
    "RAFT": [{"predictor_norm": "batch"}, {"momentum": 0.99}, {"predictor_init": "xavier"}],
}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, wrong in WRONG.items() for option in wrong])
def test_a_recipe_that_differs_is_found(name: str, option: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check(RECIPES[name], **option)


def test_a_cosine_ends_at_its_floor_and_warms_up_linearly() -> None:
    """Barlow Twins: a rate that rises over the warmup and falls to a thousandth."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = warmup_cosine(optimizer, total_steps=110, warmup_steps=10, floor=1e-3)
    rates = []
    for _ in range(111):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([(k + 1) / 11 for k in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[60] == pytest.approx(0.5005) and rates[110] == pytest.approx(1e-3)


def test_weight_decay_and_trust_leave_vectors_alone() -> None:
    """LARS as in all three recipes: biases and norms take plain momentum steps at their own rate."""
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = LARS([matrix, vector], lr=0.2, weight_decay=1e-6, vector_lr_scale=0.024)
    matrix.grad, vector.grad = torch.full((2, 2), 0.5), torch.full((2,), 0.5)
    optimizer.step()
    assert vector[0].item() == pytest.approx(1 - 0.2 * 0.024 * 0.5)
    assert matrix[0, 0].item() == pytest.approx(1 - 0.2 * 1e-3 * 1.0, rel=1e-6)  # trust |w| / |g| g


def test_small_images_have_simsiams_two_layers() -> None:
    model, optimizer, data = build("cifar10/simsiam.yaml")
    assert [entry[0] for entry in layers_of(model.projector)] == ["Linear", "BN", "ReLU", "Linear", "BN"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03 * 512 / 256) and data["batch_size"] == 512
    assert views_of(data["augmentation"])[0].blur == 0


def test_bounds_barlow_rows_are_the_cited_repositorys() -> None:
    """IgorSusmelj/barlowtwins: SGD 0.001, weight decay 0.0005, batch 512, lambda 0.005, 800 epochs, no warmup."""
    rows = yaml.safe_load(shipped("ablations/bound_table1_barlow.yaml").read_text())
    options = rows["model"]["init_args"]
    assert options["optimizer"]["class_path"] == "torch.optim.SGD"
    assert options["optimizer"]["init_args"] == {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    assert options["lambd"] == 0.005 and options["warmup_epochs"] == 0 and not options["zero_init_residual"]
    assert rows["data"]["init_args"]["batch_size"] == 512 and rows["trainer"]["max_epochs"] == 800
    sweep = yaml.safe_load(shipped("sweeps/bound_table1.yaml").read_text())["parameters"]["config"]["values"]
    assert sum("bound_table1_barlow" in entry for entry in sweep) == 2


def test_tables_take_what_produced_them() -> None:
    """DDN's and DirectPred's released code, where it differs from the text."""
    exact, _, _ = build("cifar10/simclr.yaml", loss="exact_nce", beta=-0.5)
    assert not exact.joint and exact.beta_form == "table"
    byol, _, data = build("stl10/byol.yaml", predictor="linear", predictor_norm="batch")
    assert layers_of(byol.predictor) == [("BN", "none"), linear(128, 128, True)]
    assert byol.reset_init == "xavier" and data["augmentation"] == {"blur": 1.0}
    assert layers_of(build("stl10/byol.yaml")[0].projector)[1] == ("BN", "none")


def test_no_row_is_trained_twice() -> None:
    """RAFT's tangential rows would be the linear ones again: they have neither a config nor a run of their own."""
    sweep = yaml.safe_load(shipped("sweeps/raft_table1.yaml").read_text())["parameters"]["config"]["values"]
    assert len(sweep) == len(set(sweep)) == 9 and not any("tangential" in entry for entry in sweep)
    for path in shipped("ablations").glob("*.yaml"):
        options = yaml.safe_load(path.read_text()).get("model", {}).get("init_args", {})
        assert not options.get("tangential"), path.name
