"""No code from files, no keys in files, nothing unescaped, no release known to be bad."""

import ast
import os
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from lightning_ssl.report.page import report_page
from lightning_ssl.report.series import Series
from lightning_ssl.runs.checkpoint import CheckpointError, CheckpointFiles
from tests.reliability import jobs
from tests.test_report import BROKEN, summary_of

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "lightning_ssl").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]


# The sources --------------------------------------------------------------------------------------------------------


def name_of(call):
    """The dotted name that is called, as it is written."""
    parts, node = [], call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else f".{parts[0]}" if parts else ""


def _last(node):
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


FORBIDDEN = {"eval", "exec", "compile", "__import__", "input", "os.system", "os.popen", "os.execv", "os.spawnv"}
FORBIDDEN |= {f"pickle.{name}" for name in ("load", "loads", "Unpickler", "dump", "dumps")}
FORBIDDEN |= {"joblib.load", "shelve.open", "marshal.load", "marshal.loads", "torch.hub.load"}
FORBIDDEN |= {"yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "subprocess.getoutput", "tempfile.mktemp"}


def problems(source):
    """What a source does that it must not, with the line."""
    found, tree = [], ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    safe_loaders = {"SafeLoader", *(node.name for node in classes if "SafeLoader" in map(_last, node.bases))}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node)
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if name in FORBIDDEN:
            found.append(f"{node.lineno}: {name}")
        if name == "yaml.load" and not (len(node.args) > 1 and _last(node.args[1]) in safe_loaders):
            found.append(f"{node.lineno}: {name} without a safe loader")
        if name.startswith("subprocess.") and not (node.args and isinstance(node.args[0], ast.List)):
            found.append(f"{node.lineno}: {name} of something else than a list of words")
        if given.get("shell"):
            found.append(f"{node.lineno}: {name}(shell=True)")
        if name in ("torch.load", "load_from_checkpoint") and given.get("weights_only") is not True:
            found.append(f"{node.lineno}: {name} without weights_only=True")
        if given.get("allow_pickle"):
            found.append(f"{node.lineno}: {name}(allow_pickle=True)")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sources_run_no_code_from_outside(path):
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run(command)",
        "pickle.load(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)",
    ],
)
def test_the_search_finds_what_it_looks_for(line):
    assert problems(line)


class Harm:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path):
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": Harm(tmp_path / "harm")}, tmp_path / "evil.ckpt")
    with pytest.raises(CheckpointError, match=r"runs code from the file, so it is refused"):
        CheckpointFiles().load_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "harm").exists()


# The dependencies ---------------------------------------------------------------------------------------------------


BAD = [
    ("lightning", "2.6.2"),  # malicious uploads: GHSA-w37p-236h-pfx3
    ("lightning", "2.6.3"),
    ("pytorch-lightning", "2.6.2"),
    ("pytorch-lightning", "2.6.3"),
    ("torch", "2.5.1"),  # weights_only=True ran code: CVE-2025-32434
    ("pillow", "10.2.0"),  # a buffer overflow: CVE-2024-28219
]


@pytest.mark.parametrize(("package", "release"), BAD)
def test_releases_known_to_be_bad_are_excluded(package, release):
    text = (ROOT / "pyproject.toml").read_text()
    lines = text[text.index("dependencies = [") :].split("]\n")[0].splitlines()[1:]
    required = [Requirement(line.strip().strip('",')) for line in lines if line.strip().startswith('"')]
    (requirement,) = [r for r in required if r.name == package]
    assert not requirement.specifier.contains(release)
    assert requirement.specifier.contains(version(package).partition("+")[0])


# What a run writes ----------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = set(), [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, name) for name, _ in attributes]

    def handle_data(self, data):
        self.text += data


def test_the_report_escapes_what_it_shows(tmp_path):
    evil = "<script>alert('x')</script><img src=x onerror=alert(1)>"
    (tmp_path / "config.yaml").write_text(f'name: "{evil}"\n</pre>{evil}')
    picture = tmp_path / "pictures" / "<b onclick=alert(1)>" / "step_0.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"")
    history = {f"val/{evil}": Series([(0, 1.0), (1, 2.0)]), "a&b": Series([(0, 1.0)])}
    broken = {**BROKEN, **{name: evil for name in ("place", "kind", "evidence", "cause", "remedy")}}
    html = report_page(summary_of(history, [broken], name=evil), history, tmp_path)
    shown = Tags()
    shown.feed(html)
    assert html.count("<script") == html.count("</script") == 4  # the data, the library, ours
    assert not shown.tags & {"iframe", "object", "b"}
    assert not [pair for pair in shown.attributes if pair[1].startswith("on")]
    assert shown.text.count(evil) >= 4 and "a&b" in shown.text  # shown, not obeyed
    assert "http://" not in html and html.count("https://") == html.count("https://github.com/leeoniya/uPlot")


KEY = "0123456789abcdef" * 2 + "f00dcafe"
PASSWORD = "correct-horse-battery-staple"


@pytest.mark.slow
def test_keys_and_passwords_in_the_environment_stay_there(tmp_path):
    """With Weights & Biases on, offline; every byte of every file that the run leaves is looked at."""
    callbacks = [jobs.CALLBACKS[2], jobs.REPORT, jobs.CALLBACKS[-1]]
    args = jobs.job("SimCLR", tmp_path, "--trainer.max_epochs=1", callbacks=callbacks)
    args.insert(2, "--config=overlays/wandb_offline.yaml")
    secrets = {"WANDB_API_KEY": KEY, "DATABASE_PASSWORD": PASSWORD, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    process = jobs.start(tmp_path, args, environment=secrets | {"HOME": str(tmp_path / "home")})
    process.join(240)
    assert process.exitcode == 0, jobs.output(tmp_path)[-3000:]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "metrics.csv", "report.html", "last.ckpt", "output.txt"} <= names
    assert any(name.endswith(".wandb") for name in names)
    for path in files:
        content = path.read_bytes()
        assert KEY.encode() not in content and PASSWORD.encode() not in content, path
