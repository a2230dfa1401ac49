"""`lightning-ssl reproduce cifar10`: its file of contrasts, its statistics, its jobs and what they leave behind."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import yaml
from PIL import Image
from scipy.stats import permutation_test, ttest_1samp
from torchvision import datasets

from lightning_ssl.theory.reproduce import cifar10, main
from lightning_ssl.theory.reproduce.cifar10 import data, jobs, plan, report
from lightning_ssl.theory.reproduce.cifar10 import statistics as stats
from tests.data.files import write_cifar

CLASSES = ("airplane", "automobile", "bird")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """CIFAR-10's layout with a few small images of three colours."""
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 12)):
        for label, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for row in range(count):
                pixels = rng.integers(0, 120, (32, 32, 3)) + np.eye(3, dtype=int)[label] * 120
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{row:04d}.png")
    return folder


TINY = """
seeds: [0, 1]
pilot: {seeds: [100], held_out: 30}
small: {images: 60, image_size: 16, batch_size: 20, epochs: 3, watch_every: 2, operator_every: 3, l2: 0.001}
full: {images: 60, image_size: 16, batch_size: 20, epochs: 1, watch_every: 2, operator_every: 3, l2: 0.001}
settings:
  linear: &linear
    method: DirectPred
    init_args: &arguments
      backbone: {class_path: lightning_ssl.nn.SmallConv, init_args: {width: 4, depth: 2}}
      projector_hidden: 8
      projector_dim: 4
  other: {method: DirectPred, init_args: {<<: *arguments, momentum: 0.0}}
  untrained: {<<: *linear, size: {epochs: 0}}
contrasts:
  ema: {paper: P Table 1, claim: EMA helps, first: linear, second: other, published: [70.0, 60.0]}
  rank:
    {paper: P Fig 1, claim: falls, settings: [linear, other, untrained], against: l_bound, metric: knn, direction: less}
"""


@pytest.fixture
def tiny(monkeypatch):
    real = plan.read
    monkeypatch.setattr(plan, "read", lambda full=False, pilot=False, text=None: real(full, pilot, text or TINY))
    return real(text=TINY)


# The file of contrasts -----------------------------------------------------------------------------------------------


def test_the_file_answers_what_was_asked():
    registered = plan.read()
    assert len(registered.seeds) >= 5 and not set(registered.seeds) & set(plan.read(pilot=True).seeds)
    for first, second in (
        ("byol", "byol-no-predictor"),
        ("byol-prime", "byol-prime-no-predictor"),
        ("raft", "raft-no-predictor"),
        ("byol", "byol-no-ema"),
        ("byol-mean-kept", "byol-mean-detached"),
        ("directpred", "linear"),
        ("directpred-no-ema", "linear-no-ema"),
        ("symmetric", "linear"),
        ("symmetric-no-ema", "linear-no-ema"),
        ("simclr-exact", "simclr"),
        ("simclr-beta-minus", "simclr"),
        ("simclr-beta-plus", "simclr"),
    ):
        assert any((c.first, c.second) == (first, second) for c in registered.contrasts.values()), (first, second)
    for method in ("barlow", "simsiam"):
        wanted = tuple(f"{method}-{d}" for d in (4, 16, 64, 256))
        assert any(c.settings == wanted and c.against == "l_bound" for c in registered.contrasts.values())
    for contrast in registered.contrasts.values():
        assert contrast.paper and contrast.claim


DIFFERENCES = {  # what two settings of a contrast may differ in; anything else would explain a difference as well
    "byol-needs-predictor": {"predictor"},
    "byol-gains-by-ema": {"momentum"},
    "batchnorm-mean": {"projector_norm", "predictor_norm"},
    "raft-needs-predictor": {"predictor"},
    "symmetric-with-ema": {"symmetric_predictor"},
    "directpred-over-sgd": set(),
    "beta-minus-helps": {"beta"},
    "exact-nce-comparable": {"loss", "exact_weights"},
    "barlow-dimension": {"dim"},
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_settings_of_a_contrast_differ_in_nothing_else(name, full):
    registered = plan.read(full)
    contrast = registered.contrast(name)
    first, second = (registered.setting(s)["model"]["init_args"] for s in contrast.names)
    differing = {key for key in {*first, *second} if first.get(key) != second.get(key)}
    assert differing == DIFFERENCES[name]
    assert registered.setting(contrast.first)["size"] == registered.setting(contrast.second)["size"]


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--contrast", "byol-likes-mondays", "must be one of the registered ones"),
        ("--setting", "simclr-exakt", "did you mean 'simclr-exact'"),
    ],
)
def test_what_is_not_in_the_file_is_refused(option, name, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["cifar10", option, name, "--out", str(tmp_path)])
    assert words in capsys.readouterr().err
    assert not list(tmp_path.rglob("result.json"))


