"""One pass over the images for all probes, and what a probe does where memory, data or labels are not as usual."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from sklearn.linear_model import Ridge
from sklearn.metrics import average_precision_score, r2_score
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    default_collate,
)

from lightning_ssl import distributed
from lightning_ssl.callbacks import KNNProbe, LinearProbe, Probe
from lightning_ssl.callbacks._engine import embedding, stream
from lightning_ssl.functional import curvature, descent, fit_linear_probe, probes, regression
from lightning_ssl.metrics import LinearProbeAccuracy, evaluation
from tests.callbacks import strangers
from tests.callbacks.harness import History, ddp_trainer, trainer
from tests.callbacks.test_probes import by_hand
from tests.ddp import run_ranks


class Counted(strangers.Labelled):
    reads = 0

    def __getitem__(self, i):
        self.reads += 1
        return super().__getitem__(i)


def pair(cls=strangers.Labelled, train=48, test=24):
    return strangers.loader(cls(train, seed=5)), strangers.loader(cls(test, seed=6))


def look(callbacks, module=None, **kwargs):
    run = trainer(callbacks, **kwargs)
    run.validate(module or strangers.MeanLoss(), strangers.loader(strangers.Pairs(8)), verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items()}


def calls_of(module):
    counted = []
    module.register_forward_hook(lambda *_: counted.append(1))
    return counted


def test_images_are_read_and_encoded_once_for_all_probes():
    data, module = pair(Counted), strangers.MeanLoss()
    module.target = nn.Sequential(nn.Flatten(), nn.Linear(data[0].dataset[0][0].numel(), 6))
    for loader in data:
        loader.dataset.reads = 0
    online, target = calls_of(module.backbone), calls_of(module.target)
    inner = "backbone.0"
    values = look(
        [
            KNNProbe("backbone", data, k=5),
            LinearProbe("backbone", data),
            LinearProbe("backbone", (data[0], data[1]), features=inner, name="inner"),
            KNNProbe("target", data, k=5, name="target"),
        ],
        module,
    )
    assert {"val/knn_top1", "val/linear_top1", "val/inner/linear_top1", "val/target/knn_top1"} <= values.keys()
    seen = [loader.dataset.reads for loader in data]
    assert seen == [48 + 4, 24 + 4]  # each probe looks at one sample beforehand
    assert len(online) - 2 == len(target) == 3 + 2  # batches of 16; two are the validation's own
    alone = look([KNNProbe("target", pair(), k=5, name="target")], module)
    assert alone["val/target/knn_top1"] == values["val/target/knn_top1"]


class Scramble(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        for p in pl_module.backbone.parameters():
            p.data.mul_(-1.7)  # which no version counter notices


def test_weights_that_change_between_two_probes_are_embedded_again():
    data, module = pair(), strangers.MeanLoss()
    counted = calls_of(module.backbone)
    look([KNNProbe("backbone", data, k=5), Scramble(), LinearProbe("backbone", data)], module)
    assert len(counted) == 2 + 2 * (3 + 2)  # two are the validation's own


class Stream(IterableDataset):
    """Goes on for ever."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        i = 0
        while True:
            yield self.dataset[i % len(self.dataset)]
            i += 1


class Part(IterableDataset):
    """Some samples of a dataset, in an order; a few at a time where it is to yield batches."""

    def __init__(self, dataset, order, batch=None):
        self.dataset, self.order, self.batch = dataset, order, batch

    def __iter__(self):
        samples = [self.dataset[i] for i in self.order]
        if self.batch is None:
            return iter(samples)
        return (default_collate(samples[i : i + self.batch]) for i in range(0, len(samples), self.batch))


class Digest(Probe):
    """Changes with any sample, its label and its place."""

    def evaluate(self, train, test, num_classes, trainer):
        places = [1 + torch.arange(len(part.rows)) for part in (train, test)]
        both = zip((train, test), places, strict=True)
        return {"train_rows": len(train.rows)} | {
            f"rows_{i}": (part.rows.sum(dim=1) * at * (1 + part.labels)).sum() for i, (part, at) in enumerate(both)
        }


