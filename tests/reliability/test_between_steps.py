"""Whatever ends a run, and wherever: it resumes from a whole step, and ends as the uninterrupted one does."""

import functools
import random
import signal
import warnings

import lightning.pytorch as L
import pytest
import torch

from lightning_ssl import callbacks
from lightning_ssl._lightning import RESUMES_BEHIND_THE_STEP
from lightning_ssl.data import MixtureDataModule
from lightning_ssl.methods import BYOL, DirectPred, SimCLR
from lightning_ssl.nn import MLPBackbone
from lightning_ssl.runs.checkpoint import CheckpointFiles, RunCheckpoint
from lightning_ssl.runs.loggers import ResumableCSVLogger
from tests.reliability import jobs

METHODS = {
    "SimCLR": lambda **kw: SimCLR(projector_hidden=8, projector_dim=4, scheduler="cosine", warmup_epochs=1, **kw),
    "BYOL": lambda **kw: BYOL(projector_hidden=8, projector_dim=4, predictor_hidden=8, **kw),
    "DirectPred": lambda **kw: DirectPred(projector_hidden=8, projector_dim=4, **kw),
}
STEPS, EPOCHS = 5, 3


class Torn(BaseException):
    """Not an Exception: probes turn those into warnings."""


class Trigger(L.Callback):
    """Does something, once, at a place of a step; `batch` counts the batches begun in the whole run."""

    def __init__(self, place=None, batch=0, act=None):
        self.place, self.batch, self.act, self.begun = place, batch, act, 0

    def at(self, place, batch=None):
        if place == self.place and (self.begun if batch is None else batch) >= self.batch and self.act is not None:
            act, self.act = self.act, None
            act()

    def on_train_start(self, trainer, pl_module):
        def at(place):
            return lambda *_: self.at(place)

        def forward(module, inputs, output):
            if output.requires_grad:
                output.register_hook(at("backward"))
            if module.training:
                self.at("forward")

        pl_module.projector.register_forward_hook(forward)  # BatchNorm has counted the batch
        optimizer = trainer.optimizers[0]

        def torn_step(optimizer, *_):
            before = next(pl_module.parameters()).clone()
            with torch.no_grad():
                next(pl_module.parameters()).mul_(1.5)
            self.at("inside the optimizer")
            with torch.no_grad():
                next(pl_module.parameters()).copy_(before)

        optimizer.register_step_pre_hook(torn_step)
        optimizer.register_step_post_hook(at("after the optimizer"))

    def on_train_batch_start(self, trainer, *_):
        self.begun += 1
        self.at("batch start")

    def on_before_optimizer_step(self, *_):
        self.at("before the optimizer")

    def on_train_batch_end(self, *_):
        self.at("callback")

    def on_validation_batch_end(self, *_):
        self.at("validation")

    def state_dict(self):
        return {"begun": self.begun}  # changes in mid-step

    def load_state_dict(self, state_dict):
        self.begun = state_dict["begun"]

    def on_save_checkpoint(self, *_):
        self.at("checkpoint")


class Data(MixtureDataModule):
    trigger = Trigger()
    fetched = 0

    def train_dataloader(self):
        loader = super().train_dataloader()
        original = type(loader.dataset).__getitems__

        def fetch(rows):
            self.trigger.at("fetch", self.trigger.begun + 1)
            return original(loader.dataset, rows)

        loader.dataset.__getitems__ = fetch
        return loader

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.trigger.at("transfer", self.trigger.begun + 1)
        return super().on_before_batch_transfer(batch, dataloader_idx)


class Log(ResumableCSVLogger):
    trigger = Trigger()

    def log_metrics(self, metrics, step=None):
        self.trigger.at("log")
        super().log_metrics(metrics, step)


class Probe(callbacks.KNNProbe):
    trigger = Trigger()

    def _embed(self, *args, **kwargs):
        self.trigger.at("probe")
        return super()._embed(*args, **kwargs)


def fit(method, folder, trigger=None, resume=False, **options):
    """Three epochs of five steps, a checkpoint at the end of each; the second one is validated."""
    trigger = trigger or Trigger()
    L.seed_everything(0, verbose=False)
    backbone = MLPBackbone(in_features=10, hidden_features=8, out_features=8)
    model = METHODS[method](backbone=backbone)
    data = Data(components=4, draws=16 * STEPS, batch_size=16, probe_draws=32)
    logger = Log(folder, name="run", version="")
    probe = Probe(every_n_epochs=1, k=3)
    data.trigger = logger.trigger = probe.trigger = trigger
    saver = {"save_last": True, "save_on_exception": True, **options.pop("saver", {})}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        check_val_every_n_epoch=2,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        logger=logger,
        callbacks=[
            trigger,
            probe,
            callbacks.UniformityAlignment(every_n_steps=2),
            callbacks.CollapseMonitor(every_n_steps=2),
            callbacks.RunReport(html=False),
            RunCheckpoint(folder / "run" / "checkpoints", **saver),
        ],
        plugins=[CheckpointFiles()],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data, ckpt_path="last" if resume else None)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    @functools.cache
    def run(method, accumulate=1):
        folder = tmp_path_factory.mktemp(method)
        fit(method, folder, accumulate_grad_batches=accumulate)
        return folder / "run"

    return run


