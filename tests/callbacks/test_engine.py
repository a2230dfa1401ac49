"""One trainer, one observation: shared hooks and exchanges, open bases, intervals, words, declared quantities."""

from __future__ import annotations

import warnings

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ssl import callbacks as ours
from lightning_ssl import functional, quantities
from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    CovarianceOperatorNorm,
    EffectiveRank,
    EigenspaceAlignment,
    KNNProbe,
    LinearProbe,
    Probe,
    RepresentationCircle,
    UniformityAlignment,
    Watcher,
)
from lightning_ssl.callbacks._engine.observation import observatory
from tests.callbacks import strangers
from tests.callbacks.harness import History, ddp_trainer, tape, trainer
from tests.ddp import run_ranks


class MedianNorm(Watcher):
    """A user's whole diagnostic."""

    def measure(self, rows):
        return {"median_norm": rows.norm(dim=1).median()}


class Nearest(Watcher):
    """One of pairs."""

    paired = True

    def measure(self, rows):
        return {"nearest": (rows[:, 0] - rows[:, 1]).norm(dim=1).min(), "views": float(rows.shape[1])}


class Counted(Probe):
    def evaluate(self, train, test, num_classes, trainer):
        return {"rows": float(len(train.rows)), "mean": train.rows.mean() + test.rows.mean()}


def own_diagnostics(rank, world_size):
    torch.manual_seed(0)
    history = History()
    data = tuple(strangers.loader(strangers.Labelled(n)) for n in (13, 7))
    callbacks = [
        MedianNorm("projector", every_n_steps=1, held_out=True),
        Nearest("projector", every_n_steps=1),
        Counted("backbone", data),
    ]
    module = strangers.MeanLoss()
    calls = tape(module.projector)
    run = ddp_trainer(rank, world_size, callbacks, logger=history)
    train = strangers.ordered_loader(strangers.Pairs(24), 12, rank, world_size)
    run.fit(module, train, strangers.loader(strangers.Pairs(7, seed=3), 6 // world_size))
    return history.rows, [y for grad, _, y in calls if grad][:2]


def test_a_users_own_diagnostic_is_the_same_on_1_2_and_3_ranks():
    (alone, views), *_ = run_ranks(1, own_diagnostics)
    first = {key: value for step, row in alone if step == 0 for key, value in row.items()}
    assert first["train/median_norm"] == pytest.approx(float(torch.cat(views).double().norm(dim=1).median()))
    assert first["train/nearest"] == pytest.approx(float((views[0] - views[1]).norm(dim=1).min()), rel=1e-5)
    assert first["train/views"] == 2 and first["val/rows"] == 13
    assert any("val/median_norm" in row for _, row in alone)
    for world_size in (2, 3):
        (rows, _), *_ = run_ranks(world_size, own_diagnostics)
        assert [step for step, _ in rows] == [step for step, _ in alone]
        for (_, row), (_, expected) in zip(rows, alone, strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def feature_watchers(**options):
    return [
        UniformityAlignment("projector", every_n_steps=1, **options),
        CorrelationBound("projector", num_classes=4, every_n_steps=1, picture_every=0, **options),
        EffectiveRank("projector", every_n_steps=1, **options),
        CollapseMonitor("projector", every_n_steps=1, also=()),
        RepresentationCircle("projector", every_n_steps=1),
        MedianNorm("projector", every_n_steps=1),
    ]


def counted(rank, world_size):
    """Hooks on the projector while it is called, and exchanges, of all watchers on it together."""
    hooks = []

    class Looking(strangers.MeanLoss):
        def step(self, batch):
            hooks.append((len(self.projector._forward_hooks), len(self.projector._forward_pre_hooks)))
            return super().step(batch)

    run = ddp_trainer(rank, world_size, feature_watchers(held_out=False), max_steps=6)
    run.fit(Looking(), strangers.ordered_loader(strangers.Pairs(72), 12, rank, world_size))
    return hooks, observatory(run).exchanges


def test_all_watchers_of_a_place_share_one_hook_pair_and_one_exchange():
    for hooks, exchanges in run_ranks(2, counted):
        assert hooks[1:] == [(1, 1)] * 5  # of the first step the layout is followed as well
        assert hooks[0][0] <= 2 and hooks[0][1] == 1
        assert exchanges == 6


def test_no_hooks_stay_between_observations():
    seen = []

    class Looking(strangers.MeanLoss):
        def training_step(self, batch, batch_idx):
            seen.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules()))
            return super().training_step(batch, batch_idx)

    trainer([UniformityAlignment("projector", every_n_steps=3)], max_steps=6).fit(
        Looking(), strangers.loader(strangers.Pairs(96))
    )
    assert seen[0] > 2 and seen[1:] == [0, 0, 2, 0, 0]


def test_nothing_of_a_step_is_kept_when_it_is_over():
    class Last(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            watched = observatory(trainer)
            assert watched.batch is None and not watched._joined and watched._places is None

    trainer([UniformityAlignment(every_n_steps=1), EffectiveRank(every_n_steps=1), Last()], max_steps=2).fit(
        strangers.MeanLoss(), strangers.loader(strangers.Pairs(32))
    )


def test_what_leaves_a_place_is_seen_before_the_next_layer_changes_it():
    module, history = strangers.MeanLoss(), History()
    calls = tape(module.backbone[0][3])  # a ReLU that works in place follows
    trainer([EffectiveRank("backbone.0.3", every_n_steps=9)], logger=history, max_steps=1).fit(
        module, strangers.loader(strangers.Pairs(16))
    )
    rows = torch.cat([y.mean(dim=(2, 3)) for grad, _, y in calls if grad]).double()
    assert history.series("train/effective_rank")[0] == pytest.approx(float(functional.effective_rank(rows)), rel=1e-5)


def test_the_order_of_callbacks_does_not_matter():
    """What one callback runs through the module is not what another sees of the step."""
    values = []
    for first in (0, 1):
        torch.manual_seed(0)
        history, callbacks = History(), [CovarianceOperatorNorm(every_n_steps=1), UniformityAlignment(every_n_steps=1)]
        callbacks = callbacks if first == 0 else callbacks[::-1]
        run = trainer(callbacks, logger=history)
        run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(32)))
        values.append([history.series("train/alignment"), history.series("cov_op/projector")])
    assert values[0] == values[1]


