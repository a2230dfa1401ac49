"""The console script `lightning-ssl`."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from lightning_ssl.runs import own_data
from lightning_ssl.runs.help import COMMANDS, completion, quick_answer, unknown_command

TUNING = "Callbacks are tuned and switched off by name: --knn.every_n_epochs 1 --linear false."


def main(args: list[str] | None = None) -> None:
    """Run `lightning-ssl` with `args` (default: the command line)."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # networks of one's own, beside the runs; `python -m` has it, a script has not
    if args is None:  # in place: the processes that a DDP run starts are given sys.argv
        sys.argv[1:] = resolve_configs(sys.argv[1:])
        command = sys.argv[1:]
    else:
        command = args = resolve_configs(args)
    # Each command imports what it needs: only the four of LightningCLI, and the doctor, need Lightning.
    if (words := quick_answer(command)) is not None:
        print(words, end="")
        sys.exit(0)
    if command and not command[0].startswith("-") and command[0] not in COMMANDS:
        print(f"lightning-ssl: error: {unknown_command(command[0])}", file=sys.stderr)
        sys.exit(2)
    if command[:1] == ["completion"]:
        sys.exit(completion(command[1:]))
    if command[:1] == ["runs"]:
        from lightning_ssl.runs.listing import main as listing

        sys.exit(listing(command[1:]))
    if command[:1] == ["compare"]:
        from lightning_ssl.runs.compare import main as comparing

        sys.exit(comparing(command[1:]))
    if command[:1] == ["reproduce"]:
        from lightning_ssl.theory.reproduce import main as reproduce

        sys.exit(reproduce(command[1:]))
    if command[:1] == ["dashboard"]:
        from lightning_ssl.runs.dashboard import main as dashboard

        sys.exit(dashboard(command[1:]))
    if command[:1] == ["export"]:
        from lightning_ssl.runs.export import main as exporting

        sys.exit(exporting(command[1:]))
    if command[:1] == ["embed"]:
        from lightning_ssl.runs.export import embed_arguments

        command[:] = resolve_configs(embed_arguments(command[1:]))
    cli: Any = None
    if command[:1] == ["doctor"]:
        from lightning_ssl.runs.doctor import DoctorCLI, read

        chosen, rest = read(command[1:])
        command = args = ["fit", *rest]
        cli = partial(DoctorCLI, chosen)

    for place, word in enumerate(command):
        if word == "--help.all":
            command[place] = "--help"
            sys.argv[1:] = command if args is None else sys.argv[1:]

    flags = flag_values(command)
    configs = [_peek(Path(value)) for flag, value in flags if flag in ("--config", "-c") and Path(value).is_file()]
    command[1:1] = own_data.chosen(flags, configs)
    if args is None:
        sys.argv[1:] = command

    import lightning.pytorch as L

    from lightning_ssl.runs.run import RunCLI, SaveRunConfig

    beneath = [str(shipped(name)) for name in configs_beneath(command)]
    commands = {
        name: {
            "default_config_files": beneath,
            "description": f"{getattr(L.Trainer, name).__doc__.splitlines()[0]} {TUNING}",
        }
        for name in RunCLI.subcommands()
    }
    (cli or RunCLI)(
        args=args,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        parser_kwargs={"description": TUNING, **commands},
        auto_configure_optimizers=False,
    )


def shipped(name: str) -> Path:
    """The path of a shipped YAML file."""
    return Path(str(files("lightning_ssl.configs"))) / name


def configs_beneath(args: list[str]) -> list[str]:
    """The shipped files that a command's own configs and flags are laid over.

    These are default.yaml and the config of the method and dataset that the flags name: ``--model BYOL --data.dataset
    cifar10`` stands on cifar10/byol.yaml. A --config that names a method stands alone: jsonargparse would keep those
    options of the method beneath that both have, DirectPred's linear predictor in BYOL, say.
    """
    method, dataset, root = "directpred", "digits", "data"
    for flag, value in flag_values(args):
        if flag in ("--config", "-c") and Path(value).is_file():
            content = _peek(Path(value))
            model = content.get("model") if isinstance(content, dict) else None
            if isinstance(model, str) or (isinstance(model, dict) and "class_path" in model):
                return ["default.yaml"]
        elif flag in ("--model", "--model.class_path"):
            method = value.rpartition(".")[2].lower()
        elif flag in ("--data.dataset", "--data.init_args.dataset"):
            dataset = value
        elif flag in own_data.ROOT:
            root = value
    dataset = own_data.beneath(root) if dataset in own_data.FOUND else dataset
    for folder in (dataset, "digits"):
        for file in sorted(shipped(folder).glob("*.yaml")):
            if file.stem.replace("_", "") == method:
                return ["default.yaml", f"{folder}/{file.name}"]
    return ["default.yaml"]


def _peek(path: Path) -> Any:
    """What a config holds; the parser, which reads it again, would not name the file."""
    try:
        return yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        print(f"lightning-ssl: error: --config {path} is no plain YAML: {error}", file=sys.stderr)
        sys.exit(2)


def flag_values(args: list[str]) -> list[tuple[str, str]]:
    """The flags with their values, written ``--flag value`` or ``--flag=value``."""
    pairs = []
    for arg, following in zip(args, [*args[1:], ""]):  # noqa: B905 (one longer by design)
        flag, equals, value = arg.partition("=")
        pairs.append((flag, value if equals else following))
    return pairs


def resolve_configs(args: list[str]) -> list[str]:
    """Let ``--config cifar10/byol.yaml`` name a shipped file, unless there is one of that name here.

    Several names may be joined by commas, as a sweep's parameter needs it. Configs come before flags, wherever they
    stand, so that a flag always has the last word.
    """
    configs, others = [], []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if flag not in ("--config", "-c"):
            others.append(arg)
            continue
        value = value if equals else next(rest, "")
        names = value.split(",") if value.endswith(".yaml") and not Path(value).exists() else [value]
        for name in names:
            found = not Path(name).exists() and shipped(name).is_file()
            configs.append(f"{flag}={shipped(name) if found else name}")
    return [*others[:1], *configs, *others[1:]]
