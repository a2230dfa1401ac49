"""W&B: an offline run is read back from its file, and each panel of the dashboard shows what is really logged."""

import csv
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import wandb
import yaml
from PIL import Image

import lightning_ssl.callbacks
from lightning_ssl.callbacks import EigenspaceAlignment, LinearProbe
from lightning_ssl.callbacks.wandb_setup import WandbSetup, evenly, summary_of, versions
from lightning_ssl.quantities import declared
from lightning_ssl.runs import dashboard
from lightning_ssl.runs.cli import main
from tests.wandb_reader import read_offline_run

pytestmark = pytest.mark.slow  # a whole run, read back from W&B's file

SHORT = [
    *("--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "1", "--trainer.log_every_n_steps", "1"),
    *("--trainer.check_val_every_n_epoch", "1", "--trainer.accelerator", "cpu", "--trainer.devices", "1"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
]


def fit(folder, run, *more):
    """`lightning-ssl fit` with the offline overlay, in this process."""
    configs = ["--config", "digits/directpred.yaml", "--config", "overlays/wandb_offline.yaml"]
    main(["fit", *configs, *SHORT, "--root", str(folder / "runs"), "--name", run, *more])
    wandb.finish()
    parts = sorted((folder / "runs" / run / "wandb").glob("offline-run-*"))
    return [read_offline_run(part) for part in parts]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Two epochs of three steps, and a third one resumed from the checkpoint."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")  # restored afterwards: the logger sets it
        patch.setenv("WANDB_SILENT", "true")
        patch.delenv("LIGHTNING_SSL_RUN", raising=False)
        (first,) = fit(folder, "first-part", "--trainer.max_epochs", "2")
        parts = fit(folder, "first-part", "--trainer.max_epochs", "3", "--ckpt_path", "last")
    return SimpleNamespace(folder=folder / "runs" / "first-part", first=first, parts=parts)


def test_every_logged_scalar_is_there_with_its_step(short):
    with open(short.folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for key in set(rows[0]) - {"step", "epoch"}:
        expected = np.array([(int(row["step"]), float(row[key])) for row in rows if row[key] != ""])
        logged = np.array(
            [(row["trainer/global_step"], row[key]) for part in short.parts for row in part.history if key in row]
        )
        order = np.lexsort(logged.T[::-1]), np.lexsort(expected.T[::-1])
        np.testing.assert_allclose(logged[order[0]], expected[order[1]], rtol=1e-6, err_msg=key)
    assert len(short.first.values("train/loss")) == 6
    assert len(short.first.values("val/linear_top1")) == 2  # the baseline and the last epoch


def test_metrics_have_their_summaries(short):
    summaries = short.first.summaries
    for key in ("val/linear_top1", "val/linear_top5", "val/knn_top1", "val/knn_top5"):
        assert summaries[key] == "max"
    for key in ("train/loss", "val/loss", "train/l_bound", "val/l_bound"):
        assert summaries[key] == "min"
    assert "train/uniformity" not in summaries


def test_spectra_are_a_table_and_series(short):
    with np.load(short.folder / "predictor_spectra.npz") as arrays:
        steps, s, p = arrays["step"], arrays["eigenvalues"], arrays["predictor_values"]
    (path,) = short.parts[-1].media(short.parts[-1].values("predictor/spectra")[-1])
    table = json.loads(path.read_text())
    assert table["columns"] == ["step", "mode", "eigenvalue", "predictor_value", "cosine"]
    assert len(table["data"]) == s.size
    last = [row for row in table["data"] if row[0] == steps[-1]]
    np.testing.assert_allclose([row[2] for row in last], s[-1], rtol=1e-6)
    np.testing.assert_allclose([row[3] for row in last], p[-1], rtol=1e-6)
    (path,) = short.first.media(short.first.values("predictor/eigenvalue_series_table")[-1])
    series = json.loads(path.read_text())
    assert {row[series["columns"].index("lineKey")] for row in series["data"]} == {
        f"mode {j}" for j in (0, 1, 2, 4, 8, 16, 32)
    }
    charts = short.first.config["_wandb"]["visualize"]
    assert {f"predictor/{name}_series" for name in ("eigenvalue", "value", "cosine")} <= set(charts)


def test_pictures_are_images(short):
    for key in ("predictor/spectrum", "circle/picture", "train/correlation"):
        entry = short.first.values(key)[-1]
        (path,) = short.first.media(entry)
        with Image.open(path) as image:
            assert image.size == (entry["width"], entry["height"]) and len(set(image.convert("L").getdata())) > 1


def test_config_and_versions_are_recorded(short):
    config = short.first.config
    saved = yaml.safe_load((short.folder / "config.yaml").read_text())
    assert config["run_config"]["model"] == saved["model"]
    assert (
        config["rho"] == 0.3
        and config["optimizer"]["init_args"]["lr"] == saved["model"]["init_args"]["optimizer"]["init_args"]["lr"]
    )
    assert config["versions"] == versions() and config["versions"]["lightning_ssl"] == lightning_ssl.__version__


def test_a_resumed_run_is_the_same_wandb_run(short):
    assert len(short.parts) == 2 and {part.run_id for part in short.parts} == {"first-part"}
    steps = [row["trainer/global_step"] for part in short.parts for row in part.history if "train/loss" in row]
    assert steps == list(range(9))


@pytest.mark.parametrize("section", dashboard.SECTIONS)
def test_each_panel_shows_what_is_logged(short, section):
    kinds = {"picture": "images", "series": "table"}
    for panel in dashboard.SECTIONS[section]:
        assert panel.x in short.first.keys
        for key in panel.keys:
            if panel.kind == "pattern":
                assert [k for k in short.first.keys if re.fullmatch(key, k)], key
            else:
                assert key in short.first.keys
                entry = short.first.values(key)[-1]
                kind = str(entry.get("_type")) if isinstance(entry, dict) else ""
                assert kind.startswith(kinds.get(panel.kind, "")) and bool(kind) == (panel.kind in kinds), key


def test_the_workspace_builds_offline(capsys):
    pytest.importorskip("wandb_workspaces")
    workspace = dashboard.build("someone", "something", "diagnostics")
    assert [section.name for section in workspace.sections] == list(dashboard.SECTIONS)
    assert [len(section.panels) for section in workspace.sections] == [len(p) for p in dashboard.SECTIONS.values()]
    sent = workspace._to_model().model_dump_json(by_alias=True)  # what `save` would send
    for panels in dashboard.SECTIONS.values():
        for key in (key for panel in panels for key in panel.keys):
            assert json.dumps(key) in sent, key
    assert dashboard.main(["--entity", "someone", "--project", "something", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert all(panel.title in printed for panels in dashboard.SECTIONS.values() for panel in panels)


def test_without_the_extra_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert dashboard.main(["--entity", "someone", "--project", "something"]) == 1
    assert 'pip install "lightning-ssl[dashboard]"' in capsys.readouterr().err


def test_a_workspace_that_cannot_be_saved_says_why(monkeypatch, capsys):
    interface = pytest.importorskip("wandb_workspaces.workspaces")

    def refuse(self):
        raise ValueError("no such entity")

    monkeypatch.setattr(interface.Workspace, "save", refuse)
    assert dashboard.main(["--entity", "someone", "--project", "something"]) == 1
    message = capsys.readouterr().err
    assert "someone/something: no such entity" in message and "wandb login" in message


def test_small_parts():
    assert evenly(3, 5) == [0, 1, 2] and evenly(10, 1) == [9] and evenly(101, 3) == [0, 50, 100]
    known = declared([LinearProbe, EigenspaceAlignment])
    assert summary_of("val/probe/linear_top1", known) == "max" and summary_of("train/loss", known) == "min"
    assert summary_of("predictor/alignment_mean", known) is None and summary_of("lr", known) is None
    with pytest.raises(ValueError, match="`observations`"):
        WandbSetup(observations=0)
