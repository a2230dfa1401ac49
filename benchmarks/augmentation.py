"""Two augmented views of 512 images (128 at 224 x 224), from bytes to normalised floats, random parameters included.

CIFAR recipe at 32 x 32: random resized crop, flip, colour jitter, grayscale. STL recipe at 96 x 96 and SimCLR's at
224 x 224: stronger jitter, a blur for half of the images. One thread each, as a loader's worker has; AlbumentationsX
(on OpenCV), torchvision and lightly go image by image, kornia takes the batch. Asserted: the same shapes and, up to
chance, the same mean, contrast, smoothness and colour.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from benchmarks._bench import Row, Section, faster, main, peak_memory, race
from lightning_ssl.data import cached
from lightning_ssl.data.augment import Augmentation, preset
from lightning_ssl.data.pipeline import Pipeline, RawImages
from lightning_ssl.data.sources import FACTS, Facts, Split

Views = Callable[[], list[Tensor]]
MEMORY = """\
Peak memory is that of a first batch. The first version, which took all images through each step together, had 38 to 55
MB at 32 px (the present one 36 to 41), and in a process of its own 364 and 452 MB at 96 and 224 px."""


def ours(images: Tensor, recipe: Augmentation, facts: Facts) -> Views:
    pipeline = Pipeline((recipe, recipe), num_views=2, size=images.shape[-1], mean=facts.mean, std=facts.std)
    dataset = RawImages(Split(torch.zeros(len(images), dtype=torch.int64), images), pipeline, key=0, augmented=True)
    rows = list(range(len(images)))

    def run() -> list[Tensor]:
        dataset.epoch = dataset.epoch + 1
        return list(pipeline.make_batch(dataset.__getitems__(rows)).views)

    return run


def torchvision(images: Tensor, recipe: Augmentation, facts: Facts) -> Views:
    size = images.shape[-1]
    blur = v2.GaussianBlur(recipe.kernel_size(size), recipe.blur_sigma)
    jitter = v2.ColorJitter(recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([jitter], p=recipe.jitter),
            v2.RandomGrayscale(recipe.grayscale),
            *([v2.RandomApply([blur], p=recipe.blur)] if recipe.blur else []),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(facts.mean, facts.std),
        ]
    )
    return lambda: [torch.stack([transform(image) for image in images]) for _ in range(2)]


def lightly(images: Tensor, recipe: Augmentation, facts: Facts) -> Views:
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(
        input_size=images.shape[-1],
        cj_strength=recipe.brightness / 0.8,
        gaussian_blur=recipe.blur,
        sigmas=recipe.blur_sigma,
        normalize={"mean": list(facts.mean), "std": list(facts.std)},
    )
    pictures = [F.to_pil_image(image) for image in images]  # what a dataset would hand it

    def run() -> list[Tensor]:
        return [torch.stack(view) for view in zip(*(transform(picture) for picture in pictures), strict=True)]

    return run


def kornia(images: Tensor, recipe: Augmentation, facts: Facts) -> Views:
    import kornia.augmentation as K

    size = images.shape[-1]
    kernel = recipe.kernel_size(size)
    transform = torch.nn.Sequential(
        K.RandomResizedCrop((size, size), scale=recipe.crop_scale, ratio=recipe.crop_ratio),
        K.RandomHorizontalFlip(),
        K.ColorJitter(recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue, p=recipe.jitter),
        K.RandomGrayscale(p=recipe.grayscale),
        *([K.RandomGaussianBlur((kernel, kernel), recipe.blur_sigma, p=recipe.blur)] if recipe.blur else []),
        K.Normalize(torch.tensor(facts.mean), torch.tensor(facts.std)),
    )

    def run() -> list[Tensor]:
        with torch.no_grad():
            pixels = images / 255
            return [transform(pixels) for _ in range(2)]

    return run


def albumentationsx(images: Tensor, recipe: Augmentation, facts: Facts) -> Views:
    import albumentations as A
    import cv2
    from albumentations.pytorch import ToTensorV2

    cv2.setNumThreads(0)
    size = images.shape[-1]
    kernel = recipe.kernel_size(size)

    def span(strength: float) -> tuple[float, float]:
        return max(0.0, 1 - strength), 1 + strength

    jitter = A.ColorJitter(
        *(span(strength) for strength in (recipe.brightness, recipe.contrast, recipe.saturation)),
        (-recipe.hue, recipe.hue),
        p=recipe.jitter,
    )
    blur = A.GaussianBlur(blur_range=(kernel, kernel), sigma_range=recipe.blur_sigma, p=recipe.blur)
    transform = A.Compose(
        [
            A.RandomResizedCrop((size, size), scale=recipe.crop_scale, ratio=recipe.crop_ratio),
            A.HorizontalFlip(p=recipe.flip),
            jitter,
            A.ToGray(p=recipe.grayscale),
            *([blur] if recipe.blur else []),
            A.Normalize(facts.mean, facts.std),
            ToTensorV2(),
        ]
    )
    pictures = [image.permute(1, 2, 0).contiguous().numpy() for image in images]
    return lambda: [torch.stack([transform(image=picture)["image"] for picture in pictures]) for _ in range(2)]


def check_same_work(views: dict[str, list[Tensor]], shape: tuple[int, ...], tolerance: float) -> None:
    figures = {}
    for name, pair in views.items():
        assert [(view.shape, view.dtype) for view in pair] == [(shape, torch.float32)] * 2, name
        both = torch.cat(pair)
        steps = (both[..., 1:] - both[..., :-1]).square().mean().sqrt()
        figures[name] = torch.stack((both.mean(), both.std(), steps, both[:, 0].sub(both[:, 2]).std()))
    for name, figure in figures.items():
        # kornia's crop has no antialiasing, and batched and 8-bit paths round differently.
        assert (figure - figures["torchvision"]).abs().max() < tolerance, (name, figure, figures["torchvision"])


def run(tiny: bool = False) -> Section:
    rows = []
    peers = (albumentationsx, torchvision, lightly, kornia)
    cases = [
        ("cifar10", 32, 512, (2.5, 10, 10, 3)),
        ("stl10", 96, 512, (1.5, 1, 1, 1)),
        ("simclr", 224, 128, (1.2, 1, 1, 1)),
    ]
    for name, size, batch, wanted in cases[:2] if tiny else cases:
        batch, repeats = (64, 1) if tiny else (batch, 7)
        facts, recipe = FACTS["cifar10" if size == 32 else "stl10"], preset(name)[0]
        coarse = torch.rand(batch, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        images = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)
        images = images.mul(255).to(torch.uint8)
        contenders = {make.__name__: make(images, recipe, facts) for make in (ours, *peers)}
        chance = 0.1 * (512 / batch) ** 0.5
        check_same_work({k: make() for k, make in contenders.items()}, (batch, 3, size, size), chance)
        cached._KEPT.clear()  # memory kept from the check must not count as there already
        memory = peak_memory(contenders["ours"])
        seconds = race(contenders, repeats)
        work = f"{name}, 2 x {batch} views of {size} x {size}"
        for peer, aim in zip(peers, wanted, strict=True):
            rows.append(faster(work, peer.__name__, seconds["ours"], seconds[peer.__name__], aim))
        rows.append(
            Row(
                f"{work}, peak memory",
                "the views",
                f"{1e3 * memory:.0f} MB",
                f"{2 * images.nbytes * 4 / 1e6:.0f} MB",
                "",
            )
        )
    return Section(rows, [] if tiny else [MEMORY], ["albumentationsx", "torchvision", "lightly", "kornia"])


if __name__ == "__main__":
    main(run, threads=1)
