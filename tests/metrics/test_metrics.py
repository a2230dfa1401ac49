"""Every metric on 1, 2 and 3 gloo ranks equals the functional value on the concatenated data."""

import pickle
from functools import partial

import pytest
import torch
from sklearn.metrics import r2_score
from torch import nn
from torchmetrics import MetricCollection

from lightning_ssl import functional
from lightning_ssl.functional import probes
from lightning_ssl.metrics import (
    Alignment,
    CorrelationBound,
    EffectiveRank,
    EigenspaceAlignment,
    FeatureQuality,
    KNNAccuracy,
    LinearProbeAccuracy,
    PrototypeUse,
    SecondMoment,
    Uniformity,
    evaluation,
)
from tests.ddp import run_ranks

CLASSES, D = 4, 6


def make_data(n=37, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(n, D, generator=generator) * 2 + 1 for _ in range(2))
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    return x.to(dtype), y.to(dtype), labels


def predictor():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(D, D, generator=generator)


# name -> (the metric, how a batch of rows `take` is fed to it, the value on all rows)
def alignment_case():
    return (
        Alignment(alpha=1.5),
        lambda m, x, y, labels, take: m.update(x[take], y[take]),
        lambda x, y, labels: {"": functional.alignment(x, y, 1.5)},
    )


def uniformity_case():
    return (
        Uniformity(t=1.0),
        lambda m, x, y, labels, take: m.update(x[take]),
        lambda x, y, labels: {"": functional.uniformity(x, 1.0)},
    )


def second_moment_case():
    return (
        SecondMoment(),
        lambda m, x, y, labels, take: m.update(x[take]),
        lambda x, y, labels: {"": functional.second_moment(x)},
    )


def effective_rank_case():
    return (
        EffectiveRank(),
        lambda m, x, y, labels, take: m.update(x[take]),
        lambda x, y, labels: {"": functional.effective_rank(x)},
    )


def correlation_case(unbiased):
    def expected(x, y, labels):
        l_cor = functional.correlation_loss(x, unbiased)
        moment = functional.second_moment(x / x.norm(dim=1, keepdim=True) * D**0.5)
        return {
            "l_cor": l_cor,
            "l_bound": functional.generalization_bound(l_cor, D, CLASSES),
            "correlation": moment,
        }

    return CorrelationBound(CLASSES, unbiased), lambda m, x, y, labels, take: m.update(x[take]), expected


def eigenspace_case(kind):
    bias = kind == "affine"

    def feed(m, x, y, labels, take):
        if kind == "weight":
            m.update(x[take], weight=predictor())
        else:
            m.update(x[take], outputs=y[take])

    def expected(x, y, labels):
        F = functional.second_moment(x)
        W = predictor().to(x.dtype) if kind == "weight" else functional.effective_predictor(x, y, bias)
        values = functional.eigenspace_alignment(F, W)
        s = values.eigenvalues
        return {
            **values._asdict(),
            "cosine_mean": values.cosines.mean(),
            "cosine_weighted": (values.cosines * s).sum() / s.sum(),
            "commutator_norm": functional.commutator_norm(F, W),
            "asymmetry": functional.asymmetry(W),
            "smallest_symmetric_value": torch.linalg.eigvalsh((W + W.T) / 2).min(),
        }

    return EigenspaceAlignment(bias=bias), feed, expected


def knn_case():
    def feed(m, x, y, labels, take):
        m.update(x[take], labels[take], take, split="bank")
        m.update(y[take], labels[take], take, split="query")

    def expected(x, y, labels):
        ranked = functional.knn_predict(y, x, labels, CLASSES, k=5)
        hits = ranked == labels[:, None]
        return {"top1": hits[:, 0].double().mean(), "top5": torch.tensor(1.0)}

    return KNNAccuracy(CLASSES, k=5), feed, expected


def linear_case():
    def feed(m, x, y, labels, take):
        m.update(x[take], labels[take], take, split="train")
        m.update(y[take], labels[take], take, split="test")

    def expected(x, y, labels):
        weight, bias = functional.fit_linear_probe(x, labels, CLASSES, 1e-3)
        hits = (y @ weight.T + bias).argsort(dim=1, descending=True) == labels[:, None]
        top5 = hits[:, :5].any(dim=1).double().mean()
        return {"top1": hits[:, 0].double().mean(), "top5": top5, "l2": torch.tensor(1e-3)}

    return LinearProbeAccuracy(CLASSES, l2=1e-3), feed, expected