def test_a_contrast_of_settings_that_do_not_exist_is_refused():
    broken = yaml.safe_load(TINY)
    broken["contrasts"]["ema"]["second"] = "nothing"
    with pytest.raises(ValueError, match="`setting` must be one of"):
        plan.read(text=yaml.safe_dump(broken))


def test_results_of_another_file_are_not_mixed_in(tiny, tmp_path):
    folder = tmp_path / "linear-0"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"plan": "another"}))
    with pytest.raises(ValueError, match="give another --out"):
        cifar10.finished(tiny, tmp_path, "linear", 0)


# Statistics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 6])
@pytest.mark.parametrize("alternative", ["greater", "less", "two-sided"])
def test_sign_flips_are_all_enumerated(n, alternative):
    x = np.random.default_rng(n).normal(0.4, 1, n)
    means = [np.mean([s * v for s, v in zip(signs, x, strict=True)]) for signs in itertools.product((1, -1), repeat=n)]
    count = {
        "greater": sum(m >= x.mean() - 1e-12 for m in means),
        "less": sum(m <= x.mean() + 1e-12 for m in means),
        "two-sided": sum(abs(m) >= abs(x.mean()) - 1e-12 for m in means),
    }[alternative]
    assert stats.sign_flip_test(x, alternative) == count / 2**n


@pytest.mark.parametrize("alternative", ["greater", "less"])
def test_sign_flips_agree_with_scipy(alternative):
    rng = np.random.default_rng(3)
    first, second = rng.normal(0.5, 1, 6), rng.normal(0, 1, 6)
    found = permutation_test(
        (first, second),
        lambda a, b, axis: (a - b).mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        alternative=alternative,
        n_resamples=np.inf,
    )
    assert stats.sign_flip_test(first - second, alternative) == pytest.approx(found.pvalue)


def test_equal_differences_are_ties_whatever_their_order():
    assert stats.sign_flip_test([0.1, 0.2, 0.3]) == stats.sign_flip_test([0.3, 0.1, 0.2]) == 1 / 8
    assert stats.sign_flip_test([0.0] * 6) == 1.0


def test_the_interval_is_students():
    x = np.random.default_rng(1).normal(2, 3, 6)
    wanted = ttest_1samp(x, 0).confidence_interval(0.95)
    assert stats.interval(x) == pytest.approx((wanted.low, wanted.high))
    assert stats.interval([1.0]) == (-float("inf"), float("inf"))


def contrast(direction="greater", **options):
    return plan.Contrast("c", "P", "claim", "a", "b", direction=direction, **options)


@pytest.mark.parametrize(
    ("direction", "values", "verdict"),
    [
        ("greater", [1, 2, 1, 2, 1], "confirmed"),
        ("greater", [-1, -2, -1, -2, -1], "reversed"),
        ("greater", [1, 2, 1, -2, 1], "not confirmed"),
        ("greater", [1, 2, 1, 2], "not confirmed"),  # 4 seeds cannot say it: the least p is 1/16
        ("less", [-1, -2, -1, -2, -1], "confirmed"),
        ("less", [1, 2, 1, 2, 1], "reversed"),
    ],
)
def test_verdicts(direction, values, verdict):
    assert stats.judge(contrast(direction), values).verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.1, -0.2, 0.3, 0.0, 0.1], "confirmed"),
        ([5.1, 4.8, 5.3, 5.0, 5.1], "reversed"),
        ([9.0, -9.0, 8.0, -7.0, 1.0], "not confirmed"),
        ([1.9, 2.1, 1.8, 2.3, 2.0], "not confirmed"),
    ],
)
def test_verdicts_of_equality_are_of_the_interval(values, verdict):
    assert stats.judge(contrast("equal", margin=2.0), values).verdict == verdict