def test_a_run_goes_on_with_another_interval(tmp_path):
    def run(epochs, every, ckpt=None):
        torch.manual_seed(1)
        saver = ModelCheckpoint(tmp_path, "half", enable_version_counter=False)
        spectra = EigenspaceAlignment(every_n_steps=every, picture_every=0)
        monitor = CollapseMonitor(every_n_steps=every)
        runner = trainer([spectra, monitor, saver], max_epochs=epochs, enable_checkpointing=True)
        runner.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)), ckpt_path=ckpt)
        return spectra, monitor

    spectra, monitor = run(1, 2)
    baseline, kept = monitor._judges["projector"].first, list(spectra._steps)
    spectra, monitor = run(2, 3, tmp_path / "half.ckpt")
    assert monitor._judges["projector"].first == baseline
    assert spectra._steps[: len(kept)] == kept and len(spectra._steps) > len(kept)


def test_pictures_are_drawn_every_n_th_observation_whatever_the_interval(tmp_path):
    for name, interval in (("steps", {"every_n_steps": 4}), ("epochs", {"every_n_steps": None, "every_n_epochs": 1})):
        callback = CorrelationBound("projector", 4, picture_every=2, held_out=False, **interval)
        run = trainer([callback], max_epochs=4, default_root_dir=tmp_path / name)
        run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)))
        drawn = sorted(path.stem for path in (tmp_path / name).rglob("*.png"))
        assert drawn == ["step_00000000", "step_00000008"]


def test_a_second_fit_warns_again():
    class Bare(strangers.MeanLoss):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Linear(2, 2)

    callback = UniformityAlignment("spare", every_n_steps=1)
    for _ in range(2):
        with pytest.warns(UserWarning, match="'spare' was not called"):
            trainer([callback], max_steps=2).fit(Bare(), strangers.loader(strangers.Pairs(32)))


def test_a_callback_used_in_a_second_run_starts_anew():
    callbacks, seen = [UniformityAlignment(every_n_steps=3), CollapseMonitor(every_n_steps=1)], []
    for _ in range(2):
        torch.manual_seed(0)
        history = History()
        trainer(callbacks, logger=history).fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)))
        seen.append(history.rows)
    assert seen[0] == seen[1] and len(seen[0]) > 3


def test_a_part_that_was_called_is_named():
    class Wrapped(strangers.MeanLoss):
        def __init__(self):
            super().__init__()
            self.wrapper = torch.nn.ModuleDict({"inner": self.backbone})

    with pytest.warns(UserWarning, match=r"of its parts 'wrapper\.inner' were called"):
        module = Wrapped()
        del module._modules["backbone"]
        module.__dict__["backbone"] = module.wrapper["inner"]
        trainer([EffectiveRank("wrapper")], max_steps=1).fit(module, strangers.loader(strangers.Pairs(16)))