def _streamed(rank, ranks, form):
    """A probe of streams that each rank reads in its own way, and what was said."""
    torch.manual_seed(0)
    data = [loader.dataset for loader in pair()]
    form, _, number = form.partition(" ")
    orders = {
        "split": [range(rank, len(part), ranks) for part in data],
        "shuffled": [
            torch.randperm(len(part), generator=torch.Generator().manual_seed(rank)).tolist() for part in data
        ],
    }.get(form, [range(len(part)) for part in data])
    data = [Part(part, order, 3 if form == "batches" else None) for part, order in zip(data, orders, strict=True)]
    if form == "lists":
        data = [[default_collate(list(part))] for part in data]
    stated = (int(number), 24) if number else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ddp_trainer(rank, ranks, [Digest("backbone", data, num_samples=stated)])
        run.validate(strangers.MeanLoss(), strangers.loader(strangers.Pairs(8)), verbose=False)
    told = [str(w.message) for w in caught if "Digest" in str(w.message)]
    return {key: float(value) for key, value in run.callback_metrics.items() if "rows" in key}, told


@pytest.mark.parametrize("form", ["same", "split", "batches", "lists", "same 48"])
def test_streams_are_read_once_whether_ranks_share_or_split_them(form):
    expected, _ = _streamed(0, 1, "same")
    for values, told in run_ranks(2, _streamed, form):
        assert values == pytest.approx(expected, rel=1e-5) and not told


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("shuffled", r"`data`: samples of the train stream were read by several.*: 48 of 96"),
        ("same 60", "`num_samples`.*48 of 60"),
    ],
)
def test_streams_that_are_not_what_they_are_taken_for_are_named(form, words):
    (_, told), _ = run_ranks(2, _streamed, form)
    assert any(re.search(words, line) for line in told), told


@pytest.mark.parametrize("form", ["same", "split"])
def test_a_stated_number_is_what_is_taken(form):
    expected, told = _streamed(0, 1, "same 31")
    assert not told and expected["val/train_rows"] == 31
    for values, told in run_ranks(2, _streamed, f"{form} 31"):
        assert values == pytest.approx(expected, rel=1e-5) and not told


@pytest.mark.parametrize(
    ("targets", "x", "y", "batch"),
    [
        ("class", (5, 3, 8, 8), (5,), True),
        ("class", (10, 12, 3), (10,), True),
        ("class", (3, 8, 8), (), False),
        ("class", (7, 20), (7,), True),
        ("multilabel", (3, 8, 8), (3,), False),
        ("multilabel", (4, 3, 8, 8), (4, 6), True),
        ("continuous", (1, 32), (1,), False),
        ("continuous", (1, 6, 6, 6), (1,), False),
        ("continuous", (24, 3), (24,), False),
        ("continuous", (4, 3, 8, 8), (4, 2), True),
    ],
)
def test_samples_and_batches_of_a_stream_are_told_apart(targets, x, y, batch):
    item = torch.zeros(x), torch.zeros(y, dtype=torch.long)
    found = next(iter(stream.Grouped([item, item], targets)))
    assert found[0].shape == (x if batch else (2, *x)) and found[1].shape == (y if batch else (2, *y))


def test_samples_are_known_by_all_that_they_hold():
    ids = torch.arange(40).view(10, 4)
    batch = {
        "attention_mask": torch.ones(10, 4),
        "input_ids": ids,
        "grid": torch.zeros(3),
        "label": torch.zeros(10).long(),
    }
    assert len(set(stream.marks_of(batch))) == 10
    assert stream.marks_of({**batch, "input_ids": ids.flip(0)}) == stream.marks_of(batch)[::-1]
    assert stream.marks_of({"grid": torch.zeros(3), "label": batch["label"]}) is None


def test_what_is_there_twice_is_no_sign_of_ranks_that_read_the_same():
    few = torch.arange(4).repeat(5)
    assert stream.read_by_several([few, few]) == 0
    assert stream.read_by_several([torch.arange(20), torch.arange(10, 30)]) == 10


def test_ranks_that_share_a_part_of_a_stream_are_refused():
    assert stream.is_split([[1, 2], [3, 4]]) and not stream.is_split([[1, 2], [1, 2]])
    assert stream.is_split([[1, 2], [], []]) and stream.is_split([[1], [2], []])
    assert not stream.is_split([[], []]) and not stream.is_split([None, [1]]) and not stream.is_split([[1]])
    with pytest.raises(ValueError, match="each rank a part of its own"):
        stream.is_split([[1, 2], [1, 2], [3, 4]])