def test_values_are_paired_by_seed_and_incomplete_pairs_left_out():
    results = {("a", 0): {"linear": 5.0}, ("b", 0): {"linear": 3.0}, ("a", 1): {"linear": 9.0}}
    assert stats.paired_values(contrast(), results, (0, 1)) == {0: 2.0}


def test_rank_correlations_are_of_each_seed():
    over = plan.Contrast("c", "P", "claim", settings=("a", "b", "d"), against="x", metric="y")
    results = {(n, 0): {"x": i, "y": -i} for i, n in enumerate("abd")}
    results |= {(n, 1): {"x": i, "y": y} for i, (n, y) in enumerate(zip("abd", (1, 3, 2), strict=True))}
    assert stats.paired_values(over, results, (0, 1)) == pytest.approx({0: -1.0, 1: 0.5})


def test_adjusted_p_values_are_benjamini_and_hochbergs():
    p = [0.03, 0.5, 0.015, 0.015, 1.0, 0.2]
    # By hand: of six sorted values the i-th times 6 / i, and none above those behind it.
    assert stats.false_discovery(p) == pytest.approx([0.06, 0.6, 0.045, 0.045, 1.0, 0.3])
    if hasattr(scipy.stats, "false_discovery_control"):  # since 1.11
        assert stats.false_discovery(p) == pytest.approx(list(scipy.stats.false_discovery_control(p)))


# Data ----------------------------------------------------------------------------------------------------------------


def test_the_pilot_never_reads_a_test_image(root, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(data, "packed", lambda where, part, real=data.packed: opened.append(part) or real(where, part))
    module = data.CIFAR10(str(root), 60, held_out=30)
    data._parts.cache_clear()
    assert len(module.source.train) == 60 and len(module.source.test) == 30 and opened == ["train"]
    used, held = (
        {tuple(x.flatten()[:40].tolist()) for x in s.pixels} for s in (module.source.train, module.source.test)
    )
    assert not used & held
    data._parts.cache_clear()
    assert len(data.CIFAR10(str(root), 60).source.test) == 36 and opened == ["train", "train", "test"]


def test_images_are_decoded_once(root, monkeypatch):
    first, classes = data.packed(str(root), "train")
    assert classes == list(CLASSES) and (root / "train.pt").exists()
    monkeypatch.setattr(data, "into_memory", None)
    again, _ = data.packed(str(root), "train")
    assert torch.equal(first.pixels, again.pixels) and torch.equal(first.labels, again.labels)


def test_torchvisions_files_are_read(tmp_path, monkeypatch):
    write_cifar(tmp_path)
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)  # small files have other checksums
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: setattr(self, "classes", list("abcdefghij")))
    split, classes = data.packed(str(tmp_path), "test")
    assert split.pixels.shape[1:] == (3, 32, 32) and len(classes) == 10


def test_missing_images_are_named(tmp_path):
    with pytest.raises(ValueError, match="`root` must hold cifar-10-batches-py/ or train/"):
        data.packed(str(tmp_path), "train")


def test_too_many_images_are_refused(root):
    with pytest.raises(ValueError, match="`images` must be at most 90"):
        _ = data.CIFAR10(str(root), 100, held_out=30).source


# Jobs ----------------------------------------------------------------------------------------------------------------


def test_a_job_keeps_its_diagnostics(tiny, root, tmp_path):
    result = jobs.run_job(tiny, "linear", 0, tmp_path, str(root))
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert {"linear", "knn", "uniformity", "alignment", "effective_rank", "l_cor", "l_bound"} <= set(result)
    assert len(result["modes"]["eigenvalues"]) == len(result["modes"]["predictor_values"]) == 4
    assert [row["step"] for row in result["history"]] == [3.0, 6.0, 9.0]
    assert {"predictor/alignment_weighted", "cov_op/backbone.layers.0", "train/uniformity"} <= set(result["history"][0])
    assert not (tmp_path / "last.ckpt").exists()
    with np.load(tmp_path / "predictor_spectra.npz") as spectra:  # the modes over time
        assert spectra["eigenvalues"].shape == (len(spectra["step"]), 4)


