"""Every dataset read from small files in its original format, odd image files, and bad roots."""

import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version
from PIL import Image
from torchvision import datasets
from torchvision.transforms.v2 import functional as F

from lightning_ssl.data import ImageDataModule, sources
from lightning_ssl.data.sources import CorruptImageError, decode, load, resized_crop
from tests.data.files import write_cifar, write_fashion_mnist, write_folder, write_stl10


@pytest.fixture
def unchecked(monkeypatch):
    """Small files cannot have the originals' checksums."""
    for dataset in (datasets.CIFAR10, datasets.CIFAR100):
        for name in ("train_list", "test_list"):
            monkeypatch.setattr(dataset, name, [(file, None) for file, _ in getattr(dataset, name)])
        monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": None})
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(datasets.STL10, name, [(file, None) for file, _ in getattr(datasets.STL10, name)])


def first_batch(module):
    module.setup()
    return module.on_after_batch_transfer(next(iter(module.train_dataloader())), 0)


def clean_bytes(module, batch):
    """The clean images of a probe batch as bytes again."""
    mean, std = (torch.tensor(x)[:, None, None] for x in (module.pipeline.mean, module.pipeline.std))
    return ((batch.image * std + mean) * 255).round().to(torch.uint8).numpy()


@pytest.mark.parametrize("hundred", [False, True])
def test_cifar(tmp_path, unchecked, hundred):
    pixels = write_cifar(tmp_path, hundred)
    module = ImageDataModule("cifar100" if hundred else "cifar10", str(tmp_path), batch_size=8)
    assert first_batch(module).views[0].shape == (8, 3, 32, 32)
    assert module.num_classes == (100 if hundred else 10)
    for loader, name in zip(module.probe_dataloaders(), ("train", "test"), strict=True):
        (batch,) = loader
        assert np.array_equal(clean_bytes(module, batch), pixels[name])
        per_file = 4 if name == "train" and not hundred else len(batch.label)
        assert batch.label.tolist() == [i % per_file % 10 for i in range(len(batch.label))]


def test_stl10_pretrains_on_unlabelled_images_too(tmp_path, unchecked):
    pixels = write_stl10(tmp_path)
    module = ImageDataModule("stl10", str(tmp_path), batch_size=32)
    batch = first_batch(module)
    assert batch.views[0].shape == (32, 3, 96, 96)
    assert (batch.label == -1).sum() == (batch.index >= 12).sum() > 0
    for loader, name in zip(module.probe_dataloaders(), ("train", "test"), strict=True):
        (probe,) = loader
        assert np.array_equal(clean_bytes(module, probe), pixels[name])
        assert probe.label.tolist() == [i % 10 for i in range(len(probe.label))]


def test_fashion_mnist(tmp_path):
    pixels = write_fashion_mnist(tmp_path)
    module = ImageDataModule("fashion_mnist", str(tmp_path), batch_size=8, image_size=28)
    assert first_batch(module).views[0].shape == (8, 3, 28, 28)
    (probe,) = module.probe_dataloaders()[0]
    assert np.array_equal(clean_bytes(module, probe), np.repeat(pixels["train"][:, None], 3, axis=1))
    assert first_batch(ImageDataModule("fashion_mnist", str(tmp_path), batch_size=8)).views[0].shape[-1] == 32


