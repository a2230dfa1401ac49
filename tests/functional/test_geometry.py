"""Alignment, uniformity and effective rank against brute force and closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA

from lightning_ssl.functional import alignment, effective_rank, geometry, principal_plane, uniformity


def brute_uniformity(x, t):
    x = F.normalize(x, dim=1).tolist()
    total, pairs = 0.0, 0
    for i in range(len(x)):
        for j in range(i + 1, len(x)):
            total += math.exp(-t * sum((a - b) ** 2 for a, b in zip(x[i], x[j], strict=True)))
            pairs += 1
    return math.log(total / pairs)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0])
def test_alignment(alpha):
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    rows = [(F.normalize(a, dim=0) - F.normalize(b, dim=0)).norm() ** alpha for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(alignment(x, y, alpha), torch.stack(rows).mean())


@pytest.mark.parametrize("t", [0.5, 2.0, 200.0])
@pytest.mark.parametrize("block", [1, 2, 3, 4, 11, 12, 13, 512])
def test_uniformity_at_every_chunk_boundary(monkeypatch, block, t):
    monkeypatch.setattr(geometry, "_BLOCK", block)
    x = torch.randn(12, 3, dtype=torch.float64)
    assert uniformity(x, t).item() == pytest.approx(brute_uniformity(x, t), rel=1e-12)


@pytest.mark.parametrize("block", [5, 512])
def test_uniformity_gradient(monkeypatch, block):
    monkeypatch.setattr(geometry, "_BLOCK", block)
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(uniformity, (x,))


def test_uniformity_of_a_collapsed_batch_is_zero():
    assert uniformity(torch.ones(600, 8)).item() == pytest.approx(0, abs=1e-6)


def test_uniformity_of_extreme_rows_is_that_of_their_directions():
    x = torch.randn(9, 4)
    torch.testing.assert_close(uniformity(x * torch.logspace(-30, 30, 9)[:, None]), uniformity(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_features_are_taken_in_float32(dtype):
    x, y = torch.randn(20, 6).to(dtype), torch.randn(20, 6).to(dtype)
    torch.testing.assert_close(uniformity(x), uniformity(x.double()).float())
    torch.testing.assert_close(alignment(x, y), alignment(x.double(), y.double()).float())
    torch.testing.assert_close(effective_rank(x), effective_rank(x.double()).float())


def test_effective_rank_closed_forms():
    orthogonal = torch.linalg.qr(torch.randn(20, 6, dtype=torch.float64)).Q
    assert effective_rank(orthogonal).item() == pytest.approx(6)
    one_hot = torch.outer(torch.randn(20, dtype=torch.float64), torch.randn(6, dtype=torch.float64))
    assert effective_rank(one_hot).item() == pytest.approx(1)
    # Singular values 1 and 3: q = 1/4, 3/4.
    expected = math.exp(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert effective_rank(torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))).item() == pytest.approx(expected)


def test_principal_plane_is_scikit_learns_pca():
    x = torch.randn(30, 5, dtype=torch.float64) + torch.tensor([1.0, 0, 0, 2, 0], dtype=torch.float64)
    plane, share = principal_plane(x, centre=True)
    pca = PCA(2).fit(F.normalize(x, dim=1).numpy())
    expected = torch.from_numpy(pca.transform(F.normalize(x, dim=1).numpy()))
    torch.testing.assert_close(plane.abs(), expected.abs())  # up to the axes' signs
    assert share.item() == pytest.approx(pca.explained_variance_ratio_.sum())


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize(("rows", "dim"), [(30, 5), (5, 30), (9, 9)])
def test_principal_plane_is_the_leading_singular_plane(rows, dim, centre):
    """By the smaller Gram matrix: the same coordinates as a singular value decomposition's."""
    x = torch.randn(rows, dim, dtype=torch.float64) + 0.5
    plane, share = principal_plane(x, centre=centre)
    unit = F.normalize(x, dim=1)
    unit = unit - unit.mean(0) if centre else unit
    u, s, _ = torch.linalg.svd(unit, full_matrices=False)
    torch.testing.assert_close(plane.abs(), (u[:, :2] * s[:2]).abs(), atol=1e-10, rtol=1e-8)
    assert share.item() == pytest.approx((s[:2].square().sum() / s.square().sum()).item())


def resultant_length(plane):
    return F.normalize(plane, dim=1).mean(0).norm().item()


@pytest.mark.parametrize(("rows", "dim"), [(512, 64), (64, 512)])
def test_collapse_is_one_point_of_the_circle(rows, dim):
    """RAFT Fig. 5: complete collapse is one point, healthy features go round; centred, both would be even rings."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    collapsed = torch.randn(dim, generator=generator, dtype=torch.float64) + 1e-3 * noise
    assert resultant_length(principal_plane(collapsed)[0]) > 0.999
    assert resultant_length(principal_plane(collapsed, centre=True)[0]) < 0.2
    assert resultant_length(principal_plane(noise)[0]) < 0.2
    exact = torch.ones(rows, dim)
    plane, share = principal_plane(exact)
    assert resultant_length(plane) == pytest.approx(1, abs=1e-5) and share.item() == pytest.approx(1, abs=1e-5)


def test_effective_rank_gradient():
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(effective_rank, (x,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: uniformity(torch.ones(1, 3)), "at least 2 rows"),
        (lambda: uniformity(torch.ones(3)), "matrix"),
        (lambda: uniformity(torch.tensor([[1.0, 0.0], [0.0, 0.0]])), "all-zero rows, the first at index 1"),
        (lambda: uniformity(torch.tensor([[1.0, 0.0], [math.nan, 0.0]])), "non-finite rows, the first at index 1"),
        (lambda: uniformity(torch.ones(2, 2), t=0.0), "`t` must be positive"),
        (lambda: uniformity(torch.ones(2, 2, dtype=torch.long)), "floating point"),
        (lambda: alignment(torch.ones(2, 3), torch.ones(3, 3)), "same shape"),
        (lambda: alignment(torch.ones(0, 3), torch.ones(0, 3)), "at least 1 rows"),
        (lambda: effective_rank(torch.zeros(4, 3)), "all zero"),
        (lambda: principal_plane(torch.ones(4, 1)), "at least 2 dimensions"),
        (lambda: effective_rank(torch.full((4, 3), math.inf)), "non-finite"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("t", [100.0, 1000.0])
def test_a_narrow_kernel_neither_overflows_nor_underflows(t):
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert uniformity(x, t).item() == pytest.approx(0.0, abs=1e-3)
    assert uniformity(x * torch.tensor([[1.0], [-1.0]]), t).item() == pytest.approx(-4 * t)


@pytest.mark.parametrize("seed", range(6))
def test_the_plane_has_a_sign_of_its_own(seed):
    x = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    unit = torch.nn.functional.normalize(x, dim=1)
    centred = unit - unit.mean(dim=0)
    directions = torch.linalg.lstsq(centred, principal_plane(x)[0]).solution  # [5, 2]
    assert (directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)) > 0).all()
