"""Each rule of the verdict, on features made for it."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_ssl.callbacks import CollapseMonitor
from tests.callbacks import strangers
from tests.callbacks.harness import trainer

D = 32


def rows(std, dims=D, n=256):
    """Features whose deviation is `std` (in units of 1 / sqrt(d)) over the first `dims` dimensions, around a point."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(n, D, dtype=torch.float64)
    x[:, :dims] = torch.randn(n, dims, generator=generator, dtype=torch.float64)
    x = torch.nn.functional.normalize(x, dim=1)
    centre = torch.zeros(D, dtype=torch.float64)
    centre[-1] = 1.0
    return x if std >= 1 else std * x + math.sqrt(1 - std**2) * centre


def verdicts(monitor, deviations, **options):
    return [int(monitor.measure(rows(std, **options))["verdict"]) for std in deviations]


def test_a_healthy_run_is_healthy():
    assert verdicts(CollapseMonitor(), [1, 0.9, 0.8, 0.9, 1]) == [0] * 5


def test_it_takes_as_many_observations_as_patience_says():
    falling = [1, 0.12, 0.1, 0.08, 0.06, 0.04]
    assert verdicts(CollapseMonitor(patience=1), falling) == [0, 3, 3, 3, 3, 3]
    assert verdicts(CollapseMonitor(patience=2), falling) == [0, 0, 3, 3, 3, 3]
    assert verdicts(CollapseMonitor(patience=4), falling) == [0, 0, 0, 0, 3, 3]


def test_a_suspicion_must_not_be_interrupted():
    assert verdicts(CollapseMonitor(patience=3), [1, 0.1, 0.08, 0.5, 0.07, 0.06, 0.05]) == [0, 0, 0, 0, 0, 0, 3]


def test_a_narrow_network_that_opens_up_is_not_one_that_falls():
    # Between a half of the threshold and the threshold only what still falls by a tenth is collapse.
    assert verdicts(CollapseMonitor(), [1, 0.14, 0.139, 0.138, 0.137]) == [0] * 5
    assert verdicts(CollapseMonitor(), [1, 0.14, 0.12, 0.1, 0.09])[-1] == 3
    assert verdicts(CollapseMonitor(), [1, 0.07, 0.07])[-1] == 3  # below half of it in any case


def test_a_network_born_narrow_is_judged_by_its_own_start():
    assert verdicts(CollapseMonitor(), [0.1, 0.09, 0.08, 0.07, 0.06]) == [0] * 5  # not below half of the start
    assert verdicts(CollapseMonitor(), [0.1, 0.045, 0.03])[-1] == 3


def test_the_threshold_is_the_one_given():
    assert verdicts(CollapseMonitor(complete=0.4), [1, 0.35, 0.3, 0.25])[-1] == 3
    assert verdicts(CollapseMonitor(complete=0.1), [1, 0.35, 0.3, 0.25])[-1] == 0


def test_a_few_dimensions_are_dimensional_collapse():
    assert verdicts(CollapseMonitor(), [1, 1, 1], dims=2) == [0, 2, 2]
    assert verdicts(CollapseMonitor(), [1, 1, 1], dims=6) == [0, 0, 0]
    assert verdicts(CollapseMonitor(dimensional=8), [1, 1, 1], dims=6) == [0, 2, 2]


def test_few_rows_are_not_few_dimensions():
    assert verdicts(CollapseMonitor(), [1, 1, 1], n=4) == [0, 0, 0]


def test_a_verdict_is_taken_back_when_features_spread():
    monitor = CollapseMonitor()
    assert verdicts(monitor, [1, 0.05, 0.04, 0.9]) == [0, 0, 3, 0]


class Falling(strangers.MeanLoss):
    """Its projector's outputs shrink to a point."""

    def __init__(self, rate=0.3):
        super().__init__()
        self.rate, self.scale = rate, 1.0

    def step(self, batch):
        self.scale *= self.rate
        with torch.no_grad():
            self.projector.weight.mul_(self.rate)
        return super().step(batch)


@pytest.mark.parametrize("stop", [False, True])
def test_the_run_ends_if_asked_to(stop):
    run = trainer([CollapseMonitor(every_n_steps=1, stop=stop)], max_steps=12, max_epochs=9)
    with pytest.warns(UserWarning, match="complete collapse of 'projector' at step"):
        run.fit(Falling(), strangers.loader(strangers.Pairs(64)))
    assert (run.global_step < 12) == stop


def test_state_goes_on_where_it_stopped():
    first, second = CollapseMonitor(), CollapseMonitor()
    verdicts(first, [0.8, 0.1])
    second.load_state_dict(first.state_dict())
    assert verdicts(second, [0.08]) == [3] and second._judges["projector"].first == first._judges["projector"].first
