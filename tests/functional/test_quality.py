"""Each label-free quantity against its definition written plainly, and against a package that people use."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_ssl import functional
from lightning_ssl.functional.quality import slices

N, V, D = 400, 3, 24


def views(seed=0):
    """Views grouped by sample, of uneven variances, off the origin."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.3, 3, D, dtype=torch.float64)
    samples = torch.randn(N, 1, D, generator=g, dtype=torch.float64) * scale + 0.5
    return samples + 0.4 * torch.randn(N, V, D, generator=g, dtype=torch.float64)


def entropy_rank(values):
    p = values / values.sum() + 1e-7
    return math.exp(-sum(q * math.log(q) for q in p))


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def plain(x):
    """All of them, as loops over numpy's SVD of all rows; x is [N, V, d]."""
    n, v, d = x.shape
    rows = x.reshape(n * v, d)
    singular = np.linalg.svd(rows, compute_uv=False)
    centred = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2 / len(rows)
    first, last = 11, d
    i = np.arange(first, last + 1)
    alpha = -np.polyfit(np.log(i), np.log(centred[first - 1 : last]), 1, w=np.sqrt(1 / i))[0]
    sphere = unit(rows)
    mu, cov = sphere.mean(0), np.cov(sphere.T, bias=True)
    on_sphere = np.linalg.svd(sphere - mu, compute_uv=False)
    root = np.linalg.eigh(cov)[0].clip(0) ** 0.5
    means = x.mean(1)
    between = sum(np.outer(m - means.mean(0), m - means.mean(0)) for m in means) / n
    within = sum(np.outer(x[a, b] - means[a], x[a, b] - means[a]) for a in range(n) for b in range(v)) / (n * v)
    values, vectors = np.linalg.eigh(within + 1e-4 * np.eye(d))
    half = vectors @ np.diag(values**-0.5) @ vectors.T
    return {
        "rankme": entropy_rank(singular),
        "alpha_req": alpha,
        "spectrum_area": np.mean([on_sphere[: k + 1].sum() / on_sphere.sum() for k in range(d)]),
        "stable_rank": (rows**2).sum() / singular[0] ** 2,
        "wasserstein_uniformity": math.sqrt((mu**2).sum() + 1 + np.trace(cov) - 2 / math.sqrt(d) * root.sum()),
        "sliced_gaussianity": epps_pulley(rows, slices(d, 16).numpy()),
        "lidar": entropy_rank(np.linalg.eigvalsh(half @ between @ half)),
    }


def epps_pulley(rows, directions):
    t = np.linspace(-5, 5, 17)
    normal = np.exp(-(t**2) / 2)
    found = []
    for a in directions.T:
        wave = np.exp(1j * np.outer(rows @ a, t)).mean(0)
        error = np.abs(wave - normal) ** 2 * normal
        found.append(len(rows) * np.sum((error[1:] + error[:-1]) / 2 * np.diff(t)))
    return np.mean(found)


FUNCTIONS = {
    "rankme": functional.rankme,
    "alpha_req": functional.alpha_req,
    "spectrum_area": functional.cumulative_spectrum_area,
    "stable_rank": functional.stable_rank,
    "wasserstein_uniformity": functional.wasserstein_uniformity,
    "sliced_gaussianity": lambda x: functional.sliced_gaussianity(x, directions=16),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, "lidar"])
def test_a_quantity_is_its_definition(name):
    x = views()
    found = functional.lidar(x) if name == "lidar" else FUNCTIONS[name](x.flatten(0, 1))
    assert float(found) == pytest.approx(plain(x.numpy())[name], rel=1e-10)


def test_the_closed_forms():
    x = torch.eye(8, dtype=torch.float64)
    both = torch.cat([x, -x])
    assert float(functional.rankme(both)) == pytest.approx(8, rel=1e-5)
    assert float(functional.stable_rank(both)) == pytest.approx(8)
    assert float(functional.wasserstein_uniformity(both)) == pytest.approx(0, abs=1e-7)
    point = torch.ones(5, 8, dtype=torch.float64)
    assert float(functional.wasserstein_uniformity(point)) == pytest.approx(math.sqrt(2))
    assert float(functional.stable_rank(point)) == pytest.approx(1)
    assert float(functional.alpha_req(point)) == math.inf or float(functional.alpha_req(point)) > 5
    decay = torch.diag(torch.arange(1, 301, dtype=torch.float64) ** -0.75)
    assert float(functional.alpha_req(torch.cat([decay, -decay]))) == pytest.approx(1.5)


