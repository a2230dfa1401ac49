"""JPEG files of 500 x 375 to two views of 224 x 224.

A worker's part is one thread from files to the bytes of two crops; before is the same by Pillow's decoder and
torchvision's crops, as it was done first, and the limit is the decoder and the crops alone, boxes given. The whole is
files to finished views of the SimCLR recipe with two loader workers: ours makes the views from the crops in the main
process (on a device where there is one), the peers in the workers; workers stay from epoch to epoch. Asserted: the
crops' pixels differ by a level at most.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from benchmarks._bench import Section, costs, faster, main, race
from lightning_ssl.data import ImageDataModule, sources
from lightning_ssl.data.augment import preset
from lightning_ssl.data.pipeline import Pipeline, RawImages
from lightning_ssl.data.sources import FACTS

SIZE = 224


def write_files(folder: Path, count: int) -> None:
    """Smooth pictures with some noise, which compress about as photographs do, in two classes and two splits."""
    dice = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(dice.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((500, 375), Image.BICUBIC)
        noisy = np.asarray(coarse).astype(int) + dice.integers(-12, 13, (375, 500, 3))
        for split in ("train", "test") if number < 4 else ("train",):
            place = folder / split / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{number:04}.jpg", quality=90)


def worker(folder: Path, count: int) -> dict[str, Callable[[], Tensor]]:
    """Two crops of every file: ours, the way it was before, and with boxes that are given."""
    recipe, facts = preset("simclr")[0], FACTS["image_folder"]
    split = sources.load("image_folder", str(folder), download=False).train
    pipeline = Pipeline((recipe, recipe), num_views=2, size=SIZE, mean=facts.mean, std=facts.std)
    dataset = RawImages(split, pipeline, key=0, augmented=True)
    rows = list(range(count))

    def ours() -> Tensor:
        crops = dataset.__getitems__(rows).crops
        assert crops is not None
        return crops

    def boxes() -> Iterator[list[list[int]]]:
        sides = torch.full((count,), 375), torch.full((count,), 500)
        for plan in pipeline.draw_plans(torch.arange(count), 0, 0, *sides):
            assert plan.box is not None
            yield plan.box[:, plan.places].T.long().tolist()

    def before() -> Tensor:
        images = []
        for path in split.paths:
            with Image.open(path) as image:
                images.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))
        views = []
        for view in boxes():
            crops = [
                F.resized_crop(x, *box[:4], [SIZE, SIZE], antialias=True) for x, box in zip(images, view, strict=True)
            ]
            views.append(torch.stack([x.flip(-1) if box[4] else x for x, box in zip(crops, view, strict=True)]))
        return torch.stack(views)

    drawn = list(boxes())

    def limit() -> Tensor:
        for number, path in enumerate(split.paths):
            data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
            image = decode_jpeg(data, mode=ImageReadMode.RGB)
            for view in drawn:
                last = sources.resized_crop(image, *view[number][:4], SIZE)
        return last

    assert (ours().int() - before().int()).abs().max() <= 1
    return {"ours": ours, "before": before, "limit": limit}


def whole(folder: Path, batch: int) -> dict[str, Callable[[], None]]:
    """Finished views of all files, with two workers."""
    from lightly.transforms import SimCLRTransform

    facts = FACTS["image_folder"]
    recipe = preset("simclr")[0]
    steps = [
        v2.ToImage(),
        v2.RandomResizedCrop(SIZE, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)], p=0.8),
        v2.RandomGrayscale(0.2),
        v2.RandomApply([v2.GaussianBlur(recipe.kernel_size(SIZE), recipe.blur_sigma)], p=0.5),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(facts.mean, facts.std),
    ]
    one = v2.Compose(steps)
    peers = {
        "torchvision": lambda picture: (one(picture), one(picture)),
        "lightly": SimCLRTransform(input_size=SIZE),
    }
    data = ImageDataModule("image_folder", str(folder), batch_size=batch, num_workers=2, augmentation="simclr")
    data.setup("fit")
    loader = data.train_dataloader()

    def ours() -> None:
        for raw in loader:
            data.on_after_batch_transfer(raw, 0)

    def through(transform: Callable[..., object]) -> Callable[[], None]:
        dataset = ImageFolder(str(folder / "train"), transform)
        loader = DataLoader(dataset, batch, num_workers=2, drop_last=True, persistent_workers=True)

        def run() -> None:
            for _ in loader:
                pass

        return run

    return {"ours": ours, **{name: through(transform) for name, transform in peers.items()}}


def run(tiny: bool = False) -> Section:
    count, batch, repeats = (8, 4, 1) if tiny else (256, 64, 5)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_files(folder, count)
        seconds = race(worker(folder, count), repeats)
        work = f"{count} files to two crops, one worker"
        rows = [
            faster(work, "Pillow and torchvision's crops", seconds["ours"], seconds["before"], 1.35),
            costs(work, "decoder and crops alone", seconds["ours"], seconds["limit"], 1 / 0.85),
        ]
        torch.set_num_threads(2)  # from here on by the clock on the wall: workers are other processes
        seconds = race(whole(folder, batch), repeats)
        work = f"{count} files to views, 2 workers"
        for peer in ("torchvision", "lightly"):
            rows.append(faster(work, peer, seconds["ours"], seconds[peer], 1))
    return Section(rows, peers=["torchvision", "pillow", "lightly"])


if __name__ == "__main__":
    main(run, threads=1)
