"""A run and its folder: LightningCLI with a log, checkpoints, config and report in one place for each run."""

from __future__ import annotations

import csv
import difflib
import importlib
import inspect
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Imported for their names: jsonargparse knows the subclasses that are loaded.
import lightning_ssl.callbacks
import lightning_ssl.data
import lightning_ssl.methods
from lightning_ssl.callbacks._report import run_dir


class RunParser(LightningArgumentParser):
    """Says what is wrong and what would be right, instead of all that jsonargparse tried."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser within the parser: its message is part of a larger one
            super().error(message, ex)
        self.exit(2, f"lightning-ssl: error: {explain(message, list(self._option_string_actions))}\n")


def explain(message: str, flags: list[str]) -> str:
    """The person's words for a parser's message: the value it got, the known ones, the nearest."""
    kinds = {
        "model": lightning_ssl.methods.__all__,
        "data": [name for name in lightning_ssl.data.__all__ if name.endswith("DataModule")],
        "trainer.callbacks": lightning_ssl.callbacks.__all__,
    }
    key = re.search(r'Parser key "([\w.]+)"', message)
    given = re.search(r"Given value: ([\w.]+)$", message, re.MULTILINE)
    if key and given and key[1] in kinds and "dot import path" in message:
        return (
            f"--{key[1]}: there is no {given[1]!r}{_nearest(given[1], kinds[key[1]])}. Known: "
            f"{', '.join(kinds[key[1]])}; a class of your own is named by its import path, package.module.Class"
        )
    if option := re.search(r"class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted", message):
        module, _, name = option[1].rpartition(".")
        known = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
        return f"{name} has no option {option[2]!r}{_nearest(option[2], known)}. Its options: {', '.join(known)}"
    if choice := re.search(r'"([\w.]+)":\s+Expected a typing.Literal\[(.*?)\]. Got value: (.*)', message):
        known = [part.strip("' ") for part in choice[2].split(",")]
        return f"{choice[1]} must be one of {', '.join(known)}; got {choice[3]!r}{_nearest(choice[3], known)}"
    if unknown := re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", message):
        return f"there is no flag {unknown[1]}{_nearest(unknown[1], flags)}; `lightning-ssl fit --help` lists them"
    return message


def _nearest(name: str, known: list[str]) -> str:
    lowered = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" (did you mean {lowered[close[0]]!r}?)" if close else ""


class RunCLI(LightningCLI):
    """LightningCLI whose runs each have a folder ``<root>/<run>`` that no other run has."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=RunParser,
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--root", type=str, default="runs", help="Folder that holds the runs.")
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Name of the run's folder in --root. By default a new one, or with --ckpt_path last the latest.",
        )
        parser.add_argument("--output", type=str, default="embeddings.npz", help="The file that `predict` writes.")

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        config.name = config.name or self._run_name(config)
        if config.trainer.default_root_dir is None:
            config.trainer.default_root_dir = str(Path(config.root) / config.name)
        loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
        for logger in loggers:
            kind = getattr(logger, "class_path", "").rpartition(".")[-1]
            if kind.endswith("CSVLogger") or kind == "TensorBoardLogger":
                places = {"save_dir": config.root, "name": config.name, "version": ""}
            elif kind == "WandbLogger":
                # The run's name is its id, too: the same command resumes the same W&B run.
                places = {"save_dir": config.trainer.default_root_dir, "name": config.name, "id": config.name}
            else:
                continue
            for name, value in places.items():
                logger.init_args[name] = value

    def _run_name(self, config: Any) -> str:
        # In the environment, so that the processes which a DDP run starts agree with the one that starts them.
        started = "LOCAL_RANK" in os.environ
        if not (started and "LIGHTNING_SSL_RUN" in os.environ):
            method = config.model.class_path.rpartition(".")[-1].lower()
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-{os.getpid()}"
            if config.ckpt_path == "last":
                written = sorted(Path(config.root).glob("*/checkpoints/last.ckpt"), key=lambda p: p.stat().st_mtime)
                if not written:
                    self.parser.error(
                        f"--ckpt_path last: no run in {config.root!r} has a checkpoint; set --root or --name"
                    )
                name = written[-1].parents[1].name
            os.environ["LIGHTNING_SSL_RUN"] = name
        return os.environ["LIGHTNING_SSL_RUN"]

    def instantiate_classes(self) -> None:
        """A value that a constructor refuses is the command's mistake: say so, without a traceback."""
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            refused = re.search(r"Errors:\n  - (.+?)\n  - Expected a", str(error), re.DOTALL)
            self.parser.exit(2, f"lightning-ssl: error: {refused[1] if refused else error}\n")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Leave out the callbacks on a predictor when the method has none, so that one flag switches methods."""
        if isinstance(getattr(self.model, "predictor", None), (type(None), torch.nn.Identity)):
            trainer = self.config_init[self.subcommand].trainer
            trainer.callbacks = [c for c in trainer.callbacks or [] if getattr(c, "predictor", None) != "predictor"]
        return super().instantiate_trainer(**kwargs)

    def after_predict(self) -> None:
        """Write features, labels and indices of all ranks, in the order of the indices, each once."""
        parts = self.trainer.predict_loop.predictions
        rows = {name: torch.cat([part[name].cpu() for part in parts]) for name in ("features", "label", "index")}
        if self.trainer.world_size > 1:
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, {name: rows[name].numpy() for name in rows})
        else:
            gathered = [
                {name: rows[name].float().numpy() if name == "features" else rows[name].numpy() for name in rows}
            ]
        if self.trainer.is_global_zero:
            arrays = {name: np.concatenate([part[name] for part in gathered]) for name in rows}
            _, first = np.unique(arrays["index"], return_index=True)
            output = self.config[self.subcommand].output
            np.savez_compressed(output, **{name: array[first] for name, array in arrays.items()})
            print(f"wrote {len(first)} embeddings to {output}: arrays features, label, index")


class SaveRunConfig(SaveConfigCallback):
    """Writes the config into the run's folder, without the run's name: another run with it makes its own folder."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = run_dir(trainer)  # collective
        if trainer.is_global_zero and folder is not None and not self.already_saved:
            folder.mkdir(parents=True, exist_ok=True)
            config = self.config.clone()
            if config.trainer.default_root_dir == str(Path(config.root) / config.name):
                config.trainer.default_root_dir = None
            config.name = None
            self.parser.save(config, str(folder / self.config_filename), skip_none=False, overwrite=True)
        self.already_saved = True


class ResumableCSVLogger(CSVLogger):
    """CSVLogger that keeps what an earlier part of the same run logged.

    Lightning's own deletes the file when the folder exists. This one reads it, and at the first new row drops what the
    resumed run is about to log again.
    """

    @property
    def experiment(self) -> Any:
        if self._experiment is not None or not os.path.isfile(os.path.join(self.log_dir, "metrics.csv")):
            return super().experiment
        with open(os.path.join(self.log_dir, "metrics.csv"), newline="") as file:
            rows = list(csv.DictReader(file))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Previous log files in this directory will be deleted")
            writer = super().experiment
        log_metrics = writer.log_metrics

        def first_log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            kept = [row for row in rows if step is None or int(row["step"]) < step]
            writer.metrics.extend({key: value for key, value in row.items() if value != ""} for row in kept)
            writer.log_metrics = log_metrics
            log_metrics(metrics, step)

        writer.log_metrics = first_log_metrics
        return writer
