"""The DataModule in a Trainer: order, ranks, workers, resume, bad arguments."""

import inspect
import os
import zlib

import lightning.pytorch as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_ssl.data import Augmentation, ImageDataModule, Nuisance, ViewBatch
from lightning_ssl.data.loader import ShardSampler
from tests.data.files import write_folder
from tests.ddp import run_ranks

# Lightning takes the argument since 2.6.
WEIGHTS_ONLY = {"weights_only": True} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}
# Before 2.5 Lightning counts the batch of a step's checkpoint twice; the samples are right all the same.
COUNTS_ON_RESUME = tuple(int(part) for part in L.__version__.split(".")[:2]) >= (2, 5)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Recorder(L.LightningModule):
    """Trains one weight and writes down what it sees: {(epoch, index): a digest of the sample's views}."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained, self.held_out, self.tested = [], [], []

    def training_step(self, batch, batch_idx):
        self.trained.append((self.trainer.current_epoch, batch_idx, digest(batch)))
        return self.weight * batch.views[0].mean()

    def validation_step(self, batch, batch_idx):
        self.held_out.append((self.trainer.current_epoch, batch_idx, digest(batch)))

    def test_step(self, batch, batch_idx):
        assert len(batch.views) == 1 and batch.views[0] is batch.image
        self.tested.extend(batch.index.tolist())

    def predict_step(self, batch, batch_idx):
        return batch.index

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def digest(batch):
    assert isinstance(batch, ViewBatch)
    views = torch.stack(batch.views, dim=1).flatten(1)
    return {index: zlib.crc32(row.numpy().tobytes()) for index, row in zip(batch.index.tolist(), views, strict=True)}


def trainer_for(world_size=1, **arguments):
    strategy = "ddp" if world_size > 1 else "auto"
    return L.Trainer(**{**QUIET, "enable_checkpointing": False, **arguments}, strategy=strategy, devices=world_size)


def fit_on(rank, world_size):
    """Two epochs and a test in this process, one of `world_size` with a process group, in global batches of 256."""
    names = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)}
    if world_size > 1:
        os.environ.update(names)
    try:
        model, data = Recorder(), ImageDataModule(batch_size=256 // world_size)
        trainer = trainer_for(world_size, max_epochs=2)
        trainer.fit(model, data)
        trainer.test(model, data, verbose=False)
        probed = [index for batch in data.probe_dataloaders()[0] for index in batch.index.tolist()]
        return model.trained, model.held_out, model.tested, probed
    finally:
        for name in names:
            os.environ.pop(name, None)


def test_ranks_share_the_batches_of_one_process():
    alone, ranks = fit_on(0, 1), run_ranks(2, fit_on)
    for kind in (0, 1):  # training, validation
        assert len(alone[kind]) == len(ranks[0][kind]) == len(ranks[1][kind]) > 0
        for whole, first, second in zip(alone[kind], ranks[0][kind], ranks[1][kind], strict=True):
            assert whole[:2] == first[:2] == second[:2]
            assert len(first[2]) == len(second[2]) == len(whole[2]) / 2
            assert whole[2] == {**first[2], **second[2]}
    for kind in (2, 3):  # test, probe: nothing is padded, nothing is lost
        assert sorted(alone[kind]) == sorted(ranks[0][kind] + ranks[1][kind])
    assert len(alone[2]) == 360 and len(alone[3]) == 1437


def test_epochs_differ_but_validation_views_stay():
    trained, held_out, _, _ = fit_on(0, 1)
    epochs = [{i: value for e, _, d in trained if e == epoch for i, value in d.items()} for epoch in (0, 1)]
    common = epochs[0].keys() & epochs[1].keys()
    assert len(common) > 1000
    assert all(epochs[0][index] != epochs[1][index] for index in common)
    first, last = ([d for e, _, d in held_out if e == epoch] for epoch in (0, 1))
    assert last == first[-len(last) :]  # the sanity check counts to epoch 0


def probe_on(rank, world_size):
    """Everything the probe loaders give without a Trainer."""
    return [
        [torch.cat(parts) for parts in zip(*loader, strict=True)] for loader in ImageDataModule().probe_dataloaders()
    ]


def test_probe_loaders_stand_alone():
    alone, ranks = probe_on(0, 1), run_ranks(2, probe_on)
    for split, (image, label, index) in enumerate(alone):
        assert index.tolist() == list(range(len(index)))
        order = torch.cat([rank[split][2] for rank in ranks]).argsort()
        for part, whole in enumerate((image, label, index)):
            assert torch.equal(torch.cat([rank[split][part] for rank in ranks])[order], whole)


def test_a_rank_may_have_no_samples():
    shards = [list(ShardSampler(range(3), rank, 8)) for rank in range(8)]
    assert shards == [[0], [1], [2], [], [], [], [], []]
    assert [len(ShardSampler(range(3), rank, 8)) for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("world_size", [2, 8])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world_size):
    def order(rank, ranks):
        sampler = ShardSampler(range(1437), rank, ranks, shuffle=True, even=True, seed=5)
        sampler.set_epoch(7)
        assert len(sampler) == 1437 // ranks  # as many steps on every rank
        return list(sampler)

    whole, shards = order(0, 1), [order(rank, world_size) for rank in range(world_size)]
    each = 64 // world_size
    assert len({len(shard) for shard in shards}) == 1
    for batch in range(1437 // 64):
        together = {row for shard in shards for row in shard[batch * each : (batch + 1) * each]}
        assert together == set(whole[batch * 64 : (batch + 1) * 64])


def test_the_clean_image_is_the_probes():
    data = ImageDataModule(batch_size=32, clean_image=True)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    probe = torch.cat([part.image for part in data.probe_dataloaders()[0]])
    assert torch.equal(probe[batch.index], batch.image)
    assert not torch.equal(*batch.views)


class Scheduled(Recorder):
    """Somebody else's module, whose schedule asks for the run's length."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Killed(Exception):
    pass


