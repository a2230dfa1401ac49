"""Callbacks of a config tuned and switched off by name: ``--knn.every_n_epochs 1``, ``--linear false``."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, Protocol

from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback

from lightning_ssl.runs.explain import nearest_flag
from lightning_ssl.runs.help import LISTED


class Refuse(Protocol):
    """What is called with a message for the user; it does not return."""

    def __call__(self, message: str) -> NoReturn: ...


class NamedFlag(NamedTuple):
    """``--name.option value``; the option is empty where the whole callback is meant, the value None without one."""

    name: str
    option: str
    value: str | None


def callback_names(class_name: str) -> list[str]:
    """What a callback's class may be called on the command line.

    Example:
        >>> callback_names("KNNProbe"), callback_names("lightning_ssl.callbacks.CollapseMonitor")
        (['knn_probe', 'knn'], ['collapse_monitor'])
    """
    bare = class_name.rpartition(".")[2]
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", bare).lower()
    return [snake, *([snake.removesuffix("_probe")] if snake.endswith("_probe") else [])]


def split_flags(args: list[str], known: Collection[str]) -> tuple[list[str], list[NamedFlag]]:
    """Part the flags that no parser knows, which name a callback or nothing, from the others.

    Args:
        args: The command line.
        known: The flags of the parsers; their first parts are theirs (``--trainer.max_epochs`` takes ``--trainer``).

    Returns:
        The others, in their order, and the named ones.

    Example:
        >>> split_flags(["fit", "--knn.k=20", "--name", "a", "--linear", "false"], ["--name"])[0]
        ['fit', '--name', 'a']
    """
    heads = {re.split(r"[.=+]", flag)[0] for flag in known}
    others: list[str] = []
    named: list[NamedFlag] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        flag, equals, value = arg.partition("=")
        if not re.fullmatch(r"--[A-Za-z_]\w*(\.\w+)*", flag) or flag.partition(".")[0] in heads:
            others.append(arg)
            continue
        given: str | None = value if equals else None
        if given is None and rest and not rest[0].startswith("--"):
            given = rest.pop(0)
        name, _, option = flag.removeprefix("--").partition(".")
        named.append(NamedFlag(name, option, given))
    return others, named


def tune(entries: Any, named: list[NamedFlag], make_parser: Any, known: Collection[str], refuse: Refuse) -> list[Any]:
    """The callbacks of a config as the named flags want them.

    A flag is for every callback of the class it names.

    Args:
        entries: `trainer.callbacks` of a parsed config: a list, one entry, or None.
        named: The flags.
        make_parser: Makes an empty parser, whose errors end the command.
        known: All other flags, for a hint at a misspelt one.
        refuse: Ends the command with a message.
    """
    found = [] if entries is None else list(entries) if isinstance(entries, list) else [entries]
    for flag in named:
        names = {name: entry.class_path for entry in found for name in callback_names(entry.class_path)}
        if flag.name not in names:
            _refuse_name(flag, list(names), known, refuse)
        chosen = [flag.name in callback_names(entry.class_path) for entry in found]
        if flag.option:
            if flag.value is None:
                refuse(f"--{flag.name}.{flag.option} needs a value")
            found = [
                _set(entry, flag, make_parser()) if mine else entry for entry, mine in zip(found, chosen, strict=True)
            ]
        elif flag.value in ("false", "False", "off", "no"):
            found = [entry for entry, mine in zip(found, chosen, strict=True) if not mine]
        elif flag.value not in ("true", "True", "on", "yes"):
            refuse(
                f"--{flag.name} must be false (to switch it off) or true, got {flag.value!r}; an option is set "
                f"by --{flag.name}.OPTION"
            )
    return found


def _set(entry: Namespace, flag: NamedFlag, parser: Any) -> Namespace:
    """One option, checked and converted as in a config."""
    module, _, name = entry.class_path.rpartition(".")
    parser.add_subclass_arguments(getattr(import_module(module), name), flag.name)
    parser.set_defaults({flag.name: entry.as_dict()})
    config: Namespace = parser.parse_args([f"--{flag.name}.{flag.option}={flag.value}"])
    return config[flag.name]  # type: ignore[no-any-return]


def _refuse_name(flag: NamedFlag, present: list[str], known: Collection[str], refuse: Refuse) -> NoReturn:
    import lightning_ssl.callbacks

    for name in lightning_ssl.callbacks.__all__:
        if flag.name in callback_names(name) and issubclass(getattr(lightning_ssl.callbacks, name), Callback):
            refuse(f"--{flag.name}: this run has no {name}; add it with --trainer.callbacks+={name}")
    option = f".{flag.option}" if flag.option else ""
    written = f"--{flag.name}{option}"
    hint = nearest_flag(written, [*known, *(f"--{name}{option}" for name in present)])
    refuse(
        f"there is no flag {written}{hint}; {LISTED}; a callback is tuned by its "
        f"name: {', '.join(present) or 'this run has none'}"
    )