@pytest.mark.parametrize("name", sorted(set(ours.__all__) - {"Quantity"}))
def test_every_declared_quantity_can_be_read(name):
    for quantity in getattr(getattr(ours, name), "quantities", ()):
        assert quantity.section in quantities.SECTIONS and quantity.title and quantity.read.endswith(".")
        assert quantity.form.format(0.5)


def test_every_logged_key_is_declared(tmp_path):
    history = History()
    data = tuple(strangers.loader(strangers.Labelled(n)) for n in (32, 16))
    callbacks = [
        *feature_watchers(held_out=True)[:5],
        EigenspaceAlignment(every_n_steps=1),
        CovarianceOperatorNorm(every_n_steps=2),
        KNNProbe("backbone", data, k=5),
        LinearProbe("backbone", data, name="line", l2=[1e-3, 1e-2]),
    ]
    for targets, cls in (("multilabel", strangers.Attributes), ("continuous", strangers.Values)):
        other = tuple(strangers.loader(cls(n)) for n in (32, 16))
        callbacks += [probe("backbone", other, name=targets, targets=targets) for probe in (KNNProbe, LinearProbe)]
    run = trainer(callbacks, logger=history, default_root_dir=tmp_path)
    run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(32)), strangers.loader(strangers.Pairs(8)))
    known = quantities.declared(callbacks)
    keys = {key for _, row in history.rows for key in row} - {"epoch"}
    assert len(keys) > 40
    undeclared = {key for key in keys if quantities.find(key, known) is None}
    assert not undeclared
    for quantity in known:  # and nothing is declared that is not logged
        if quantity not in quantities.LOSSES:
            assert any(quantity.matches(key) for key in keys), quantity.key


def test_what_cannot_be_shared_is_told_once_a_run():
    class Bad(Watcher):
        def measure(self, rows):
            raise ValueError("nothing to see")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer([Bad("projector", every_n_steps=1)])
        run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)))
    assert sum("nothing to see" in str(w.message) for w in caught) == 1 and run.global_step == 4


def test_batch_statistics_are_those_of_the_step():
    """Forward passes that move no weight leave the operators as they are, whatever running statistics become."""
    torch.manual_seed(0)
    module = strangers.LightlySimCLR()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    history = History()
    callback = CovarianceOperatorNorm(output="projection_head", every_n_steps=1, samples=16)
    run = trainer([callback], logger=history, max_epochs=30)
    run.fit(module, strangers.loader(strangers.Pairs(16)))  # one batch, again and again
    for key in (key for key in history.rows[0][1] if key.startswith("cov_op")):
        values = list(history.series(key).values())
        assert len(values) == 30
        assert values == pytest.approx([values[0]] * 30, rel=1e-5), key


def test_wide_features_cost_no_more_than_their_rows():
    """65,536 features of 16 rows: no matrix of their squares is made."""

    class Wide(strangers.MeanLoss):
        def __init__(self):
            super().__init__()
            self.projector = torch.nn.Linear(16, 65_536)
            self.predictor = torch.nn.Identity()

    history = History()
    callbacks = [callback for callback in feature_watchers() if not isinstance(callback, MedianNorm)]
    module = Wide()
    calls = tape(module.projector)
    trainer(callbacks, logger=history, max_steps=1).fit(module, strangers.loader(strangers.Pairs(8), 8))
    rows = torch.cat([y for grad, _, y in calls if grad]).double()
    logged = history.rows[0][1] | {key: value for _, row in history.rows for key, value in row.items()}
    assert logged["train/effective_rank"] == pytest.approx(float(functional.effective_rank(rows)), rel=1e-4)
    unit = torch.nn.functional.normalize(rows, dim=1)
    gram = unit @ unit.T * 65_536
    n = len(rows)
    norm = (n * (gram / n).square().sum() - 65_536**2) / (n - 1)
    assert logged["train/l_cor"] == pytest.approx(float(norm - 2 * 65_536 + 65_536), rel=1e-4)
    assert "circle/explained_variance" in logged and "collapse/verdict" in logged


class Blocked(strangers.MeanLoss):
    """Both views in one call, of samples that are nothing like each other's views."""

    def step(self, batch):
        x = torch.randn(2 * len(batch[1]), 3, 8, 8)
        z = self.projector(self.backbone(x))
        return -torch.nn.functional.cosine_similarity(self.predictor(z), z.roll(1, 0).detach()).mean()


def test_in_doubt_there_is_a_warning_and_no_number_but_for_what_needs_no_pairs():
    history = History()
    with pytest.warns(UserWarning, match=r"UniformityAlignment.*pairing="):
        run = trainer([UniformityAlignment(every_n_steps=1), EffectiveRank(every_n_steps=1)], logger=history)
        run.fit(Blocked(), strangers.loader(strangers.Pairs(32)))
    keys = {key for _, row in history.rows for key in row}
    assert "train/effective_rank" in keys
    assert not {"train/uniformity", "train/alignment"} & keys


