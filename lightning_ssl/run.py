"""A run and its folder: LightningCLI with a log, checkpoints, config and report in one place for each run."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger

# Imported for their names: jsonargparse knows the subclasses that are loaded.
import lightning_ssl.callbacks
import lightning_ssl.data
import lightning_ssl.methods  # noqa: F401
from lightning_ssl.callbacks._report import run_dir


class RunCLI(LightningCLI):
    """LightningCLI whose runs each have a folder ``<root>/<run>`` that no other run has."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            L.LightningModule, L.LightningDataModule, subclass_mode_model=True, subclass_mode_data=True, **kwargs
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--root", type=str, default="runs", help="Folder that holds the runs.")
        parser.add_argument(
            "--run",
            type=str | None,
            default=None,
            help="Name of the run's folder in --root. By default a new one, or with --ckpt_path last the latest.",
        )
        parser.add_argument("--output", type=str, default="embeddings.npz", help="The file that `predict` writes.")

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        config.run = config.run or self._run_name(config)
        if config.trainer.default_root_dir is None:
            config.trainer.default_root_dir = str(Path(config.root) / config.run)
        loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
        for logger in loggers:
            kind = getattr(logger, "class_path", "").rpartition(".")[-1]
            if kind.endswith("CSVLogger") or kind == "TensorBoardLogger":
                places = {"save_dir": config.root, "name": config.run, "version": ""}
            elif kind == "WandbLogger":
                # The run's name is its id, too: the same command resumes the same W&B run.
                places = {"save_dir": config.trainer.default_root_dir, "name": config.run, "id": config.run}
            else:
                continue
            for name, value in places.items():
                logger.init_args[name] = value

    def _run_name(self, config: Any) -> str:
        # In the environment, so that the processes which a DDP run starts agree with the one that starts them.
        if "LIGHTNING_SSL_RUN" not in os.environ:
            method = config.model.class_path.rpartition(".")[-1].lower()
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-{os.getpid()}"
            if config.ckpt_path == "last":
                written = sorted(Path(config.root).glob("*/checkpoints/last.ckpt"), key=lambda p: p.stat().st_mtime)
                if not written:
                    self.parser.error(
                        f"--ckpt_path last: no run in {config.root!r} has a checkpoint; set --root or --run"
                    )
                name = written[-1].parents[1].name
            os.environ["LIGHTNING_SSL_RUN"] = name
        return os.environ["LIGHTNING_SSL_RUN"]

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Leave out the callbacks on a predictor when the method has none, so that one flag switches methods."""
        config = self.config[self.subcommand]
        if isinstance(getattr(self.model, "predictor", None), (type(None), torch.nn.Identity)):
            config.trainer.callbacks = [
                callback
                for callback in config.trainer.callbacks or []
                if callback.get("init_args", {}).get("predictor") != "predictor"
            ]
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
    """Writes the config into the run's folder; a resumed run writes it again."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = run_dir(trainer)  # collective
        if trainer.is_global_zero and folder is not None and not self.already_saved:
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, str(folder / self.config_filename), skip_none=False, overwrite=True)
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
        writer = super().experiment
        log_metrics = writer.log_metrics

        def first_log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            kept = [row for row in rows if step is None or int(row["step"]) < step]
            writer.metrics.extend({key: value for key, value in row.items() if value != ""} for row in kept)
            writer.log_metrics = log_metrics
            log_metrics(metrics, step)

        writer.log_metrics = first_log_metrics
        return writer
