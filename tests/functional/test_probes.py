"""The probes against scikit-learn."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from lightning_ssl.functional import fit_linear_probe, fit_ridge, knn_predict, probes, regression


def clusters(n=300, dim=12, classes=5, spread=1.0, dtype=torch.float64):
    labels = torch.randint(0, classes, (n,))
    centres = torch.randn(classes, dim, dtype=dtype)
    return centres[labels] * 0.7 + spread * torch.randn(n, dim, dtype=dtype), labels


@pytest.mark.parametrize("chunk", [1, 7, 100, 2**25])
@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (20, 0.1), (20, 0.01), (300, 0.5)])
def test_knn_is_scikit_learns(monkeypatch, chunk, k, temperature):
    """Cosine distance = 1 - cos, so exp(cos/T) is proportional to exp(-distance/T)."""
    bank, labels = clusters()
    queries, _ = clusters(n=60)
    monkeypatch.setattr(probes, "_SIMILARITIES", chunk * len(bank))
    if chunk == 7:
        monkeypatch.setattr(probes, "_QUERIES", 16)
    model = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distances: np.exp(-distances / temperature)
    ).fit(bank.numpy(), labels.numpy())
    scores = torch.from_numpy(model.predict_proba(queries.numpy()))
    ranked = knn_predict(queries, bank, labels, num_classes=5, k=k, temperature=temperature)
    assert ranked.shape == (60, 5)
    torch.testing.assert_close(scores.gather(1, ranked), scores.sort(dim=1, descending=True).values)
    assert (ranked.sort(dim=1).values == torch.arange(5)).all()


def test_knn_clamps_k_to_the_bank():
    bank, labels = clusters(n=10)
    assert (knn_predict(bank, bank, labels, 5, k=200) == knn_predict(bank, bank, labels, 5, k=10)).all()


@pytest.mark.parametrize(("n", "spread"), [(300, 0.3), (300, 1.0), (1000, 1.0)])  # a quarter of the last comes first
def test_linear_probe_is_scikit_learns(n, spread):
    x, labels = clusters(n=n, spread=spread)
    x = x @ torch.randn(12, 12, dtype=torch.float64) * torch.logspace(-3, 3, 12, dtype=torch.float64) + 5
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    l2 = 1e-3
    weight, bias = fit_linear_probe(x, labels, 5, l2=l2, tolerance=1e-9)
    model = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-8, max_iter=5000).fit(((x - mean) / std).numpy(), labels)
    # Adding one vector to all classes changes nothing but the penalty, which centres them at the optimum.
    torch.testing.assert_close(weight * std, torch.from_numpy(model.coef_), atol=1e-3, rtol=1e-3)
    offset = bias + weight @ mean
    expected = torch.from_numpy(model.intercept_)
    torch.testing.assert_close(offset - offset.mean(), expected - expected.mean(), atol=1e-3, rtol=1e-3)
    predictions = (x @ weight.T + bias).argmax(dim=1)
    assert (predictions.numpy() == model.predict(((x - mean) / std).numpy())).all()


def test_linear_probe_stands_at_a_stationary_point_of_its_objective():
    x, labels = clusters()
    weight, bias = fit_linear_probe(x, labels, 5, l2=0.01, tolerance=1e-8)
    std = x.std(dim=0, correction=0)
    standard = (x - x.mean(dim=0)) / std
    w = (weight * std).requires_grad_()
    b = (bias + weight @ x.mean(dim=0)).requires_grad_()
    loss = torch.nn.functional.cross_entropy(standard @ w.T + b, labels) + 0.005 * w.square().sum()
    loss.backward()
    assert max(w.grad.abs().max(), b.grad.abs().max()) < 1e-7


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_linear_probe_in_any_grad_mode_with_constant_features_and_low_precision(mode):
    with mode():
        x, labels = clusters(dtype=torch.float32)
        x[:, 3] = 7.1
        weight, bias = fit_linear_probe(x.bfloat16(), labels, 6)
    assert weight.isfinite().all() and bias.isfinite().all()
    assert weight[:, 3].abs().max() == 0
    assert ((x @ weight.T + bias).argmax(dim=1) == labels).float().mean() > 0.8


ROWS, LABELS = torch.eye(4), torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: knn_predict(ROWS, ROWS, LABELS, 2, k=0), "`k` must be at least 1, got 0"),
        (lambda: knn_predict(ROWS, ROWS, LABELS, 1), "must lie in"),
        (lambda: knn_predict(ROWS, ROWS, LABELS - 1, 2), "must lie in"),
        (lambda: knn_predict(ROWS, ROWS, LABELS[:3], 2), "one for each row"),
        (lambda: knn_predict(ROWS, ROWS, LABELS.float(), 2), "integers"),
        (lambda: knn_predict(ROWS, ROWS[:, :3], LABELS, 2), "all-zero"),
        (lambda: knn_predict(ROWS[:, :3] + 1, ROWS, LABELS, 2), "agree in dimension"),
        (lambda: knn_predict(ROWS, ROWS[:0], LABELS[:0], 2), "`bank` needs at least 1"),
        (lambda: knn_predict(ROWS, ROWS, LABELS, 2, temperature=0.0), "temperature"),
        (lambda: fit_linear_probe(ROWS, LABELS * 0, 2), "one class only"),
        (lambda: fit_linear_probe(ROWS, LABELS, 2, l2=0.0), "l2"),
        (lambda: fit_linear_probe(ROWS * math.nan, LABELS, 2), "non-finite"),
        (lambda: fit_linear_probe(ROWS, LABELS, 1), "must lie in"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_probe_that_ran_out_of_steps_says_so():
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(300, 8, generator=dice, dtype=torch.float64)
    labels = (x @ torch.randn(8, 3, generator=dice, dtype=torch.float64)).argmax(dim=1)
    with pytest.warns(UserWarning, match=r"`max_iter=3` steps were not enough for l2=1e-08"):
        fit_linear_probe(x, labels, 3, l2=1e-8, max_iter=3)
    with pytest.raises(ValueError, match="`max_iter` must be at least 1, got 0"):
        fit_linear_probe(x, labels, 3, max_iter=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_linear_probe(x, labels, 3, l2=1e-2)


def test_a_start_may_have_any_mean_over_classes_and_must_fit():
    x, labels = clusters(dtype=torch.float32)
    best = fit_linear_probe(x, labels, 5, l2=1e-2, tolerance=1e-6)
    start = regression.LinearProbeResult(best.weight + 0.5, best.bias - 3)
    found = fit_linear_probe(x, labels, 5, l2=1e-2, tolerance=1e-6, start=start)
    torch.testing.assert_close(found.weight, best.weight, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"`start` must have weights \[5, 12\], a row a class, got \[4, 12\]"):
        fit_linear_probe(x, labels, 5, start=regression.LinearProbeResult(best.weight[:4], best.bias[:4]))


def test_gradients_autocast_and_coarse_products_change_nothing():
    x, labels = clusters(n=3000, dtype=torch.float32)
    several, numbers = torch.nn.functional.one_hot(labels, 5), x[:, :2] + 1
    kinds = [
        lambda x, start: [*fit_linear_probe(x, labels, 5, start=start)],
        lambda x, start: [*fit_linear_probe(x, several, 5, start=start)],
        lambda x, _: [*fit_ridge(x, numbers, [1e-3])[0]],
        lambda x, _: [knn_predict(x[:50], x, labels, 5)],
    ]
    begin = fit_linear_probe(x[:1000], labels[:1000], 5)
    for kind in kinds:
        expected = kind(x, begin)
        variable = [part.clone().requires_grad_() for part in (x, *begin)]
        with torch.autocast("cpu", torch.bfloat16):
            found = kind(variable[0], regression.LinearProbeResult(*variable[1:]))
        assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("scale", [1e-24, 1e-10, 1e20])
def test_knn_of_features_of_any_size(scale):
    bank, labels = clusters(dtype=torch.float32)
    queries = clusters(n=60, dtype=torch.float32)[0]
    assert torch.equal(
        knn_predict(queries * scale, bank * scale, labels, 5, k=20), knn_predict(queries, bank, labels, 5, k=20)
    )