class KillAt(L.Callback):
    def __init__(self, step, mid_step=False):
        self.step, self.mid_step = step, mid_step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and not self.mid_step:
            raise Killed

    def on_before_optimizer_step(self, trainer, *_):
        if trainer.global_step == self.step and self.mid_step:
            raise Killed


# Epochs have five steps: in the middle of the second, with and without a worker that reads ahead, and at its end.
@pytest.mark.parametrize(("kill_at", "workers"), [(8, 0), (8, 1), (8, 2), (10, 0)])
@pytest.mark.parametrize("module", [Recorder, Scheduled])
def test_a_resumed_run_continues_as_if_never_stopped(tmp_path, kill_at, workers, module):
    def run(model, path=None, **arguments):
        data = ImageDataModule(batch_size=256, num_workers=workers, seed=3)
        checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        callbacks = [checkpoint, *arguments.pop("callbacks", [])]
        trainer = trainer_for(max_epochs=3, enable_checkpointing=True, callbacks=callbacks, limit_val_batches=0)
        trainer.fit(model, data, ckpt_path=path, **WEIGHTS_ONLY)

    whole, killed, resumed = module(), module(), module()
    run(whole)
    with pytest.raises(Killed):
        run(killed, callbacks=[KillAt(kill_at)])
    run(resumed, tmp_path / f"step={kill_at}.ckpt")
    assert len(whole.trained) == 15
    assert killed.trained == whole.trained[:kill_at]
    expected = whole.trained[kill_at:]
    if not COUNTS_ON_RESUME:
        resumed.trained, expected = (
            [(epoch, seen) for epoch, _, seen in trained] for trained in (resumed.trained, expected)
        )
    assert resumed.trained == expected


@pytest.mark.parametrize("module", [Recorder, Scheduled])
def test_a_run_stopped_twice_in_one_epoch_continues_each_time(tmp_path, module):
    def run(model, path=None, kill_at=None):
        checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = [checkpoint, *([KillAt(kill_at)] if kill_at else [])]
        trainer = trainer_for(max_epochs=2, enable_checkpointing=True, callbacks=callbacks, limit_val_batches=0)
        trainer.fit(model, ImageDataModule(batch_size=256), ckpt_path=path, **WEIGHTS_ONLY)

    whole, first, second, third = module(), module(), module(), module()
    run(whole)
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    with pytest.raises(Killed):
        run(first, kill_at=7)
    with pytest.raises(Killed):
        run(second, tmp_path / "step=6.ckpt", kill_at=9)
    run(third, tmp_path / "step=8.ckpt")
    parts = [*first.trained[:6], *second.trained[:2], *third.trained]
    assert [(epoch, seen) for epoch, _, seen in parts] == [(epoch, seen) for epoch, _, seen in whole.trained]


def test_every_epoch_has_an_order_of_its_own():
    sampler = ShardSampler(range(100), 0, 1, shuffle=True, seed=5)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == list(range(100))


@pytest.mark.parametrize("module", [Recorder, Scheduled])
def test_a_batch_that_failed_is_trained_on_after_the_resume(tmp_path, module):
    def run(model, path=None, **arguments):
        trainer = trainer_for(max_epochs=2, limit_val_batches=0, **arguments)
        trainer.fit(model, ImageDataModule(batch_size=256), ckpt_path=path, **WEIGHTS_ONLY)

    whole, killed, resumed = module(), module(), module()
    run(whole)
    with pytest.raises(Killed):
        run(killed, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(tmp_path), KillAt(7, mid_step=True)])
    run(resumed, tmp_path / "on_exception.ckpt")
    assert [seen[2] for seen in resumed.trained] == [seen[2] for seen in whole.trained[7:]]


