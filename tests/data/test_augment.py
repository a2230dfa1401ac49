"""Recipes: their parameters are distributed as torchvision's, and a picture's bits do not depend on its batch."""

import mmap
import threading
import time

import pytest
import torch
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_ssl.data import cached
from lightning_ssl.data.augment import (
    NUM_UNIFORMS,
    PRESETS,
    Augmentation,
    all_at_once,
    carry_out,
    draw_boxes,
    draw_plan,
    preset,
)
from lightning_ssl.rng import uniforms

on_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="memory is kept on Linux alone")


def plan_for(recipe, count, side=32, view=0):
    sides = torch.full((count,), side)
    return draw_plan(recipe, uniforms(torch.arange(count), NUM_UNIFORMS, 0, 0, view), sides, sides)


def image_by_image(plan, recipe, image, size):
    """The same view by torchvision's functional transforms."""
    views = [torch.empty(0)] * len(image)
    grayscale, blur, solarize = ([*rows.tolist()] for rows in (plan.grayscale, plan.blur, plan.solarize))
    for place, row in enumerate(plan.rows.tolist()):
        top, left, height, width, flip = plan.box[:, place].long().tolist()
        x = F.resized_crop(image[row] / 255, top, left, height, width, [size, size], antialias=True)
        x = F.horizontal_flip(x) if flip else x
        if place < plan.hue_ends[-1]:
            hue_before = sum(place >= end for end in plan.hue_ends)
            for step in range(4):
                if step == hue_before:
                    x = F.adjust_hue(x, float(plan.hue[place]))
                if step < 3:
                    factor, luma, mean = plan.steps[step, :, place].tolist()
                    adjust = F.adjust_contrast if mean else F.adjust_saturation if luma else F.adjust_brightness
                    x = adjust(x, factor)
        x = F.rgb_to_grayscale(x, 3) if place in grayscale else x
        if place in blur:
            sigma = float(plan.sigma[blur.index(place)])
            x = F.gaussian_blur(x, [recipe.kernel_size(size)] * 2, [sigma, sigma])
        views[row] = F.solarize(x, recipe.solarize_threshold) if place in solarize else x
    return torch.stack(views)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("size", [32, 20])
