"""Each batched transform against torchvision's v2 functional one, image by image."""

import pytest
import torch
from torchvision.transforms.v2 import functional as F

from lightning_ssl.data import transforms
from lightning_ssl.data.augment import Augmentation, draw_boxes
from lightning_ssl.rng import uniforms

BATCH = 24


def images(height=32, width=32, smooth=True):
    if not smooth:
        return torch.randint(0, 256, (BATCH, 3, height, width), dtype=torch.uint8)
    coarse = torch.rand(BATCH, 3, height // 4, width // 4)
    fine = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic")
    return (fine.clamp(0, 1) * 255).round().to(torch.uint8)


def planes(image):
    return transforms.to_planes(image) / 255


def each(image, function, *parameters):
    """Apply a torchvision function to every image with its own parameters; the result plane by plane."""
    rows = [function(x, *values) for x, *values in zip(image / 255, *parameters, strict=True)]
    return torch.stack(rows, dim=1)


def within(actual, expected, tolerance=5e-3):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < tolerance


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 32), (96, 96, 32), (33, 50, 40), (28, 28, 32)])
def test_resized_crop(height, width, size):
    image = images(height, width, smooth=False)
    sides = (torch.full((BATCH,), side) for side in (height, width))
    top, left, h, w = draw_boxes(Augmentation(), uniforms(torch.arange(BATCH), 22), *sides).float()
    flip = (torch.arange(BATCH) % 2).float()

    def reference(x, top, left, h, w, flip):
        box = F.resized_crop(x, int(top), int(left), int(h), int(w), [size, size], antialias=True)
        return F.horizontal_flip(box) if flip else box

    expected = each(image, reference, *(values.tolist() for values in (top, left, h, w, flip)))
    order = torch.randperm(BATCH)
    actual = transforms.resized_crop(image, order, *(values[order] for values in (top, left, h, w, flip)), size)
    within(actual, expected[:, order], tolerance=5e-3)
    plain = transforms.resized_crop(image[:, :1], order, *(values[order] for values in (top, left, h, w, flip)), size)
    assert torch.equal(plain, actual[:1].expand(3, -1, -1, -1))


def test_brightness_contrast_saturation():
    image, factor = images(), torch.linspace(0, 1.8, BATCH)
    zero = torch.zeros(BATCH)
    for function, factors in [
        (F.adjust_brightness, (factor, zero, zero)),
        (F.adjust_saturation, (factor, 1 - factor, zero)),
        (F.adjust_contrast, (factor, zero, 1 - factor)),
    ]:
        within(transforms.blend_(planes(image), *factors), each(image, function, factor.tolist()), 2e-4)


@pytest.mark.parametrize("smooth", [True, False])
def test_hue(smooth):
    image = images(smooth=smooth)
    image[0] = 77  # grey has no hue
    image[1, :, :8] = torch.tensor([255, 255, 0], dtype=torch.uint8)[:, None, None]  # two channels share the maximum
    shift = torch.linspace(-0.5, 0.5, BATCH)
    within(transforms.adjust_hue_(planes(image), shift), each(image, F.adjust_hue, shift.tolist()), 1e-5)


def test_grayscale():
    image = images()
    within(transforms.gray(planes(image)), each(image, F.rgb_to_grayscale)[0], 1e-6)


@pytest.mark.parametrize("kernel_size", [3, 9, 23])
def test_gaussian_blur(kernel_size):
    image, sigma = images(32, 40, smooth=False), torch.linspace(0.1, 2.0, BATCH)
    expected = each(image, lambda x, s: F.gaussian_blur(x, [kernel_size] * 2, [s, s]), sigma.tolist())
    within(transforms.gaussian_blur(planes(image), sigma, kernel_size), expected, 2.5e-3)


def test_solarize_and_normalize():
    image = images(smooth=False)
    within(transforms.solarize_(planes(image), 0.5), each(image, lambda x: F.solarize(x, 0.5)), 1e-7)
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    within(transforms.normalize_(planes(image), mean, std), each(image, lambda x: F.normalize(x, mean, std)), 1e-6)


def test_a_constant_image_stays_constant():
    image = torch.full((4, 3, 32, 32), 200, dtype=torch.uint8)
    box = torch.tensor([[3.0, 5, 20, 21, 0], [0, 0, 32, 32, 1], [1, 1, 9, 30, 1], [31, 31, 1, 1, 0]]).T
    for size in (32, 17):
        crop = transforms.resized_crop(image, torch.arange(4), *box, size=size)
        assert (crop - 200 / 255).abs().max() < 1e-6
    blurred = transforms.gaussian_blur(planes(image), torch.tensor([0.1, 0.5, 1.0, 2.0]), 5)
    assert (blurred - 200 / 255).abs().max() < 1e-6
