"""One HTML page with everything in it: the verdict, tables, interactive curves (uPlot), pictures with a slider."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ssl.quantities import SECTIONS
from lightning_ssl.report import words
from lightning_ssl.report.series import Series, on_grid

Points = Sequence[tuple[int, float]] | Series
Chart = dict[str, Any]

CELLS = 160_000  # values on a page; each takes about eight bytes
PICTURE_BYTES = 1_800_000
MOST_PICTURES = 12  # of a kind
MODES = 16  # of a spectrum
OTHER = {"other": "What else was logged."}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def charts(
    runs: Mapping[str, Mapping[str, Points]],
    declared: Mapping[str, Mapping[str, Any]],
    owners: Mapping[str, str | None],
    more: Sequence[Chart] = (),
) -> list[Chart]:
    """The charts of one or several runs: one for each quantity, with a line for each of its keys and runs.

    Args:
        runs: Of each run, by its name: the points of its logged keys.
        declared: What is said of the quantities, by their keys.
        owners: The quantity's key of a logged key.
        more: Further charts: ``title``, ``section``, ``read``, and ``lines``: {label: points}, those of ``dashed``
            dashed.
    """
    groups: dict[str, list[str]] = {}
    for key in sorted({key for curves in runs.values() for key in curves}):
        groups.setdefault(owners.get(key) or key, []).append(key)
    wanted: list[Chart] = []
    for group, keys in groups.items():
        lines = {}
        for number, (run, curves) in enumerate(runs.items()):
            for key in (key for key in keys if len(curves.get(key, ()))):
                own = key.removeprefix(group.partition("*")[0]) if group.endswith("/*") else key
                label = own if len(runs) == 1 else run if len(keys) == 1 else f"{run}: {own}"
                lines[label] = (number, curves[key])
        about = declared.get(group, {})
        wanted.append({"title": about.get("title", group), "section": about.get("section", "other"), "key": group,
                       "read": reading(about), "lines": lines})  # fmt: skip
    wanted += [{**chart, "key": "", "lines": {k: (0, v) for k, v in chart["lines"].items()}} for chart in more]
    most = max(40, min(1000, CELLS // max(1, sum(len(chart["lines"]) for chart in wanted))))
    found = []
    for number, chart in enumerate(wanted):
        x, values = on_grid({label: points for label, (_, points) in chart["lines"].items()}, most)
        series = [
            {"label": label, "run": chart["lines"][label][0], "y": y}
            | ({"dash": [4, 4]} if label in chart.get("dashed", ()) else {})
            for label, y in values.items()
        ]
        found.append(
            {name: chart[name] for name in ("title", "section", "key", "read")}
            | {"id": f"chart-{number}", "x": x, "series": series, "wide": len(series) > 12}
        )
    return found


def reading(about: Mapping[str, Any]) -> str:
    """How to read a quantity, and where healthy and collapsed runs lie."""
    if not about:
        return "Logged without a description; its key is all that is known."
    parts = [about["read"]]
    if about.get("healthy"):
        parts.append(f"Healthy: {about['healthy']}.")
    if about.get("collapsed"):
        parts.append(f"Collapsed: {about['collapsed']}.")
    if not about.get("healthy") and not about.get("collapsed"):
        better = {"higher": "Higher is better", "lower": "Lower is better"}.get(about.get("better", ""), "")
        parts.append(f"{better or 'Neither way is better'}; how far depends on network and data: compare runs.")
    return " ".join(parts)


def spectra(folder: Path) -> list[Chart]:
    """The largest eigenvalues s_j of F and the predictor's p_j over time."""
    found = []
    for path in sorted(folder.glob("*_spectra.npz")):
        with np.load(path) as arrays:
            for name, symbol, what in (
                ("eigenvalues", "s", "Eigenvalues of F: modes that grow are learnt, modes near 0 have collapsed."),
                ("predictor_values", "p", "The predictor along F's eigenvectors; it follows s_j on the parabola."),
            ):
                steps, values = arrays["step"].tolist(), arrays[name][:, :MODES]
                lines = {
                    f"{symbol}{j}": list(zip(steps, values[:, j].tolist(), strict=True)) for j in range(values.shape[1])
                }
                title = f"{path.stem.replace('_', ' ')}: {symbol}_j"
                found.append({"title": title, "section": "predictor", "read": what, "lines": lines})
    return found


