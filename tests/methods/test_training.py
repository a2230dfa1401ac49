"""The methods in a Trainer: precision, accumulation, clipping, compile, checkpoints, bad batches, logging."""

import pickle
import shutil
from contextlib import nullcontext

import lightning.pytorch as L
import pytest
import torch
import torchvision
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ssl.data import ImageDataModule, MixtureDataModule
from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, DirectPred, SimCLR, SimSiam
from tests.ddp import run_ranks
from tests.methods.helpers import METHODS, SMALL, fit, loader, make_batch, norm_free, small

each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)


def finite(model):
    return all(p.isfinite().all() for p in model.parameters())


@each_method
@pytest.mark.parametrize("how", ["bf16-mixed", "16-mixed", "accumulate", "clip", "compile"])
def test_a_few_steps_stay_finite(method, how):
    options = {
        "bf16-mixed": {"precision": "bf16-mixed"},
        "16-mixed": {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))},
        "accumulate": {"accumulate_grad_batches": 2},
        "clip": {"gradient_clip_val": 0.1},
        "compile": {},
    }[how]
    model = small(method)
    before = model.projector[0].weight.detach().clone()
    if how == "compile":
        model.backbone.compile(backend="aot_eager")
    trainer = fit(model, batches=4, val=1, **options)
    assert trainer.global_step == (2 if how == "accumulate" else 4)
    assert finite(model) and not torch.equal(before, model.projector[0].weight)
    assert trainer.callback_metrics["train/loss"].isfinite() and trainer.callback_metrics["val/loss"].isfinite()
    assert trainer.callback_metrics["train/loss"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_backbone_compiled_to_machine_code_trains_as_the_plain_one():
    weights = []
    for compiled in (False, True):
        model = small(BYOL)
        if compiled:
            model.backbone.compile()
        fit(model, batches=3)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


@each_method
def test_each_online_network_is_called_once_a_view_with_gradient(method):
    model = small(method, **({"loss": "exact_nce"} if method is SimCLR else {}))
    calls = []
    for name in ("backbone", "projector", "predictor", "target.backbone", "target.projector"):
        if hasattr(model, name.split(".")[0]):
            model.get_submodule(name).register_forward_hook(
                lambda module, args, out, name=name: calls.append((name, out.requires_grad, len(out)))
            )
    model.losses(make_batch())
    for name in ("backbone", "projector", "predictor"):
        if hasattr(model, name):
            assert calls.count((name, True, 8)) == 2
    assert all(not grad for name, grad, _ in calls if name.startswith("target"))


@pytest.mark.parametrize("method", [BYOL, RAFT, BYOLPrime, DirectPred])
def test_target_follows_once_an_optimizer_step_under_accumulation(method):
    model, calls = small(method), []
    follow = model.target.follow
    model.target.follow = lambda *args: (calls.append(1), follow(*args))
    fit(model, batches=5, accumulate_grad_batches=2)
    assert len(calls) == 3


def test_target_does_not_follow_steps_that_amp_skips():
    model, follows, moved = small(BYOL), [], []
    follow = model.target.follow
    model.target.follow = lambda *args: (follows.append(1), follow(*args))
    weight = model.projector[0].weight
    last = [weight.detach().clone()]

    def compare(*args):
        moved.append(not torch.equal(last[0], weight))
        last[0] = weight.detach().clone()

    model.on_train_batch_end = compare
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    fit(model, batches=20, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    assert not moved[0] and moved[-1]
    assert len(follows) == sum(moved) < 20


@each_method
def test_checkpoints_hold_everything_and_load_with_weights_only(method, tmp_path):
    model = method(backbone="small_conv", **SMALL[method])
    fit(model, batches=2, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, filename="last")])
    path = tmp_path / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"]["backbone"] == "small_conv"
    assert any(key.startswith("target.") for key in checkpoint["state_dict"]) == hasattr(model, "target")
    loaded = method.load_from_checkpoint(path, weights_only=True)
    assert dict(loaded.hparams) == dict(model.hparams)
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    if method is DirectPred:
        assert torch.equal(loaded.direct.F, model.direct.F)


