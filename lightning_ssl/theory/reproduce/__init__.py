"""`lightning-ssl reproduce NAME`: the papers' experiments, our figures beside the published ones."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ssl.theory.reproduce.report import Run

__all__ = ["EXPERIMENTS", "main", "reproduce"]


class Experiment(NamedTuple):
    """Where an experiment is, what it is, its minutes on 2 cores (default and published size), and its options."""

    where: str  # module:function, imported when asked for
    what: str
    minutes: tuple[float, float]
    options: tuple[str, ...] = ()


OVERLAY_OPTIONS = ("lr", "sgd_momentum", "momentum", "weight_decay", "predictor_weight_decay", "alpha_p", "sigma2")
TREES, IMAGES = ("epochs", "loss"), ("epochs",)
CIFAR10 = ("root", "setting", "contrast", "jobs", "pilot")

EXPERIMENTS = {
    "table6": Experiment("trees:table6", "DDN-v2 Table 6: HLTM correlations, 90 cells", (9, 9), TREES),
    "table2": Experiment("trees:v1_table2", "DDN-v1 Table 2: HLTM correlations with 2 and 5 units", (3, 3), TREES),
    "covop-growth": Experiment(
        "trees:covop_growth", "DDN-v2 Figs 13-14: covariance-operator norms grow", (25, 60), TREES
    ),
    "two-layer": Experiment("clusters:two_layer", "DDN-v1 Figs 7-8: two-layer networks on ten Gaussians", (1.5, 1.5)),
    "phase-portraits": Experiment(
        "dynamics:phase_portraits", "DirectPred Figs 3, 4, 10: where the modes go", (0.3, 0.5)
    ),
    "ema-weight-decay": Experiment("dynamics:ema_weight_decay", "DirectPred Fig 5: roles of eta and beta", (0.3, 0.3)),
    "ema-assumption": Experiment("dynamics:ema_assumption", "DirectPred Fig 7: W_a is proportional to W", (0.5, 0.5)),
    "symmetry": Experiment("dynamics:symmetry", "DirectPred Fig 8: W_p becomes symmetric", (0.3, 0.5)),
    "commutator": Experiment("dynamics:commutator", "DirectPred Fig 9: the commutator of F and W_p", (0.3, 0.5)),
    "bound": Experiment("images:bound", "Bound Figs 3-4: L_bound against kNN, on digits", (2, 8), IMAGES),
    "byol-ablations": Experiment(
        "images:byol_ablations", "RAFT Table 1, DDN-v1 Tables 3-5: patterns on digits", (18, 60), IMAGES
    ),
    "raft-figures": Experiment(
        "images:raft_figures", "RAFT Figs 1 and 4: predictors and beta over training, on digits", (8, 25), IMAGES
    ),
    "cifar10": Experiment(
        "cifar10:cifar10",
        "DDN-v1 Tables 3-4, DDN-v2 2-3, DirectPred 3 and 8, Bound 1, RAFT 1: registered contrasts on CIFAR-10",
        (45, 1_200_000),
        CIFAR10,
    ),
    "overlay": Experiment(
        "overlay:overlay", "Theory over a run's (s_j, p_j): needs --run LOGDIR", (0.3, 0.3), ("run", *OVERLAY_OPTIONS)
    ),
}
"""The experiments by their names."""


def reproduce(name: str, full: bool = False, out: str | Path = "reproduction", seed: int = 0, **options: Any) -> str:
    """Run an experiment; returns its report in Markdown, also written to ``out`` with a PNG.

    Interrupted, it continues from the stages kept in ``out``.

    Args:
        name: One of :data:`EXPERIMENTS`.
        full: The published size rather than the default one.
        out: Folder in which the experiment makes its own.
        seed: Seed of everything random.
        options: Further options of the experiment: ``epochs``, ``loss``, those of the overlay.
    """
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.4)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown experiment {name!r}.{hint} Known: {', '.join(EXPERIMENTS)}.")
    for option in options:
        if option not in EXPERIMENTS[name].options:
            known = ", ".join(f"--{o}" for o in EXPERIMENTS[name].options) or "none of its own"
            raise ValueError(f"{name} has no --{option}; its options are: {known}. Leave it out.")
    if options.get("epochs", 1) < 1:
        raise ValueError(f"`epochs` must be at least 1, got {options['epochs']}")
    module, function = EXPERIMENTS[name].where.split(":")
    experiment = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    run = Run(name, Path(out), full, seed, **options)
    return run.finish(experiment(run))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: ``NAME [--full] [--out DIR] [--seed N] [--run LOGDIR]``, or ``--list``."""
    parser = argparse.ArgumentParser(
        prog="lightning-ssl reproduce", description="Run an experiment of the papers beside its published figures."
    )
    parser.add_argument("name", nargs="?", help="the experiment; --list shows them")
    parser.add_argument("--list", action="store_true", help="list the experiments and their duration")
    parser.add_argument("--full", action="store_true", help="the published size rather than the default one")
    parser.add_argument("--out", default="reproduction", help="folder for results; an interrupted run resumes there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="another number of epochs, where there are any")
    parser.add_argument(
        "--loss",
        help='of table2, table6 and covop-growth: "nce" (default) or "batch_ratio", the one of the authors\' code',
    )
    group = parser.add_argument_group("overlay", "a run's log folder; the rest is read from its config unless given")
    group.add_argument("--run", metavar="LOGDIR")
    for name in OVERLAY_OPTIONS:
        group.add_argument(f"--{name}", type=float)
    group = parser.add_argument_group("cifar10", "contrasts, settings and seeds are those of cifar10_contrasts.yaml")
    group.add_argument("--root", help="folder with cifar-10-batches-py/, or with train/<class>/ and test/<class>/")
    group.add_argument("--setting", help="run this setting alone")
    group.add_argument("--contrast", help="run the settings of this contrast alone")
    group.add_argument("--jobs", type=int, help="processes side by side; by default one a core, with --full 1")
    group.add_argument(
        "--pilot",
        action="store_true",
        default=None,
        help="seeds and held-out images for choosing settings",
    )
    args = parser.parse_args(argv)
    if args.list:
        width = max(map(len, EXPERIMENTS))
        for name, experiment in EXPERIMENTS.items():
            default, full = (f"{m:g} min" for m in experiment.minutes)
            print(f"{name:{width}}  {experiment.what} (about {default}; --full {full})")
        return 0
    if args.name is None:
        parser.error("give the NAME of an experiment, or --list")
    if args.name in EXPERIMENTS:
        minutes = EXPERIMENTS[args.name].minutes[args.full]
        print(f"{args.name}: about {minutes:g} min on 2 cores; results in {args.out}", flush=True)
    names = ("run", "epochs", "loss", *OVERLAY_OPTIONS, *CIFAR10)
    options = {key: value for key in names if (value := getattr(args, key)) is not None}
    try:
        print(reproduce(args.name, args.full, args.out, args.seed, **options))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"\n{args.name} was interrupted; the same command goes on where it stopped.", flush=True)
        return 130
    return 0