def report_page(summary: words.Summary, history: Mapping[str, Points], folder: Path, more: Sequence[Chart] = ()) -> str:
    """The page of one run; everything that comes from the run is escaped."""
    run, said = summary["run"], words.answer(summary)
    state = {"running": "is running", "finished": "finished"}.get(run["state"], f"stopped by {run['reason']}")
    cost = summary["cost"]
    intro = (
        f"<h1>{escape(run['method'])} on {escape(run['data'])}: {escape(run['name'])}</h1>"
        f'<p class="note">{escape(state)}, {summary["steps"]} steps, {summary["epochs"]} epochs, '
        f"{_duration(cost['seconds'])} on {cost['ranks']} × {escape(cost['device'])}</p>"
    )
    drawn = charts(
        {run["name"]: history},
        summary["declared"],
        {key: entry["declared"] for key, entry in summary["quantities"].items()},
        [*spectra(folder), *more],
    )
    known = {key: about["section"] for key, about in summary["declared"].items()}
    images = pictures(folder, known)
    body = intro + verdict(said) + headline_table(summary) + sections(drawn, images)
    rows = "".join(_row(row) for row in words.table(summary, headlines=False))
    body += (
        '<details><summary>All quantities</summary><div class="scroll"><table><tr><th>quantity</th><th class="n">first'
        f'</th><th class="n">best</th><th class="n">last</th></tr>{rows}</table></div></details>'
    )
    config = folder / "config.yaml"
    if config.is_file():
        body += f"<details><summary>Config</summary><pre>{escape(config.read_text())}</pre></details>"
    lines = "\n".join(f"{name} {number}" for name, number in summary["versions"].items())
    body += f"<details><summary>Versions</summary><pre>{escape(lines)}</pre></details>"
    return document(f"{run['name']}: {said.title}", body, [run["name"]], drawn, images, run["state"] == "running")


def verdict(said: words.Answer) -> str:
    """What happened, first on the page."""
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in said.sentences)
    return f'<section class="verdict {said.grade}" id="verdict"><h2>{escape(said.title)}</h2>{sentences}</section>'


def headline_table(summary: words.Summary) -> str:
    """The quantities that matter most: first, best and last, with their steps."""
    rows = "".join(_row(row) for row in words.table(summary, headlines=True))
    if not rows:
        return ""
    head = '<tr><th></th><th class="n">first</th><th class="n">best</th><th class="n">last</th></tr>'
    return f'<div class="scroll"><table id="summary">{head}{rows}</table></div>'


def _row(row: Sequence[str]) -> str:
    key, title, *cells = row
    shown = "".join(f'<td class="n">{_with_step(cell)}</td>' for cell in cells)
    return f"<tr><td>{escape(title)} <small>{escape(key)}</small></td>{shown}</tr>"


def _with_step(cell: str) -> str:
    value, at, step = cell.rpartition(" @")
    return f"{escape(value)} <small>step {escape(step)}</small>" if at else escape(cell)


def sections(drawn: Sequence[Chart], images: Sequence[dict[str, Any]] = ()) -> str:
    """Headings, places for the charts, and pictures with their sliders."""
    parts = ['<div class="keys" id="keys"></div>']
    for name, note in {**SECTIONS, **OTHER}.items():
        figures = [
            f'<figure class="{"wide" if chart["wide"] else ""}"><h3>{escape(chart["title"])}</h3>'
            f'<div class="tools"></div><div class="plot" id="{chart["id"]}"></div><figcaption>{escape(chart["read"])}'
            f"{_keys(chart)}</figcaption></figure>"
            for chart in drawn
            if chart["section"] == name
        ]
        figures += [_picture(image) for image in images if image["section"] == name]
        if figures:
            grid = "".join(figures)
            parts.append(f'<h2>{name.capitalize()}</h2><p class="note">{note}</p><div class="grid">{grid}</div>')
    return "".join(parts)


