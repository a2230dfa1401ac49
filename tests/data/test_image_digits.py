"""The embedded digits: batches, probe loaders, and their independence of the number of ranks."""

import torch

from lightning_ssl.data import ImageDataModule, ProbeBatch, ViewBatch
from tests.ddp import run_ranks


def _epoch(module, epoch):
    """{index: the bits of all views} of one training epoch, and the sets of indices batch by batch."""
    loader = module.train_dataloader()
    loader.sampler.set_epoch(epoch)
    pixels, batches = {}, []
    for raw in loader:
        batch = module.on_after_batch_transfer(raw, 0)
        batches.append(batch.index.tolist())
        for row, index in enumerate(batch.index.tolist()):
            pixels[index] = [view[row].numpy().tobytes() for view in batch.views]
    return pixels, batches


def _rank_epoch(rank, world_size, epoch):
    module = ImageDataModule(batch_size=128 // world_size)
    module.setup()
    return _epoch(module, epoch)


def test_two_ranks_see_what_one_sees_bit_for_bit():
    pixels, batches = _rank_epoch(0, 1, 3)
    shards = run_ranks(2, _rank_epoch, 3)
    assert shards[0][0].keys().isdisjoint(shards[1][0])
    assert {**shards[0][0], **shards[1][0]} == pixels
    for alone, first, second in zip(batches, shards[0][1], shards[1][1], strict=True):
        assert set(alone) == {*first, *second}


def _rank_probe(rank, world_size):
    train, test = ImageDataModule().probe_dataloaders()
    return [(batch.index, batch.label, batch.image) for batch in train], [batch.index for batch in test]


def test_probe_loaders_give_every_sample_once():
    alone, _ = _rank_probe(0, 1)
    shards = run_ranks(2, _rank_probe)
    index = torch.cat([rows for shard in shards for rows, _, _ in shard[0]])
    image = torch.cat([image for shard in shards for _, _, image in shard[0]])
    assert sorted(index.tolist()) == list(range(1437))
    assert torch.equal(image[index.argsort()], torch.cat([image for _, _, image in alone]))
    assert sorted(torch.cat([rows for shard in shards for rows in shard[1]]).tolist()) == list(range(360))


def test_batches():
    module = ImageDataModule(batch_size=32, clean_image=True)
    module.setup()
    batch = module.on_after_batch_transfer(next(iter(module.train_dataloader())), 0)
    assert isinstance(batch, ViewBatch)
    assert [view.shape for view in batch.views] == [(32, 3, 32, 32)] * 2
    assert not torch.equal(*batch.views)
    probe = next(iter(module.probe_dataloaders()[0]))
    assert isinstance(probe, ProbeBatch)
    train = torch.cat([b.image for b in module.probe_dataloaders()[0]])
    assert torch.equal(train[batch.index], batch.image)
