"""What the site's build adds to mkdocs: the package as it is installed, and docstrings' roles as links and formulas."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[1]
_scratch: list[tempfile.TemporaryDirectory[str]] = []


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: Any) -> Any:
    """Show mkdocstrings the package with `callbacks/` and `configs/` in it, however and whether it is installed."""
    if not _scratch:
        _scratch.append(tempfile.TemporaryDirectory())
        package = Path(_scratch[0].name) / "lightning_ssl"
        ignore = shutil.ignore_patterns("__pycache__", "*.yaml", "assets")
        shutil.copytree(ROOT / "lightning_ssl", package, ignore=ignore)
        for name in ("callbacks", "configs"):
            shutil.copytree(ROOT / name, package / name, ignore=ignore)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_scratch[0].name]
    return config


def on_shutdown() -> None:
    """Leave nothing behind."""
    while _scratch:
        _scratch.pop().cleanup()


class Roles(griffe.Extension):
    """Turns the docstrings' :class:`X` into a link where X has a page, and their formulas into MathML."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = translate(obj.docstring.value, obj)


def translate(text: str, obj: griffe.Object) -> str:
    """A docstring in Markdown; what stands in its examples is left alone."""
    text = re.sub(r"^( *)\.\. math::(.*\n(?:(?:\1 +.*)?\n)*)", _block, text + "\n", flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]+)`", lambda found: _formula(found[1], "inline"), text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # the word that makes them code
    return re.sub(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`", lambda found: _link(found[1], obj), text)


def _block(found: re.Match[str]) -> str:
    lines = [line.replace("&", "") for line in re.sub(r"\s+", " ", found[2]).split(r"\\") if line.strip()]
    return f"{found[1]}<div>{''.join(_formula(line, 'block') for line in lines)}</div>\n\n"


def _formula(tex: str, display: str) -> str:
    plain = re.sub(r"\\[bB]ig(?![a-z])", "", re.sub(r"\s+", " ", tex).strip())
    made = convert(plain.replace(r"\arg\min", r"\operatorname*{argmin}"), display=display)
    if "\\" in made:
        raise ValueError(f"a formula holds what cannot be shown: {tex}")
    return made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


def _link(name: str, obj: griffe.Object) -> str:
    """A link to what a name stands for in its module or class; without one where it has no page."""
    for scope in (obj, obj.parent):
        try:
            path = scope.resolve(name) if scope is not None else name
        except (griffe.NameResolutionError, AttributeError):
            continue
        return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'
    return f'<autoref identifier="{name}" optional><code>{name}</code></autoref>'
