"""A run and its folder: LightningCLI with a log, checkpoints, config and report in one place for each run."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning.pytorch as L
import torch
from jsonargparse import ActionConfigFile
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Imported for their names: jsonargparse knows the subclasses that are loaded.
import lightning_ssl.callbacks
import lightning_ssl.data
import lightning_ssl.methods
from lightning_ssl.callbacks import Probe
from lightning_ssl.folder import run_dir
from lightning_ssl.runs.checkpoint import CheckpointError, CheckpointFiles, UnreadableError, readable
from lightning_ssl.runs.embeddings import write_embeddings
from lightning_ssl.runs.explain import explain, innermost
from lightning_ssl.runs.loggers import GuardLoggers, ResumableCSVLogger
from lightning_ssl.runs.owner import evaluation_name, is_run, one_of_many, refusal, run_meant, started_again
from lightning_ssl.runs.peers import Disagreement, Peers
from lightning_ssl.runs.tuning import split_flags, tune

__all__ = ["ResumableCSVLogger", "RunCLI", "RunParser", "SaveRunConfig", "explain"]


class RunParser(LightningArgumentParser):
    """Says what is wrong and what would be right, instead of all that jsonargparse tried."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser within the parser: its message is part of a larger one
            super().error(message, ex)
        self.exit(2, f"lightning-ssl: error: {explain(message, self.flags)}\n")

    @property
    def flags(self) -> list[str]:
        """Every flag there is."""
        return list(self._option_string_actions)


