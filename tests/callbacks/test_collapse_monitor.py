"""Each rule of the verdict, on features made for it."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from lightning_ssl import functional, methods
from lightning_ssl.callbacks import CollapseMonitor, Verdict
from lightning_ssl.callbacks._dynamics import Rates, carried_on, rates_of
from lightning_ssl.callbacks._judge import Judge, Look, PrototypeJudge, Rules
from lightning_ssl.data import ImageDataModule
from lightning_ssl.nn import LinearBackbone
from lightning_ssl.theory import linear
from tests.callbacks import strangers
from tests.callbacks.harness import History, trainer

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


# Dimensions lost, and never had ---------------------------------------------------------------------------------------


def isotropic(live, dim=512, n=256, seed=0):
    x = torch.zeros(n, dim, dtype=torch.float64)
    x[:, :live] = torch.randn(n, live, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x


@pytest.mark.parametrize("live", [64, 16, 4])
def test_dimensions_that_are_cut_are_seen_within_20_observations(live):
    monitor = CollapseMonitor()
    for seed in range(30):
        assert monitor.measure(isotropic(512, seed=seed))["verdict"] == 0
    kinds = []
    for seed in range(20):
        monitor.measure(isotropic(live, seed=100 + seed))
        kinds.append(monitor.verdict.kind)
    assert kinds[-1] == ("partial" if live > 2 else "dimensional")
    (place,) = monitor.verdict.places
    assert place.evidence[0].quantity == "alive" and place.evidence[0].value == live and place.remedy


def test_a_network_born_with_few_dimensions_that_opens_up_is_left_alone():
    monitor = CollapseMonitor()
    grown = [4, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert [monitor.measure(isotropic(live, seed=live))["verdict"] for live in grown] == [0] * len(grown)


def test_one_that_never_opens_up_is_not():
    monitor = CollapseMonitor()
    for seed in range(30):
        monitor.measure(isotropic(16, seed=seed))
    assert monitor.verdict.kind == "partial"


def test_faint_directions_do_not_hide_a_flat_cloud():
    """What kept the old rank high: many directions with a hundredth of the deviation."""
    x = isotropic(128, 128, 256)
    x[:, 2:] *= 0.01
    monitor = CollapseMonitor()
    assert [monitor.measure(x)["verdict"] for _ in range(3)][-1] == 2
    assert float(functional.effective_rank(x)) > 10  # by deviations it looks like many


# The rules, on numbers ------------------------------------------------------------------------------------------------


def looks(stds, ranks=None, noise=math.nan):
    ranks = ranks or [20.0] * len(stds)
    return [Look(5 * i, s, r, r, 64, 64, noise) for i, (s, r) in enumerate(zip(stds, ranks, strict=True))]


def judged(observations, **rules):
    judge = Judge("projector", Rules(**rules))
    return [judge.see(look) for look in observations]


def test_views_as_far_apart_as_samples_make_a_small_deviation_a_collapse():
    falling = [0.8, 0.5, 0.3, 0.16, 0.16, 0.16]
    assert [v.kind for v in judged(looks(falling, noise=0.95))][-2:] == ["complete"] * 2
    assert [v.kind for v in judged(looks(falling, noise=0.5))] == ["healthy"] * 6
    assert [v.kind for v in judged(looks(falling))] == ["healthy"] * 6  # nothing known of views


def test_a_young_network_whose_views_come_together_has_time_to_open_up():
    flat = [20.0] * 3 + [1.8] * 20
    same, rising = [0.5] * 23, [0.5] * 3 + [0.3 * 1.05**i for i in range(20)]
    first = next(i for i, v in enumerate(judged(looks(same, flat, noise=0.7))) if v.kind == "dimensional")
    assert first == 12  # observation 13
    assert {v.kind for v in judged(looks(rising, flat, noise=0.7))} == {"healthy"}
    assert judged(looks(same, flat, noise=0.95))[5].kind == "dimensional"  # views do not: no time is given


def test_a_collapse_is_forecast_while_all_is_healthy():
    stds = [0.9 * 0.9**i for i in range(14)]  # below half of the start from observation 7 on, 0.17 at 15.8
    found = judged(looks(stds, noise=0.95))
    assert [v.kind for v in found] == ["healthy"] * 14
    first = next(i for i, v in enumerate(found) if v.forecast)
    assert first == 7
    forecast = found[first].forecast
    assert forecast.kind == "complete" and forecast.basis == "trend"
    assert forecast.earliest <= forecast.step <= forecast.latest and abs(forecast.step - 5 * 15.8) <= 5


@pytest.mark.parametrize(
    ("stds", "noise"),
    [
        ([0.9 * 0.9**i for i in range(14)], 0.5),  # views come together: it learns
        ([0.9 * 0.9**i for i in range(14)], math.nan),  # not known
        ([0.3 + 0.6 * 0.7**i for i in range(14)], 0.95),  # levels off
        ([0.9 * 0.999**i for i in range(14)], 0.95),  # slow, and hardly fallen
    ],
)
def test_a_forecast_is_silent_where_it_does_not_know(stds, noise):
    assert not any(v.forecast for v in judged(looks(stds, noise=noise)))


def test_causes_are_named_as_far_as_the_evidence_goes():
    point = [0.8, 0.05, 0.04]
    judge = Judge("projector")
    for look in looks(point):
        judge.see(look, {"weights": 0.1, "decay": 0.5})
    assert "weight decay (0.5)" in judge.verdict.cause and "lower the weight decay" in judge.verdict.remedy
    judge = Judge("projector")
    for look in looks(point):
        judge.see(look, {"target": True, "predictor": False})
    assert "no predictor" in judge.verdict.cause
    judge = Judge("projector")
    for look in looks(point):
        judge.see(look)
    assert judge.verdict.cause == "" and judge.verdict.remedy


def test_prototypes():
    most = math.log(64)
    judge = PrototypeJudge("prototypes", 64)
    assert [judge.see(i, most, 0.9 * most, 1.0).kind for i in range(6)] == ["healthy"] * 6
    assert [judge.see(i, 0.3 * most, 0.2 * most, 0.1).kind for i in range(2)] == ["healthy", "prototype"]
    assert "same prototypes" in judge.verdict.cause and judge.verdict.grade == 3
    judge = PrototypeJudge("prototypes", 64)
    kinds = [judge.see(i, most, 0.9999 * most, 1.0).kind for i in range(6)]
    assert kinds[:3] == ["healthy"] * 3 and kinds[-1] == "prototype" and "sharpen" in judge.verdict.remedy


# Told where people look -----------------------------------------------------------------------------------------------


def test_a_turn_reaches_the_file_the_callable_and_the_checkpoint(tmp_path):
    heard, history = [], History()
    monitor = CollapseMonitor(every_n_steps=1, stop="partial", on_verdict=heard.append)
    run = trainer([monitor], max_epochs=9, max_steps=40, logger=history, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="complete collapse of 'projector' at step") as warned:
        run.fit(Falling(), strangers.loader(strangers.Pairs(64)))
    assert sum("collapse of" in str(w.message) for w in warned) == 1, "one warning"
    assert run.global_step < 40 and heard[-1].stopped == "complete" and heard[-1].turns[0].after == "complete"
    kept = json.loads(next(tmp_path.rglob("collapse.json")).read_text())
    assert kept == monitor.verdict.to_dict() and kept["stopped"] == "complete" and kept["grade"] == 3
    assert Verdict.from_dict(monitor.state_dict()["report"]) == monitor.verdict
    assert max(history.series("collapse/verdict").values()) == 3


def test_every_place_has_its_verdict():
    history = History()
    monitor = CollapseMonitor(every_n_steps=1)
    torch.manual_seed(0)
    model = methods.BYOL(backbone="small_conv", projector_hidden=32, projector_dim=16)
    run = trainer([monitor], max_steps=5, logger=history)
    run.fit(model, datamodule=ImageDataModule("digits", batch_size=32))
    assert {place.place for place in monitor.verdict.places} == {
        "projector",
        "backbone",
        "predictor",
        "target.projector",
    }
    assert [place.main for place in monitor.verdict.places] == [True, False, False, False]
    for place in ("backbone", "predictor", "target.projector"):
        assert list(history.series(f"collapse/{place}/verdict").values()) == [0, 0]  # every fourth observation


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": "never"}, "`stop` must be"),
        ({"also": ["projector"]}, "`also` must name"),
        ({"temperature": 0}, "`temperature`"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        CollapseMonitor(**options)


# The dynamics ---------------------------------------------------------------------------------------------------------


def test_modes_below_the_basins_boundary_are_forecast_to_collapse():
    """Below the critical decay the saddle p_- divides them; above it all collapse (DirectPred Sec. 3.2)."""
    sigma2 = 0.5
    critical = linear.critical_weight_decay(1.0, sigma2)
    saddle = linear.fixed_points(critical / 2, 1.0, sigma2)[1].p

    rates = Rates(0.1, 1.0, critical / 2, critical / 2)
    low, high = (torch.full((4,), factor * saddle, dtype=torch.float64) for factor in (0.5, 1.5))
    strengths = [p**2 * (1 + sigma2) for p in (low, high)]  # on the invariant parabola
    found = carried_on(strengths[0], low, sigma2, rates, 50, 4000)
    assert found.kind == "complete" and found.basis == "dynamics" and 50 < found.earliest <= found.step
    assert carried_on(strengths[1], high, sigma2, rates, 50, 4000) is None
    strong = Rates(0.1, 1.0, 1.2 * critical, 1.2 * critical)
    assert carried_on(strengths[1], high, sigma2, strong, 50, 4000) is not None


@pytest.mark.parametrize(("decay", "expected"), [(20.0, True), (0.0, False)])
def test_a_linear_network_under_strong_decay_is_forecast_from_its_optimizer(decay, expected):
    torch.manual_seed(0)
    model = methods.BYOL(
        LinearBackbone(3 * 16 * 16, 16),
        projector_hidden=0,
        projector_dim=8,
        predictor="linear",
        predictor_bias=False,
        normalize=False,
        momentum=0.0,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=decay),
    )
    monitor = CollapseMonitor(every_n_steps=1)
    trainer([monitor], max_steps=8).fit(model, datamodule=ImageDataModule("digits", batch_size=64, image_size=16))
    found = [turn for turn in monitor.verdict.turns if turn.after == "forecast"]
    assert bool(found) == expected
    if expected:
        assert "from the dynamics" in found[0].words and found[0].step == 0


def test_the_dynamics_are_silent_where_they_do_not_hold():
    model = methods.BYOL("small_conv", predictor="linear")  # normalised outputs

    class Run:
        optimizers: ClassVar = [torch.optim.SGD(model.parameters(), lr=0.1)]

    assert rates_of(Run, model, model.predictor) is None
    model.normalize = False
    assert rates_of(Run, model, model.predictor) == Rates(0.1, 1.0, 0.0, 0.0)
    Run.optimizers = [torch.optim.Adam(model.parameters())]
    assert rates_of(Run, model, model.predictor) is None


# One rule each, on looks made for it ----------------------------------------------------------------------------------


def test_so_few_possible_dimensions_are_not_flat():
    looks = [Look(i, 1.0, 2.0, 2.0, 3, 3, noise=0.95) for i in range(4)]
    assert judged(looks)[-1].kind == "healthy"
    assert judged([replace(look, participation=4.0, alive=64, limit=64) for look in looks])[-1].kind == "dimensional"


def test_a_small_deviation_is_a_collapse_only_where_views_do_not_agree():
    falling = [Look(i, s, 20.0, 20.0, 64, 64, noise=0.95) for i, s in enumerate([1.0, 0.1685, 0.1512])]
    assert judged(falling)[-1].kind == "complete"
    assert judged([replace(look, noise=0.1) for look in falling])[-1].kind == "healthy"


def test_few_live_dimensions_are_left_alone_while_the_rank_grows():
    growing = [Look(i, 1.0, 4.0, 3 * 1.02**i, 10, 64, noise=0.3) for i in range(20)]
    assert judged(growing)[-1].kind == "healthy"
    assert judged([replace(look, rank=4.0) for look in growing])[-1].kind == "partial"


def test_nothing_is_forecast_before_half_is_lost():
    falling = [Look(5 * i, 0.92**i, 20.0, 20.0, 64, 64, noise=0.95) for i in range(10)]
    assert judged(falling[:8])[-1].forecast is None  # at 0.56 of the start
    assert judged(falling)[-1].forecast is not None


def test_no_batch_bounds_the_rank():
    monitor = CollapseMonitor()
    ranks = [float(monitor.measure(isotropic(64, dim=64, n=16, seed=seed))["variance_rank"]) for seed in range(8)]
    assert ranks[0] < 15 < 25 < ranks[-1]


def test_three_rows_have_two_dimensions():
    assert verdicts(CollapseMonitor(), [1, 1, 1], n=3) == [0, 0, 0]


def test_a_run_that_is_not_to_stop_still_tells():
    told = []
    run = trainer([CollapseMonitor(every_n_steps=1, on_verdict=told.append)], max_steps=8, max_epochs=9)
    with pytest.warns(UserWarning, match="complete collapse"):
        run.fit(Falling(), strangers.loader(strangers.Pairs(64)))
    assert told and told[-1].kind == "complete" and run.global_step == 8


def test_other_places_do_not_warn():
    monitor = CollapseMonitor()
    for path, rank in (("projector", 20.0), ("backbone", 1.2)):
        judge = monitor._judges[path] = Judge(path, main=path == "projector")
        for i in range(4):
            judge.see(Look(i, 1.0, rank, rank, 64, 64, noise=0.95))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.report(SimpleNamespace(current_epoch=0, is_global_zero=True), 3, "train")
    assert monitor.verdict.kind == "healthy" and [turn.place for turn in monitor.verdict.turns] == ["backbone"]