def test_presets_equal_torchvision(name, size):
    coarse = torch.rand(48, 3, 8, 8)
    image = (torch.nn.functional.interpolate(coarse, size=32, mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)
    for view, recipe in enumerate(preset(name)):
        plan = plan_for(recipe, 48, view=view)
        actual = carry_out(plan, recipe, image, size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        assert (actual - image_by_image(plan, recipe, image, size)).abs().max() < 5e-3


def test_boxes_are_distributed_as_torchvisions():
    count = 3000
    height, width = 48, 64
    recipe = Augmentation(crop_scale=(0.08, 1.0))
    sides = (torch.full((count,), side) for side in (height, width))
    ours = draw_boxes(recipe, uniforms(torch.arange(count), 22, 4), *sides)
    transform = v2.RandomResizedCrop(32)
    drawn = [transform.make_params([torch.empty(3, height, width)]) for _ in range(count)]
    for row, name in enumerate(("top", "left", "height", "width")):
        theirs = torch.tensor([float(box[name]) for box in drawn])
        assert stats.ks_2samp(ours[row].numpy(), theirs.numpy()).pvalue > 1e-4, name


def test_a_box_that_never_fits_is_central():
    """An image a hundred times as wide as high, of which a square of half the area is asked for."""
    recipe = Augmentation(crop_scale=(0.5, 1.0), crop_ratio=(1.0, 1.0))
    box = draw_boxes(recipe, uniforms(torch.arange(3), 22), torch.full((3,), 10), torch.full((3,), 1000))
    assert box.T.tolist() == [[0, 495, 10, 10]] * 3


def test_colours_are_distributed_as_torchvisions():
    count = 4000
    recipe = Augmentation(jitter=1.0, brightness=0.4, contrast=1.5, saturation=0.2, hue=0.1)
    plan = plan_for(recipe, count)
    transform = v2.ColorJitter(0.4, 1.5, 0.2, 0.1)
    drawn = [transform.make_params([]) for _ in range(count)]
    pixel, luma, mean = plan.steps.unbind(1)  # [step, B] each
    contrast, saturation = mean != 0, luma != 0
    brightness = ~contrast & ~saturation
    for name, mask in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
        assert mask.sum(0).eq(1).all()
        theirs = [params[f"{name}_factor"] for params in drawn]
        assert stats.ks_2samp(pixel[mask].numpy(), theirs).pvalue > 1e-4, name
    assert stats.ks_2samp(plan.hue.numpy(), [params["hue_factor"] for params in drawn]).pvalue > 1e-4

    # All 24 orders are equally likely. Ours is read off the plan: the hue's place among the three steps.
    hue_before = sum((torch.arange(count) >= end).long() for end in plan.hue_ends)
    order = torch.stack([mask.float().argmax(0) for mask in (brightness, contrast, saturation)])
    code = hue_before * 9 + order[0] * 3 + order[1]
    counts = code.unique(return_counts=True)[1]
    assert len(counts) == 24 and stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_probabilities():
    count = 20_000
    recipe = Augmentation(flip=0.3, jitter=0.7, grayscale=0.2, blur=0.6, solarize=0.1, blur_sigma=(0.5, 1.5))
    plan = plan_for(recipe, count)
    for hits, probability in [
        (plan.box[4].sum(), 0.3),
        (plan.hue_ends[-1], 0.7),
        (len(plan.grayscale), 0.2),
        (len(plan.blur), 0.6),
        (len(plan.solarize), 0.1),
    ]:
        assert stats.binomtest(int(hits), count, probability).pvalue > 1e-4
    assert stats.kstest(plan.sigma.numpy(), stats.uniform(0.5, 1.0).cdf).pvalue > 1e-4


@pytest.mark.parametrize("side", [32, 45])
def test_bits_do_not_depend_on_batch_or_threads(side):
    recipe = Augmentation(blur=0.5, solarize=0.2, blur_kernel=0.2)
    image = torch.randint(0, 256, (60, 3, side, side), dtype=torch.uint8)

    def views(rows):
        sides = torch.full((len(rows),), side)
        plan = draw_plan(recipe, uniforms(rows, NUM_UNIFORMS, 1, 2, 3), sides, sides)
        return carry_out(plan, recipe, image[rows], 32, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))

    whole = views(torch.arange(60))
    for batch in (1, 7, 30):
        parts = torch.cat([views(rows) for rows in torch.arange(60).split(batch)])
        assert torch.equal(parts, whole), batch
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(views(torch.arange(60)), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("side", "size"), [(32, 32), (27, 27), (80, 64), (70, 96), (150, 160)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_few_images_at_a_time_are_the_whole_batch(side, size, channels):
    """On a CPU large views are made otherwise than on a device, with the same bits."""
    recipe = Augmentation(blur=0.5, solarize=0.3)
    image = torch.randint(0, 256, (40, channels, side, side), dtype=torch.uint8)
    plan = plan_for(recipe, 40, side)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    for given in (plan, plan._replace(box=None)):
        pixels = image if given.box is not None else torch.randint(0, 256, (40, 3, size, size), dtype=torch.uint8)
        at_once = all_at_once(given, recipe, pixels, size, mean, std)
        assert torch.equal(cached.carry_out(given, recipe, pixels, size, mean, std), at_once)
    assert torch.equal(
        carry_out(plan, recipe, image, size, mean, std), all_at_once(plan, recipe, image, size, mean, std)
    )


def test_bad_recipes():
    with pytest.raises(ValueError, match=r"must be a preset, got 'simclar'; .*simclr"):
        preset("simclar")
    for bad in ({"flip": 1.5}, {"hue": 0.7}, {"brightness": -1}, {"crop_scale": (1.0, 0.2)}, {"crop_scale": (0.5, 2)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Augmentation(**bad)


@on_linux
def test_memory_is_used_again_only_when_nobody_holds_it(monkeypatch):
    """A view, a slice of it and an array each hold it; a few are kept, of one size, the rest goes back."""
    monkeypatch.setattr(cached, "_KEPT", [])
    size = cached._LARGE // 4
    first = cached.large(size).fill_(1)
    part, array, place = first[5:6], first[7:8].numpy(), first.data_ptr()
    del first
    assert cached.large(size).data_ptr() != place
    del part
    others = [cached.large(size).fill_(2) for _ in range(6)]
    assert array[0] == 1 and len({other.data_ptr() for other in others} | {place}) == 7
    assert len(cached._KEPT) == cached._KEEP
    del array, others
    assert cached.large(size).data_ptr() == place
    assert cached.large(5 * size, dtype=torch.uint8).shape == (5 * size,)  # bytes, and more of them than are kept
    assert cached.large(2 * size).shape == (2 * size,) and [len(kept.memory) for kept in cached._KEPT] == [8 * size]


def saved_for_backward(view):
    weight = torch.ones((), requires_grad=True)
    return (weight * view.view(view.shape)).sum(), weight


def held_by_a_thread(view):
    """A thread that has a part of it, until it is told to say what is in it."""
    asked, said = threading.Event(), []

    def hold(part):
        asked.wait()
        said.append(part.unique().tolist())

    thread = threading.Thread(target=hold, args=(view[3:9],), daemon=True)
    thread.start()
    del view

    def ask():
        asked.set()
        thread.join()
        return said[0]

    return ask


@on_linux
@pytest.mark.parametrize(
    ("hold", "look"),
    [
        (lambda view: view[5:6], lambda part: part.tolist()),
        (lambda view: view[5:6].numpy(), lambda part: part.tolist()),
        (lambda view: memoryview(view.numpy()), lambda part: [part[0]]),
        (saved_for_backward, lambda saved: [torch.autograd.grad(*saved)[0].item() / (cached._LARGE // 4)]),
        (held_by_a_thread, lambda ask: ask()),
    ],
    ids=["slice", "array", "buffer", "saved for backward", "thread"],
)
def test_whoever_holds_memory_keeps_it(hold, look, monkeypatch):
    monkeypatch.setattr(cached, "_KEPT", [])
    size = cached._LARGE // 4
    view = cached.large(size).fill_(1)
    place, held = view.data_ptr(), hold(view)
    del view
    taken = [cached.large(size).fill_(2) for _ in range(3)]
    assert place not in [other.data_ptr() for other in taken]
    assert look(held) == [1]
    del held
    assert cached.large(size).data_ptr() == place


@on_linux
def test_threads_never_take_the_same_memory(monkeypatch):
    """Two that ask at once, for the one memory that is idle, while it takes a while to see that it is."""
    monkeypatch.setattr(cached, "_KEPT", [])
    size, taken = cached._LARGE // 4, []
    place = cached.large(size).data_ptr()

    def idle(kept):
        answer = kept.loan() is None
        time.sleep(0.05)
        return answer

    monkeypatch.setattr(cached._Kept, "idle", property(idle))
    threads = [threading.Thread(target=lambda: taken.append(cached.large(size))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({view.data_ptr() for view in taken} | {place}) == len(taken) == 2


def test_large_views_are_ordinary_tensors():
    recipe = Augmentation(blur=0.5)
    image = torch.randint(0, 256, (64, 3, 96, 96), dtype=torch.uint8)
    plan = plan_for(recipe, 64, 96)
    view = carry_out(plan, recipe, image, 96, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert view.untyped_storage().nbytes() >= cached._LARGE
    again = carry_out(plan, recipe, image, 96, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert torch.equal(view, again) and view.data_ptr() != again.data_ptr()
    kept = view.clone()
    assert torch.equal(view.share_memory_(), kept) and view.is_shared()  # as a worker hands it over
