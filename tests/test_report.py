"""The page of a run, looked at in a browser; summary.json; curves that keep their extremes."""

import json
import time
from importlib.metadata import version

import lightning.pytorch as L
import numpy as np
import pytest
from PIL import Image

from lightning_ssl import callbacks
from lightning_ssl.callbacks import run_report
from lightning_ssl.quantities import declared
from lightning_ssl.report import words
from lightning_ssl.report.page import embedded_curves, report_page
from lightning_ssl.report.series import Series, on_grid, thin
from lightning_ssl.report.summary import quantities_of, read_summary, settings
from tests.browser import browser
from tests.callbacks import strangers

KNOWN = declared(vars(callbacks).values())
HEALTHY = {
    "place": "projector",
    "main": True,
    "kind": "healthy",
    "healthy": True,
    "step": None,
    "evidence": "51 of 64 dimensions are alive after 40 looks",
    "cause": "",
    "remedy": "",
    "forecast": "",
}
BROKEN = {
    **HEALTHY,
    "kind": "complete collapse",
    "healthy": False,
    "step": 120,
    "evidence": "the spread fell from 0.8 to 0.01",
    "cause": "there is no predictor, and the target is the online network",
    "remedy": "give the method its predictor back: --model.predictor mlp",
}


def curves(steps=400, falls=False):
    """What a run might have logged."""
    noise = np.random.default_rng(0).normal(0, 0.02, steps)
    at = np.arange(steps)
    return {
        "train/loss": Series(zip(at.tolist(), (2 * np.exp(-at / 100) + 0.3 + noise).tolist(), strict=True)),
        "train/uniformity": Series((int(s), -2.0 * (np.exp(-s / 60) if falls else 1)) for s in at[::5]),
        "train/effective_rank": Series((int(s), 40 * (np.exp(-s / 60) if falls else 1)) for s in at[::5]),
        "val/knn_top1": Series((s, 0.3 - 0.2 * s / steps if falls else 0.3 + 0.5 * s / steps) for s in (0, 200, 399)),
        "cov_op/layer.1": Series((int(s), 1e-4 * 10 ** (s / 100)) for s in at[::20]),
        "cov_op/layer.2": Series((int(s), 1e-3 * 10 ** (s / 100)) for s in at[::20]),
        "my/own": Series([(7, 1.5)]),
    }


