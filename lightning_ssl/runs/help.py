"""Short answers that need no torch: help on one screen, the version, what completes a word."""

from __future__ import annotations

import argparse
import difflib
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

COMMANDS = {
    "fit": "train a method with its diagnostics on",
    "validate": "evaluate a checkpoint on the validation data",
    "test": "evaluate a checkpoint on the test data",
    "predict": "write a checkpoint's features, labels and indices to one file",
    "embed": "write a run's features of every split to one file, .npz or .parquet",
    "export": "write a run's backbone for torchvision, timm, safetensors, TorchScript or ONNX",
    "doctor": "find silent bugs in module, data and settings before the first epoch",
    "runs": "list the runs in a folder: method, data, steps, verdict, probes, age",
    "compare": "say which of some runs broke, from when, and in what their configs differ",
    "reproduce": "run the papers' experiments beside their published figures",
    "dashboard": "lay out a W&B workspace for the diagnostics",
    "completion": "print a script that completes commands, flags and names in your shell",
}
METHODS = ("SimCLR", "BYOL", "SimSiam", "DirectPred", "BarlowTwins", "RAFT", "BYOLPrime")
DATASETS = ("digits", "cifar10", "cifar100", "stl10", "fashion_mnist", "imagenet", "image_folder", "hf", "wds")
TRAINED = ("fit", "validate", "test", "predict")

TOP = """\
usage: lightning-ssl COMMAND [--FLAG VALUE ...]

Self-supervised training under the microscope.

{commands}

lightning-ssl COMMAND --help   the flags that people use; --help.all lists every one
lightning-ssl --version        the version
"""

FIT = """\
usage: lightning-ssl {command} [--config FILE ...] [--FLAG VALUE ...]

{what}

What to train
  --model NAME                {methods}
                              or package.module.Class of your own
  --model.backbone NAME       resnet18, resnet50, ..., or a class: lightning_ssl.nn.SmallConv
  --model.optimizer NAME      Adam, SGD, LARS, or any class of torch.optim
  --model.optimizer.lr X      and the optimizer's other options: --model.optimizer.weight_decay X
  --model.OPTION X            any option of the method: --model.projector_dim 128
  --config FILE               a YAML file of options, yours or a shipped one (cifar10/byol.yaml,
                              ablations/..., overlays/ddp.yaml, overlays/wandb.yaml); repeat it to
                              lay one over another; flags have the last word

On which data
  --data.dataset NAME         {datasets}
  --data.root DIR             where the images are; --data.download true fetches what can be
  --data.batch_size N         samples per process
  --data.num_workers N        processes that load

How long, on what
  --trainer.max_epochs N      or --trainer.max_steps N
  --trainer.devices N         with --config overlays/ddp.yaml: GPUs of this machine
  --trainer.precision P       32-true, bf16-mixed, 16-mixed
  --trainer.accelerator A     auto, gpu, cpu
  --trainer.log_every_n_steps N
  --trainer.check_val_every_n_epoch N
  --trainer.fast_dev_run 1    one batch, nothing written
  --seed_everything N         seed of everything random

The run
  --root DIR                  the folder that holds the runs (default: runs)
  --name NAME                 the run's folder in it; a name that is taken is refused
  --ckpt_path last            go on with the run of --name, else of --config, else the latest
  --ckpt_path FILE            begin from a checkpoint{output}

Diagnostics, by the callback's name
  --knn.every_n_epochs 1      tune one: --linear.l2 X, --covariance_operator_norm.every_n_steps 200
  --linear false              switch one off
  --trainer.callbacks+=NAME   add one of lightning_ssl.callbacks, or a class of your own

Where the rest is
  lightning-ssl {command} --help.all              every flag, some 600 lines
  lightning-ssl {command} --print_config          the config that these flags make, as YAML
  lightning-ssl {command} --model.help BYOL       the options of a method; likewise --data.help,
                                            --trainer.callbacks.help KNNProbe
"""
WHAT = {
    "fit": "Trains a method with its diagnostics on. Without flags: DirectPred on the digits, about a minute.\n"
    "It leaves a folder with report.html, summary.json, config.yaml, metrics.csv, checkpoints and pictures.",
    "validate": "Evaluates a checkpoint on the validation data, probes included. Writes to a folder of its own.",
    "test": "Evaluates a checkpoint on the test data, probes included. Writes to a folder of its own.",
    "predict": "Writes features, labels and indices of all samples to one .npz file.",
}
OUTPUT = "\n  --output FILE               the file that is written (default: embeddings.npz)"

LISTED = "`lightning-ssl fit --help` lists the usual ones, --help.all all"