def test_a_clean_validation_has_no_pairs_whatever_training_has():
    class Clean(strangers.MeanLoss):
        def validation_step(self, batch, batch_idx):
            self.projector(self.backbone(batch[0]))

    history = History()
    run = trainer([UniformityAlignment(views=2, every_n_steps=1)], logger=history)
    run.fit(Clean(), strangers.loader(strangers.Pairs(32)), strangers.loader(strangers.Labelled(32)))
    keys = {key for _, row in history.rows for key in row}
    assert {"train/alignment", "val/uniformity"} <= keys and "val/alignment" not in keys


def test_another_network_is_not_logged():
    """A module that does not do the same twice: nothing says so but the comparison with the step."""

    class Drifting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = torch.nn.Linear(16, 8), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * self.calls

    class Module(strangers.MeanLoss):
        def __init__(self):
            super().__init__()
            self.projector = Drifting()

    history = History()
    with pytest.warns(UserWarning, match="give other outputs than in the step"):
        run = trainer([CovarianceOperatorNorm(every_n_steps=1)], logger=history)
        run.fit(Module(), strangers.loader(strangers.Pairs(32)))
    assert not any(key.startswith("cov_op") for _, row in history.rows for key in row)


def test_somebodys_own_hooks_move_no_buffer_of_theirs():
    class Hooked(strangers.MeanLoss):
        """Its backbone's hook feeds a part that nobody named."""

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.backbone.register_forward_hook(self.count)

        def count(self, *_):
            self.seen.add_(1)

    data = tuple(strangers.loader(strangers.Labelled(n)) for n in (16, 8))
    counts = []
    for callbacks in ([], [CovarianceOperatorNorm(every_n_steps=1), KNNProbe("backbone", data, k=3)]):
        module = Hooked()
        trainer(callbacks).fit(module, strangers.loader(strangers.Pairs(32)))
        counts.append(float(module.seen))
    assert counts[0] == counts[1] == 4


class Scaling(L.LightningDataModule):
    """Normalises on the device, and augments in training only, as many DataModules do."""

    num_classes = 4

    def train_dataloader(self):
        return strangers.loader(strangers.Pairs(32))

    def probe_dataloaders(self):
        return tuple(strangers.loader(strangers.Labelled(n, seed=n)) for n in (48, 24))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not isinstance(batch[0], torch.Tensor):
            return batch
        image = batch[0] - batch[0].mean(dim=(2, 3), keepdim=True)
        return [torch.randn_like(image) if self.trainer.training else image, *batch[1:]]


def test_probes_see_what_the_transfer_hooks_make():
    seen = []

    class Looking(Probe):
        def evaluate(self, train, test, num_classes, trainer):
            seen.append(train.rows)
            return {}

    torch.manual_seed(0)
    module, data = strangers.MeanLoss(), Scaling()
    with torch.no_grad():
        image = data.probe_dataloaders()[0].dataset.pairs.images
        expected = module.backbone(image - image.mean(dim=(2, 3), keepdim=True))
    trainer([Looking("backbone", every_n_epochs=9)], max_steps=1).fit(module, datamodule=data)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_without_weights_is_no_encoder():
    data = tuple(strangers.loader(strangers.Labelled(n)) for n in (16, 8))
    with pytest.raises(ours.probe.MisconfigurationException, match=r"`features='backbone\.0\.5'`"):
        trainer([KNNProbe("backbone.0.5", data)]).fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(16)))
    history = History()
    run = trainer([KNNProbe("backbone", data, k=3, features="backbone.0.5")], logger=history)
    run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(16)))
    assert history.series("val/knn_top1")


def test_a_long_run_keeps_a_thinned_history(monkeypatch):
    monkeypatch.setattr("lightning_ssl.callbacks.eigenspace_alignment.MAX_HISTORY", 4)
    callback = EigenspaceAlignment(every_n_steps=1, picture_every=0)
    trainer([callback], max_epochs=3).fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)))
    assert len(callback._steps) <= 4 and callback._steps[0] == 0


def test_actions_follow_steps_and_not_micro_batches():
    class Counting(ours.SymmetricPredictor):
        acts = 0

        def act(self, trainer, predictor):
            self.acts += 1

    callback = Counting()
    run = trainer([callback], accumulate_grad_batches=2)
    run.fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(64)))
    assert callback.acts == run.global_step == 2
