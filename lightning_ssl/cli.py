"""The console script `lightning-ssl`."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

DESCRIPTION = """\
Self-supervised training under the microscope. Besides the commands below there are `lightning-ssl reproduce --list`
(the papers' tables and figures) and `lightning-ssl dashboard --help` (a W&B workspace for the diagnostics)."""


def main(args: list[str] | None = None) -> None:
    """Run `lightning-ssl` with `args` (default: the command line)."""
    if args is None:  # in place: the processes that a DDP run starts are given sys.argv
        sys.argv[1:] = resolve_configs(sys.argv[1:])
        command = sys.argv[1:]
    else:
        command = args = resolve_configs(args)
    # Each command imports what it needs: only the four of LightningCLI need Lightning.
    if command[:1] == ["reproduce"]:
        from lightning_ssl.theory.reproduce import main as reproduce

        sys.exit(reproduce(command[1:]))
    if command[:1] == ["dashboard"]:
        from lightning_ssl.dashboard import main as dashboard

        sys.exit(dashboard(command[1:]))

    from lightning_ssl.run import RunCLI, SaveRunConfig

    commands = {name: {"default_config_files": [str(shipped("default.yaml"))]} for name in RunCLI.subcommands()}
    RunCLI(
        args=args,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        parser_kwargs={"description": DESCRIPTION, **commands},
        auto_configure_optimizers=False,
    )


def shipped(name: str) -> Path:
    """The path of a shipped YAML file."""
    return Path(str(files("lightning_ssl.configs"))) / name


def resolve_configs(args: list[str]) -> list[str]:
    """Let ``--config cifar10/byol.yaml`` name a shipped file, unless there is one of that name here."""
    resolved = []
    for previous, arg in zip(["", *args], args):  # noqa: B905 (one longer by design)
        flag, equals, value = arg.partition("=")
        name = value if equals and flag in ("--config", "-c") else arg if previous in ("--config", "-c") else None
        if name is not None and not Path(name).exists() and shipped(name).is_file():
            arg = arg.removesuffix(name) + str(shipped(name))
        resolved.append(arg)
    return resolved