@pytest.mark.parametrize(
    ("method", "options"), [(BYOL, {}), (DirectPred, {}), (DirectPred, {"partitions": 3, "freq": 3}), (SimSiam, {})]
)
def test_a_resumed_run_is_the_uninterrupted_one(method, options, tmp_path):
    whole, every = small(method, **options), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(whole, callbacks=[every], max_epochs=2, enable_checkpointing=True)
    resumed = small(method, seed=1, **options)
    fit(resumed, max_epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt")
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@each_method
def test_modules_survive_pickling(method):
    model = pickle.loads(pickle.dumps(small(method)))
    assert isinstance(model.optimizer(model.parameter_groups()), torch.optim.Optimizer)
    fit(model, batches=1)


def test_backbone_exports_to_torchvision():
    model = BYOL(backbone="resnet18", stem="imagenet")
    resnet = torchvision.models.resnet18()
    missing, unexpected = resnet.load_state_dict(model.backbone.state_dict(), strict=False)
    assert missing == ["fc.weight", "fc.bias"] and not unexpected


def test_logs_and_predictions():
    model = small(RAFT)
    trainer = fit(model, batches=2, val=2)
    assert {f"{s}/{k}" for s in ("train", "val") for k in ("loss", "align", "cross_model")} == set(
        trainer.callback_metrics
    )
    prediction = trainer.predict(model, loader(1))[0]
    assert prediction["features"].shape == (8, 16) and torch.equal(prediction["index"], torch.arange(8))
    torch.testing.assert_close(prediction["features"], model.eval()(make_batch().image))


@pytest.mark.parametrize("method", [SimCLR, BarlowTwins])
def test_a_lone_last_sample_is_left_out_of_validation(method):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    full, lone = loader(1), loader(1, rows=1)
    model = small(method).eval()
    losses = [
        trainer.validate(model, torch.utils.data.DataLoader([*full, *extra], batch_size=None), verbose=False)
        for extra in ([], lone)
    ]
    assert losses[0] == losses[1] and "val/loss" in losses[0][0]


# --- bad batches ---


class Poison(nn.Module):
    """The identity, until told otherwise."""

    def __init__(self):
        super().__init__()
        self.value = 1.0

    def forward(self, x):
        return x * self.value


def poison(model, what, step):
    def start(batch, batch_idx):
        if batch_idx == step:
            if what == "view":
                batch.views[1][2, 0, 0, 0] = float("nan")
            elif what == "weight":
                model.projector[0].weight.data[0, 0] = float("inf")
            else:
                model.backbone.layers[-1].value = float("inf")

    model.backbone.layers.append(Poison())
    model.on_train_batch_start = start
    return model


@pytest.mark.parametrize(
    "what,name", [("view", r"views\[1\]"), ("weight", "projector.0.weight"), ("layer", "backbone.layers.6")]
)
@pytest.mark.parametrize("method", [SimCLR, BYOL, BarlowTwins, RAFT], ids=lambda m: m.__name__)
def test_a_non_finite_loss_stops_the_run_and_spares_the_checkpoint(method, what, name, tmp_path):
    model = poison(small(method), what, step=2)
    callback = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(FloatingPointError, match=f"step 2 .*{name}"):
        fit(model, batches=5, enable_checkpointing=True, callbacks=[callback])
    saved = sorted(tmp_path.iterdir())
    assert [p.stem for p in saved] == ["step=1", "step=2"]
    state = torch.load(saved[-1], weights_only=True)["state_dict"]
    assert all(t.isfinite().all() for t in state.values())


def poisoned_rank(rank, world_size, method):
    model = norm_free(method)
    batch = make_batch(seed=rank)
    if rank == 1:
        batch.views[0][0, 0, 0, 0] = float("nan")
    try:
        model.training_step(batch, 0)
    except FloatingPointError as error:
        return str(error)


@pytest.mark.parametrize("method", [BYOL, SimCLR])
def test_all_ranks_stop_when_one_is_poisoned(method):
    healthy, poisoned = run_ranks(2, poisoned_rank, method)
    assert "views[0]" in poisoned and "non-finite loss" in healthy


# --- bad input ---


@pytest.mark.parametrize(
    "method,options,message",
    [
        (DirectPred, {"predictor": "mlp"}, 'predictor="linear"'),
        (DirectPred, {"rho": 1.5}, "`rho`"),
        (BYOL, {"stop_gradient": False}, "momentum=0"),
        (BYOL, {"predictor_reset_init": "zeros"}, "`predictor_reset_init`"),
        (BYOL, {"head_init": "zeros"}, "`head_init`"),
        (SimCLR, {"beta": -1.0}, "`beta_form`"),
        (SimSiam, {"projector_layers": 0}, "`projector_layers`"),
        (BYOL, {"predictor": "none", "symmetric_predictor": True}, 'predictor="linear"'),
        (BYOL, {"predictor": "cubic"}, "`predictor`"),
        (BYOL, {"predictor_init": "uniform"}, "`init_range`"),
        (BYOL, {"predictor_init": "identity"}, 'predictor="linear"'),
        (BYOL, {"projector_norm": "layer"}, "detached_std"),
        (BYOL, {"momentum": 1.5}, "`momentum`"),
        (BYOL, {"momentum_schedule": "linear"}, "`momentum_schedule`"),
        (BYOL, {"target_init": "zeros"}, "`target_init`"),
        (BYOL, {"predictor_lr_scale": -1.0}, "`predictor_lr_scale`"),
        (BYOL, {"scheduler": "step"}, "`scheduler`"),
        (BYOL, {"warmup_epochs": -1.0}, "`warmup_epochs`"),
        (SimCLR, {"loss": "hinge"}, "`loss`"),
        (SimCLR, {"negatives": 0}, "`negatives`"),
        (SimCLR, {"tau": 0.0}, "`tau`"),
        (SimCLR, {"exact_weights": "dirty"}, "`exact_weights`"),
        (SimSiam, {"dim": 1}, "`dim`"),
        (SimSiam, {"projector": "conv"}, "`projector`"),
        (BarlowTwins, {"lambd": -1.0}, "`lambd`"),
        (RAFT, {"cross_model_weight": -1.0}, "BYOLPrime"),
        (RAFT, {"momentum": -0.1}, "`momentum`"),
    ],
)
def test_bad_options_are_refused_at_construction_with_the_remedy(method, options, message):
    with pytest.raises(ValueError, match=message):
        small(method, **options)


def test_unserved_options_are_refused_before_training():
    with pytest.raises(ValueError, match="14 negatives"):
        fit(small(SimCLR, negatives=15))
    with pytest.raises(ValueError, match="clean_image=True"):
        fit(small(SimCLR, loss="exact_nce"), image=False)

    class Data(L.LightningDataModule):
        batch_size, clean_image = 4, False

        def train_dataloader(self):
            raise AssertionError("must not be asked")

    for options, message in (({"negatives": 7}, "6 negatives"), ({"loss": "exact_simple"}, "clean_image=True")):
        trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        with pytest.raises(MisconfigurationException, match=message):
            trainer.fit(small(SimCLR, **options), datamodule=Data())


@pytest.mark.parametrize("data", [ImageDataModule(batch_size=8), MixtureDataModule(dim=4, batch_size=8)])
def test_exact_losses_refuse_our_own_data_without_clean_images(data):
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, fast_dev_run=True
    )
    with pytest.raises(MisconfigurationException, match="clean_image=True"):
        trainer.fit(small(SimCLR, loss="exact_nce"), datamodule=data)