def _one_cannot_read(rank, ranks):
    class Broken(Part):
        def __iter__(self):
            raise OSError("the disk is gone")

    data = [(Broken if rank else Part)(loader.dataset, range(9)) for loader in pair()]
    with pytest.raises(MisconfigurationException) as refused:
        ddp_trainer(rank, ranks, [KNNProbe("backbone", data)]).validate(
            strangers.MeanLoss(), strangers.loader(strangers.Pairs(8)), verbose=False
        )
    return str(refused.value)


def test_data_that_one_rank_cannot_read_ends_the_run_on_all():
    well, broken = run_ranks(2, _one_cannot_read)
    assert "another rank could not read" in well and "OSError: the disk is gone" in broken


class Table:
    """As a Hugging Face dataset: rows by number, pictures as they are; not a torch Dataset."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        image, label = self.dataset[i]
        pixels = (image.sigmoid() * 255).byte().permute(1, 2, 0).numpy()
        return {"image": Image.fromarray(pixels), "label": label}


class Bytes(Dataset):
    """The same pictures as tensors."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        image, label = self.dataset[i]
        return (image.sigmoid() * 255).byte().float() / 255, label


def test_any_kind_of_data_is_embedded_alike():
    module = strangers.MeanLoss()
    train, test = (loader.dataset for loader in pair())
    expected = look([KNNProbe("backbone", (train, test), k=5)], module)
    streams = Stream(train), DataLoader(Stream(test), batch_size=7)
    assert look([KNNProbe("backbone", streams, k=5, num_samples=(48, 24))], module) == expected
    pictures = look([KNNProbe("backbone", (Table(train), Table(test)), k=5)], module)
    assert pictures == look([KNNProbe("backbone", (Bytes(train), Bytes(test)), k=5)], module)


def test_samples_that_a_batch_sampler_leaves_out_are_left_out():
    parts = [pair()[0].dataset] * 2
    drawn = [SubsetRandomSampler(range(0, 20)), SubsetRandomSampler(range(20, 48))]
    loaders = [
        DataLoader(part, batch_sampler=BatchSampler(some, 5, False)) for part, some in zip(parts, drawn, strict=True)
    ]
    expected = [DataLoader(part, batch_size=5, sampler=some) for part, some in zip(parts, drawn, strict=True)]
    module = strangers.MeanLoss()
    found = look([Digest("backbone", loaders)], module)
    assert found["val/train_rows"] == 20 and found == look([Digest("backbone", expected)], module)
    whole = BatchSampler(DistributedSampler(parts[0], 2, 1), 5, False)
    assert look([Digest("backbone", [DataLoader(parts[0], batch_sampler=whole)] * 2)])["val/train_rows"] == 48


def test_attributes_and_numbers_against_scikit_learn():
    module, values = strangers.MeanLoss(), {}
    for targets, cls in (("multilabel", strangers.Attributes), ("continuous", strangers.Values)):
        data = pair(cls)
        values |= look([LinearProbe("backbone", data, l2=1e-2, targets=targets)], module)
    x, _ = by_hand(module, "backbone", data[0].dataset)
    u, _ = by_hand(module, "backbone", data[1].dataset)
    x, u = torch.from_numpy(x), torch.from_numpy(u)
    y, v = (torch.stack([loader.dataset[i][1] for i in range(len(loader.dataset))]).double() for loader in data)
    mean, scale = x.mean(0), x.std(0, correction=0)
    model = Ridge(alpha=1e-2 * len(x)).fit(((x - mean) / scale).numpy(), y.numpy())
    assert values["val/linear_r2"] == pytest.approx(r2_score(v, model.predict(((u - mean) / scale).numpy())), abs=1e-4)
    y, v = (
        torch.stack([loader.dataset[i][1] for i in range(len(loader.dataset))]).long()
        for loader in pair(strangers.Attributes)
    )
    weight, bias = fit_linear_probe(x, y, 4, 1e-2)
    expected = average_precision_score(v.numpy(), (u @ weight.T + bias).numpy(), average="macro")
    assert values["val/linear_map"] == pytest.approx(expected, abs=1e-6)


