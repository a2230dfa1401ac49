"""Whole runs on the pretend device: nothing mixes devices, and a non-finite loss is found late but not too late."""

import math

import pytest

from tests.pretend import cases

ABLATIONS = [
    ("SimCLR", {"negatives": 4, "loss": "triplet", "gradient_noise": 0.1}, {}),
    ("SimCLR", {"loss": "exact_nce"}, {"clean_image": True}),
    ("BYOL", {"predictor": "linear", "symmetric_predictor": True, "momentum_schedule": "cosine"}, {}),
    ("BYOL", {"projector_norm": "mean,detached_std", "tangential": True, "normalize": False}, {}),
    ("DirectPred", {"partitions": 2, "freq": 2}, {}),
    ("DirectPred", {"mode": "optimal"}, {}),
    ("BarlowTwins", {}, {"augmentation": "barlow_twins", "views": "augment"}),
]


@pytest.mark.parametrize(("name", "options", "settings"), ABLATIONS, ids=lambda x: x if isinstance(x, str) else "-")
def test_every_stage_of_a_method_stays_on_its_device(name, options, settings, on_device):
    assert math.isfinite(on_device(cases.ablations, name, options, **settings))


def test_the_device_refuses_what_a_gpu_refuses(on_device):
    found = on_device(cases.mixing)
    assert found == ["mix", "numpy", "generator", "sync", "sync", "up", "down"]


def test_functions_and_metrics_give_the_same_there(on_device):
    assert len(on_device(cases.functionals)) == 19


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("view", "the input views[1]"),
        ("weight", "the parameter projector.0.weight"),
        ("layer", "the output of backbone"),
    ],
)
def test_a_non_finite_loss_is_named_and_no_checkpoint_follows_it(what, name, on_device, tmp_path):
    message, saved, finite = on_device(cases.poisoned, what, 5, str(tmp_path))
    assert "non-finite loss at step 5 (epoch 0)" in message and name in message
    assert saved == ["step=4"] and finite


def test_direct_pred_finds_its_root_without_an_eigensolver(on_device):
    apart, moved = on_device(cases.direct_root)
    assert apart < 1e-6 < 0.1 < moved


def test_the_covariance_operator_is_the_same_there(on_device):
    off = on_device(cases.operator_there)
    assert len(off) == 6 and all(value < 1e-4 for value in off.values()), off


def test_leading_singular_vectors_are_found_without_a_decomposition(on_device):
    found = on_device(cases.leading_pairs)
    assert len(found) == 4 and all(abs(value) < 1e-9 for case in found for value in case), found