class Killed(Exception):
    pass


def test_a_killed_job_goes_on_with_the_same_numbers(tiny, root, tmp_path):
    whole = jobs.run_job(tiny, "linear", 0, tmp_path / "whole", str(root))

    def kill(epoch):
        if epoch == 3:  # in the last epoch, with two kept
            raise Killed

    with pytest.raises(Killed):
        jobs.run_job(tiny, "linear", 0, tmp_path / "killed", str(root), kill)
    assert (tmp_path / "killed" / "last.ckpt").exists() and not (tmp_path / "killed" / "result.json").exists()
    epochs = []
    again = jobs.run_job(tiny, "linear", 0, tmp_path / "killed", str(root), epochs.append)
    assert epochs == [3]
    for key in set(whole) - {"seconds", "cpu_seconds"}:
        assert again[key] == whole[key], key


@pytest.mark.slow
def test_a_process_killed_outright_loses_no_finished_epoch(root, tmp_path):
    program = (
        "import time, sys\nfrom pathlib import Path\n"
        "from lightning_ssl.theory.reproduce.cifar10 import jobs, plan\n"
        f"text = {TINY!r}\n"
        "def slow(epoch):\n    print(epoch, flush=True)\n    time.sleep(3 if epoch > 1 else 0)\n"
        f"jobs.run_job(plan.read(text=text), 'linear', 0, Path({str(tmp_path)!r}), {str(root)!r}, slow)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["1", "2"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    epochs = []
    result = jobs.run_job(plan.read(text=TINY), "linear", 0, tmp_path, str(root), epochs.append)
    assert epochs in ([2, 3], [3]) and len(result["history"]) == 3


def test_a_claim_is_exclusive_and_ends_with_the_process(tmp_path):
    def hold(folder, ready):
        with jobs.claimed(folder) as mine:
            ready.send(mine)
            time.sleep(60)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    other = context.Process(target=hold, args=(tmp_path, there))
    other.start()
    assert here.recv() is True
    with jobs.claimed(tmp_path) as mine:
        assert not mine
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with jobs.claimed(tmp_path) as mine:
        assert mine


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_writes_table_forest_plot_and_figures(tiny, root, tmp_path, capsys):
    assert main(["cifar10", "--root", str(root), "--out", str(tmp_path), "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 of 6:" in out and "spent, about 0:00:00" in out
    folder = tmp_path / "cifar10-seed0"
    assert Image.open(folder / "figure.png").size[0] > 500
    kept = json.loads((folder / "results.json").read_text())
    assert kept["complete"] and kept["runs"] == 6
    row = kept["contrasts"][0]
    runs = {
        (n, s): json.loads((folder / "runs" / f"{n}-{s}" / "result.json").read_text())
        for n in tiny.settings
        for s in (0, 1)
    }
    wanted = [runs["linear", s]["linear"] - runs["other", s]["linear"] for s in (0, 1)]
    assert row["values"] == pytest.approx(wanted, abs=1e-2) and row["verdict"] == "not confirmed"
    text = (folder / "report.md").read_text()
    assert f"{row['mean']:+.2f}" in text and "+10.00" in text and "not confirmed" in text
    before = (folder / "runs" / "linear-0" / "result.json").stat().st_mtime_ns
    assert main(["cifar10", "--root", str(root), "--out", str(tmp_path), "--jobs", "1"]) == 0  # nothing is run twice
    assert (folder / "runs" / "linear-0" / "result.json").stat().st_mtime_ns == before


def test_one_setting_alone(tiny, root, tmp_path):
    main(["cifar10", "--root", str(root), "--out", str(tmp_path), "--setting", "untrained", "--pilot"])
    folder = tmp_path / "cifar10-pilot-seed0"
    assert [p.name for p in (folder / "runs").iterdir()] == ["untrained-100"]
    kept = json.loads((folder / "results.json").read_text())
    assert not kept["complete"] and kept["pilot"] and kept["contrasts"] == []
    assert "not a result" in (folder / "report.md").read_text()


def test_the_verdicts_of_the_report_are_all_there():
    registered = plan.read()
    rng = np.random.default_rng(0)
    keys = ("linear", "knn", *report.WHY)
    results = {
        (name, seed): {**{k: float(v) for k, v in zip(keys, rng.normal(40, 1, 6), strict=True)}, "seed": seed,
                       "seconds": 25.0, "code": "abc", "history": []}
        for name in registered.settings
        for seed in registered.seeds
    }  # fmt: skip
    kept = report.summary(registered, results, False, False, 60.0)
    assert len(kept["contrasts"]) == len(registered.contrasts)
    text = report.write(kept).markdown()
    for row in kept["contrasts"]:
        assert f"| {row['name']} (" in text and row["verdict"] in report.COLOURS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byol", "raft", "barlow-256", "simsiam-64", "directpred-no-ema", "simclr-exact"])
def test_the_published_size_takes_its_first_two_steps(name, root, tmp_path):
    registered = plan.read(full=True)
    assert {"images": 50000, "epochs": 100}.items() <= registered.size.items()
    backbone = registered.setting(name)["model"]["init_args"]["backbone"]
    assert backbone == "resnet18"
    # The published network, heads and recipe, in batches of 8 small images; all settings are made of these parts.
    size = {**registered.size, "accelerator": "cpu", "images": 60, "watch_every": 1, "operator_every": 2}
    own = {**registered.setting(name)["size"], "batch_size": 8, "epochs": 1}
    settings = {
        name: {**registered.setting(name), "size": {**own, "image_size": 32, "watch_every": 1, "operator_every": 2}}
    }
    short = plan.Plan(settings, {}, (0,), size)
    result = jobs.run_job(
        short, name, 0, tmp_path, str(root), limits={"limit_train_batches": 2, "limit_val_batches": 1}
    )
    assert result["history"][-1]["step"] == 2 and np.isfinite(result["history"][-1]["train/loss"])


@pytest.mark.slow
def test_processes_side_by_side_share_the_jobs(root, tmp_path):
    """The same numbers as from one process; helpers that are killed leave their jobs to the others."""
    text = TINY.replace("epochs: 3", "epochs: 1")
    small, todo = plan.read(text=text), [(name, seed) for seed in (0, 1) for name in ("linear", "other")]
    helpers = cifar10._helpers(2, (text, False, False, todo, tmp_path / "two", str(root)))
    deadline = time.monotonic() + 120
    while not list((tmp_path / "two").glob("*/claim")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(helpers[0].pid, signal.SIGKILL)
    helpers[1].join(240)
    cifar10.work(small, todo, tmp_path / "one", str(root))
    for job in todo:
        first, second = (cifar10.finished(small, tmp_path / where, *job) for where in ("one", "two"))
        assert first is not None and second is not None and first["linear"] == second["linear"]
        assert first["history"] == second["history"]


def test_docs_hold_the_figures_of_the_results_file():
    docs = Path(__file__).parents[2] / "docs"
    kept = json.loads((docs / "cifar10_results.json").read_text())
    page, table = (docs / "cifar10.md").read_text(), (docs / "reproduction.md").read_text()
    assert kept["plan"] == plan.read().fingerprint and not kept["pilot"] and len(kept["code"]) == 1
    made = report.write(kept)
    assert made.text in page and all(part.markdown() in page for part in made.tables)
    for row in kept["contrasts"]:
        assert report.record(row) in table, row["name"]
        again = stats.judge(plan.read().contrast(row["name"]), row["values"])
        assert again.verdict == row["verdict"] and again.p == pytest.approx(row["p"], abs=1e-4)
        assert (again.mean, again.low, again.high) == pytest.approx((row["mean"], row["low"], row["high"]), abs=2e-3)
    assert kept["code"][0] in page and f"{kept['hours_of_one_core']:.2f} hours" in page
    assert {row["name"] for row in kept["contrasts"]} == set(plan.read().contrasts)
    assert Image.open(docs / "cifar10.png").size[0] > 500


@pytest.mark.parametrize("full", [False, True])
def test_every_setting_can_be_built(full):
    registered = plan.read(full)
    for name in registered.settings:
        if not full or name in ("byol-mean-detached", "symmetric-no-ema", "raft-no-predictor", "simclr-beta-plus"):
            assert jobs.build(registered.setting(name)["model"]).backbone is not None
