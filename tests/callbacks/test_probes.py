"""The probes' accuracies are those of features embedded by hand, on any kind of probe data."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_ssl.callbacks import KNNProbe, LinearProbe
from lightning_ssl.callbacks._engine.replay import evaluation_mode
from lightning_ssl.callbacks.probe import shard
from tests.callbacks import strangers
from tests.callbacks.harness import History, ddp_trainer, trainer
from tests.ddp import run_ranks


def loaders(train=48, test=24, cls=strangers.Labelled, **kwargs):
    return strangers.loader(cls(train, seed=5), **kwargs), strangers.loader(cls(test, seed=6), **kwargs)


def by_hand(module, path, dataset):
    encoder = module.get_submodule(path)
    with torch.no_grad(), evaluation_mode(encoder):
        features = encoder(dataset.pairs.images).flatten(1)
    return features.double().numpy(), dataset.pairs.labels.numpy()


@pytest.mark.parametrize("cls", [strangers.Labelled, strangers.Dicts])
def test_accuracies_against_scikit_learn(cls, tmp_path):
    module, data, history = strangers.LightlyBYOL(), loaders(cls=cls, shuffle=True), History()
    x, y = by_hand(module, "backbone", data[0].dataset)
    u, v = by_hand(module, "backbone", data[1].dataset)
    before = KNeighborsClassifier(7, metric="cosine", weights=lambda d: torch.exp(-torch.tensor(d) / 0.1).numpy())
    expected = before.fit(x, y).score(u, v)
    callbacks = [KNNProbe("backbone", data, k=7), LinearProbe("backbone", data, l2=1e-2)]
    trainer(callbacks, logger=history, max_epochs=3).fit(module, strangers.loader(strangers.Pairs(64)))
    assert history.series("val/knn_top1")[0] == pytest.approx(expected)
    assert set(history.series("val/linear_top1")) == {0, 3, 7, 11}  # before training, and with each epoch's last step

    x, y = by_hand(module, "backbone", data[0].dataset)
    u, v = by_hand(module, "backbone", data[1].dataset)
    mean, scale = x.mean(0), x.std(0)
    after = LogisticRegression(C=1 / (1e-2 * len(x)), tol=1e-8, max_iter=5000).fit((x - mean) / scale, y)
    assert history.series("val/linear_top1")[11] == pytest.approx(after.score((u - mean) / scale, v))
    assert history.series("val/linear_top5")[11] == 1.0  # four classes


def test_datasets_do_as_well_as_loaders():
    module, values = strangers.MeanLoss(), []
    for data in (loaders(), tuple(loader.dataset for loader in loaders())):
        run = trainer([KNNProbe("backbone", data, k=5)])
        run.validate(module, strangers.loader(strangers.Pairs(8)), verbose=False)
        values.append(run.callback_metrics["val/knn_top1"])
    assert values[0] == values[1]


def test_a_checkpoint_is_chosen_by_a_probe(tmp_path):
    saver = ModelCheckpoint(tmp_path, monitor="val/knn_top1", mode="max")
    callbacks = [KNNProbe("backbone", loaders(), k=5), saver]
    run = trainer(callbacks, max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(32)), strangers.loader(strangers.Pairs(8)))
    assert saver.best_model_score is not None


def test_several_probes_and_intervals():
    history, data = History(), loaders()
    callbacks = [
        KNNProbe("backbone", data, k=5),
        KNNProbe("backbone.0", data, k=5, every_n_epochs=3, baseline=False),
        KNNProbe("backbone", loaders(30, 20), k=5, name="other", every_n_epochs=None, every_n_steps=3),
    ]
    run = trainer(callbacks, logger=history, max_epochs=4)
    run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(32)))
    assert set(history.series("val/backbone/knn_top1")) == {0, 1, 3, 5, 7}
    assert set(history.series("val/backbone.0/knn_top1")) == {5, 7}  # the third epoch, and the last
    assert set(history.series("val/other/knn_top1")) == {0, 3, 6}


class Indexed(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return torch.full((3, 8, 8), float(i)), i % 2


def _shards(rank, world_size):
    run = ddp_trainer(rank, world_size, [])
    full = DataLoader(Indexed(), batch_size=2, shuffle=True)
    part = DataLoader(Subset(Indexed(), [1, 2, 5]), batch_size=4)
    return [[(batch[0][:, 0, 0, 0].tolist(), at.tolist()) for batch, at in shard(run, x)] for x in (full, part)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_sample_is_embedded_once(world_size):
    shards = run_ranks(world_size, _shards)
    for number, samples in ((0, set(range(7))), (1, {1, 2, 5})):
        values = [value for rank in shards for batch, _ in rank[number] for value in batch]
        places = [place for rank in shards for _, at in rank[number] for place in at]
        assert len(values) == len(samples) and set(values) == samples
        assert sorted(places) == list(range(len(samples)))


class ProbeModule(L.LightningDataModule):
    num_classes = 4

    def train_dataloader(self):
        return strangers.loader(strangers.Pairs(32))

    def probe_dataloaders(self):
        return loaders()


def test_a_data_module_with_probe_loaders():
    module, run = strangers.MeanLoss(), trainer([KNNProbe("backbone", k=5), LinearProbe("backbone", ProbeModule())])
    run.fit(module, datamodule=ProbeModule())
    assert {"val/knn_top1", "val/linear_top1"} <= run.callback_metrics.keys()


class Unlabelled(strangers.Labelled):
    def __getitem__(self, i):
        return super().__getitem__(i)[0]


class OneClass(strangers.Labelled):
    def __getitem__(self, i):
        return super().__getitem__(i)[0], 2


class Views(strangers.Labelled):
    def __getitem__(self, i):
        return self.pairs[i][:2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"`data` is missing.*pass `data=\(train_loader, test_loader\)`"),
        (loaders(cls=Unlabelled), "must yield .image, label. or a dict"),
        (loaders(cls=Views), "one clean image tensor"),
        (loaders(cls=OneClass), r"one class only \(label 2\)"),
        (loaders(test=0), "test set is empty"),
        (loaders()[:1], r"pair \(train_loader, test_loader\)"),
        (L.LightningDataModule(), "has no `probe_dataloaders"),
    ],
)
def test_bad_probe_data_is_refused_before_training(data, message):
    for cls in (KNNProbe, LinearProbe):
        module = strangers.MeanLoss()
        with pytest.raises(MisconfigurationException, match=message):
            trainer([cls("backbone", data)]).fit(module, strangers.loader(strangers.Pairs(16)))


def test_k_above_the_bank_is_clamped():
    with pytest.warns(UserWarning, match="`k=999` is more than the 48 samples"):
        run = trainer([KNNProbe("backbone", loaders(), k=999)])
        run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(16)))
    assert "val/knn_top1" in run.callback_metrics