def test_fashion_mnist_as_shipped_by_debian(tmp_path):
    try:
        listing = subprocess.run(["dpkg", "-L", "dataset-fashion-mnist"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in listing.stdout.split():
        if path.endswith("ubyte.gz"):
            (raw / Path(path).name).symlink_to(path)
    source = load("fashion_mnist", str(tmp_path))
    assert source.train.pixels.shape == (60_000, 1, 28, 28) and source.test.pixels.shape == (10_000, 1, 28, 28)
    assert source.train.labels.bincount().tolist() == [6000] * 10


def test_image_folder(tmp_path):
    write_folder(tmp_path)
    module = ImageDataModule("image_folder", str(tmp_path), batch_size=4, image_size=24, clean_image=True)
    batch = first_batch(module)
    assert [view.shape for view in batch.views] == [(4, 3, 24, 24)] * 2 and batch.image.shape == (4, 3, 24, 24)
    train, test = ([*loader] for loader in module.probe_dataloaders())
    assert train[0].label.tolist() == [0] * 6 + [1] * 6 and test[0].label.tolist() == [0] * 3 + [1] * 3
    assert torch.equal(train[0].image[batch.index], batch.image)
    cached = ImageDataModule("image_folder", str(tmp_path), batch_size=4, image_size=24, in_memory=True)
    assert first_batch(cached).views[0].shape == (4, 3, 24, 24)
    assert cached.source.train.pixels.dtype == torch.uint8


def test_imagenet(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "test").rename(tmp_path / "val")
    names = {f"class{i}": (f"name {i}", f"synonym {i}") for i in range(2)}
    torch.save((names, ["class0"] * 3 + ["class1"] * 3), tmp_path / "meta.bin")
    module = ImageDataModule("imagenet", str(tmp_path), batch_size=4, image_size=24)
    assert first_batch(module).views[0].shape == (4, 3, 24, 24)
    assert module.source.classes == ["name 0", "name 1"]
    assert [len(loader.dataset) for loader in module.probe_dataloaders()] == [12, 6]


@pytest.mark.slow
def test_cifar10_as_jpeg_files(tmp_path):
    """Every hundredth of the 60,000 images, from an archive that may lie beside the project."""
    archive = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar10-images.tar.gz"
    if not archive.exists():
        pytest.skip("cifar10-images.tar.gz is not there")
    with tarfile.open(archive, "r|gz") as files:
        for count, member in enumerate(member for member in files if member.isfile()):
            if count % 100 == 0:
                files.extract(member, tmp_path, filter="data")
    module = ImageDataModule("image_folder", str(tmp_path), batch_size=256, image_size=32, in_memory=True)
    assert first_batch(module).views[0].shape == (256, 3, 32, 32)
    assert module.num_classes == 10
    train, test = ([*loader] for loader in module.probe_dataloaders())
    assert torch.cat([batch.label for batch in train]).bincount().tolist() == [50] * 10
    assert torch.cat([batch.label for batch in test]).bincount().tolist() == [10] * 10
    original = decode(sorted(str(path) for path in (tmp_path / "train" / "airplane").iterdir())[0])
    assert torch.equal(module.source.train.pixels[0], original)  # already of the right size


def test_odd_image_files_load_as_rgb(tmp_path):
    ramp = np.linspace(0, 255, 64).round().astype(np.uint8).reshape(8, 8)
    gray, rgb = Image.fromarray(ramp), Image.fromarray(np.stack([ramp, ramp.T, 255 - ramp], axis=-1))
    wide = ramp.astype(np.uint16) * 257
    cases = {
        "gray.png": (gray, gray.convert("RGB")),
        "rgba.png": (rgb.convert("RGBA"), rgb),
        "palette.png": (gray.convert("P"), gray.convert("RGB")),
        "cmyk.tif": (rgb.convert("CMYK"), rgb),
        "wide.png": (Image.fromarray(wide), gray.convert("RGB")),
        "wide.tif": (Image.fromarray(wide), gray.convert("RGB")),
        "gray_alpha.png": (gray.convert("LA"), gray.convert("RGB")),
    }
    for name, (image, expected) in cases.items():
        image.save(tmp_path / name)
        pixels = decode(str(tmp_path / name)).permute(1, 2, 0).numpy()
        assert np.array_equal(pixels, np.asarray(expected)), name


def test_jpeg_files_give_pillows_pixels(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (37, 51, 3), dtype=np.uint8)
    for name, mode, options in [
        ("plain.jpg", "RGB", {}),
        ("subsampled.jpg", "RGB", {"quality": 70, "subsampling": 2}),
        ("progressive.jpg", "RGB", {"progressive": True}),
        ("gray.jpg", "L", {}),
        ("cmyk.jpg", "CMYK", {}),
        ("comment.jpg", "RGB", {"comment": b"x" * 40_000, "dpi": (72, 72)}),
    ]:
        Image.fromarray(noise).convert(mode).save(tmp_path / name, **options)
        expected = np.asarray(Image.open(tmp_path / name).convert("RGB")).astype(int)
        pixels = decode(str(tmp_path / name)).permute(1, 2, 0).numpy()
        assert np.abs(pixels - expected).max() <= 1, name  # two builds of one library
    data = (tmp_path / "plain.jpg").read_bytes()
    for kept in range(1, len(data), 97):  # wherever a file was cut off it is refused, as Pillow refuses it
        (tmp_path / "cut.jpg").write_bytes(data[:kept])
        with pytest.raises(CorruptImageError, match=r"cut\.jpg"):
            decode(str(tmp_path / "cut.jpg"))
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)  # not asked for what torchvision reads
        assert decode(str(tmp_path / "plain.jpg")).shape == (3, 37, 51)
    refused = []
    with monkeypatch.context() as patch:  # nor torchvision for what it may convert in its own way
        patch.setattr(sources, "decode_jpeg", lambda data, mode: refused.append(len(data)) or torch.zeros(0))
        assert decode(str(tmp_path / "cmyk.jpg")).shape == (3, 37, 51) and not refused

    def refuse(data, mode):
        raise RuntimeError("not this one")

    monkeypatch.setattr(sources, "decode_jpeg", refuse)  # what it refuses Pillow judges
    assert decode(str(tmp_path / "plain.jpg")).shape == (3, 37, 51)


def test_crops_are_torchvisions():
    image = torch.randint(0, 256, (60, 80, 3), dtype=torch.uint8).permute(2, 0, 1)
    level = 0 if Version(torch.__version__) >= Version("2.10") else 1  # earlier ones round by the layout in memory
    for box in [(0, 0, 60, 80), (5, 7, 41, 33), (59, 79, 1, 1), (10, 3, 20, 70), (2, 2, 32, 32)]:
        expected = F.resized_crop(image, *box, [32, 32], antialias=True)
        assert (resized_crop(image, *box, 32).int() - expected.int()).abs().max() <= level, box


def test_missing_root_says_what_to_put_there(tmp_path):
    for name, layout in [("cifar10", "cifar-10-batches-py"), ("stl10", "stl10_binary"), ("fashion_mnist", "raw")]:
        for root in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(FileNotFoundError, match=rf"(?s){root}.*{layout}.*download"):
                ImageDataModule(name, str(root)).setup()
    for name in ("image_folder", "imagenet"):
        with pytest.raises(FileNotFoundError, match=r"train/"):
            ImageDataModule(name, str(tmp_path)).setup()


def test_empty_or_unequal_class_folders_are_named(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train" / "class7").mkdir()
    with pytest.raises(FileNotFoundError, match="class7"):
        ImageDataModule("image_folder", str(tmp_path)).setup()
    (tmp_path / "train" / "class7").rmdir()
    (tmp_path / "test" / "class1").rename(tmp_path / "test" / "klass1")
    with pytest.raises(FileNotFoundError, match=r"class1.*klass1"):
        ImageDataModule("image_folder", str(tmp_path)).setup()


def test_corrupt_files(tmp_path):
    write_folder(tmp_path)
    broken = tmp_path / "train" / "class0" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    arguments = {"root": str(tmp_path), "batch_size": 12, "image_size": 16}
    with pytest.raises(CorruptImageError, match=r"2\.jpg.*on_corrupt"):
        first_batch(ImageDataModule("image_folder", **arguments))
    module = ImageDataModule("image_folder", **arguments, on_corrupt="skip")
    with pytest.warns(UserWarning, match=r"2\.jpg"):
        batch = first_batch(module)
    assert sorted(batch.index.tolist()) == [0, 1, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11]  # its neighbour stands in
    with pytest.warns(UserWarning, match=r"2\.jpg"):
        (probe,) = module.probe_dataloaders()[0]
    assert probe.index.tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.warns(UserWarning, match=r"2\.jpg"):
        cached = ImageDataModule("image_folder", **{**arguments, "batch_size": 8}, on_corrupt="skip", in_memory=True)
        assert len(cached.source.train) == 11


def test_a_probe_needs_two_classes(tmp_path):
    write_folder(tmp_path, classes=1)
    module = ImageDataModule("image_folder", str(tmp_path), batch_size=2, image_size=16)
    assert first_batch(module).views[0].shape == (2, 3, 16, 16)  # pretraining needs no classes
    with pytest.raises(ValueError, match="at least two classes for a probe, got 'class0' alone"):
        module.probe_dataloaders()