def quality_case():
    def expected(x, y, labels):
        rows = torch.stack([x, y], dim=1)
        flat = rows.flatten(0, 1)
        return {
            "rankme": functional.rankme(flat),
            "alpha_req": functional.alpha_req(flat),
            "spectrum_area": functional.cumulative_spectrum_area(flat),
            "stable_rank": functional.stable_rank(flat),
            "wasserstein_uniformity": functional.wasserstein_uniformity(flat),
            "sliced_gaussianity": functional.sliced_gaussianity(flat, 16),
            "lidar": functional.lidar(rows),
            "modes": torch.linalg.eigvalsh(functional.second_moment(flat)).flip(0),
        }

    return (
        FeatureQuality(directions=16),
        lambda m, x, y, labels, take: m.update(torch.stack([x[take], y[take]], dim=1)),
        expected,
    )


def prototype_case():
    return (
        PrototypeUse(0.5, 0.3),
        lambda m, x, y, labels, take: m.update(x[take], y[take]),
        lambda x, y, labels: functional.prototype_use(x, 0.5, y, 0.3)._asdict(),
    )


CASES = {
    "alignment": alignment_case,
    "quality": quality_case,
    "prototypes": prototype_case,
    "uniformity": uniformity_case,
    "second_moment": second_moment_case,
    "effective_rank": effective_rank_case,
    "correlation": partial(correlation_case, False),
    "correlation_unbiased": partial(correlation_case, True),
    "eigenspace_weight": partial(eigenspace_case, "weight"),
    "eigenspace_linear": partial(eigenspace_case, "linear"),
    "eigenspace_affine": partial(eigenspace_case, "affine"),
    "knn": knn_case,
    "linear": linear_case,
}

# How the 37 rows fall to the ranks; what is missing falls to nobody's loss: each layout covers all rows.
LAYOUTS = {
    "strided": lambda n, world: [list(range(r, n, world)) for r in range(world)],
    "uneven": lambda n, world: (
        [list(range(n - 2 * (world - 1)))] + [[n - 2 * r - 2, n - 2 * r - 1] for r in range(world - 1)]
    ),
    "one_rank_has_nothing": lambda n, world: [[]] * (world - 1) + [list(range(n))],
}


def as_dict(value):
    return value if isinstance(value, dict) else {"": value}


def assert_values(got, expected, rtol=1e-5):
    got = as_dict(got)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            got[key].double(), value.double(), rtol=rtol, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


def compute_on_rank(rank, world_size, name, layout, batch):
    metric, feed, _ = CASES[name]()
    data = make_data()
    mine = LAYOUTS[layout](len(data[0]), world_size)[rank]
    for start in range(0, len(mine), batch):
        feed(metric, *data, torch.tensor(mine[start : start + batch]))
    first = as_dict(metric.compute())
    again = as_dict(metric.compute())  # the reduction must not be applied twice
    assert all(torch.equal(first[key], again[key]) for key in first)
    return first


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_the_concatenated_data(name, layout, world_size):
    x, y, labels = make_data()
    expected = CASES[name]()[2](x.double(), y.double(), labels)
    for values in run_ranks(world_size, compute_on_rank, name, layout, 8):
        assert_values(values, expected)


def padded_knn(rank, world_size):
    """As a padding DistributedSampler deals: 7 samples on 3 ranks, the first two again at the end."""
    x, y, labels = make_data()
    metric = KNNAccuracy(CLASSES, k=3)
    take = torch.tensor([[0, 3, 6], [1, 4, 0], [2, 5, 1]])[rank]
    metric.update(x[take], labels[take], take, split="bank")
    metric.update(y[take], labels[take], take, split="query")
    return metric.compute()["top1"]


def test_knn_drops_what_a_sampler_repeats():
    x, y, labels = (t[:7] for t in make_data())
    expected = (functional.knn_predict(y, x, labels, CLASSES, k=3)[:, 0] == labels).double().mean()
    assert all(value == expected for value in run_ranks(3, padded_knn))
    # The repeated rows would change the result, else this test could not fail.
    again = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1])
    votes = functional.knn_predict(y[again], x[again], labels[again], CLASSES, k=3)[:, 0]
    assert (votes == labels[again]).double().mean() != expected


def go_on(rank, world_size):
    """Rows in shuffled order, some on both ranks; the state after `compute`, and what more rows then make of it."""
    x, y, labels = make_data()
    metric, found = LinearProbeAccuracy(CLASSES, 1e-2), []
    for part in (torch.arange(24), torch.arange(24, 37)):
        take = part[torch.randperm(len(part), generator=torch.Generator().manual_seed(rank))]
        for some in take.split(5):
            metric.update(x[some], labels[some], some, split="train")
            metric.update(y[some], labels[some], some, split="test")
        found.append({name: float(value) for name, value in metric.compute().items()})
        metric._computed = None
    (rows,), (at,) = metric.train_features, metric.train_indices
    return found, torch.equal(rows, x[at]), sorted(at.tolist()) == list(range(37))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_fed_stays_after_compute(world_size):
    x, y, labels = make_data()
    for found, same, every in run_ranks(world_size, go_on):
        for values, n in zip(found, (24, 37), strict=True):
            weight, bias = functional.fit_linear_probe(x[:n], labels[:n], CLASSES, 1e-2)
            top1 = ((y[:n] @ weight.T + bias).argmax(dim=1) == labels[:n]).double().mean()
            assert values["top1"] == pytest.approx(float(top1))
        assert same and every


