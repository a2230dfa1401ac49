"""Signals that ask a run to end: heeded between two steps, so that what is saved is a whole one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightning_ssl._lightning import cluster_environment

REQUEUE = 75  # sysexits.h: "temporary failure, the user is invited to retry"
INTERRUPTED = 128 + signal.SIGINT


class RunStopped(SystemExit):
    """A run that was asked to end, saved its last step and can go on: exit code 75, or 130 after Ctrl-C."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(code)
        self.reason = reason


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGUSR1 (SLURM's requeue signal) while it listens, and a launcher that is gone.

    A second Ctrl-C is an ordinary KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received = 0  # the signal's number
        self._replaced: dict[int, Any] = {}
        self._parent = 0
        self._requeue = 0
        self._helper = False

    def listen(self, trainer: L.Trainer) -> None:
        """Take the place of the handlers there are: Lightning's save in the middle of a step, or end there."""
        self.received = 0
        # torchrun's workers outlive an agent that was killed; nobody would end or restart them.
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        environment = cluster_environment(trainer)
        self._helper = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue = int(environment.requeue_signal or signal.SIGUSR1)
            signals.append(signal.Signals(self._requeue))
        if threading.current_thread() is threading.main_thread() and not self._replaced:
            self._replaced = {number: signal.signal(number, self._note) for number in set(signals)}

    def restore(self) -> None:
        """Give way to the handlers that were there."""
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._replaced = {}

    def _note(self, number: int, frame: Any) -> None:
        other = getattr(self._replaced.get(number), "__self__", None)
        if isinstance(other, StopSignals):  # a second checkpoint callback's
            other.received = number
        if number == signal.SIGINT and self.received == number:
            raise KeyboardInterrupt
        if not self.received:
            self.received = number
            # Not by `print`, which the signal may have interrupted.
            words = f"{signal.Signals(number).name}: the run ends, and is saved, after this step"
            os.write(2, f"\nlightning-ssl: {words}{' (again: at once)' if number == signal.SIGINT else ''}\n".encode())

    def pending(self) -> int:
        """The signal's number; -1 where the process that started this one is gone; else 0."""
        if not self.received and self._parent and os.getppid() != self._parent:
            return -1
        return self.received

    def stopped(self, number: int, step: int, path: str) -> RunStopped:
        """What ends the run, once the step is saved, for a reason that the ranks agreed on."""
        name = signal.Signals(number).name if number > 0 else "the loss of the agent that started a rank"
        reason = f"ended by {name} after step {step}; {path} holds it: the same command with --ckpt_path last goes on"
        # Lightning's launcher kills the process that speaks for the run when one it has started does not end with 0.
        return RunStopped(reason, 0 if self._helper else INTERRUPTED if number == signal.SIGINT else REQUEUE)

    def requeue(self, number: int) -> str:
        """Queue a SLURM job again, if that is what the signal is for; returns what there is to say about it."""
        job = os.environ.get("SLURM_JOB_ID", "")
        if not (number and number == self._requeue and job):
            return ""
        if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        try:
            done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            return f"; job {job} could not be queued again: {error}"
        return f"; job {job} is queued again" if done.returncode == 0 else f"; scontrol requeue: {done.stderr.strip()}"