def test_lost_dimensions_move_what_uniformity_hardly_sees():
    """512 to 64 dimensions in use: uniformity moves by 3 %, the Wasserstein form fivefold, RankMe eightfold."""
    g = torch.Generator().manual_seed(0)
    full = torch.randn(2048, 512, generator=g)
    cut = full.clone()
    cut[:, 64:] = 0
    changed = float(functional.uniformity(cut) / functional.uniformity(full))
    assert 0.95 < changed < 1
    forms = [float(functional.wasserstein_uniformity(x)) for x in (full, cut)]
    assert forms[1] > 2 * forms[0]
    assert float(functional.rankme(full)) > 480 and 60 < float(functional.rankme(cut)) < 66


def test_lidar_groups_the_views_of_a_sample():
    x = views()
    mixed = x.reshape(V, N, D).transpose(0, 1)  # the same rows in groups of different samples
    assert float(functional.lidar(x)) != pytest.approx(float(functional.lidar(mixed)), rel=1e-3)
    signal = torch.zeros(N, V, D, dtype=torch.float64)
    signal[:, :, :4] = x[:, :1, :4]
    assert float(functional.lidar(signal)) == pytest.approx(4, rel=0.35)  # four directions tell samples apart


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_prototype_use_is_its_definition(temperature):
    g = torch.Generator().manual_seed(1)
    logits, teacher = (torch.randn(50, 7, generator=g, dtype=torch.float64) for _ in range(2))
    found = functional.prototype_use(logits, temperature, teacher, 0.5)
    p = torch.softmax(logits / temperature, 1).numpy()
    q = torch.softmax(teacher / 0.5, 1).numpy()
    mean = p.mean(0)
    assert float(found.mean_assignment_entropy) == pytest.approx(-(mean * np.log(mean)).sum(), rel=1e-10)
    assert float(found.assignment_entropy) == pytest.approx(np.mean([-(r * np.log(r)).sum() for r in p]), rel=1e-10)
    assert float(found.used) == pytest.approx(len(set(p.argmax(1))) / 7)
    assert float(found.teacher_kl) == pytest.approx(np.mean((q * np.log(q / p)).sum(1)), rel=1e-10)
    assert math.isnan(functional.prototype_use(logits).teacher_kl)


def test_target_lag_of_a_moving_average():
    """Steady updates u: the average at momentum m is m / (1 - m) updates behind."""
    m, online, target, update = 0.9, torch.zeros(5).double(), torch.zeros(5).double(), torch.ones(5).double() * 0.1
    for _ in range(400):
        previous, online = online, online + update
        target = m * target + (1 - m) * online
    assert float(functional.target_lag([online], [target], [previous])) == pytest.approx(m / (1 - m), rel=1e-6)
    assert float(functional.target_lag([online], [online], [previous])) == 0


def test_mode_growth():
    before, after = torch.tensor([4.0, 1.0]).double(), torch.tensor([4.0, 0.5]).double()
    assert functional.mode_growth(before, after, 10).tolist() == pytest.approx([0, -math.log(2) / 10])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: functional.lidar(torch.randn(5, 4)), "grouped by sample"),
        (lambda: functional.lidar(torch.randn(5, 1, 4)), "V >= 2"),
        (lambda: functional.rankme(torch.full((3, 2), math.nan)), "non-finite"),
        (lambda: functional.prototype_use(torch.randn(4, 3), temperature=0), "`temperature` must be positive"),
        (lambda: functional.prototype_use(torch.randn(4, 3), 1.0, torch.randn(4, 2)), "`teacher` must have the shape"),
        (lambda: functional.target_lag([torch.ones(2)], [torch.ones(3)], [torch.ones(2)]), "the same weights"),
        (lambda: functional.mode_growth(torch.ones(3), torch.ones(2), 1), "the same dimension"),
        (lambda: functional.wasserstein_uniformity(torch.zeros(3, 2)), "all-zero"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# The package takes eigenvalues where RankMe's paper has singular values, and decomposes LiDAR's matrix as if it were
# features; so the same steps are taken from our parts.


def test_rankme_equals_reptrix():
    reptrix = pytest.importorskip("reptrix.rankme")
    x = views().flatten(0, 1)
    assert float(functional.rankme(x, centre=True, power=2)) == pytest.approx(reptrix.get_rankme(x), rel=1e-9)


def test_lidar_equals_reptrix():
    reptrix = pytest.importorskip("reptrix.lidar")
    x = views()
    matrix = functional.lidar_matrix(x, delta=1e-3 / V)  # theirs sums over views where the paper averages
    theirs = reptrix.get_lidar(x.float(), N, V, del_sigma_augs=1e-3)
    assert float(functional.rankme(matrix, centre=True, power=2)) == pytest.approx(float(theirs), rel=1e-4)


def test_alpha_equals_reptrix():
    reptrix = pytest.importorskip("reptrix.alpha")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 128, generator=g, dtype=torch.float64) * torch.arange(1, 129) ** -0.6
    assert float(functional.alpha_req(x)) == pytest.approx(reptrix.get_alpha(x)[0], rel=1e-9)