def _keys(chart: Chart) -> str:
    return f" <code>{escape(chart['key'])}</code>" if chart["key"] else ""


def _picture(image: dict[str, Any]) -> str:
    last = len(image["images"]) - 1
    return (
        f'<figure id="{image["id"]}"><h3>{escape(image["name"])}</h3>'
        f'<img alt="{escape(image["name"])}" src="{image["images"][-1]}">'
        f'<input type="range" min="0" max="{last}" value="{last}"{" disabled" if not last else ""}>'
        f"<figcaption><output>step {image['steps'][-1]}</output></figcaption></figure>"
    )


def pictures(folder: Path, known: Mapping[str, str]) -> list[dict[str, Any]]:
    """The pictures of a run by their kind: some of each, evenly over the steps, the first and the last among them."""
    kinds = sorted({path.parent for path in (folder / "pictures").rglob("*.png")})
    paths = {kind: sorted(kind.glob("*.png")) for kind in kinds}
    for most in range(MOST_PICTURES, 0, -1):
        chosen = {kind: [found[i] for i in _spread(len(found), most)] for kind, found in paths.items()}
        if sum(path.stat().st_size for some in chosen.values() for path in some) * 4 / 3 <= PICTURE_BYTES:
            break
    return [
        {
            "id": f"picture-{number}",
            "name": (name := kind.relative_to(folder / "pictures").as_posix()),
            "section": _picture_section(name, known),
            "steps": [int("".join(filter(str.isdigit, path.stem)) or 0) for path in some],
            "images": [_encoded(path, path.stat().st_mtime_ns) for path in some],
        }
        for number, (kind, some) in enumerate(chosen.items())
    ] if paths else []  # fmt: skip


def _spread(count: int, most: int) -> list[int]:
    if most == 1:
        return [count - 1]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)}) if count > most else list(range(count))


@lru_cache(maxsize=256)
def _encoded(path: Path, changed: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _picture_section(name: str, known: Mapping[str, str]) -> str:
    """The section of the callback that drew a picture: that of the other keys which begin like its own."""
    stem = name.split("/")[0]
    named = {"correlation": "geometry", "picture": "geometry", "spectrum": "predictor"}
    same = (section for key, section in known.items() if fnmatch(stem, key.split("/")[0]) and stem != "train")
    return named.get(name.split("/")[-1]) or next(same, "other")


def document(
    title: str,
    body: str,
    runs: Sequence[str],
    drawn: Sequence[Chart],
    images: Sequence[dict[str, Any]] = (),
    running: bool = False,
) -> str:
    """A whole page around its body; its charts and pictures follow as data."""
    slides = [{name: image[name] for name in ("id", "steps", "images")} for image in images if len(image["images"]) > 1]
    shown = [{name: chart[name] for name in ("id", "key", "x", "series", "wide")} for chart in drawn]
    data = _json({"runs": list(runs), "running": running, "charts": shown})
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_asset('uPlot.min.css')}{_asset('page.css')}</style></head><body>{body}"
        "<noscript>The curves need JavaScript, which is in this page.</noscript>"
        f'<script type="application/json" id="curves">{data}</script>'
        f'<script type="application/json" id="pictures">{_json(slides)}</script>'
        f"<script>{_asset('uPlot.iife.min.js')}</script><script>{_asset('page.js')}</script></body></html>\n"
    )


def embedded_curves(page: str) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run's page, by their keys."""
    begin = page.index('id="curves">') + len('id="curves">')
    data = json.loads(page[begin : page.index("</script>", begin)])
    found: dict[str, list[tuple[int, float]]] = {}
    for chart in data["charts"]:
        start = chart["key"].partition("*")[0] if chart["key"].endswith("/*") else ""
        for line in chart["series"] if chart["key"] else ():
            pairs = zip(chart["x"], line["y"], strict=True)
            found[start + line["label"]] = [(step, value) for step, value in pairs if value is not None]
    return found


def _json(value: Any) -> str:
    """JSON that may stand in a page."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@lru_cache
def _asset(name: str) -> str:
    return (files("lightning_ssl.report") / "assets" / name).read_text()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
