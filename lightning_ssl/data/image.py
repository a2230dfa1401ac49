"""One DataModule for images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import Dataset

from lightning_ssl.data import hub, sources
from lightning_ssl.data.augment import Augmentation, recipes_for
from lightning_ssl.data.batch import RawBatch
from lightning_ssl.data.digits import Nuisance
from lightning_ssl.data.folders import kind_of, recipe_for, side_of
from lightning_ssl.data.loader import EpochDataset, ShardLoader, ShardSampler
from lightning_ssl.data.module import ShardedDataModule
from lightning_ssl.data.pipeline import Pipeline, ProbeImages, RawImages
from lightning_ssl.data.sources import FACTS, Source, Split

TRAIN, TEST, PROBE_TRAIN = 0, 1, 2  # keys of the splits' randomness


class ImageDataModule(ShardedDataModule):
    """Images in, augmented views out.

    Training and validation batches are `ViewBatch`es: bytes cross to the device and the views are made there, all
    images at once. Validation serves the test split, its views fixed for the whole run, in full batches (what does not
    fill one is left out). Test and predict batches are `ViewBatch`es whose only view is the clean image.

    Everything random is a function of (`seed`, epoch, sample index, view): a run on W ranks with `batch_size` G / W
    sees the same batches of G samples and the same views, bit for bit, as one process with `batch_size` G, with any
    number of workers, and also after a resume, in mid-epoch too.

    Args:
        dataset: "digits" (embedded in scikit-learn, needs no files), "cifar10", "cifar100", "stl10" (pretrains on train
            and unlabeled, probes on train and test), "fashion_mnist", "imagenet", "image_folder": any folder of
            images, with classes (``<class>/<image>``) or without, with ``train/`` and ``test/`` (or ``val/``) or
            without, when a fifth is held out; "hf", a dataset of Hugging Face (`pip install datasets`), or "wds",
            WebDataset's tar files (`pip install webdataset`), likewise with or without classes and a test split. Or
            any torch `Dataset` whose items are PIL images or bytes [C, H, W], alone or followed by their class. By
            default what lies in `root`, or the digits if none is given.
        test_dataset: With a dataset of your own: a second one, for validation, test and the probes.
        root: Folder of the dataset; "data" by default. ``hf/NAME`` is one of Hugging Face: a folder that `save_to_disk`
            wrote or that holds parquet or arrow files, or a name on the hub. ``wds/FOLDER/train-{000..099}.tar`` is
            WebDataset's tar files on disk; those with "test" or "val" for "train" are the test split.
        download: Let torchvision download what is missing.
        batch_size: Samples per process and step.
        probe_batch_size: Samples per process and step of the probe, test and predict loaders.
        num_workers: Worker processes per loader; sets kept in memory need none.
        views: How views are made: "resample" draws a new nuisance for each (digits only), "augment" augments the image,
            "auto" resamples where that is possible.
        num_views: Views per sample.
        augmentation: A preset ("simclr", "byol", "simsiam", "barlow_twins", "stl10", "cifar10", "digits", "none"), one
            recipe for all views, or a list with one (recipe or single-view preset) for each, used in turn if shorter.
            By default the usual one of the dataset, or of images of that size.
        nuisance: Draw the digits with a nuisance (True, or its range), or plainly (False).
        clean_image: Make `ViewBatch.image`, too.
        image_size: Side of the images; by default the dataset's own (28 x 28 Fashion-MNIST is enlarged to 32), or
            what suits the files of a folder, 32 to 224.
        mean: Channel means to normalise by; by default the dataset's.
        std: Channel standard deviations, likewise.
        in_memory: For "image_folder" and "imagenet": decode every file once, resized to `image_size`, and keep one
            tensor. For small images.
        on_corrupt: What to do about a file that cannot be decoded: "error" names it; "skip" warns, leaves it out of
            clean batches and puts the next file in its place in training.
        seed: Seed of the order and of the views.

    Example:
        >>> data = ImageDataModule(batch_size=64, clean_image=True)
        >>> data.setup()
        >>> batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
        >>> [tuple(view.shape) for view in batch.views], tuple(batch.image.shape)
        ([(64, 3, 32, 32), (64, 3, 32, 32)], (64, 3, 32, 32))
        >>> train, test = data.probe_dataloaders()
        >>> sum(len(batch.index) for batch in train), sum(len(batch.index) for batch in test)
        (1437, 360)
    """

    def __init__(
        self,
        dataset: Literal[
            "digits", "cifar10", "cifar100", "stl10", "fashion_mnist", "imagenet", "image_folder", "hf", "wds"
        ]
        | Dataset  # type: ignore[type-arg]
        | None = None,
        root: str | None = None,
        download: bool = False,
        batch_size: int = 128,
        probe_batch_size: int = 512,
        num_workers: int = 0,
        views: Literal["auto", "resample", "augment"] = "auto",
        num_views: int = 2,
        augmentation: str | Augmentation | list[str | Augmentation] | None = None,
        nuisance: bool | Nuisance = True,
        clean_image: bool = False,
        image_size: int | None = None,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
        in_memory: bool = False,
        on_corrupt: Literal["error", "skip"] = "error",
        seed: int = 0,
        test_dataset: Dataset | None = None,  # type: ignore[type-arg]
    ) -> None:
        super().__init__()
        if dataset is None:
            dataset = "digits" if root is None else kind_of(root)  # type: ignore[assignment]
        elif dataset == "digits" and root is not None:
            rank_zero_warn(f"the digits are embedded: root={root!r} is not read; leave out `dataset` to train on it")
        root = root or "data"
        own = not isinstance(dataset, str)
        if test_dataset is not None and not own:
            raise ValueError(
                f"`test_dataset` goes with a dataset of your own, got dataset={dataset!r}; leave it out, or give both"
            )
        if not own:
            _choice("dataset", dataset, FACTS)
        _choice("views", views, ("auto", "resample", "augment"))
        _choice("on_corrupt", on_corrupt, ("error", "skip"))
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("probe_batch_size", probe_batch_size, 1),
            ("num_workers", num_workers, 0),
            ("num_views", num_views, 1),
            ("image_size", 1 if image_size is None else image_size, 1),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}")
        can_resample = dataset == "digits" and nuisance is not False
        if views == "resample" and not can_resample:
            raise ValueError(
                "`views` must be 'augment' where there is no nuisance to draw anew, got 'resample' with "
                f"dataset={dataset!r}, nuisance={nuisance!r}; set views='augment', or the digits with a nuisance"
            )
        if augmentation is not None and can_resample and views != "augment":
            raise ValueError(
                f"`augmentation` must be left out where views resample the nuisance, got {augmentation!r}; set "
                "views='augment' to use it"
            )

        facts = FACTS["image_folder" if own else str(dataset)]
        self._source: Source | None = None
        if dataset in ("image_folder", *hub.KINDS):
            if dataset in hub.KINDS and image_size is None:
                self._source = hub.load(str(dataset), root)
                side = hub.side_of(self._source, facts.image_size)
            else:
                side = image_size or side_of(root, facts.image_size)
            facts = replace(facts, image_size=side, augmentation=recipe_for(side))
        self.facts, self.root, self.download = facts, root, download
        self.dataset = type(dataset).__name__ if own else str(dataset)
        self._own = None if isinstance(dataset, str) or dataset is None else (dataset, test_dataset)
        self.batch_size, self.probe_batch_size, self.num_workers = batch_size, probe_batch_size, num_workers
        self.in_memory, self.on_corrupt, self.seed = in_memory, on_corrupt, seed
        augment = views == "augment" or not can_resample
        is_digits = dataset == "digits"
        self.pipeline = Pipeline(
            recipes=recipes_for(augmentation or facts.augmentation, num_views) if augment else None,
            num_views=num_views,
            size=image_size or facts.image_size,
            mean=tuple(mean or facts.mean),
            std=tuple(std or facts.std),
            digits=is_digits,
            nuisance=(Nuisance() if nuisance is True else nuisance or None) if is_digits else None,
            clean_image=clean_image,
            seed=seed,
        )
        self.predict_splits: Literal["test", "all"] = "test"  # what `predict` embeds

    @property
    def source(self) -> Source:
        """The dataset, loaded at first use."""
        if self._source is None or (self.in_memory and self.facts.files and self._source.train.pixels is None):
            source = self._source or self._load()
            if self.in_memory and self.facts.files:
                train, test = (
                    sources.into_memory(split, self.pipeline.size, self.on_corrupt)
                    for split in (source.train, source.test)
                )
                source = Source(train, train, test, source.classes)
            self._source = source
        return self._source

    def _load(self) -> Source:
        if self._own is not None:
            return sources.wrap(*self._own)
        return hub.load(self.dataset, self.root) if self.dataset in hub.KINDS else sources.load(self.dataset, self.root)

    @property
    def clean_image(self) -> bool:
        """Whether batches hold the clean image; a method that needs it asks before training."""
        return self.pipeline.clean_image

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a view."""
        return (3, self.pipeline.size, self.pipeline.size)

    @property
    def labelled(self) -> bool:
        """Whether there are classes for probes to tell apart."""
        return len(self.source.classes) > 1 and len(self.source.test) > 0

    @property
    def num_classes(self) -> int:
        """Number of classes of the probe splits."""
        return len(self.source.classes)

    def prepare_data(self) -> None:
        if self.download and self.facts.downloads:
            sources.load(self.dataset, self.root, download=True)

    def setup(self, stage: str | None = None) -> None:
        _ = self.source  # bad roots fail here, before training starts

    def train_dataloader(self) -> ShardLoader:
        _, world_size = self.shard()
        split = self.source.train
        if self.batch_size * world_size > len(split):
            raise ValueError(
                f"`batch_size` must be at most {len(split) // world_size} for the {len(split)} training samples of "
                f"{self.dataset!r} on {world_size} process(es), got {self.batch_size}; lower it"
            )
        return self.resumed(self._view_loader(split, TRAIN, self.batch_size, shuffle=True))

    def val_dataloader(self) -> ShardLoader | list[ShardLoader]:
        _, world_size = self.shard()
        split = self.source.test
        if not len(split):  # a dataset of one's own, without a test set
            return []
        batch_size = max(1, min(self.batch_size, len(split) // world_size))
        return self._view_loader(split, TEST, batch_size, shuffle="once")

    def test_dataloader(self) -> ShardLoader:
        return self._clean_loader(RawImages(self.source.test, self.pipeline, TEST, False, self.on_corrupt))

    def predict_dataloader(self) -> ShardLoader | list[ShardLoader]:
        if self.predict_splits == "test":
            return self.test_dataloader()
        train = RawImages(self.source.train, self.pipeline, TRAIN, False, self.on_corrupt)
        return [self._clean_loader(train), self.test_dataloader()]

    def probe_dataloaders(self) -> tuple[ShardLoader, ShardLoader]:
        """Clean train and test splits as `ProbeBatch`es on the CPU; each rank gets its own shard, without padding.

        Works without a Trainer, too; the rank is then that of `torch.distributed`, if it is initialised.
        """
        if self.trainer is None:
            self.prepare_data()
        source, loaders = self.source, []
        if not len(source.test):
            raise ValueError("`test_dataset` must be given for probes, got None; give a labelled test set")
        # Digits of the train split are drawn as for the clean image of training.
        train_key = TRAIN if source.probe_train is source.train else PROBE_TRAIN
        for split, key, name in ((source.probe_train, train_key, "train"), (source.test, TEST, "test")):
            present = split.labels.unique()
            if present[-1] < 0:
                raise ValueError(
                    f"the {name} split of `dataset` must have classes for a probe, got images alone; give both, or "
                    "leave the probes out"
                )
            if len(present) < 2:
                raise ValueError(
                    f"the {name} split of {self.dataset!r} must have at least two classes for a probe, got "
                    f"{source.classes[int(present[0])]!r} alone; check root={self.root!r}"
                )
            loaders.append(
                self._clean_loader(ProbeImages(RawImages(split, self.pipeline, key, False, self.on_corrupt)))
            )
        return loaders[0], loaders[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not isinstance(batch, RawBatch):
            return batch
        with torch.no_grad():
            made = self.pipeline.make_batch(batch)
            if self.trainer is None:
                return made
            # Made in single precision whatever the Trainer's, then taken to the model's (64-true, bf16-true).
            dtype = self.trainer.lightning_module.dtype
            image = None if made.image is None else made.image.to(dtype)
            return made._replace(views=tuple(view.to(dtype) for view in made.views), image=image)

    def _view_loader(self, split: Split, key: int, batch_size: int, shuffle: bool | str) -> ShardLoader:
        dataset = RawImages(split, self.pipeline, key, True, self.on_corrupt)
        sampler = ShardSampler(dataset, *self.shard(), shuffle=shuffle, even=True, seed=self.seed)
        return self._loader(dataset, sampler, batch_size, drop_last=True)

    def _clean_loader(self, dataset: EpochDataset) -> ShardLoader:
        return self._loader(dataset, ShardSampler(dataset, *self.shard()), self.probe_batch_size)

    def _loader(
        self, dataset: EpochDataset, sampler: ShardSampler, batch_size: int, drop_last: bool = False
    ) -> ShardLoader:
        return ShardLoader(
            dataset,
            sampler=sampler,
            batch_size=batch_size,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=drop_last and self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def _choice(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {value!r}")