@pytest.mark.parametrize("batch", [torch.zeros(4, 3, 8, 8), make_batch()._replace(views=make_batch().views[:1])])
def test_batches_without_two_views_are_refused(batch):
    with pytest.raises(ValueError, match="views"):
        small(BYOL).training_step(batch, 0)


def test_schedules_need_a_length():
    with pytest.raises(ValueError, match="max_epochs"):
        fit(small(SimSiam), max_epochs=-1)


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0), (3, 1), (12, 10)])
def test_a_run_shorter_than_the_warmup_warms_up_over_its_first_tenth(epochs, warmup):
    rates = []

    class Rates(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = small(BarlowTwins, warmup_epochs=10)
    with pytest.warns(UserWarning, match=r"`warmup_epochs`=10 .* first tenth") if epochs < 11 else nullcontext():
        fit(model, max_epochs=epochs, callbacks=[Rates()])
    steps = 4 * warmup if epochs > 10 else warmup
    assert rates.index(max(rates)) == steps
    assert rates[0] == pytest.approx(0.2 / (steps + 1))


# --- command line ---


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader(2)


def cli(method, tmp_path, *args):
    common = [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false", "--trainer.max_epochs=1"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    return LightningCLI(method, Data, args=["fit", *common, *quiet, *args], save_config_callback=None)


@each_method
def test_command_line_defaults_and_overrides(method, tmp_path):
    args = [f"--model.{name}={value}" for name, value in SMALL[method].items()]
    done = cli(method, tmp_path, *args, "--model.backbone=small_conv", "--model.optimizer.lr=0.004")
    assert done.trainer.optimizers[0].param_groups[0].get("initial_lr", 0.004) == 0.004
    assert type(done.trainer.optimizers[0]) is type(
        method(**SMALL[method], backbone="linear").optimizer([nn.Parameter()])
    )


def test_command_line_backbone_by_class_and_its_checkpoint(tmp_path):
    args = [f"--model.{name}={value}" for name, value in SMALL[BYOL].items()]
    backbone = [
        "--model.backbone=lightning_ssl.nn.SmallConv",
        "--model.backbone.width=8",
        "--model.backbone.norm=group",
    ]
    optimizer = ["--model.optimizer=lightning_ssl.nn.LARS", "--model.optimizer.lr=0.5", "--model.scheduler=cosine"]
    done = cli(BYOL, tmp_path, *args, *backbone, *optimizer)
    path = done.trainer.checkpoint_callback.best_model_path
    loaded = BYOL.load_from_checkpoint(path, weights_only=True)
    for a, b in zip(done.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    optimizer = loaded.optimizer(loaded.parameter_groups())
    assert type(optimizer).__name__ == "LARS" and optimizer.param_groups[0]["lr"] == 0.5
