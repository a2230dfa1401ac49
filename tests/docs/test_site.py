"""The site: builds without a warning, has a place for every public name, and shows docstrings, not their source."""

import html
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

import lightning_ssl
from tests.docs.pages import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(find_spec(name) for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml")),
        reason='needs pip install -e ".[docs]"',
    ),
]


def build(folder, **environment):
    command = [str(ROOT / ".ci" / "docs"), str(folder)]
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.html")}


def public():
    """The names that packages export, and those of the theory's modules."""
    modules = {"lightning_ssl.callbacks"}  # which an editable install keeps elsewhere
    for module in pkgutil.walk_packages(lightning_ssl.__path__, "lightning_ssl."):
        if module.ispkg or module.name.startswith("lightning_ssl.theory."):
            modules.add(module.name)
    for module in sorted(name for name in modules if "._" not in name):
        found = importlib.import_module(module)
        for name in getattr(found, "__all__", ()):
            yield module, name, getattr(found, name)


def test_every_public_name_has_a_place(site):
    shown = {anchor for page in site.values() for anchor in re.findall(r'id="(lightning_ssl[\w.]*)"', page)}
    names = list(public())
    assert len(names) > 200
    missing = []
    for module, name, thing in names:
        home = thing.__name__ if inspect.ismodule(thing) else f"{getattr(thing, '__module__', '')}.{name}"
        if not {f"{module}.{name}", home} & shown:
            missing.append(f"{module}.{name}")
    assert not missing


def test_docstrings_are_shown_and_not_their_source(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", "".join(page for name, page in site.items() if name.startswith("api"))))
    assert not re.findall(r".{20}:(?:class|func|meth|mod|data|attr|math):`?.{20}|\.\. math.{20}", text)
    assert "How evenly the features cover the sphere" in text  # a docstring's words
    assert sum(page.count("<math") for page in site.values()) > 150
    assert not re.findall(r"\\(?:frac|sum|hat|mathrm)\b", text)
    for name, page in site.items():
        assert "tmp" not in re.findall(r"<title>(.*?)</title>", page)[0], name


def test_nothing_is_fetched_from_elsewhere(site):
    for name, page in site.items():
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page), name


def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    """With the settings of mkdocs.yml and a page that has such a link."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[there](b.md#nowhere)\n")
    (tmp_path / "docs" / "b.md").write_text("# B\n")
    kept = re.search(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.M)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: a\nstrict: true\n{kept}")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "#nowhere" in done.stderr
