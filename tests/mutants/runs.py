"""Checkpoints, logs, the console script and the methods' refusals."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "        if not self._holding:\n            self.release()",
        "        self.release()",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "os.fsync(file.fileno())",
        "pass",
        "tests/reliability/test_checkpoint.py tests/reliability/test_faults.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "            if os.path.exists(written):\n                os.unlink(written)",
        "            pass",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "if not self._holding and len(self._held) == 1:",
        "if not self._holding:",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "torch.load(path, map_location=map_location, weights_only=True)",
        "torch.load(path, map_location=map_location, weights_only=False)",
        "tests/reliability/test_checkpoint.py tests/reliability/test_security.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        'if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:',
        "if False:",
        "tests/reliability/test_checkpoint.py tests/reliability/test_bad_input.py -k 'foreign or ckpt'",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "others.sort(key=lambda p: p.stat().st_mtime, reverse=True)",
        "others.sort(key=lambda p: p.stat().st_mtime)",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "if validation_follows(trainer) or trainer.is_last_batch:",
        "if trainer.is_last_batch:",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "every > 0 and trainer.global_step % every == 0",
        "False",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "        with self._hold(trainer):\n            super().on_train_batch_end",
        "        if True:\n            super().on_train_batch_end",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "def on_train_batch_start(\n        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int\n    ) -> None:\n        self._release(trainer)",
        "def on_train_batch_start(\n        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int\n    ) -> None:\n        pass",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "self.save_on_exception and self.may_save(trainer)",
        "self.may_save(trainer)",
        "tests/reliability/test_checkpoint.py",
    ),
    Mutant(
        "lightning_ssl/runs/checkpoint.py",
        "or isinstance(exception, CheckpointError):",
        "or False:",
        "tests/reliability/test_checkpoint.py tests/reliability/test_faults.py",
    ),
    Mutant(
        "lightning_ssl/runs/tuning.py",
        "            found = [entry for entry, mine in zip(found, chosen, strict=True) if not mine]",
        "            pass",
        "tests/test_cli.py -k by_name",
    ),
    Mutant(
        "lightning_ssl/runs/tuning.py",
        'flag.partition(".")[0] in heads',
        "False",
        "tests/test_cli.py -k by_name",
    ),
    Mutant(
        "lightning_ssl/runs/run.py",
        '_, first = np.unique(arrays["index"], return_index=True)',
        'first = np.arange(len(arrays["index"]))',
        "tests/test_cli.py -k embeddings",
    ),
    Mutant(
        "lightning_ssl/runs/run.py",
        'rows["features"] = rows["features"].float()',
        "pass",
        "tests/test_cli.py -k embeddings",
    ),
    Mutant(
        "lightning_ssl/runs/loggers.py",
        'if int(row["step"]) < first]',
        "]",
        "tests/test_cli.py -k keeps",
    ),
    Mutant(
        "lightning_ssl/runs/loggers.py",
        'lines if not lines or lines[-1].endswith("\\n") else lines[:-1]',
        "lines",
        "tests/reliability/test_faults.py tests/test_cli.py -k 'log'",
    ),
    Mutant(
        "lightning_ssl/methods/base.py",
        "shorter = total // 10",
        "shorter = total - 1",
        "tests/methods/test_training.py -k 'tenth or clean'",
    ),
    Mutant(
        "lightning_ssl/methods/simclr.py",
        'getattr(data, "clean_image", True) is False',
        'getattr(data, "no_such", True) is False',
        "tests/methods/test_training.py -k 'clean_images or unserved'",
    ),
]
