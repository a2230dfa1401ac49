import itertools

import pytest
import torch
import torch.nn.functional as F

from lightning_ssl.nn import BatchNormParts, build_norm

PARTS = ("keep", "detach", "omit")


def by_hand(g, x, mean, std, eps=1e-5):
    """dL/dx for upstream gradient g, derived on paper."""
    centred, scale = x - x.mean(0), torch.rsqrt(x.var(0, correction=0) + eps)
    if std == "omit":
        grad, through_variance = g, torch.zeros_like(g)
    else:
        grad = g * scale
        y = (x if mean == "omit" else centred) * scale
        # d(scale)/dx_i = -scale^3 (x_i - mean)/N; the variance is about the batch mean in every variant.
        through_variance = -centred * scale**2 * (g * y).mean(0) if std == "keep" else torch.zeros_like(g)
    if mean == "keep":
        grad = grad - grad.mean(0)
    return grad + through_variance


@pytest.mark.parametrize("mean,std", itertools.product(PARTS, PARTS))
def test_gradient_of_every_combination_is_as_derived(mean, std):
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn(9, 4, dtype=torch.float64)
    (BatchNormParts(mean, std)(x) * g).sum().backward()
    torch.testing.assert_close(x.grad, by_hand(g, x.detach(), mean, std))


@pytest.mark.parametrize("mean,std", itertools.product(PARTS, PARTS))
def test_detaching_changes_the_gradient_but_not_the_output(mean, std):
    x = torch.randn(9, 4, dtype=torch.float64)
    kept = BatchNormParts(*("keep" if part == "detach" else part for part in (mean, std)))
    torch.testing.assert_close(BatchNormParts(mean, std)(x), kept(x))


def test_all_parts_kept_are_batch_normalisation():
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn(9, 4, dtype=torch.float64)
    expected = F.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(BatchNormParts()(x), expected)
    ours, theirs = (torch.autograd.grad((y * g).sum(), x)[0] for y in (BatchNormParts()(x), expected))
    torch.testing.assert_close(ours, theirs)


def test_all_parts_omitted_are_the_identity():
    x = torch.randn(3, 4)
    assert torch.equal(BatchNormParts("omit", "omit")(x), x)


@pytest.mark.parametrize(
    "spec,mean,std",
    [("mean", "keep", "omit"), ("detached_std", "omit", "detach"), ("mean, detached_std", "keep", "detach")],
)
def test_names(spec, mean, std):
    layer = build_norm(spec, 4)
    assert (layer.mean, layer.std) == (mean, std)
    assert not list(layer.parameters()) and not list(layer.buffers())


@pytest.mark.parametrize("spec", ["", "bach", "mean,mean", "mean;std", "detached_batch"])
def test_unknown_names_are_refused(spec):
    with pytest.raises(ValueError, match="detached_"):
        build_norm(spec, 4)