def test_of_equal_scores_the_first_class_counts():
    dice = torch.Generator().manual_seed(0)
    scores = torch.randint(4, (500, 7), generator=dice).float()
    scores[torch.rand(500, 7, generator=dice) < 0.1] = torch.nan
    truth = torch.randint(7, (500,), generator=dice)
    ranked = scores.argsort(dim=1, descending=True, stable=True)
    expected = (ranked == truth[:, None]).int().argmax(dim=1)
    known = ~scores.gather(1, truth[:, None]).isnan()[:, 0]
    found = evaluation.places_of(scores, truth)
    assert torch.equal(found[known], expected[known]) and bool((found[~known] >= 6).all())


@pytest.mark.parametrize("targets", ["class", "multilabel", "continuous"])
def test_predictions_count_alike_a_few_at_a_time(targets, monkeypatch):
    x, y, labels = make_data()
    labels = {"class": labels, "multilabel": nn.functional.one_hot(labels, CLASSES), "continuous": y[:, :CLASSES]}[
        targets
    ]
    train, test = (evaluation.Shard(rows, labels, torch.arange(37), 37) for rows in (x, y))
    together, found = evaluation.Together(x.device, sharded=False), []
    for budget, queries in ((2**25, 1024), (64, 16)):
        monkeypatch.setattr(probes, "_QUERIES", queries)
        linear = evaluation.linear_evaluation(train, test, CLASSES, [1e-1, 1e-2], together, targets, budget=budget)
        nearest = evaluation.knn_evaluation(train, test, CLASSES, 5, 0.1, together, targets, budget)
        found.append({**linear.values, **{f"knn_{name}": value for name, value in nearest.items()}})
    assert found[0] == pytest.approx(found[1], abs=1e-5) and len(found[0]) > 1


def test_a_call_only_adds_rows():
    """A part of one split has no value: torchmetrics would have lost the rows before it."""
    x, y, labels = make_data()
    called, fed = (KNNAccuracy(CLASSES, k=3) for _ in range(2))
    for some in torch.arange(37).split(10):
        for split, rows in (("bank", x), ("query", y)):
            assert called(rows[some], labels[some], some, split=split) is None
            fed.update(rows[some], labels[some], some, split=split)
    assert called.compute() == fed.compute()


def test_a_constant_target_counts_as_in_scikit_learn():
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=dice)
    targets = torch.stack([x[:, 0] + 0.1 * torch.randn(200, generator=dice), torch.full((200,), 1e4 + 0.1)], dim=1)
    for shift in (0.0, 1.0):
        metric = LinearProbeAccuracy(2, 1e-6, targets="continuous")
        metric.update(x, targets, torch.arange(200), split="train")
        metric.update(x[:50], targets[:50] + shift, torch.arange(50), split="test")
        weight, bias = functional.fit_ridge(x, targets, [1e-6])[0]
        expected = r2_score((targets[:50] + shift).double(), (x[:50] @ weight.T + bias).double())
        found = float(metric.compute()["r2"])
        assert found == pytest.approx(expected, abs=1e-6) or (not shift and found > expected)


def different_widths(rank, world_size):
    metric = SecondMoment()
    metric.update(torch.ones(2, 3 + rank))
    with pytest.raises(ValueError, match="different shapes on different ranks"):
        metric.compute()
    rows = Uniformity()
    rows.update(torch.ones(2, 3 + rank))
    with pytest.raises(ValueError, match="different row shapes"):
        rows.compute()
    return True


def nothing_anywhere(rank, world_size):
    for metric in (
        SecondMoment(),
        Uniformity(),
        Alignment(),
        EffectiveRank(),
        KNNAccuracy(2),
        CorrelationBound(2),
        FeatureQuality(),
        PrototypeUse(),
    ):
        with pytest.raises(ValueError, match="no rows on any rank"):
            metric.compute()
    return True


@pytest.mark.parametrize("case", [different_widths, nothing_anywhere])
def test_all_ranks_raise_together(case):
    assert run_ranks(2, case) == [True, True]


