"""The label-free quantities as they are logged: of the rows of many steps, as their definitions say."""

from __future__ import annotations

import copy

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ssl import functional
from lightning_ssl.callbacks import FeatureQuality, PrototypeUse, TargetLag
from tests.callbacks import strangers
from tests.callbacks.harness import History, tape, trainer


def watched(callbacks, model=None, steps=6):
    torch.manual_seed(0)
    model, history = model or strangers.MeanLoss(), History()
    calls = tape(model.projector)
    run = trainer(callbacks, max_steps=steps, max_epochs=9, logger=history)
    run.fit(model, strangers.loader(strangers.Pairs(64)))
    return history, calls, run


def test_values_are_of_all_rows_of_a_window():
    history, calls, _ = watched([FeatureQuality(every_n_steps=1, window=3, directions=8)])
    assert list(history.series("train/rankme")) == [2, 5]
    # As many calls as views a step: the first three steps' rows, grouped by sample.
    a_step = len(calls) // 6
    steps = [torch.stack([out.flatten(1) for _, _, out in calls[a_step * i : a_step * (i + 1)]], 1) for i in range(6)]
    assert steps[0].shape[1] == 2
    first = torch.cat(steps[:3]).double()
    rows = first.flatten(0, 1)
    expected = {
        "rankme": functional.rankme(rows),
        "lidar": functional.lidar(first),
        "alpha_req": functional.alpha_req(rows),
        "spectrum_area": functional.cumulative_spectrum_area(rows),
        "stable_rank": functional.stable_rank(rows),
        "wasserstein_uniformity": functional.wasserstein_uniformity(rows),
        "sliced_gaussianity": functional.sliced_gaussianity(rows, 8),
    }
    for name, value in expected.items():
        assert history.series(f"train/{name}")[2] == pytest.approx(float(value), rel=1e-5), name
    modes = [
        torch.linalg.eigvalsh(functional.second_moment(torch.cat(steps[i : i + 3]).flatten(0, 1).double())).flip(0)
        for i in (0, 3)
    ]
    growth = functional.mode_growth(*modes, 3)
    assert history.series("train/mode_growth_top") == {5: pytest.approx(float(growth[0]), rel=1e-4)}
    assert history.series("train/modes_growing") == {5: pytest.approx(float((growth > 0).double().mean()))}


def test_no_batch_bounds_them():
    """Isotropic, d = 64: a batch of 16 rows shows a rank below 16, ten of them show most of the dimensions."""
    g = torch.Generator().manual_seed(0)
    metric = FeatureQuality()._metric
    for _ in range(40):
        metric.update(torch.randn(16, 64, generator=g))
    assert float(metric.compute()["rankme"]) > 60


def test_a_run_goes_on_in_the_middle_of_a_window():
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 2, 6, generator=g)
    first, second = FeatureQuality(directions=4), FeatureQuality(directions=4)
    first._metric.update(rows[:12])
    first._seen = 1
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for callback in (first, second):
        callback._metric.update(rows[12:])
    a, b = first._metric.compute(), second._metric.compute()
    assert all(torch.equal(a[name], b[name]) for name in a) and second._seen == 1


def test_prototype_use_of_a_window():
    history, calls, _ = watched([PrototypeUse("projector", 0.5, every_n_steps=1, window=2)], steps=2)
    logits = torch.cat([out.flatten(1) for _, _, out in calls]).double()
    found = functional.prototype_use(logits, 0.5)
    assert history.series("train/mean_assignment_entropy")[1] == pytest.approx(float(found[0]), rel=1e-5)
    assert history.series("train/assignment_entropy")[1] == pytest.approx(float(found[1]), rel=1e-5)
    assert history.series("train/prototypes_used")[1] == pytest.approx(float(found[2]), rel=1e-5)
    assert not history.series("train/teacher_kl")


class Twins(L.LightningModule):
    """An online weight that moves by its learning rate, and an average of it."""

    def __init__(self):
        super().__init__()
        self.online = torch.nn.Linear(3, 2)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return -self.online.weight.sum() - self.online.bias.sum()

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for a, b in zip(self.target.parameters(), self.online.parameters(), strict=True):
                a.lerp_(b, 0.5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.online.parameters(), lr=0.1)


def test_target_lag_is_logged():
    history = History()
    run = trainer([TargetLag("online", "target", every_n_steps=1)], max_steps=30, max_epochs=50, logger=history)
    run.fit(Twins(), strangers.loader(strangers.Pairs(64)))
    lags = list(history.series("train/target_lag").values())
    # Looked at before the average moves: one update behind at first, 1 / (1 - m) = 2 in the end.
    assert lags[0] == pytest.approx(1) and lags[-1] == pytest.approx(2, rel=1e-3)


def test_target_lag_refuses_what_is_no_twin():
    with pytest.raises(MisconfigurationException, match="`target` must name the twin"):
        trainer([TargetLag("backbone", "projector")], max_steps=1).fit(
            strangers.MeanLoss(), strangers.loader(strangers.Pairs(8))
        )


@pytest.mark.parametrize("make", [lambda: FeatureQuality(window=0), lambda: PrototypeUse(window=0)])
def test_bad_arguments(make):
    with pytest.raises(ValueError, match="`window`"):
        make()
