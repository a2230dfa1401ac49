"""What a training step costs besides its networks: pieces, precision, operator calls, collectives."""

from __future__ import annotations

from functools import partial

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssl import distributed
from lightning_ssl.data import ImageDataModule, ViewBatch
from lightning_ssl.methods import simclr
from tests.callbacks.harness import ddp_trainer, trainer
from tests.ddp import run_ranks
from tests.pretend.cases import METHODS, method

LOSSES = ["nce", "simple", "triplet", "exact_nce", "exact_simple"]


class Made(TorchDispatchMode):
    """Counts operator calls, and how many numbers the largest tensor has that one of them made."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        made = out if isinstance(out, (tuple, list)) else [out]
        self.largest = max([self.largest, *(x.numel() for x in made if isinstance(x, Tensor))])
        return out


def contrast(model, n, dim=8, clean=False):
    generator = torch.Generator().manual_seed(n)
    z1, z2 = (torch.randn(n, dim, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    unit = [torch.nn.functional.normalize(z, dim=1) for z in (z1, z2)]
    rows = torch.nn.functional.normalize(z1.detach() + z2.detach(), dim=1) if clean else None
    loss = model._contrast(*unit, rows)
    loss.backward()
    return loss.detach(), z1.grad, z2.grad


@pytest.mark.parametrize("negatives", ["all", 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_simclr_in_pieces_is_the_whole(loss, negatives, monkeypatch):
    model = method("SimCLR", loss=loss, negatives=negatives)
    whole = contrast(model, 12, clean=loss.startswith("exact"))
    monkeypatch.setattr(simclr, "CHUNK", 24 * 5)  # five anchors at a time
    pieces = contrast(model, 12, clean=loss.startswith("exact"))
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_mask_of_negatives_is_their_index():
    """The loss that masks the anchor's own sample, against the one that lists all others."""
    model = method("SimCLR")
    listed = method("SimCLR", negatives=2 * (12 - 1))
    for a, b in zip(contrast(model, 12), contrast(listed, 12), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("negatives", ["all", 4])
def test_simclrs_work_on_the_host_does_not_grow_with_the_batch(negatives):
    calls = []
    for n in (16, 512):
        model = method("SimCLR", negatives=negatives)
        with Made() as made:
            contrast(model, n)
        calls.append(made.calls)
    assert calls[0] == calls[1] < 250


@pytest.mark.slow
def test_simclr_holds_no_more_than_a_piece_of_the_distances():
    """4,096 samples: 67 million distances, of which no tensor holds more than 2^24 (and a column)."""
    with Made() as made:
        contrast(method("SimCLR"), 4096)
    assert made.largest <= simclr.CHUNK * (1 + 1 / 4096)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("name", METHODS)
def test_half_precision_weights(name, precision):
    # In half precision Adam's usual eps of 1e-8 is 0, and it divides 0 by 0.
    options = {"optimizer": partial(torch.optim.Adam, lr=1e-3, eps=1e-4)} if precision == "16-true" else {}
    model = method(name, **options)
    run = trainer([], max_steps=2, max_epochs=1, limit_val_batches=1, precision=precision)
    run.fit(model, datamodule=ImageDataModule("digits", batch_size=16))
    half = torch.bfloat16 if precision == "bf16-true" else torch.float16
    assert {p.dtype for p in model.parameters()} == {half}
    assert run.callback_metrics["train/loss"].isfinite() and run.callback_metrics["train/loss"].dtype == torch.float32


def collectives(rank, world_size, name):
    """Of ours, those of a training step by name, in the third step; DDP's own are not among them."""
    seen, begin = [], distributed._begin
    distributed._begin = lambda kind: (seen.append(kind), begin(kind))[1]
    try:
        model, data = method(name), ImageDataModule("digits", batch_size=8)
        steps = []
        model.on_train_batch_end = lambda *_: (steps.append(list(seen)), seen.clear())
        run = ddp_trainer(rank, world_size, [], max_steps=3, limit_val_batches=0)
        run.fit(model, datamodule=data)
        return steps[2]
    finally:
        distributed._begin = begin


# The mean of the losses for the log, and what the mathematics needs.
EXPECTED = {
    "SimCLR": ["gather_rows", "all_reduce_sum", "all_reduce_sum"],
    "BYOL": ["all_reduce_sum"],
    "SimSiam": ["all_reduce_sum"],
    "DirectPred": ["all_reduce_sum", "all_reduce_sum", "broadcast"],
    "BarlowTwins": ["all_reduce_sum"] * 6,  # three sums, the losses' mean, and two sums for the gradient
    "RAFT": ["all_reduce_sum"],
    "BYOLPrime": ["all_reduce_sum"],
}


@pytest.mark.parametrize("name", ["SimCLR", "BYOL", "BarlowTwins", "DirectPred"])
def test_collectives_of_a_step(name):
    assert run_ranks(2, collectives, name) == [EXPECTED[name]] * 2


def barlow(rank, world_size, dim, counts):
    """The loss and the gradient of this rank's rows, and the collectives it took."""
    begun, begin = [], distributed._begin
    distributed._begin = lambda kind: (begun.append(kind), begin(kind))[1]
    try:
        model = method("BarlowTwins", lambd=0.1).double()
        z = torch.randn(2, sum(counts), dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
        own = z[:, sum(counts[:rank]) : sum(counts[: rank + 1])].clone().requires_grad_()
        model.project = lambda x: x
        model.counts = lambda x: list(counts)
        loss = model.losses(ViewBatch(tuple(own), None, None, None))["loss"]
        loss.backward()
        return float(loss), own.grad.numpy(), begun
    finally:
        distributed._begin = begin


@pytest.mark.parametrize("dim", [6, 40])
@pytest.mark.parametrize("counts", [(4, 4), (7, 1), (8, 0)])
def test_barlows_matrix_from_own_rows_or_gathered_ones(dim, counts):
    (alone,) = run_ranks(1, barlow, dim, (8,))
    found = run_ranks(2, barlow, dim, counts)
    gradient = numpy.concatenate([grad for _, grad, _ in found], axis=1)
    assert [loss for loss, *_ in found] == pytest.approx([alone[0]] * 2, rel=1e-10)
    # DDP takes the mean over ranks: the gradients are those of the sum of both ranks' equal losses.
    assert gradient / 2 == pytest.approx(alone[1], rel=1e-8, abs=1e-12)
    # Of wide features the rows go over, of narrow ones the matrix.
    assert ("gather_rows" in found[0][2]) == (dim == 40)