@pytest.mark.parametrize("name", CASES)
def test_pickle_clone_reset_and_forward(name):
    x, y, labels = make_data()
    metric, feed, expected = CASES[name]()
    want = expected(x.double(), y.double(), labels)
    feed(metric, x, y, labels, torch.arange(20))
    copies = [pickle.loads(pickle.dumps(metric)), metric.clone()]
    for copy in copies:
        feed(copy, x, y, labels, torch.arange(20, 37))
        assert_values(copy.compute(), want)
    metric.reset()
    feed(metric, x, y, labels, torch.arange(37))
    assert_values(metric.compute(), want)
    assert not list(nn.ModuleDict({"metric": metric}).state_dict()), "states stay out of checkpoints"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_rows(name, dtype):
    x, y, labels = make_data(dtype=dtype)
    metric, feed, expected = CASES[name]()
    feed(metric, x, y, labels, torch.arange(37))
    assert_values(metric.compute(), expected(x.double(), y.double(), labels), rtol=1e-4)


def test_metric_collection():
    x, _, _ = make_data()
    collection = MetricCollection([Uniformity(), SecondMoment(), EffectiveRank(), CorrelationBound(CLASSES)])
    collection.update(x[:20])
    collection.update(x[20:])
    values = collection.compute()
    torch.testing.assert_close(values["Uniformity"], functional.uniformity(x))
    torch.testing.assert_close(values["SecondMoment"].float(), functional.second_moment(x))
    torch.testing.assert_close(values["l_cor"].float(), functional.correlation_loss(x))
    collection.reset()
    collection(x)
    torch.testing.assert_close(collection.compute()["EffectiveRank"].float(), functional.effective_rank(x))


def test_sums_of_large_offsets_do_not_cancel():
    """Features far from the origin: float32 sums would lose the spread that the affine fit needs."""
    x = torch.randn(4000, 3) + 1000
    W = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.5, 0.0, 3.0]])
    metric = EigenspaceAlignment(bias=True)
    for part in x.split(100):
        metric.update(part, outputs=((part.double() - 1000) @ W.T.double() - 7))
    torch.testing.assert_close(metric._predictor().float(), W, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Alignment(alpha=0.0), "alpha"),
        (lambda: Uniformity(t=-1.0), "`t`"),
        (lambda: CorrelationBound(num_classes=0), "num_classes"),
        (lambda: KNNAccuracy(num_classes=3, k=0), "`k`"),
        (lambda: Alignment().update(torch.ones(2, 3), torch.ones(2, 4)), "same shape"),
        (lambda: Uniformity().update(torch.zeros(2, 3)), "all-zero"),
        (lambda: SecondMoment().update(torch.full((2, 3), float("nan"))), "non-finite"),
        (lambda: EffectiveRank().update(torch.ones(3)), "matrix"),
        (lambda: EigenspaceAlignment().update(torch.ones(2, 3)), "pass one of them"),
        (lambda: EigenspaceAlignment().update(torch.ones(2, 3), weight=torch.ones(2, 3)), "square"),
        (lambda: EigenspaceAlignment().update(torch.ones(2, 3), weight=torch.ones(2, 2)), r"\[3, 3\]"),
        (lambda: EigenspaceAlignment().update(torch.ones(2, 3), torch.ones(2, 4)), "shaped as `inputs`"),
        (lambda: KNNAccuracy(2).update(torch.ones(1, 2), torch.tensor([2]), torch.tensor([0]), "bank"), "must lie in"),
        (lambda: KNNAccuracy(2).update(torch.ones(1, 2), torch.tensor([1]), torch.tensor([0]), "test"), "split"),
        (lambda: KNNAccuracy(2).update(torch.ones(1, 2), torch.tensor([1]), torch.tensor([0, 1]), "bank"), "indices"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", ["quality", "prototypes"])
def test_streamed_sums_are_the_definition_in_double_precision(name):
    x, y, labels = make_data(dtype=torch.float64)
    metric, feed, expected = CASES[name]()
    for start in range(0, 37, 5):
        feed(metric, x, y, labels, torch.arange(start, min(start + 5, 37)))
    for key, value in expected(x, y, labels).items():
        torch.testing.assert_close(metric.compute()[key], value, rtol=1e-10, atol=1e-12)


def test_roundoff_adds_no_rank():
    metric = EffectiveRank()
    metric.update(torch.randn(500, 1, dtype=torch.float64) @ torch.randn(1, 64, dtype=torch.float64))
    assert metric.compute().item() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("temperature", "expected"), [(0.01, 1.0), (100.0, 0.0)])
def test_the_votes_have_the_temperature_that_was_asked_for(temperature, expected):
    """One near neighbour of the right class against two far ones of the other."""
    metric = KNNAccuracy(num_classes=2, k=3, temperature=temperature)
    bank = torch.tensor([[1.0, 0.1], [1.0, 1.0], [1.0, 1.0]])
    metric.update(bank, torch.tensor([0, 1, 1]), torch.arange(3), split="bank")
    metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([0]), split="query")
    assert metric.compute()["top1"].item() == expected