def summary_of(history, verdicts=(), name="a run", state="finished", steps=400):
    quantities, known = quantities_of(history, KNOWN)
    run = {"name": name, "method": "BYOL", "data": "digits", "state": state, "reason": "", "began": 0.0, "updated": 9.0}
    return {
        "schema": 1,
        "run": {**run, "host": "here", "pid": 1},
        "steps": steps,
        "epochs": 4,
        "verdicts": list(verdicts),
        "quantities": quantities,
        "declared": known,
        "config_hash": None,
        "versions": {"python": "3"},
        "cost": {"seconds": 61.0, "seconds_per_step": 0.1, "ranks": 1, "device": "cpu", "peak_memory_bytes": 1},
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def shown(page, path, html):
    path.write_text(html)
    page.events.clear()
    return page.open(path)


def test_a_collapsed_runs_page_begins_with_the_verdict(page, tmp_path):
    for step in (0, 200, 300):
        picture = tmp_path / "pictures" / "circle" / "picture" / f"step_{step:08d}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (step % 256, 0, 0)).save(picture)
    history = curves(falls=True)
    shown(page, tmp_path / "report.html", report_page(summary_of(history, [BROKEN]), history, tmp_path))
    top = page.run("document.getElementById('verdict').innerText")
    for said in (
        "Complete collapse of projector since step 120",
        "spread fell from 0.8 to 0.01",
        "no predictor",
        "Remedy: give the method its predictor back",
        "kNN probe, top-1 fell from 30.0% (step 0)",
    ):
        assert said in top, said
    assert page.run("document.getElementById('verdict').getBoundingClientRect().bottom <= innerHeight")
    assert page.run("document.getElementById('summary').innerText.includes('step 399')")
    below = page.run("document.querySelector('.plot').getBoundingClientRect().top")
    assert below > page.run("document.getElementById('summary').getBoundingClientRect().bottom")

    # Every chart says how to read it; the slider goes over the pictures.
    assert page.run("[...document.querySelectorAll('figcaption')].every(c => c.innerText.length > 5)")
    assert "Collapsed: " in page.run("document.body.innerText")
    source = "document.querySelector('#picture-0 img').src"
    last = page.run(source)
    page.run("(s => { s.value = 0; s.dispatchEvent(new Event('input')) })(document.querySelector('#picture-0 input'))")
    assert page.run(source) != last and page.run("document.querySelector('#picture-0 output').innerText") == "step 0"
    assert not page.problems()


def test_curves_zoom_hover_and_take_a_logarithmic_scale(page, tmp_path):
    history = curves()
    shown(page, tmp_path / "report.html", report_page(summary_of(history, [HEALTHY]), history, tmp_path))
    page.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    plot = "document.querySelector('.plot').uplot"
    left, top, width, height = page.run(
        f"(b => [b.left, b.top, b.width, b.height])({plot}.over.getBoundingClientRect())"
    )
    before = page.run(f"[{plot}.scales.x.min, {plot}.scales.x.max]")
    page.mouse("mouseMoved", left + width / 2, top + height / 2)
    tip = page.run("document.querySelector('figure .tip').innerText")
    step = int(tip.split("\n")[0].removeprefix("step "))
    value = float(tip.split("train/loss: ")[1].split("\n")[0])
    assert abs(step - 200) < 5 and value == pytest.approx(dict(history["train/loss"])[step], rel=1e-3)
    page.drag(left + width * 0.25, top + height / 2, left + width * 0.5)
    zoomed = page.run(f"[{plot}.scales.x.min, {plot}.scales.x.max]")
    assert before == [0, 399] and zoomed == pytest.approx([100, 200], abs=4)
    page.run("document.querySelector('.tools button[title=\"show all steps\"]').click()")
    assert page.run(f"[{plot}.scales.x.min, {plot}.scales.x.max]") == before
    page.run("document.querySelector('.tools button').click()")
    assert page.run(f"{plot}.scales.y.distr") == 3
    assert not page.problems()


def test_two_hundred_layers_and_a_hundred_thousand_steps(page, tmp_path):
    """As RunReport keeps them: at most a thousand points of a series."""
    rng, steps = np.random.default_rng(0), 100_000
    history = {}
    for number in range(1000):
        values = rng.normal(size=steps).cumsum() if number < 5 else rng.normal(size=1000).cumsum()
        kept = thin(values, 1000)
        at = kept * (steps // len(values))
        family = ("cov_op", "cov_op_trace", "cov_op_ratio", "cov_op_intra", "cov_op_error")[number % 5]
        history[f"{family}/blocks.{number // 5}.mlp.fc1"] = Series(zip(at.tolist(), values[kept], strict=True))
    history |= curves(falls=True)
    html = report_page(summary_of(history, [BROKEN], steps=steps), history, tmp_path)
    assert len(html.encode()) < 5e6, len(html)
    seconds = min(shown(page, tmp_path / "report.html", html) for _ in range(3))  # the machine may be busy
    assert page.run("document.querySelectorAll('[data-drawn]').length") >= 1
    assert seconds < 2, seconds
    assert "blocks.199.mlp.fc1" in html and not page.problems()
    page.run("document.querySelector('figure.wide .plot').scrollIntoView()")
    page.run("new Promise(done => setTimeout(done, 300))")
    assert page.run("document.querySelector('figure.wide .plot').uplot.series.length") > 200


def test_the_least_and_the_greatest_value_stay():
    values = np.sin(np.arange(50_000) / 700)
    values[[1234, 43_210]] = 7, -7
    series = Series(enumerate(values.tolist()))
    assert len(series) <= 1000 and series[0] == (0, 0.0) and series[-1][0] == 49_999
    assert series.extreme(True) == (1234, 7) and series.extreme(False) == (43_210, -7)
    x, drawn = on_grid({"a": series, "b": [(3, float("nan")), (5, 2.0)]}, 60)
    assert len(x) <= 60 and x == sorted(set(x)) and x[0] == 0 and x[-1] == 49_999
    assert max(v for v in drawn["a"] if v is not None) == 7 and min(v for v in drawn["a"] if v is not None) == -7
    assert [v for v in drawn["b"] if v is not None] == [2.0]


def test_what_a_page_shows_can_be_read_back(tmp_path):
    history = curves()
    found = embedded_curves(report_page(summary_of(history), history, tmp_path))
    assert found.keys() == history.keys()
    for key, points in found.items():
        assert np.array(points) == pytest.approx(np.array(list(history[key])), rel=1e-3), key


@pytest.mark.parametrize(
    ("verdicts", "falls", "grade", "said"),
    [
        ([HEALTHY], False, "good", "51 of 64 dimensions are alive"),
        ([BROKEN], True, "bad", "Complete collapse of projector since step 120"),
        ([HEALTHY], True, "doubt", "kNN probe, top-1 fell from 30.0% (step 0) to 10.0% (step 399)"),
        ([], False, "unknown", "No CollapseMonitor watched this run"),
        ([{**HEALTHY, "forecast": "complete collapse is expected about step 900"}], False, "doubt", "about step 900"),
    ],
)
def test_sentences_stand_for_the_figures(verdicts, falls, grade, said):
    answer = words.answer(summary_of(curves(falls=falls), verdicts))
    assert answer.grade == grade and said in " ".join([answer.title, *answer.sentences])
    assert ("healthy" in answer.title.lower()) == (not falls and bool(verdicts))


class Looks(L.Callback):
    """What the folder holds when an epoch begins, and how often values were brought to the host by then."""

    def __init__(self, folder, reads):
        self.folder, self.reads, self.seen = folder, reads, []

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch:
            summary = read_summary(self.folder)
            self.seen.append((summary["run"]["state"], summary["steps"], "Healthy so far" in self.page()))

    def page(self):
        return (self.folder / "report.html").read_text()


class Validated(strangers.LightlyBYOL):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


def test_the_page_is_written_each_epoch_and_values_are_read_in_bulk(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(run_report, "to_host", lambda values, real=run_report.to_host: reads.append(1) or real(values))
    looks = Looks(tmp_path, reads)
    watch = [callbacks.CollapseMonitor("backbone", every_n_steps=1), callbacks.RunReport(), looks]
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=watch, limit_train_batches=4,
    )  # fmt: skip
    held_out = strangers.loader(strangers.Pairs(16))
    trainer.fit(Validated(), strangers.loader(strangers.Pairs(64)), held_out)
    steps = [step for step, _ in watch[1].history["val/loss"]]
    assert steps == sorted(set(steps)) and len(steps) == 3  # each validation once
    assert looks.seen == [("running", 4, True), ("running", 8, True)]
    assert len(reads) <= 3 * 5 + 1  # at the end of an epoch and of the run, not with each step
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["run"]["state"] == "finished" and summary["run"]["method"] == "Validated"
    assert {"first", "best", "last", "min", "max", "count", "declared"} == set(summary["quantities"]["collapse/std"])
    assert summary["quantities"]["collapse/std"]["last"]["step"] == 11
    assert summary["cost"]["seconds"] > 0 and summary["versions"]["torch"] == version("torch")
    assert summary["verdicts"][0]["healthy"] and abs(summary["run"]["updated"] - time.time()) < 60


def test_the_same_config_has_the_same_settings():
    one = {"name": "a", "ckpt_path": None, "model": {"class_path": "x.BYOL", "init_args": {"dim": 3}}}
    two = {"name": "b", "ckpt_path": "last", "model": {"class_path": "x.BYOL", "init_args": {"dim": 3}}}
    assert settings(one) == settings(two) == {"model": "BYOL", "model.dim": 3}
    assert settings({"trainer": {"callbacks": [{"class_path": "x.KNN"}, {"class_path": "y.KNN"}]}}) == {
        "trainer.callbacks.KNN": "on",
        "trainer.callbacks.KNN+": "on",
    }
