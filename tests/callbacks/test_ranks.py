"""On 1, 2 and 3 ranks each logged value is the same, and nothing waits for a rank that has nothing to say."""

from __future__ import annotations

import math
import tempfile
from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset

from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    CovarianceOperatorNorm,
    DirectPredictor,
    EffectiveRank,
    EigenspaceAlignment,
    FeatureQuality,
    KNNProbe,
    LinearProbe,
    PredictorReset,
    RepresentationCircle,
    SymmetricPredictor,
    UniformityAlignment,
)
from tests.callbacks import strangers
from tests.callbacks.harness import History, ddp_trainer
from tests.ddp import run_ranks

KEYS = {
    "train/uniformity",
    "train/alignment",
    "val/uniformity",
    "val/alignment",
    "train/l_cor",
    "train/l_bound",
    "val/l_bound",
    "train/effective_rank",
    "train/alive_dimensions",
    "train/feature_std",
    "val/effective_rank",
    "predictor/alignment_mean",
    "predictor/alignment_weighted",
    "predictor/commutator_norm",
    "predictor/asymmetry",
    "predictor/smallest_symmetric_value",
    "predictor/balance_residual",
    "collapse/verdict",
    "collapse/std",
    "collapse/rank",
    "collapse/variance_rank",
    "collapse/noise",
    "collapse/backbone/verdict",
    "collapse/predictor/deviation",
    "train/rankme",
    "train/lidar",
    "train/alpha_req",
    "train/spectrum_area",
    "train/stable_rank",
    "train/wasserstein_uniformity",
    "train/sliced_gaussianity",
    "circle/explained_variance",
    "val/knn_top1",
    "val/knn_top5",
    "val/linear_top1",
    "val/linear_top5",
    "cov_op/backbone.0.3",
    "cov_op_ratio/projector",
    "cov_op_error/projector",
}


def watchers(probe_train: int = 41, probe_test: int = 23) -> list:
    data = (strangers.loader(strangers.Labelled(probe_train, seed=5)), strangers.loader(strangers.Labelled(probe_test)))
    return [
        UniformityAlignment("projector", every_n_steps=1),
        CorrelationBound("projector", num_classes=4, every_n_steps=1),
        EffectiveRank("backbone", every_n_steps=1),
        EigenspaceAlignment("predictor", every_n_steps=1),
        CollapseMonitor("projector", every_n_steps=1),
        FeatureQuality("projector", every_n_steps=1, window=1),
        RepresentationCircle("projector", every_n_steps=1),
        KNNProbe("backbone", data, k=5),
        LinearProbe("backbone", data, l2=1e-2),
        CovarianceOperatorNorm(["backbone.0.3", "projector"], every_n_steps=2),
    ]


def fit(rank, world_size, case):
    """Train two epochs of uneven batches; return what was logged, and the metrics each rank knows."""
    torch.manual_seed(0)
    history = History()
    callbacks, options, held_out = watchers(), {}, strangers.Pairs(7, seed=3)
    if case == "few":  # fewer samples than ranks, in the held-out data and in the probe's
        callbacks, held_out = watchers(probe_test=2), strangers.Pairs(2, seed=3)
    if case == "dev":
        options = {"fast_dev_run": 2}
    if case == "early":
        callbacks.append(EarlyStopping("train/uniformity", min_delta=math.inf, patience=1))
        options = {"max_epochs": 5}
    if case == "acting":
        callbacks += [DirectPredictor("predictor", freq=2), SymmetricPredictor("predictor")]
        callbacks += [PredictorReset("predictor", every_n_epochs=1)]
    if case == "limited":
        options = {f"limit_{stage}_batches": 1 for stage in ("train", "val", "test")}
    val = strangers.loader(held_out, 6 // world_size)
    if case == "empty":
        val = DataLoader(OnlyRankZero(rank), batch_size=None)
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    with tempfile.TemporaryDirectory() as root:
        run = ddp_trainer(rank, world_size, callbacks, logger=history, default_root_dir=root, **options)
        # 18 samples in global batches of 12: the last one is short.
        run.fit(strangers.MeanLoss(), strangers.ordered_loader(strangers.Pairs(18), 12, rank, world_size), val)
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    if case in ("whole", "limited"):
        for evaluate in (run.validate, run.test):
            values = evaluate(run.lightning_module, val, verbose=False)[0]
            metrics |= {f"{evaluate.__name__} {key}": value for key, value in values.items()}
    return history.rows, metrics


class OnlyRankZero(IterableDataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        if self.rank == 0:
            yield next(iter(strangers.loader(strangers.Pairs(6))))


@cache
def alone(case):
    return run_ranks(1, fit, case)[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", ["whole", "limited", "few", "early", "acting"])
def test_ranks_agree_with_one_process(world_size, case):
    alone_rows, alone_metrics = alone(case)
    together = run_ranks(world_size, fit, case)
    rows = together[0][0]  # rank 0 holds the logger
    assert [step for step, _ in rows] == [step for step, _ in alone_rows]
    for (step, row), (_, expected) in zip(rows, alone_rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-7), step
    for _, metrics in together:
        assert metrics == pytest.approx(alone_metrics, rel=1e-5, abs=1e-7)
    if case in ("whole", "limited"):
        assert alone_metrics.keys() >= KEYS
        evaluated = {"test test/uniformity", "test test/knn_top1", "validate val/linear_top1", "validate val/l_cor"}
        assert evaluated <= alone_metrics.keys()


@pytest.mark.parametrize("case", ["dev", "empty"])
def test_nothing_waits(case):
    together = run_ranks(3, fit, case, timeout=60)
    assert all(metrics.keys() == together[0][1].keys() for _, metrics in together)
    assert "train/uniformity" in together[0][1]
    if case == "empty":
        assert "val/uniformity" in together[2][1]
