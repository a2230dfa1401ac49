"""On a device: few calls, one copy of the parameters, and the views of the CPU."""

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssl.data import packed
from lightning_ssl.data.augment import NUM_UNIFORMS, Augmentation, draw_plan, make_views, preset
from lightning_ssl.data.packed import Plans
from lightning_ssl.data.pipeline import Pipeline, RawImages
from lightning_ssl.data.sources import Split
from lightning_ssl.rng import uniforms

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


class Calls(TorchDispatchMode):
    """Counts the operators that work: views and bare allocations do not."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not view and not func.name().startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def draw(recipes, count, side, size):
    sides = torch.full((count,), side)
    plans = [
        draw_plan(recipe, uniforms(torch.arange(count), NUM_UNIFORMS, 3, 0, view), sides, sides)
        for view, recipe in enumerate(recipes)
    ]
    return Plans(plans, recipes, size, MEAN, STD)


def two(name):
    return (preset(name) * 2)[:2]


RECIPES = {
    "simclr": two("simclr"),
    "byol": two("byol"),
    "everything": (Augmentation(blur=0.5, solarize=0.2), Augmentation(blur=0.5, solarize=0.2, blur_kernel=0.2)),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("side", "size"), [(32, 32), (96, 96), (100, 64)])
def test_two_views_are_at_most_150_calls(name, side, size):
    image = torch.randint(0, 256, (64, 3, side, side), dtype=torch.uint8)
    plans = draw(RECIPES[name], 64, side, size).to("meta")  # where nothing can wait for a number
    image = image.to("meta")
    with Calls() as calls:
        views = plans.make(image)
    assert [view.shape for view in views] == [(64, 3, size, size)] * 2
    assert 50 < len(calls.names) <= 150, (len(calls.names), calls.names)


@pytest.mark.parametrize("name", [*RECIPES, "cifar10", "none"])
@pytest.mark.parametrize("together", [True, False])
def test_views_made_together_are_those_of_the_cpu(name, together, monkeypatch):
    if not together:
        monkeypatch.setattr(packed, "_TOGETHER", 1)
    recipes = RECIPES.get(name) or two(name)
    image = torch.randint(0, 256, (40, 3, 36, 36), dtype=torch.uint8)
    plans = draw(recipes, 40, 36, 40)
    for ours, theirs in zip(plans.pack().make(image), make_views(plans, image), strict=True):
        assert torch.equal(ours, theirs)
    crops = torch.randint(0, 256, (2, 40, 3, 40, 40), dtype=torch.uint8)
    plans = Plans([plan._replace(box=None) for plan in plans.views], recipes, 40, MEAN, STD)
    for ours, theirs in zip(plans.pack().make(crops), make_views(plans, crops), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_small_batches_whose_groups_are_empty(count):
    for name in RECIPES:
        image = torch.randint(0, 256, (count, 1, 20, 20), dtype=torch.uint8)
        plans = draw(RECIPES[name], count, 20, 24)
        for ours, theirs in zip(plans.pack().make(image), make_views(plans, image), strict=True):
            assert torch.equal(ours, theirs)


def test_parameters_cross_in_one_copy():
    pixels = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    pipeline = Pipeline(RECIPES["simclr"], num_views=2, size=32, mean=MEAN, std=STD)
    data = RawImages(Split(torch.zeros(16, dtype=torch.int64), pixels), pipeline, key=0, augmented=True)
    batch = data.__getitems__(list(range(16)))
    for plans in (batch.plans, batch.plans.to("cpu")):
        assert plans is batch.plans
    batch.plans.pack()
    with Calls() as calls:
        moved = move_data_to_device(batch, torch.device("meta"))
    assert moved.plans._numbers.device.type == "meta"
    assert calls.names == ["aten::_to_copy"] * 4  # image, label, index and all parameters
