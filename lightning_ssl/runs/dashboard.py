"""`lightning-ssl dashboard`: a Weights & Biases workspace laid out for the diagnostics."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ssl import callbacks
from lightning_ssl.quantities import SECTIONS as SECTION_NOTES
from lightning_ssl.quantities import Quantity, declared

STEP = "trainer/global_step"  # under which Lightning's WandbLogger keeps the step
INSTALL = 'pip install "lightning-ssl[dashboard]"'


@dataclass(frozen=True)
class Panel:
    """One panel, and the keys it shows.

    Attributes:
        title: Its title.
        keys: Metrics, pictures or tables; `x` is another one.
        kind: "line" over the steps (or over `x`), "scatter" of the runs' last values of `x` and the key, "picture",
            "series" (a table of lines that `WandbSetup` logs), or "pattern": lines of all metrics that match the
            regular expression which is the key.
        x: The metric on the horizontal axis.
    """

    title: str
    keys: tuple[str, ...]
    kind: Literal["line", "scatter", "picture", "series", "pattern"] = "line"
    x: str = STEP


# What no single quantity shows: two at once, pictures, spectra over time.
MORE: dict[str, tuple[Panel, ...]] = {
    "learning": (Panel("bound against kNN", ("val/knn_top1",), "scatter", x="val/l_bound"),),
    "geometry": (
        Panel("uniformity and alignment: the way of each run", ("train/uniformity",), x="train/alignment"),
        Panel("uniformity and alignment: where each run stands", ("train/uniformity",), "scatter", x="train/alignment"),
        Panel("circle", ("circle/picture",), "picture"),
        Panel("correlation matrix", ("train/correlation",), "picture"),
    ),
    "predictor": (
        Panel("parabola", ("predictor/spectrum",), "picture"),
        Panel("eigenvalues of F", ("predictor/eigenvalue_series_table",), "series"),
        Panel("predictor along F's eigenvectors", ("predictor/value_series_table",), "series"),
        Panel("cosines", ("predictor/cosine_series_table",), "series"),
    ),
}


def panel_of(quantity: Quantity) -> Panel:
    """A quantity's own panel, with the stages it is logged in."""
    start, _, name = quantity.key.rpartition("/")
    if name == "*":
        return Panel(f"{quantity.title}, by layer", (f"{start}/.*",), "pattern")
    stages = [start]
    if start == "*":
        stages = ["val"] if quantity.section == "learning" and name != "loss" else ["train", "val"]
    return Panel(quantity.title, tuple(f"{stage.rstrip('*')}/{name}" for stage in stages))


# What the shipped configs do not have: added by hand, as a panel of the workspace is.
ASKED_FOR = ("FeatureQuality", "PrototypeUse", "TargetLag")
OTHER_TARGETS = ("_map", "_r2", "_mse", "_l2")  # of probes of attributes and of numbers, and of several penalties


def sections() -> dict[str, tuple[Panel, ...]]:
    """The panels of what the callbacks of the shipped configs log, by section."""
    shown = [thing for name, thing in vars(callbacks).items() if name not in ASKED_FOR]
    known = [q for q in declared(shown) if "*_" not in q.key and not q.key.endswith(OTHER_TARGETS)]
    return {
        name: (*(panel_of(quantity) for quantity in known if quantity.section == name), *MORE.get(name, ()))
        for name in SECTION_NOTES
    }


SECTIONS = sections()


def build(entity: str, project: str, name: str) -> Any:
    """The workspace, not saved yet."""
    try:
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise ModuleNotFoundError(f"the dashboard needs wandb-workspaces: {INSTALL}") from error
    sections = [
        ws.Section(name=title, panels=[_draw(panel) for panel in panels], is_open=True)
        for title, panels in SECTIONS.items()
    ]
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def _draw(panel: Panel) -> Any:
    from wandb_workspaces.reports import v2

    wr: Any = v2  # its names are made when it is imported

    if panel.kind == "scatter":
        (y,) = panel.keys
        return wr.ScatterPlot(title=panel.title, x=wr.SummaryMetric(panel.x), y=wr.SummaryMetric(y))
    if panel.kind == "picture":
        return wr.MediaBrowser(title=panel.title, media_keys=list(panel.keys))
    if panel.kind == "series":
        (table,) = panel.keys
        return wr.CustomChart(
            query={"summaryTable": {"tableKey": table}},
            chart_name="wandb/lineseries/v0",
            chart_fields={"step": "step", "lineKey": "lineKey", "lineVal": "lineVal"},
            chart_strings={"title": panel.title, "xname": "step"},
        )
    if panel.kind == "pattern":
        (pattern,) = panel.keys
        return wr.LinePlot(title=panel.title, x=panel.x, metric_regex=pattern)
    return wr.LinePlot(title=panel.title, x=panel.x, y=list(panel.keys))


def main(argv: list[str]) -> int:
    """Run ``lightning-ssl dashboard`` with its arguments; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning-ssl dashboard",
        description="Create a W&B workspace with sections " + ", ".join(SECTIONS) + ".",
    )
    parser.add_argument("--entity", required=True, help="W&B user or team")
    parser.add_argument("--project", required=True, help="W&B project, such as lightning-ssl of overlays/wandb.yaml")
    parser.add_argument("--name", default="lightning-ssl", help="name of the workspace view")
    parser.add_argument("--dry_run", action="store_true", help="build it and list its panels, without an account")
    args = parser.parse_args(argv)
    try:
        workspace = build(args.entity, args.project, args.name)
    except ModuleNotFoundError as error:
        print(f"lightning-ssl dashboard: error: {error}", file=sys.stderr)
        return 1
    if args.dry_run:
        for section, panels in SECTIONS.items():
            print(section)
            for panel in panels:
                print(f"  {panel.title}: {', '.join(panel.keys)}" + (f" over {panel.x}" if panel.x != STEP else ""))
        return 0
    try:
        workspace.save()
    except Exception as error:  # W&B raises its own, requests' and plain ones
        print(
            f"lightning-ssl dashboard: error: W&B did not save the workspace of {args.entity}/{args.project}: {error}\n"
            "Log in with `wandb login`, and check that entity and project exist; --dry_run needs neither.",
            file=sys.stderr,
        )
        return 1
    print(f"workspace saved: {workspace.url}")
    return 0