def assert_same(run, reference):
    state, expected = jobs.checkpoint(run), jobs.checkpoint(reference)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops", "Data"):
        odd = jobs.differences(state[part], expected[part], part)
        if not RESUMES_BEHIND_THE_STEP:  # before 2.5 Lightning counts the epoch that it resumes in once more, or less
            odd = [difference for difference in odd if "/epoch_progress/total/" not in difference]
        assert not odd
    ours, theirs = (
        {key: value for key, value in found["callbacks"].items() if "Checkpoint" not in key}
        for found in (state, expected)
    )
    assert not jobs.differences(ours, theirs)
    assert jobs.log(run) == jobs.log(reference)


PLACES = [
    "fetch",
    "transfer",
    "batch start",
    "forward",
    "backward",
    "before the optimizer",
    "inside the optimizer",
    "after the optimizer",
    "callback",
    "validation",
    "probe",
    "checkpoint",
    "log",
]
THIRD = STEPS + 3  # batches begun when it happens, in the middle of the second epoch


slow = pytest.mark.slow
FAST = [("BYOL", place) for place in ("fetch", "forward", "inside the optimizer", "log")]
EXCEPTIONS = [
    (m, place) if (m, place) in FAST else pytest.param(m, place, marks=slow) for m in METHODS for place in PLACES
]


@pytest.mark.parametrize(("method", "place"), EXCEPTIONS)
def test_an_exception(method, place, uninterrupted, tmp_path):
    def tear():
        raise Torn(place)

    with pytest.raises(Torn):
        fit(method, tmp_path, Trigger(place, THIRD, tear))
    step = jobs.checkpoint(tmp_path / "run")["global_step"]
    assert step == (THIRD - 1 if place == "fetch" else STEPS)  # nothing is lost where a batch could not be loaded
    fit(method, tmp_path, resume=True)
    assert_same(tmp_path / "run", uninterrupted(method))


@slow
@pytest.mark.parametrize("batch", [STEPS + 2, STEPS + 3, STEPS + 4])
def test_an_exception_amid_gradient_accumulation(batch, uninterrupted, tmp_path):
    def tear():
        raise Torn

    with pytest.raises(Torn):
        fit("BYOL", tmp_path, Trigger("fetch", batch, tear), accumulate_grad_batches=2)
    # Three steps of 2, 2 and 1 batches an epoch: before the 7th batch one of two is trained on, before the 8th two, and
    # before the 9th one again, so that the epoch's beginning is the last whole step that was saved.
    assert jobs.checkpoint(tmp_path / "run")["global_step"] == (4 if batch == STEPS + 3 else 3)
    fit("BYOL", tmp_path, resume=True, accumulate_grad_batches=2)
    assert_same(tmp_path / "run", uninterrupted("BYOL", 2))


def test_a_step_that_could_not_be_logged_is_trained_again(uninterrupted, tmp_path):
    def tear():
        raise Torn

    often = {"saver": {"every_n_train_steps": 1}}
    with pytest.raises(Torn):
        fit("BYOL", tmp_path, Trigger("log", THIRD, tear), **often)
    assert jobs.checkpoint(tmp_path / "run")["global_step"] == THIRD - 1
    fit("BYOL", tmp_path, resume=True, **often)
    assert jobs.log(tmp_path / "run") == jobs.log(uninterrupted("BYOL"))


_random = random.Random(5)
_within = [place for place in PLACES if place not in ("checkpoint", "validation", "probe")]
MOMENTS = [
    (list(METHODS)[i % 3], _random.choice(_within), _random.randint(1, STEPS * EPOCHS - 1), name)
    for i, name in enumerate(["SIGINT", "SIGTERM"] * 5)
]


MOMENTS += [("BYOL", "validation", 1, "SIGUSR1"), ("BYOL", "probe", 7, "SIGINT")]


@pytest.mark.parametrize(
    ("method", "place", "batch", "name"), [*MOMENTS[:2], *(pytest.param(*m, marks=slow) for m in MOMENTS[2:])]
)
def test_a_signal_ends_the_run_after_the_step_it_came_in(method, place, batch, name, uninterrupted, tmp_path):
    trigger = Trigger(place, batch, lambda: signal.raise_signal(getattr(signal, name)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with pytest.raises(SystemExit) as ended:
        fit(method, tmp_path, trigger)
    assert ended.value.code == (130 if name == "SIGINT" else 75)
    step = jobs.checkpoint(tmp_path / "run")["global_step"]
    if place in ("validation", "probe"):
        assert step == 2 * STEPS  # the end of the epoch
    else:
        assert step in (trigger.begun - 1, trigger.begun)
        assert step >= batch - 1
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    fit(method, tmp_path, resume=True)
    assert_same(tmp_path / "run", uninterrupted(method))


@slow
@pytest.mark.parametrize("batch", [STEPS + 1, STEPS + 2])
def test_a_signal_amid_gradient_accumulation(batch, uninterrupted, tmp_path):
    """The run ends when all batches of the step are in it."""
    trigger = Trigger("forward", batch, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        fit("SimCLR", tmp_path, trigger, accumulate_grad_batches=2)
    assert jobs.checkpoint(tmp_path / "run")["global_step"] == 4
    fit("SimCLR", tmp_path, resume=True, accumulate_grad_batches=2)
    assert_same(tmp_path / "run", uninterrupted("SimCLR", 2))


@slow
def test_a_second_interrupt_ends_the_run_at_once(uninterrupted, tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            fit("BYOL", tmp_path, Trigger("forward", THIRD, twice))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores further ones while it ends
    assert ended.value.code == 1
    assert jobs.checkpoint(tmp_path / "run")["global_step"] == STEPS
    fit("BYOL", tmp_path, resume=True)
    assert_same(tmp_path / "run", uninterrupted("BYOL"))