@pytest.mark.parametrize("module", [Recorder, Scheduled])
def test_a_run_saved_when_it_had_ended_goes_on_with_a_whole_epoch(tmp_path, module):
    data, model, longer = ImageDataModule(batch_size=256), module(), module()
    trainer = trainer_for(max_epochs=1, limit_val_batches=0)
    trainer.fit(model, data)
    next(iter(data.train_dataloader()))  # on the side, it moves nothing
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer = trainer_for(max_epochs=2, limit_val_batches=0)
    trainer.fit(longer, data, ckpt_path=tmp_path / "end.ckpt", **WEIGHTS_ONLY)
    assert [(epoch, batch) for epoch, batch, _ in longer.trained] == [(1, batch) for batch in range(5)]


def test_workers_change_nothing(tmp_path):
    write_folder(tmp_path)
    epochs = []
    for workers in (0, 2):
        data = ImageDataModule("image_folder", str(tmp_path), batch_size=3, image_size=16, num_workers=workers)
        model = Recorder()
        trainer_for(max_epochs=2).fit(model, data)
        epochs.append(model.trained)
    assert len(epochs[0]) == 8 and epochs[0] == epochs[1]


def test_predict_and_overfit():
    data = ImageDataModule(batch_size=128, probe_batch_size=100)
    predicted = trainer_for().predict(Recorder(), data)
    assert torch.cat(predicted).tolist() == list(range(360))
    model = Recorder()
    trainer_for(overfit_batches=2, max_epochs=2).fit(model, data)
    assert [sorted(seen) for _, _, seen in model.trained[:2]] == [sorted(seen) for _, _, seen in model.trained[2:]]


def test_views_and_recipes():
    kinds = [
        {"views": "augment"},
        {"nuisance": False},
        {"views": "augment", "augmentation": "byol", "num_views": 3},
        {"views": "augment", "augmentation": [Augmentation(blur=1.0), "none"], "image_size": 40},
        {"nuisance": Nuisance(rotate=90.0)},
    ]
    for kind in kinds:
        data = ImageDataModule(batch_size=16, **kind)
        batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
        size = kind.get("image_size", 32)
        assert [view.shape for view in batch.views] == [(16, 3, size, size)] * kind.get("num_views", 2)
        assert batch.image is None and all(view.isfinite().all() for view in batch.views)
    byol = ImageDataModule(views="augment", augmentation="byol", num_views=3).pipeline.recipes
    assert [recipe.solarize for recipe in byol] == [0.0, 0.2, 0.0]


def test_augmentation_none_is_the_clean_image():
    data = ImageDataModule(batch_size=16, views="augment", augmentation="none", clean_image=True)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    for view in batch.views:
        assert (view - batch.image).abs().max() < 0.5 / 255 / 0.2 + 1e-5  # half a grey level


def test_yaml():
    parser = ArgumentParser()
    parser.add_class_arguments(ImageDataModule, "data")
    config = parser.parse_string(
        """
        data:
          views: augment
          num_views: 2
          augmentation: [{blur: 1.0, crop_scale: [0.2, 1.0]}, simclr]
          nuisance: {rotate: 5.0}
        """
    )
    data = parser.instantiate_classes(config).data
    assert data.pipeline.recipes == (Augmentation(blur=1.0, crop_scale=(0.2, 1.0)), Augmentation(blur=0.5))
    assert data.pipeline.nuisance == Nuisance(rotate=5.0)
    again = parser.parse_string(parser.dump(config))
    assert parser.instantiate_classes(again).data.pipeline == data.pipeline


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "cifar"}, r"`dataset` must be one of .*cifar10.*image_folder, got 'cifar'"),
        ({"views": "augment", "augmentation": "simclar"}, r"must be a preset, got 'simclar'; .*simclr"),
        ({"augmentation": "simclr"}, "set views='augment'"),
        ({"views": "resample", "nuisance": False}, "set views='augment'"),
        ({"dataset": "cifar10", "views": "resample"}, "set views='augment'"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"num_views": 0}, "`num_views` must be at least 1, got 0"),
        ({"on_corrupt": "ignore"}, "`on_corrupt` must be one of error, skip, got 'ignore'"),
        ({"views": "augment", "augmentation": ["byol"]}, "give it alone"),
        ({"views": "augment", "augmentation": {"blurr": 1.0}}, "must have known fields.*blurr"),
        ({"views": "augment", "augmentation": ["none"] * 3}, "at most a recipe a view, got 3 for 2"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ImageDataModule(**arguments)


def test_batch_larger_than_the_dataset():
    with pytest.raises(ValueError, match=r"`batch_size` must be at most 1437 .* 1437 training samples .* got 2000"):
        ImageDataModule(batch_size=2000).train_dataloader()