class RunCLI(LightningCLI):
    """LightningCLI whose runs each have a folder ``<root>/<run>``, which is that run's for ever.

    A name that is taken is refused, unless the command goes on with that run. What evaluates a run has a folder of its
    own.
    """

    writes = True  # whether the command leaves anything in the folder

    def __init__(self, **kwargs: Any) -> None:
        self.parsers: list[RunParser] = []
        self.reading: str | None = None  # the checkpoint whose hyperparameters are being read
        self.given: str | None = None  # the checkpoint that the command names
        self.peers = Peers()
        try:
            super().__init__(
                L.LightningModule,
                L.LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                **kwargs,
            )
        except Exception as error:
            self._answer(error)

    def _answer(self, error: Exception) -> None:
        """What a person can mend needs no traceback: files that are missing, places a module does not have."""
        try:
            if self.reading is not None:
                with readable(self.reading):
                    raise error
            raise error
        except CheckpointError as found:
            wrong = self.given is not None and isinstance(found, UnreadableError)
            self.parser.exit(2 if wrong else 1, f"lightning-ssl: error: {found}\n")
        except (MisconfigurationException, FileNotFoundError, Disagreement):
            self.parser.exit(2, f"lightning-ssl: error: {error}\n")
        except RuntimeError as found:
            if "loading state_dict for" not in str(found):
                raise
            path, reason = self.config[self.config.subcommand].ckpt_path, str(found).splitlines()
            self.parser.exit(
                2,
                f"lightning-ssl: error: --ckpt_path {path} holds another network than the config builds "
                f"({' '.join(reason[1:2]).strip()[:200]}); give the run's own --config runs/NAME/config.yaml\n",
            )
        except Exception:
            if not self.peers.ended_by_others:
                raise
            sys.stderr.flush()
            os._exit(1)  # it has said why; what would still wait for the others need not

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--root", type=str, default="runs", help="Folder that holds the runs.")
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Name of the run's folder in --root, which no other run may have; with --ckpt_path last the run to go "
            "on with. By default a new one; with --ckpt_path last the run of --config, else the latest.",
        )
        parser.add_argument("--output", type=str, default="embeddings.npz", help="The file that `predict` writes.")
        parser.add_argument(
            "--splits",
            type=Literal["test", "all"],
            default="test",
            help="What `predict` embeds: the test split, or the training split too.",
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = RunParser(**{"dump_header": [f"lightning.pytorch=={L.__version__}"], **kwargs})
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="Path to a configuration file in json or yaml format."
        )
        self.parsers.append(parser)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Take out the flags that name a callback, and set its options when the list of callbacks is known."""
        if not (args is None or isinstance(args, list)):
            super().parse_arguments(parser, args)
            return
        known = sorted({flag for known in self.parsers for flag in known.flags})
        others, named = split_flags(sys.argv[1:] if args is None else args, known)
        if args is not None or named:
            self.config = parser.parse_args(others)
        else:
            super().parse_arguments(parser, args)
        if named:
            trainer = self.config[self.config.subcommand].trainer
            empty = partial(RunParser, parser_mode=parser.parser_mode)
            trainer.callbacks = tune(trainer.callbacks, named, empty, known, self._refuse)
        config = self.config[self.config.subcommand]
        if config.get("ckpt_path") == "last" and self.config.subcommand != "fit":
            # By its path, so that the network is built from the hyperparameters in it.
            config.ckpt_path = str(self._meant(config) / "checkpoints" / "last.ckpt")
        path = config.get("ckpt_path")
        if path not in (None, "best", "last", "hpc", "registry") and "://" not in path:
            self.reading = self.given = path
            if self.config.subcommand == "fit" and one_of_many() and not Path(path).exists():
                # Not the end of this rank alone, for which the others would wait: all end when they compare.
                self.peers.missing, self.reading, config.ckpt_path = path, None, None
            else:
                os.stat(path)

    def _refuse(self, message: str) -> NoReturn:
        self.parser.exit(2, f"lightning-ssl: error: {message}\n")

    def before_instantiate_classes(self) -> None:
        self.reading = None
        config = self.config[self.subcommand]
        if config.name and Path(config.name).name != config.name:
            self.parser.error(f"--name {config.name!r} must be the name of one folder in --root: leave out the path")
        if Path(config.root).exists() and not Path(config.root).is_dir():
            self.parser.error(f"--root {config.root!r} is a file: name a folder for the runs")
        if self.subcommand == "predict" and not Path(config.output).absolute().parent.is_dir():
            self.parser.error(f"--output {config.output!r}: its folder does not exist; make it first")
        if self.subcommand == "predict" and config.output.endswith(".parquet") and not find_spec("pyarrow"):
            self.parser.error(f"--output {config.output!r} needs pyarrow: pip install pyarrow, or write .npz")
        config.name = self._run_name(config)
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
            rank_zero_warn(
                "workers that torchrun starts again may find each other's earlier addresses in the store it shares "
                "with them, and fail: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        folder = Path(config.root, config.name)
        if self.subcommand == "fit" and is_run(folder):
            last = folder / "checkpoints" / "last.ckpt"
            again = started_again(last if last.is_file() else folder / "config.yaml")
            writes = self.writes and not config.trainer.fast_dev_run
            if writes and (words := refusal(folder, config.ckpt_path, config.model.class_path, again)):
                self.parser.exit(2, f"lightning-ssl: error: {words}\n")
            if again and last.is_file():
                config.ckpt_path = "last"  # of this very run, whatever its first start began from
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

    def _meant(self, config: Any) -> Path:
        """The folder of the run that --ckpt_path last is of."""
        folder = run_meant(config.root, config.name, [str(path) for path in config.get("config") or []])
        if folder is None:
            self.parser.error(f"--ckpt_path last: no run in {config.root!r} has a checkpoint; set --root or --name")
        return folder

    def _run_name(self, config: Any) -> str:
        """The name of the folder that this command writes to, the same in all its processes."""
        training = self.subcommand == "fit"
        if config.name and (training or not is_run(Path(config.root, config.name))):
            return str(config.name)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
            self.parser.error("--name must be given where torchrun restarts workers: they resume the run of that name")
        method = config.model.class_path.rpartition(".")[-1].lower()
        if training and SLURMEnvironment.detect():
            return f"{method}-job{os.environ['SLURM_JOB_ID']}"  # the same for all tasks, and when it is queued again
        # In the environment, so that the processes which a DDP run starts agree with the one that starts them.
        started = "LOCAL_RANK" in os.environ
        if not (started and "LIGHTNING_SSL_RUN" in os.environ):
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-{os.getpid()}"
            if not training:
                name = evaluation_name(config.root, config.name, config.ckpt_path, str(self.subcommand)) or name
            elif config.ckpt_path == "last":
                folder = self._meant(config)
                rank_zero_info(f"lightning-ssl: goes on with {folder}")
                name = folder.name
            os.environ["LIGHTNING_SSL_RUN"] = name
        return os.environ["LIGHTNING_SSL_RUN"]

    def instantiate_classes(self) -> None:
        """A value that a constructor refuses is the command's mistake: say so, without a traceback."""
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            self.parser.exit(2, f"lightning-ssl: error: {innermost(str(error))}\n")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Leave out callbacks on a predictor that the method does not have, and probes of classes the data has not."""
        config = self.config_init[self.subcommand].trainer
        given = config.callbacks or []
        given = given if isinstance(given, list) else [given]  # one class alone: --trainer.callbacks=RunCheckpoint
        if isinstance(getattr(self.model, "predictor", None), (type(None), torch.nn.Identity)):
            given = [c for c in given if getattr(c, "predictor", None) != "predictor"]
        if not getattr(self.datamodule, "labelled", True):
            given = [c for c in given if not (isinstance(c, Probe) and c.data is None)]
        config.callbacks = given
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, lightning_ssl.callbacks.RunReport):
                callback.extras.append(theory_charts)
        trainer.callbacks[:0] = [GuardLoggers(), self.peers]  # type: ignore[attr-defined]
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = CheckpointFiles()
        return trainer

    def before_predict(self) -> None:
        splits = self.config[self.subcommand].splits
        if splits != "test" and not hasattr(self.datamodule, "predict_splits"):
            self.parser.error(f"--splits {splits} is for ImageDataModule, got {type(self.datamodule).__name__}")
        if splits != "test":
            self.datamodule.predict_splits = splits

    def after_predict(self) -> None:
        """Write features, labels and indices of all ranks, in the order of the indices, each once."""
        found: Any = self.trainer.predict_loop.predictions
        parts = dict(zip(("train", "test"), found, strict=True)) if isinstance(found[0], list) else found
        write_embeddings(parts, self.config[self.subcommand].output)


def theory_charts(folder: Path) -> list[dict[str, Any]]:
    """The theory's modes beside the run's own, for its page, where the theory covers the run."""
    from lightning_ssl.theory.reproduce.overlay import page_charts  # takes a second to import

    return page_charts(folder)


class SaveRunConfig(SaveConfigCallback):
    """Writes the config into the run's folder, so that another run with it is another run.

    The run's name and its --ckpt_path are left out. A run that goes on with another config keeps the earlier one as
    config-1.yaml, and so on; only once its checkpoint is loaded.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            self._write(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        folder = run_dir(trainer)  # collective
        if trainer.is_global_zero and folder is not None and not self.already_saved:
            folder.mkdir(parents=True, exist_ok=True)
            config = self.config.clone()
            if config.trainer.default_root_dir == str(Path(config.root) / config.name):
                config.trainer.default_root_dir = None
            config.name = config.ckpt_path = None
            # Options that are None are written, too; since 4.49 jsonargparse calls that otherwise.
            renamed = tuple(int(part) for part in version("jsonargparse").split(".")[:2]) >= (4, 49)
            keep = {"skip_unset" if renamed else "skip_none": False}
            place, written = folder / self.config_filename, folder / f".{self.config_filename}"
            self.parser.save(config, str(written), overwrite=True, **keep)
            if place.exists() and place.read_bytes() != written.read_bytes():
                earlier = len(list(folder.glob(f"{place.stem}-*{place.suffix}")))
                place.rename(folder / f"{place.stem}-{earlier + 1}{place.suffix}")
            written.replace(place)
        self.already_saved = True
