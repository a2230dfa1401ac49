"""Hugging Face's datasets and WebDataset's shards, written here by those packages: the same batches as from memory."""

import io
import re
import sys

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssl.data import ImageDataModule
from lightning_ssl.runs.cli import main
from lightning_ssl.runs.own_data import chosen
from tests.callbacks.test_probe_shards import Digest
from tests.data.test_image import QUIET, WEIGHTS_ONLY, Recorder
from tests.test_cli import SHORT

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 24, 20, 3), dtype=np.uint8)  # 24 high
LABELS = [row % 3 for row in range(20)]


def png(row):
    file = io.BytesIO()
    Image.fromarray(PIXELS[row]).save(file, format="png")
    return file.getvalue()


def hugging_face(folder, form, rows=range(20), labels=True):
    """Some rows in one of the forms; returns what --data.root takes."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {"picture": [{"bytes": png(row), "path": None} for row in rows]}
    features = {"picture": datasets.Image()}
    if labels:
        columns["kind"] = [LABELS[row] for row in rows]
        features["kind"] = datasets.ClassLabel(names=["a", "b", "c"])
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    if form == "saved":
        made.save_to_disk(str(folder))
    elif form == "splits":
        datasets.DatasetDict({"train": made, "validation": made.select(range(6))}).save_to_disk(str(folder))
    else:
        (folder / "data").mkdir(parents=True)
        made.to_parquet(str(folder / "data" / "train-00000.parquet"))
        made.select(range(6)).to_parquet(str(folder / "data" / "test-00000.parquet"))
    return f"hf/{folder}"


def shards(folder, names=("train-000", "train-001", "test-000"), labels=True):
    """Twenty samples in two shards, the first six again in a third."""
    wds = pytest.importorskip("webdataset")
    folder.mkdir(parents=True)
    parts = {"train-000": range(12), "train-001": range(12, 20), "test-000": range(6)}
    for name in names:
        with wds.TarWriter(str(folder / f"{name}.tar")) as writer:
            for row in parts[name]:
                sample = {"__key__": f"sample{row:04}", "png": png(row), "json": {"row": row}}
                writer.write({**sample, "cls": LABELS[row]} if labels else sample)
    return f"wds/{folder}/train-{{000..001}}.tar"


MAKERS = {
    "parquet": lambda folder: hugging_face(folder, "parquet"),
    "splits": lambda folder: hugging_face(folder, "splits"),
    "shards": shards,
}


def in_memory():
    pixels, labels = torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.tensor(LABELS)
    return TensorDataset(pixels, labels), TensorDataset(pixels[:6], labels[:6])


def batches(data):
    return [data.on_after_batch_transfer(batch, 0) for batch in data.train_dataloader()]


@pytest.mark.parametrize("form", MAKERS)
def test_batches_are_those_of_the_same_images_in_memory(form, tmp_path):
    data = ImageDataModule(root=MAKERS[form](tmp_path / "d"), batch_size=4, image_size=16, clean_image=True)
    train, test = in_memory()
    plain = ImageDataModule(train, test_dataset=test, batch_size=4, image_size=16, augmentation="cifar10")
    plain.pipeline = data.pipeline
    assert data.num_classes == 3 and data.labelled
    seen = []
    for ours, theirs in zip(batches(data), batches(plain), strict=True):
        assert torch.equal(ours.index, theirs.index) and torch.equal(ours.label, theirs.label)
        assert all(torch.equal(a, b) for a, b in zip(ours.views, theirs.views, strict=True))
        seen += ours.index.tolist()
    assert sorted(seen) == list(range(20))
    for ours, theirs in zip(data.probe_dataloaders(), plain.probe_dataloaders(), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.image, b.image) and torch.equal(a.label, b.label)


@pytest.mark.parametrize("form", ["hf", "wds"])
def test_without_classes_and_a_test_split(form, tmp_path):
    make = {
        "hf": lambda: hugging_face(tmp_path / "d", "saved", labels=False),
        "wds": lambda: shards(tmp_path / "d", ("train-000", "train-001"), labels=False),
    }[form]
    data = ImageDataModule(root=make(), batch_size=4)
    assert not data.labelled and data.pipeline.size == 32 and data.facts.augmentation == "cifar10"
    assert (len(data.source.train), len(data.source.test)) == (16, 4) and data.source.held_out
    assert set(data.source.train.labels.tolist()) == {-1} and set(data.source.test.labels.tolist()) == {-1}
    rows = [data.source.train.read(row, "error")[0] for row in range(16)]
    held = [data.source.test.read(row, "error")[0] for row in range(4)]
    pixels = {bytes(torch.from_numpy(PIXELS[row]).permute(2, 0, 1).contiguous().numpy()) for row in range(20)}
    assert {bytes(image.contiguous().numpy()) for image in [*rows, *held]} == pixels  # each once


@pytest.mark.parametrize("form", ["parquet", "shards"])
@pytest.mark.parametrize("workers", [0, 2])
def test_views_do_not_depend_on_workers_or_ranks(form, workers, tmp_path, monkeypatch):
    root = MAKERS[form](tmp_path / "d")
    whole = batches(ImageDataModule(root=root, batch_size=4, num_workers=workers))
    found = {}
    for rank in range(2):
        data = ImageDataModule(root=root, batch_size=2)
        monkeypatch.setattr(data, "shard", lambda rank=rank: (rank, 2))
        found[rank] = batches(data)
    for step, batch in enumerate(whole):
        parts = [found[rank][step] for rank in range(2)]
        order = torch.cat([part.index for part in parts])
        assert sorted(order.tolist()) == sorted(batch.index.tolist())
        for view in range(2):
            views = torch.cat([part.views[view] for part in parts])
            rows = [order.tolist().index(int(i)) for i in batch.index]
            assert torch.equal(views[rows], batch.views[view])


class Keeper(Recorder):
    """Keeps the views themselves, too."""

    def training_step(self, batch, batch_idx):
        self.seen = [*getattr(self, "seen", ()), batch.views[0].detach().clone()]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("form", ["parquet", "shards"])
def test_a_resumed_run_goes_on_with_the_same_views(form, tmp_path):
    root = MAKERS[form](tmp_path / "d")

    def run(steps, path=None):
        saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        model = Keeper()
        trainer = L.Trainer(**QUIET, callbacks=[saving], max_steps=steps, limit_val_batches=0)
        trainer.fit(model, ImageDataModule(root=root, batch_size=4), ckpt_path=path, **WEIGHTS_ONLY)
        return model.seen

    whole, second = run(8), run(8, tmp_path / "step=3.ckpt")
    assert len(whole) == 8 and len(second) == 5
    assert all(torch.equal(a, b) for a, b in zip(second, whole[3:], strict=True))


def test_a_damaged_image_is_named_or_skipped(tmp_path):
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        for row in range(8):
            writer.write({"__key__": f"s{row}", "jpg": b"no image" if row == 5 else png(row), "cls": LABELS[row]})
    data = ImageDataModule(root=f"wds/{tmp_path}/a.tar", batch_size=2, image_size=16)
    row = [member.key for member in data.source.train.members].index("s5.jpg")
    with pytest.raises(RuntimeError, match=r"s5.jpg in .*a.tar cannot be decoded"):
        data.source.train.read(row, "error")
    with pytest.warns(UserWarning, match="skipped"):
        assert data.source.train.read(row, "skip")[0] is None


def test_the_command_says_what_it_found(tmp_path, capsys):
    root = shards(tmp_path / "d")
    assert chosen([("--data.root", root)], [])[0] == "--data.dataset=wds"
    words = capsys.readouterr().out
    assert "26 images in" in words and "of 3 classes" in words and "held out" not in words


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("hf/no/such/folder", "cannot be read by datasets"),
        ("hf/{here}/columns", r"must have a column of images.*got number"),
        ("wds/{here}/none-{{000..003}}.tar", "none-000.tar' cannot be read as a plain tar file"),
        ("wds/{here}/none-*.tar", "holds no image, in 0 tar file"),
        ("wds/https://example.org/a.tar", "must name files.*download the shards first"),
        ("wds/{here}/text.tar", "cannot be read as a plain tar file"),
    ],
)
def test_what_cannot_be_read_is_one_line(root, words, tmp_path, monkeypatch, capsys):
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("webdataset")
    datasets.Dataset.from_dict({"number": [1, 2]}).save_to_disk(str(tmp_path / "columns"))
    (tmp_path / "text.tar").write_text("no archive")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused(root.format(here=tmp_path), words, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("kind", "package"), [("hf", "datasets"), ("wds", "webdataset")])
def test_a_missing_package_is_one_line(kind, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    refused(f"{kind}/{tmp_path}/x", f"which is not installed: pip install {package}", tmp_path, monkeypatch, capsys)


def refused(root, words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--data.root", root, *SHORT])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-ssl: error:")]
    assert ended.value.code == 2 and len(said) == 1
    assert re.search(words, said[0]), said[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "shards"])
def test_from_the_command_line_and_again(form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    monkeypatch.delenv("LIGHTNING_SSL_RUN", raising=False)
    root = MAKERS[form](tmp_path / "d")
    short = [flag for flag in SHORT if "batch_size" not in flag]
    main(["fit", "--data.root", root, *short, "--trainer.max_epochs=1", "--name", "first"])
    assert "kNN probe" in capsys.readouterr().out
    main(["fit", "--config", "runs/first/config.yaml", "--name", "again"])
    first, again = (
        torch.load(f"runs/{run}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in ("first", "again")
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    main(["embed", "runs/first", "--output", "all.npz"])
    with np.load("all.npz") as file:
        assert len(file["features"]) == 26 and sorted(set(file["label"])) == [0, 1, 2]


def samples(folder, form):
    """Train and test data for a probe, as users of those packages write it."""
    if form.startswith("hf"):
        datasets = pytest.importorskip("datasets")
        root = hugging_face(folder, "splits").removeprefix("hf/")
        both = datasets.load_from_disk(root).rename_columns({"picture": "image", "kind": "label"})
        parts = both["train"], both["validation"]
        return [part.to_iterable_dataset() for part in parts] if form == "hf iterable" else parts
    wds = pytest.importorskip("webdataset")
    shards(folder)
    names = [[str(folder / f"train-00{i}.tar") for i in range(2)], str(folder / "test-000.tar")]
    plain = [wds.WebDataset(name, shardshuffle=False).decode("torchrgb").to_tuple("png", "cls") for name in names]
    if form == "wds batches":
        return [wds.WebLoader(part.batched(3), batch_size=None) for part in plain]
    return plain


@pytest.mark.parametrize("form", ["hf", "hf iterable", "wds", "wds batches"])
def test_probes_read_what_the_packages_yield(form, tmp_path):
    pixels, test = (part.tensors for part in in_memory())
    expected = probed([TensorDataset(x / 255, y) for x, y in (pixels, test)])
    assert len(expected) == 3 and expected["val/train_rows"] == 20
    assert probed(samples(tmp_path / "d", form), num_samples=(20, 6)) == pytest.approx(expected, rel=1e-5)


def probed(data, **kwargs):
    class Mean(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5, stride=5), torch.nn.Flatten())

        def validation_step(self, batch, batch_idx):
            pass

    trainer = L.Trainer(callbacks=[Digest("backbone", data, **kwargs)], **QUIET)
    trainer.validate(Mean(), DataLoader(TensorDataset(torch.zeros(1))), verbose=False)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}
