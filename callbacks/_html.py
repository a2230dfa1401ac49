"""The run's report as one HTML page: curves and pictures inside it, nothing to fetch."""

from __future__ import annotations

import base64
import html
import io
import platform
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lightning_ssl.quantities import SECTIONS, Quantity, find

History = dict[str, list[tuple[int, float]]]

STYLE = """
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:0}h2{margin-top:2.5rem;border-bottom:1px solid #8886}p.note{color:#888;margin-top:.2rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(20rem,1fr));gap:1rem}figure{margin:0;background:#fff;
border:1px solid #8884;border-radius:6px;padding:.4rem}figure img,figure svg{width:100%;height:auto}figcaption{
color:#444;font-size:.85rem;text-align:center}pre{overflow:auto;background:#8881;padding:1rem;border-radius:6px;font-size:.8rem}"""


def page(title: str, history: History, folder: Path, how: str, steps: int, quantities: Iterable[Quantity] = ()) -> str:
    """The whole page; everything that comes from the run is escaped."""
    parts, known = [], list(quantities)
    for name, note in (*SECTIONS.items(), ("other", "What else was logged.")):
        keys = [key for key in sorted(history) if _section(key, known) == name]
        figures = [_figure(_caption(key, known), curve([key], history)) for key in keys]
        figures += _pictures(folder, name, known)
        if name == "predictor":
            figures += [
                _figure(f"{path.stem} over time", spectra(path)) for path in sorted(folder.glob("*_spectra.npz"))
            ]
        if figures:
            parts.append(
                f'<h2>{name.capitalize()}</h2><p class="note">{note}</p><div class="grid">{"".join(figures)}</div>'
            )
    config = folder / "config.yaml"
    if config.is_file():
        parts.append(f"<h2>Config</h2><pre>{html.escape(config.read_text())}</pre>")
    versions = "\n".join(f"{name} {_version(name)}" for name in ("lightning-ssl", "lightning", "torch", "torchmetrics"))
    parts.append(f"<h2>Versions</h2><pre>python {platform.python_version()}\n{html.escape(versions)}</pre>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    intro = f'<h1>{html.escape(title)}</h1><p class="note">{html.escape(how)} after {steps} steps</p>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{intro}{"".join(parts)}</body></html>\n'


def curve(keys: list[str], history: History) -> Figure:
    """Values over steps; a single value is a dot."""
    figure = Figure(figsize=(4, 2.4), layout="constrained")
    axes = figure.subplots()
    for key in keys:
        steps, values = zip(*history[key], strict=True)
        axes.plot(steps, values, marker="." if len(steps) < 30 else "", lw=1.2)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    return figure


def spectra(path: Path) -> Figure:
    """The largest eigenvalues s_j of F and the predictor's p_j over time."""
    figure = Figure(figsize=(4, 3), layout="constrained")
    with np.load(path) as arrays:
        for axes, name, symbol in zip(
            figure.subplots(2, sharex=True), ("eigenvalues", "predictor_values"), ("$s_j$", "$p_j$"), strict=True
        ):
            axes.plot(arrays["step"], arrays[name][:, :32], lw=0.7, alpha=0.7)
            axes.set_ylabel(symbol)
    axes.set_xlabel("step")
    return figure


def _section(key: str, quantities: list[Quantity]) -> str:
    quantity = find(key, quantities)
    return "other" if quantity is None else quantity.section


def _caption(key: str, quantities: list[Quantity]) -> str:
    quantity = find(key, quantities)
    return key if quantity is None else f"{key}: {quantity.title}"


def _picture_section(name: str, quantities: list[Quantity]) -> str:
    """The section of the callback that drew a picture: that of the other keys which begin like its own."""
    stem = name.split("/")[0]
    named = {"correlation": "geometry", "picture": "geometry", "spectrum": "predictor"}
    same = (
        quantity.section for quantity in quantities if fnmatch(stem, quantity.key.split("/")[0]) and stem != "train"
    )
    return named.get(name.split("/")[-1]) or next(same, "other")


def _pictures(folder: Path, section: str, quantities: list[Quantity]) -> list[str]:
    """The last picture of each kind that belongs to a section."""
    found = []
    for kind in sorted({path.parent for path in (folder / "pictures").rglob("*.png")}):
        name = kind.relative_to(folder / "pictures").as_posix()
        if _picture_section(name, quantities) == section:
            data = base64.b64encode(max(kind.glob("*.png")).read_bytes()).decode()
            image = f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
            found.append(f"<figure>{image}<figcaption>{html.escape(name)}</figcaption></figure>")
    return found


def _figure(caption: str, figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
