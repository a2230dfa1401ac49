"""Anybody's folder of images: with classes and without, with a test split and without, of any size."""

import random

import pytest
import torch
from PIL import Image

from lightning_ssl.data import ImageDataModule
from lightning_ssl.data.folders import kind_of, read_folder, side_of
from lightning_ssl.runs.cli import main
from lightning_ssl.runs.own_data import chosen
from tests.test_cli import SHORT


def write(folder, count, side=8):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (side, side + 3), (number, 0, 0)).save(folder / f"{number:03}.png")


def names(part):
    return ["/".join(path.split("/")[-2:]) for path, _ in part]


def test_train_and_test_with_classes(tmp_path):
    for split, count in (("train", 4), ("valid", 2)):
        for name in ("a", "b"):
            write(tmp_path / split / name, count)
    found = read_folder(str(tmp_path))
    assert found.classes == ["a", "b"] and not found.held_out
    assert [label for _, label in found.train] == [0] * 4 + [1] * 4 and [label for _, label in found.test] == [
        0,
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("inside", ["", "train"])
def test_a_fifth_is_held_out_where_there_is_no_test_split(tmp_path, inside):
    for name in ("a", "b"):
        write(tmp_path / inside / name, 20)
    (tmp_path / inside / "a" / "notes.txt").write_text("no image")
    found = read_folder(str(tmp_path))
    assert found.held_out and len(found.train) == 32 and len(found.test) == 8
    assert not set(found.train) & set(found.test)
    assert all(path.split("/")[-2] == found.classes[label] for path, label in [*found.train, *found.test])
    assert {label for _, label in found.test} == {0, 1}  # drawn, and not the last class alone
    again = read_folder(str(tmp_path))
    assert again == found


def test_images_without_classes(tmp_path):
    write(tmp_path, 10)
    write(tmp_path / "deep" / "er", 5)
    found = read_folder(str(tmp_path))
    assert found.classes == [] and {label for _, label in found.train} == {-1}
    assert len(found.train) == 12 and len(found.test) == 3
    data = ImageDataModule(root=str(tmp_path), batch_size=4)
    assert not data.labelled and data.dataset == "image_folder"
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    assert batch.views[0].shape == (4, 3, 32, 32)
    with pytest.raises(ValueError, match="must have classes for a probe"):
        data.probe_dataloaders()


@pytest.mark.parametrize(
    ("side", "expected", "recipe"),
    [(8, 32, "cifar10"), (28, 32, "cifar10"), (64, 64, "stl10"), (90, 96, "stl10"), (300, 224, "simclr")],
)
def test_views_suit_the_images(tmp_path, side, expected, recipe):
    write(tmp_path, 3, side)
    data = ImageDataModule(root=str(tmp_path))
    assert (data.pipeline.size, data.facts.augmentation) == (expected, recipe)
    assert ImageDataModule(root=str(tmp_path), image_size=48).pipeline.size == 48
    assert side_of(str(tmp_path / "nothing"), 224) == 224


def test_what_lies_there_decides(tmp_path):
    assert kind_of(str(tmp_path)) == "image_folder"
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert ImageDataModule(root=str(tmp_path)).dataset == "cifar10"
    assert ImageDataModule().dataset == "digits"
    with pytest.warns(UserWarning, match="the digits are embedded"):
        ImageDataModule("digits", root=str(tmp_path))


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    write(tmp_path / "one" / "a", 1)
    write(tmp_path / "empty" / "a", 3)
    (tmp_path / "empty" / "b").mkdir()
    for name, words in (("one", "holds 1 image"), ("empty", r"without an image: \['b'\]"), ("none", "does not exist")):
        with pytest.raises(FileNotFoundError, match=words):
            ImageDataModule(root=str(tmp_path / name)).setup()


def test_the_command_chooses_and_says_what(tmp_path, capsys):
    write(tmp_path, 50)
    root = ("--data.root", str(tmp_path))
    assert chosen([root], []) == ["--data.dataset=image_folder", "--data.batch_size=10", "--trainer.max_epochs=100"]
    words = capsys.readouterr().out
    assert (
        "50 images" in words and "without classes: the probes are left out" in words and "10 of them held out" in words
    )
    assert "32 x 32 by the recipe of cifar10" in words
    assert chosen([root], [{"trainer": {"max_epochs": 3}}]) == ["--data.dataset=image_folder"]
    for flags, configs in [
        ([root, ("--data.dataset", "cifar10")], []),
        ([root], [{"data": {"init_args": {"dataset": "stl10"}}}]),
        ([("--name", "a")], []),
    ]:
        assert chosen(flags, configs) == []


@pytest.mark.slow
def test_a_folder_of_ones_own_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Without labels and a test split; the saved config runs again, on the same images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    monkeypatch.delenv("LIGHTNING_SSL_RUN", raising=False)
    paint = random.Random(0)
    (tmp_path / "mine").mkdir()
    for number in range(90):
        colour = tuple(paint.randrange(256) for _ in range(3))
        Image.new("RGB", (20, 20), colour).save(tmp_path / "mine" / f"{number}.jpg")
    short = [flag for flag in SHORT if "batch_size" not in flag]
    main(["fit", "--data.root", "mine", *short, "--trainer.max_epochs=1", "--name", "first"])
    words = capsys.readouterr().out
    assert "90 images in 'mine', without classes" in words and "kNN" not in words and "uniformity" in words
    main(["fit", "--config", "runs/first/config.yaml", "--name", "again"])
    first, again = (
        torch.load(f"runs/{run}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in ("first", "again")
    )
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