def test_the_penalty_is_chosen_without_the_test_split():
    """Labels of the train split are noise in all but the strongest direction; those of the test split say otherwise."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(600, 40, generator=dice)
    y = (x[:, 0] + 2.0 * torch.randn(600, generator=dice) > 0).long()
    penalties, found = [1e-6, 1e-1], []
    for flip in (0, 1):
        metric = LinearProbeAccuracy(2, l2=penalties)
        metric.update(x, y, torch.arange(600), split="train")
        metric.update(x[:50], (y[:50] + flip) % 2, torch.arange(50), split="test")
        found.append(metric.compute())
    assert found[0]["l2"] == found[1]["l2"] == 1e-1
    alone = LinearProbeAccuracy(2, l2=1e-1)
    alone.update(x, y, torch.arange(600), split="train")
    alone.update(x[:50], y[:50], torch.arange(50), split="test")
    assert alone.compute()["top1"] == found[0]["top1"]  # fitted on all of the train split in the end


def test_few_shots_are_so_many_of_each_class():
    labels = torch.tensor([0] * 30 + [1] * 3 + [2] * 20)
    whole = evaluation.Shard(torch.arange(53.0)[:, None], labels, torch.arange(53), 53)
    together = evaluation.Together(torch.device("cpu"), sharded=False)
    few = evaluation.first_of_each_class(whole, 5, 3, together)
    assert torch.bincount(few.labels).tolist() == [5, 3, 5] and few.positions.tolist() == list(range(13))
    again = whole.part(torch.isin(whole.rows[:, 0], few.rows[:, 0]), together)
    assert all(torch.equal(a, b) for a, b in zip(again[:3], few[:3], strict=True)) and again.total == 13
    values = look([LinearProbe("backbone", pair(), shots=3)])
    assert 0 <= values["val/linear_top1"] <= 1


@pytest.mark.parametrize("baseline", [True, False])
def test_the_cost_is_said_before_the_first_step(monkeypatch, baseline):
    told, before = [], []
    monkeypatch.setattr(Probe, "tell", lambda self, message: told.append(message))

    class Steps(Callback):
        def on_train_batch_start(self, *_):
            before.append(" ".join(told))

    probe = LinearProbe("backbone", pair(), l2=[1e-3, 1e-2], baseline=baseline)
    trainer([probe, Steps()]).fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(16)))
    assert "a probe takes 48 + 24 rows" in before[0] and "MB" in before[0] and " s" in before[0]


def test_another_probes_wish_that_cannot_be_met_does_no_harm():
    class Uncalled(strangers.MeanLoss):
        def __init__(self):
            super().__init__()
            self.backbone.add_module("never", nn.Identity())
            self.backbone.forward = lambda x: self.backbone[1](self.backbone[0](x))

    data = pair()
    with pytest.warns(UserWarning, match=r"LinearProbe.*a probe failed.*was not called"):
        values = look(
            [KNNProbe("backbone", data, k=5), LinearProbe("backbone", data, features="backbone.never")], Uncalled()
        )
    assert "val/knn_top1" in values and "val/linear_top1" not in values


PLACES = {
    "embedding": (embedding, "_run"),
    "gathering": (evaluation, "_arrange"),
    "similarity": (probes, "_cosines"),
    "votes": (probes, "_votes"),
    "exchange": (distributed._Parcel, "load"),
    "test rows": (evaluation, "predict"),
    "principal directions": (torch.linalg, "eigh"),
    "curvature": (regression.Classes, "probabilities"),
    "heaviest rows": (torch, "bincount"),
    "blocks": (curvature.Curvature, "_own_moments"),
    "preconditioner": (torch.linalg, "cholesky_ex"),
    "regression": (regression.Classes, "loss"),
    "memory of steps": (descent.Descent, "_remember"),
    "coefficients": (regression.Design, "raw"),
}


def short_rank(place):
    return 0 if place in ("principal directions", "coefficients") else 1  # the first rank finds them for all


def short_of_memory(rank, ranks, place, short=True):
    """A fit whose first probe, before training, finds no memory at one place on one rank."""
    torch.manual_seed(0)
    owner, name = PLACES[place]
    original, left = getattr(owner, name), [1 if short and rank == short_rank(place) else 0]

    def fails(*args, **kwargs):
        if left[0]:
            left[0] = 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return original(*args, **kwargs)

    setattr(owner, name, fails)
    history, data = History(), pair(train=41, test=23)
    nearest = place in ("similarity", "votes")
    dtype = "float16" if nearest else "float32"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kinds = [KNNProbe] if nearest else [LinearProbe]
            callbacks = [kind("backbone", data, dtype=dtype) for kind in kinds]
            run = ddp_trainer(rank, ranks, callbacks, logger=history)
            run.fit(strangers.MeanLoss(), strangers.ordered_loader(strangers.Pairs(24), 12, rank, ranks))
    finally:
        setattr(owner, name, original)
    told = [str(w.message) for w in caught if "ran out of memory" in str(w.message)]
    return told, {key: float(value) for key, value in run.callback_metrics.items()}, run.global_step


@pytest.mark.parametrize("place", PLACES)
def test_memory_that_one_rank_cannot_have_is_a_warning_on_all(place):
    (_, expected, steps), *_ = run_ranks(1, short_of_memory, place, False)
    for told, values, taken in run_ranks(2, short_of_memory, place):
        assert len(told) == 1 and "half the chunk" in told[0] and f"rank {short_rank(place)}" in told[0]
        assert taken == steps
        found = {key: value for key, value in values.items() if key.startswith("val/")}
        assert found and found == pytest.approx({key: expected[key] for key in found}, abs=1e-6)


class Scarce(TorchDispatchMode):
    """Memory for the tensor that would be the n-th of 150 numbers and more is not to be had."""

    def __init__(self, n):
        super().__init__()
        self.left, self.seen = n, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace != "c10d" and not func.is_view and isinstance(out, torch.Tensor) and out.numel() >= 150:
            self.seen += 1
            if self.seen == self.left:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return out


def scarce(rank, ranks, first, every):
    """Three probes, again and again: at one place after the other one of the ranks finds no memory."""
    data, probe, tell = pair(train=161, test=83), Probe._probe, distributed.gather_objects

    def told_in_any_case(*args):  # plain data: some hundred bytes
        with _disable_current_modes():
            return tell(*args)

    def run(short, n):
        mode = Scarce(n)

        def watched(*args):
            with mode if rank == short else nullcontext():
                return probe(*args)

        Probe._probe, distributed.gather_objects = watched, told_in_any_case
        torch.manual_seed(0)
        kinds = [KNNProbe("backbone", data, k=5), LinearProbe("backbone", data, l2=[1e-1, 1e-2])]
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = ddp_trainer(rank, ranks, [*kinds, LinearProbe("backbone", data, shots=5, name="shots")])
                run.validate(strangers.MeanLoss(), strangers.loader(strangers.Pairs(8)), verbose=False)
        finally:
            Probe._probe, distributed.gather_objects = probe, tell
        told = [str(w.message) for w in caught if "ran out of memory" in str(w.message)]
        values = {key: float(value) for key, value in run.callback_metrics.items() if key.startswith("val/")}
        return distributed.gather_objects((mode.seen, told))[short], told, values, n

    (count, _), _, expected, _ = run(0, 0)
    return expected, [run(n % 2, n) for n in range(first, count, every)]


@pytest.mark.parametrize("first", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (27, 47))])
def test_memory_that_one_rank_lacks_anywhere_is_a_warning_on_all(first):
    both = run_ranks(2, scarce, first, 60)
    for expected, found in both:
        assert len(found) >= 10 and len(expected) >= 7
        for (seen, short), told, values, n in found:
            assert (n, seen, len(short), len(told)) == (n, seen, *2 * [int(seen >= n)])
            assert values == pytest.approx({key: expected[key] for key in values}, abs=1e-6)


def test_memory_that_is_short_in_one_process_is_a_warning(monkeypatch):
    def fails(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(probes, "_cosines", fails)
    with pytest.warns(UserWarning, match="KNNProbe.*ran out of memory, training goes on"):
        run = trainer([KNNProbe("backbone", pair(), k=5, every_n_epochs=9)])
        run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(16)))
    assert run.global_step == 1


class Spread(Probe):
    """A user's own, of shards."""

    def evaluate_shards(self, train, test, num_classes, trainer):
        total = self.together(trainer).sum(lambda: [train.rows.double().sum()], [()])[0]
        return {"mean": total / train.total, "rows": train.total, "kinds": float(train.rows.dtype == torch.bfloat16)}


def own_shards(rank, ranks):
    torch.manual_seed(0)
    run = ddp_trainer(rank, ranks, [Spread("backbone", pair(train=7, test=2), dtype="bfloat16")])
    run.validate(strangers.MeanLoss(), strangers.loader(strangers.Pairs(8)), verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items()}


def test_a_users_probe_of_shards():
    expected = run_ranks(1, own_shards)[0]
    assert expected["val/rows"] == 7 and expected["val/kinds"] == 1
    for values in run_ranks(2, own_shards):
        assert values == pytest.approx(expected, rel=1e-5)
