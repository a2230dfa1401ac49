"""Anybody's dataset in the DataModule, and the augmentation on its own."""

import lightning.pytorch as L
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from lightning_ssl.data import Augment, Augmentation, ImageDataModule
from lightning_ssl.data.pipeline import Pipeline, RawImages
from lightning_ssl.data.sources import Split
from tests.data.test_image import QUIET, Recorder

PIXELS = torch.randint(256, (12, 3, 20, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Items(Dataset):
    """The same images in the form that is asked for."""

    def __init__(self, kind, rows=range(12), transform=None):
        self.kind, self.rows, self.transform = kind, list(rows), transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        pixels, label = PIXELS[self.rows[i]], self.rows[i] % 3
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        return {
            "pil": (image, label),
            "bytes": (pixels, torch.tensor(label)),
            "alone": pixels,
            "triple": (image, label, i),
        }[self.kind]


def module(kind, **arguments):
    return ImageDataModule(Items(kind), batch_size=4, image_size=16, test_dataset=Items(kind, range(6)), **arguments)


@pytest.mark.parametrize("in_memory", [False, True])
def test_every_form_of_item_gives_the_same_batches(in_memory):
    batches = {}
    for kind in ("pil", "bytes", "triple", "alone"):
        data = module(kind, clean_image=True, in_memory=in_memory)
        batches[kind] = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    for kind, batch in batches.items():
        assert torch.equal(batch.index, batches["pil"].index)
        assert all(torch.equal(a, b) for a, b in zip(batch.views, batches["pil"].views, strict=True))
        assert torch.equal(batch.image, batches["pil"].image)
        assert batch.label.tolist() == ([-1] * 4 if kind == "alone" else (batch.index % 3).tolist())


def test_a_dataset_of_ones_own_trains_validates_tests_and_probes():
    data, model = module("pil"), Recorder()
    trainer = L.Trainer(**QUIET, enable_checkpointing=False, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, data)
    assert sorted(i for _, _, seen in model.trained for i in seen) == list(range(12))
    assert len(model.held_out) == 1
    trainer.test(model, data, verbose=False)
    assert model.tested == list(range(6))
    train, test = data.probe_dataloaders()
    assert torch.cat([batch.label for batch in train]).tolist() == [i % 3 for i in range(12)]
    assert len(torch.cat([batch.label for batch in test])) == 6
    assert data.num_classes == 3


def test_without_a_test_set_there_is_training_alone():
    data, model = ImageDataModule(Items("alone"), batch_size=4, image_size=16), Recorder()
    L.Trainer(**QUIET, enable_checkpointing=False, max_epochs=1).fit(model, data)
    assert len(model.trained) == 3 and not model.held_out
    with pytest.raises(ValueError, match="`test_dataset` must be given for probes"):
        data.probe_dataloaders()


def test_items_that_are_no_images_are_refused_with_the_remedy():
    class Floats(Items):
        def __getitem__(self, i):
            return PIXELS[i] / 255, 0

    with pytest.raises(TypeError, match=r"`dataset` must yield PIL images or bytes .* got torch.float32 .* ToTensor"):
        next(iter(ImageDataModule(Floats("pil"), batch_size=4).train_dataloader()))
    with pytest.raises(TypeError, match="`dataset` must be a dataset with a length"):
        ImageDataModule(object(), batch_size=4).train_dataloader()
    with pytest.raises(ValueError, match="`test_dataset` goes with a dataset of your own"):
        ImageDataModule("digits", test_dataset=Items("pil"))


# The augmentation on its own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["simclr", "byol", Augmentation(crop=False, blur=1.0), ["none", Augmentation()]])
def test_augment_makes_the_pipelines_views(recipe):
    augment = Augment(recipe, size=18, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2), seed=7)
    pipeline = Pipeline(augment.recipes, 2, 18, (0.4, 0.5, 0.6), (0.2, 0.3, 0.2), seed=7)
    images = RawImages(Split(torch.zeros(12, dtype=torch.int64), PIXELS), pipeline, 0, True)
    images.epoch = 3
    rows = [5, 0, 11, 2]
    expected = pipeline.make_batch(images.__getitems__(rows)).views
    views = augment(PIXELS[rows], index=torch.tensor(rows), epoch=3)
    assert all(torch.equal(view, other) for view, other in zip(views, expected, strict=True))
    other_epoch = augment(PIXELS[rows], index=torch.tensor(rows), epoch=4)
    assert recipe == ["none", Augmentation()] or not torch.equal(views[0], other_epoch[0])


def test_augment_draws_from_torchs_generator():
    augment = Augment("simclr", num_views=3)
    torch.manual_seed(1)
    first = augment(PIXELS)
    torch.manual_seed(1)
    again = augment(PIXELS)
    assert len(first) == 3 and all(
        view.shape == (12, 3, 20, 20) and 0 <= view.min() <= view.max() <= 1 for view in first
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(augment(PIXELS)[0], first[0])
    assert not list(augment.parameters()) and not augment.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Augment("simclr")(PIXELS / 255),
            "`image` must be bytes .* got .* torch.float32; give pixels 0 to 255",
        ),
        (lambda: Augment("simclr")(PIXELS[0]), "`image` must be bytes of shape"),
        (lambda: Augment("simclr")(PIXELS, index=torch.arange(3)), "`index` must have one entry an image"),
        (lambda: Augment("simclar"), "must be a preset, got 'simclar'; .*simclr"),
        (lambda: Augment(num_views=0), "`num_views` must be at least 1"),
    ],
)
def test_bad_uses_of_augment(call, message):
    with pytest.raises(ValueError, match=message):
        call()
