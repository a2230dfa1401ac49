"""Views per second of the CIFAR-10 recipe, against torchvision, lightly and kornia doing the same work.

Two views of a batch of 32 x 32 images by random resized crop, flip, colour jitter, grayscale and normalisation, from
bytes to normalised floats, random parameters included. The contenders take turns within one run, so that a busy
machine slows all of them; the ratio of the medians is the figure to look at. One thread each by default: threads that
wait for each other on a busy machine measure the neighbours.

    python benchmarks/augmentation.py [--batch-size 512] [--repeats 7] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_ssl.data.augment import preset
from lightning_ssl.data.pipeline import Pipeline, RawImages
from lightning_ssl.data.sources import FACTS, Split

SIZE = 32
MEAN, STD = FACTS["cifar10"].mean, FACTS["cifar10"].std


def ours(images: Tensor) -> Callable[[], list[Tensor]]:
    recipe = preset("cifar10")[0]
    pipeline = Pipeline((recipe, recipe), num_views=2, size=SIZE, mean=MEAN, std=STD)
    dataset = RawImages(Split(torch.zeros(len(images), dtype=torch.int64), images), pipeline, key=0, augmented=True)
    rows = list(range(len(images)))

    def run() -> list[Tensor]:
        dataset.epoch = dataset.epoch + 1
        return list(pipeline.make_batch(dataset.__getitems__(rows)).views)

    return run


def torchvision(images: Tensor) -> Callable[[], list[Tensor]]:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    return lambda: [torch.stack([transform(image) for image in images]) for _ in range(2)]


def lightly(images: Tensor) -> Callable[[], list[Tensor]]:
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(
        input_size=SIZE, cj_strength=0.5, gaussian_blur=0.0, normalize={"mean": list(MEAN), "std": list(STD)}
    )
    pictures = [F.to_pil_image(image) for image in images]  # what a dataset would hand it

    def run() -> list[Tensor]:
        return [torch.stack(view) for view in zip(*(transform(picture) for picture in pictures), strict=True)]

    return run


def kornia(images: Tensor) -> Callable[[], list[Tensor]]:
    import kornia.augmentation as K

    transform = torch.nn.Sequential(
        K.RandomResizedCrop((SIZE, SIZE), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    )

    def run() -> list[Tensor]:
        with torch.no_grad():
            pixels = images / 255
            return [transform(pixels) for _ in range(2)]

    return run


def check_same_work(views: dict[str, list[Tensor]], batch_size: int) -> None:
    """Views of all contenders have the same shape and, up to chance, the same mean, spread and smoothness."""
    figures = {}
    for name, pair in views.items():
        assert [(view.shape, view.dtype) for view in pair] == [((batch_size, 3, SIZE, SIZE), torch.float32)] * 2, name
        both = torch.cat(pair)
        steps = (both[..., 1:] - both[..., :-1]).square().mean().sqrt()
        figures[name] = torch.stack((both.mean(), both.std(), steps, both[:, 0].sub(both[:, 2]).std()))
    for name, figure in figures.items():
        # kornia's crop has no antialiasing and both batched and 8-bit paths round differently: a tenth is chance.
        assert (figure - figures["torchvision"]).abs().max() < 0.1, (name, figure, figures["torchvision"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    coarse = torch.rand(arguments.batch_size, 3, 8, 8)
    images = torch.nn.functional.interpolate(coarse, size=SIZE, mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    contenders = {make.__name__: make(images) for make in (ours, torchvision, lightly, kornia)}
    check_same_work({name: run() for name, run in contenders.items()}, arguments.batch_size)  # and warm up

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: 2 * arguments.batch_size / statistics.median(times) for name, times in seconds.items()}
    print(f"batch {arguments.batch_size}, {SIZE} x {SIZE}, {arguments.threads} threads, median of {arguments.repeats}")
    for name, rate in rates.items():
        ratio = "" if name == "ours" else f"   ours is {rates['ours'] / rate:5.1f} times as fast"
        print(f"{name:12s} {rate:10,.0f} views/s{ratio}")


if __name__ == "__main__":
    main()
