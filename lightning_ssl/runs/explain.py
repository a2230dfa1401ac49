"""The parser's messages in a person's words: what it got, what would be right, what comes nearest."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from importlib.resources import files
from pathlib import Path

import torch

import lightning_ssl.callbacks
import lightning_ssl.data
import lightning_ssl.methods
from lightning_ssl.runs.help import COMMANDS, LISTED, SYNONYMS

# What a class may be named by its bare name for, and the names.
KINDS = {
    "model": lightning_ssl.methods.__all__,
    "data": [name for name in lightning_ssl.data.__all__ if name.endswith("DataModule")],
    "trainer.callbacks": lightning_ssl.callbacks.__all__,
    "trainer.logger": ["CSVLogger", "TensorBoardLogger", "WandbLogger"],
    "optimizer": ["LARS", *(name for name, cls in vars(torch.optim).items() if inspect.isclass(cls))],
}


def explain(message: str, flags: list[str]) -> str:
    """The person's words for a parser's message; a message that needs none is returned as it is."""
    for translate in (_unknown_class, _unknown_option, _unknown_flag, _wrong_value, _wrong_config):
        if words := translate(message, flags):
            return words
    return message


def innermost(message: str) -> str:
    """What was refused, of a message into which jsonargparse may have wrapped it, with all the types that it tried."""
    _, wrapped, tried = message.partition("Errors:\n  - ")
    reasons = tried.partition("\nGiven value")[0].split("\n  - ") if wrapped else []
    return next((words for words in reasons if not words.startswith(("Expected a", "Not a valid"))), message)


def _unknown_class(message: str, flags: list[str]) -> str | None:
    if missing := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        known = dir(importlib.import_module(missing[1]))
        return f"{missing[1]} has no {missing[2]!r}{nearest(missing[2], known)}"
    given = re.search(r"dot import path string: ([\w.]+)", message)
    given = given or re.search(r"dot import path.*^\s*Given value: ([\w.]+)$", message, re.MULTILINE | re.DOTALL)
    keys = re.findall(r'Parser key "([\w.]+)"', message)
    if not keys or keys[-1] not in KINDS or given is None:
        return None
    known = KINDS[keys[-1]]
    return (
        f"--{keys[-1]}: there is no {given[1]!r}{nearest(given[1], known)}. Known: {', '.join(known)}; a class of "
        "your own is named by its import path, package.module.Class"
    )


def _unknown_option(message: str, flags: list[str]) -> str | None:
    found = re.search(r"class_path '(?P<path>[\w.]+)':\s+Option '(?P<option>[\w.]+)' is not accepted", message)
    found = found or re.search(
        r"Option '(?P<option>[\w.]+)' is not accepted.*?class_path='(?P<path>[\w.]+)'", message, re.DOTALL
    )
    if not found:
        return None
    module, _, name = found["path"].rpartition(".")
    known = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    return f"{name} has no option {found['option']!r}{nearest(found['option'], known)}. Its options: {', '.join(known)}"


def _unknown_flag(message: str, flags: list[str]) -> str | None:
    if unknown := re.search(r"[Uu]nrecognized arguments: (\S+)", message):
        name = unknown[1].partition("=")[0]
        return f"there is no flag {name}{nearest_flag(name, flags)}; {LISTED}"
    if unknown := re.search(r"does not accept option '([\w.]+)'", message):
        known = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
        top = [*known, "model", "data", "trainer", "optimizer", "seed_everything", "ckpt_path", "root", "name"]
        head = unknown[1].partition(".")[0]
        return f"the config has no option {unknown[1]!r}{nearest(head, top)}; {LISTED}"
    return None


def _wrong_value(message: str, flags: list[str]) -> str | None:
    """The innermost value that was refused stands first in the message, behind the types it was tried with."""
    value = re.search(r"(?:Given|Got) value: (.*?)(?:\. Got value|$)", message, re.M)
    keys = re.findall(r'Parser key "([\w.]+)"', message[: value.start()] if value else "")
    if value is None or not keys:
        return None
    tried = re.findall(r"Expected an? (<class '[\w.]+'>|typing\.Literal\[.*?\])", message[: value.start()])
    kinds = [kind[8:-2].rpartition(".")[2] for kind in tried if kind.startswith("<class") and "NoneType" not in kind]
    choices = [part.strip("' ") for kind in tried if "Literal" in kind for part in kind[15:-1].split(",")]
    if not kinds and not choices:
        return None
    expected = " or ".join([*kinds, *([f"one of {', '.join(choices)}"] if choices else [])])
    return f"{'.'.join(keys)} must be {expected}; got {value[1]!r}{nearest(value[1], choices)}"


def _wrong_config(message: str, flags: list[str]) -> str | None:
    if missing := re.search(r"File does not exist: '(.+?)'", message):
        base = Path(str(files("lightning_ssl.configs")))
        shipped = [path.relative_to(base).as_posix() for path in base.rglob("*.yaml")]
        asked = "/".join(Path(missing[1]).parts[-2:])
        return f"--config: there is no file {missing[1]!r}, nor a shipped one of that name{nearest(asked, shipped)}"
    if unexpected := re.search(r"Unexpected config:\s*(.*)", message, re.DOTALL):
        got = (unexpected[1].strip().splitlines() or ["nothing"])[0]
        return f"--config needs a YAML file of options, like `trainer: {{max_epochs: 10}}`; got {got!r}"
    if '"subcommand"' in message:
        return f"give a command: {', '.join(COMMANDS)}; `lightning-ssl --help` explains them"
    return None


def nearest_flag(name: str, known: list[str]) -> str:
    """A hint at the flag that is meant: by another name for it, by its last part, or by its letters."""
    bare = name.strip("-").replace("-", "_").lower()
    if meant := SYNONYMS.get(bare):
        return f" (did you mean '{meant}'?)"
    same = [flag for flag in known if flag.rpartition(".")[2].strip("-") == bare and flag != name]
    for kind, module in (("model", lightning_ssl.methods), ("data", lightning_ssl.data)):
        for entry in KINDS[kind]:
            if bare in inspect.signature(getattr(module, entry)).parameters:
                same.append(f"--{kind}.{bare}")
    return f" (did you mean {same[0]!r}?)" if same else nearest(name, known)


def nearest(name: str, known: list[str]) -> str:
    """A hint at the known name that comes nearest, or nothing."""
    lowered = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" (did you mean {lowered[close[0]]!r}?)" if close else ""