# Other names for what people look for.
MEANT = {
    "--model.optimizer.lr": "lr learning_rate base_lr",
    "--model.optimizer.weight_decay": "wd weight_decay",
    "--model.optimizer": "optim optimizer opt",
    "--model.backbone": "backbone arch encoder network",
    "--model": "method",
    "--data.dataset": "dataset data_set",
    "--data.batch_size": "batch batch_size bs batchsize batch_size_per_gpu",
    "--data.num_workers": "workers num_workers nworkers",
    "--data.root": "data_dir data_path data_root data_folder",
    "--trainer.max_epochs": "epochs max_epochs num_epochs n_epochs",
    "--trainer.max_steps": "steps max_steps num_steps iterations",
    "--trainer.devices": "gpus devices num_gpus ngpus n_gpus",
    "--trainer.num_nodes": "nodes num_nodes",
    "--trainer.precision": "precision amp fp16 bf16 half",
    "--trainer.accelerator": "device accelerator cuda cpu gpu",
    "--trainer.strategy": "strategy ddp distributed",
    "--trainer.logger": "logger log wandb tensorboard",
    "--trainer.fast_dev_run": "dry_run debug smoke_test",
    "--seed_everything": "seed random_seed",
    "--ckpt_path last": "resume continue resume_from",
    "--ckpt_path": "checkpoint ckpt weights load pretrained",
    "--root": "out out_dir output_dir save_dir log_dir logdir results",
    "--name": "run_name exp_name experiment run",
}
SYNONYMS = {other: flag for flag, others in MEANT.items() for other in others.split()}


def command_help(command: str) -> str:
    """The help of fit, validate, test or predict, on one screen."""
    return FIT.format(
        command=command,
        what=WHAT[command],
        methods=", ".join(METHODS),
        datasets=", ".join(DATASETS),
        output=OUTPUT if command == "predict" else "",
    )


def top_help() -> str:
    """What commands there are."""
    width = max(map(len, COMMANDS))
    return TOP.format(commands="\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items()))


def unknown_command(name: str) -> str:
    """What to say to a command that there is not."""
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    known = ", ".join(f"'{command}'" for command in COMMANDS)
    return f"there is no command {name!r} (choose from {known}).{hint} `lightning-ssl --help` explains them"


def quick_answer(command: list[str]) -> str | None:
    """What needs no torch: help, and the version; None for everything else."""
    if command[:1] in (["--help"], ["-h"], ["help"]):
        return top_help()
    if command[:1] in (["--version"], ["-V"], ["version"]):
        return f"lightning-ssl {version('lightning-ssl')}\n"
    if command and command[0] in TRAINED and {"--help", "-h"} & set(command[1:]):
        return command_help(command[0])
    return None


# Completion -----------------------------------------------------------------------------------------------------------

BASH = """\
_lightning_ssl() {
  local IFS=$'\\n'
  COMPREPLY=($(lightning-ssl completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -o nosort -F _lightning_ssl lightning-ssl
"""
SCRIPTS = {
    "bash": BASH,
    "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + BASH.replace(" -o nosort", ""),
    "fish": "complete -c lightning-ssl -a '(lightning-ssl completion words -- (commandline -opc)[2..-1] "
    "(commandline -ct))'\n",
}


def completion(argv: list[str]) -> int:
    """Run ``lightning-ssl completion``: the script of a shell, or with "words" what completes the last word."""
    if argv[:2] == ["words", "--"]:
        print("\n".join(completions(argv[2:])))
        return 0
    parser = argparse.ArgumentParser(
        "lightning-ssl completion",
        description='Print a script that completes commands, flags and names: eval "$(lightning-ssl completion bash)"',
    )
    parser.add_argument("shell", choices=list(SCRIPTS))
    print(SCRIPTS[parser.parse_args(argv).shell], end="")
    return 0


def completions(given: list[str]) -> list[str]:
    """What may stand in the place of the last word.

    Example:
        >>> completions(["fit", "--model", "BYOL"])
        ['BYOL', 'BYOLPrime']
    """
    *before, word = given or [""]
    if not before:
        return [name for name in [*COMMANDS, "--help", "--version"] if name.startswith(word)]
    if word == "=":
        word = ""
    elif before[-1] == "=" and len(before) > 1:  # bash parts --model=BYOL at the sign
        before = before[:-1]
    elif "=" in word:
        flag, _, value = word.partition("=")
        return [f"{flag}={found}" for found in _values(flag, before[0]) if found.startswith(value)]
    choices = flags(before[0]) if word.startswith("-") else _values(before[-1], before[0])
    return [choice for choice in choices if choice.startswith(word)]


def flags(command: str) -> list[str]:
    """The flags that a command's short help names."""
    own = {"compare": ["--root", "--output", "--json"], "runs": ["--root", "--json"], "reproduce": ["--list", "--run"]}
    if command not in TRAINED:
        return [*own.get(command, []), "--help"]
    text = command_help(command)
    named = {part.strip("`,;:()").partition("+")[0] for part in text.split() if part.startswith("--")}
    return sorted(named - {"--FLAG", "--model.OPTION"})


def _values(flag: str, command: str) -> list[str]:
    if flag in ("--config", "-c"):
        base = Path(str(files("lightning_ssl.configs")))
        return sorted(path.relative_to(base).as_posix() for path in base.rglob("*.yaml"))
    if flag == "--name" or command == "compare":
        return sorted(path.name for path in Path("runs").glob("*") if path.is_dir())
    known = {"--model": METHODS, "--data.dataset": DATASETS, "--ckpt_path": ("last",)}
    return list(known.get(flag, ()))
