"""Other people's code in processes of its own: a hang, a crash or a lack of memory ends them, not the doctor."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import multiprocessing as mp
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

SEED = 20_240_917


class Ended(Exception):
    """The examined code hung, crashed or ran out of memory; the text says which, and where."""


@dataclass
class Outcome:
    """What one process came to: a value, or why there is none."""

    value: Any = None
    problem: str = ""
    hung: bool = False
    died: bool = False
    notes: list[Any] = field(default_factory=list)  # what it said on the way


@dataclass(frozen=True)
class Isolation:
    """How processes are started and how long they may run.

    Args:
        limit: Seconds.
        device: Where the module runs; other processes than forks are needed for any but the CPU.
    """

    limit: float = 60.0
    device: str = "cpu"

    def one(self, work: Callable[..., Any], *args: Any) -> Any:
        """The value of ``work(*args)``, from a process of its own."""
        (outcome,) = self.several(_alone, 1, work, args)
        if outcome.problem:
            raise Ended(outcome.problem)
        return outcome.value

    def several(self, work: Callable[..., Any], ranks: int, *args: Any) -> list[Outcome]:
        """What ``work(rank, note, *args)`` came to in each of several processes; ``note`` tells the parent things."""
        context: Any = mp.get_context(start_method(self.device))
        outcomes = [Outcome() for _ in range(ranks)]
        processes, pipes = [], []
        with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
            try:
                for rank in range(ranks):
                    mine, theirs = context.Pipe(duplex=False)
                    inputs = (theirs, rank, self.limit, folder, work, args)
                    process = context.Process(target=_child, args=inputs)
                    try:
                        process.start()
                    except (AttributeError, TypeError, OSError, RuntimeError, ValueError) as error:
                        raise Ended(f"the module or its data cannot be handed to another process: {error}") from error
                    theirs.close()
                    processes.append(process)
                    pipes.append(mine)
                _collect(pipes, processes, outcomes, time.monotonic() + self.limit)
            finally:
                for process in processes:
                    _kill(process)
            for rank, outcome in enumerate(outcomes):
                if outcome.died and os.path.exists(said := f"{folder}/{rank}"):
                    outcome.problem += _last_words(said)
        return outcomes


def start_method(device: str) -> str:
    """ "fork" gives each process the live objects, also such as cannot be pickled; threads of CUDA forbid it."""
    forks = sys.platform == "linux" and device == "cpu" and not torch.cuda.is_initialized()
    return "fork" if forks else "spawn"


def _collect(pipes: list[Connection], processes: list[Any], outcomes: list[Outcome], deadline: float) -> None:
    """Hear the processes out until each has an outcome."""
    open_ = dict(enumerate(pipes))
    while open_:
        left = deadline - time.monotonic()
        ready = wait(list(open_.values()), timeout=max(0.0, left))
        if not ready:
            for rank in open_:
                outcomes[rank].hung = True
                outcomes[rank].problem = "it did not come to an end in its time"
            return
        for rank in [rank for rank, pipe in open_.items() if pipe in ready]:
            try:
                kind, content = open_[rank].recv()
            except EOFError:
                processes[rank].join(5)
                outcomes[rank].problem = _death(processes[rank].exitcode)
                outcomes[rank].died = True
                del open_[rank]
                continue
            if kind == "note":
                outcomes[rank].notes.append(content)
                continue
            del open_[rank]
            if kind == "value":
                outcomes[rank].value = content
            else:
                outcomes[rank].problem = content
                # Those that wait for it in a collective get a moment to end by themselves.
                deadline = min(deadline, time.monotonic() + 5)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        extra = ": most likely out of memory" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{extra}"
    return f"the process ended itself with exit code {code} (os._exit or sys.exit in the examined code)"


def _kill(process: Any) -> None:
    """The process and all that it started; it leads a group of its own."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.join()


def _last_words(path: str) -> str:
    with open(path, errors="replace") as file:
        lines = [line.strip() for line in file.read()[-2000:].splitlines() if line.strip()]
    return f"; its last words: {lines[-1][:200]}" if lines else ""


def _alone(rank: int, note: Callable[[Any], None], work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return work(*args)


def _child(pipe: Any, rank: int, limit: float, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    faulthandler.disable()  # a crash is told in one line
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(limit) + 30)  # should the doctor itself be gone
    with open(f"{folder}/{rank}", "w") as said:
        for number in (1, 2):
            os.dup2(said.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    logging.disable(logging.CRITICAL)
    _bound_memory()
    torch.set_num_threads(1)  # a fork has lost the threads of its parent
    seed_all(SEED)
    tempfile.tempdir = folder  # whatever it writes there goes with it

    def send(kind: str, content: Any) -> None:
        buffer = io.BytesIO()
        pickle.Pickler(buffer).dump((kind, content))  # `send` would share the tensors, and this process ends
        pipe.send_bytes(buffer.getvalue())

    try:
        send("value", work(rank, lambda content: send("note", content), *args))
    except MemoryError:
        send("error", f"out of memory{_line()}")
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".strip()
        if "can't allocate memory" in text or "out of memory" in text:
            text = f"out of memory: {text.splitlines()[0][:200]}"
        send("error", f"{text[:600]}{_line()}")
    pipe.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # nobody's atexit handlers, which belong to the parent


def _line() -> str:
    """Where the error being handled arose: the innermost line outside of installed packages and of this one."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    own = [frame for frame in frames if not foreign(frame.filename)]
    return f" ({place(own[-1].filename, own[-1].lineno)})" if own else ""


def place(file: str, line: int | None) -> str:
    """A line of a file, from the working directory if it is in there."""
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{line}"


_HERE = os.path.dirname(os.path.abspath(__file__))


def foreign(file: str) -> bool:
    """Whether a file belongs to Python, an installed package or the doctor, not to the examined code."""
    return (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith((_HERE, "<", os.path.dirname(os.__file__)))
    )


def _bound_memory() -> None:
    """No more memory than there is: a refusal can be told, a machine that swaps or kills cannot."""
    with contextlib.suppress(Exception):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if something must be ended, then this
        import resource

        values = {}
        for path in ("/proc/meminfo", "/proc/self/status"):
            with open(path) as file:
                for line in file:
                    name, _, rest = line.partition(":")
                    values[name] = rest
        free, used = (int(values[name].split()[0]) * 1024 for name in ("MemAvailable", "VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + int(0.9 * free), resource.RLIM_INFINITY))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (other people's code draws from it)
    torch.manual_seed(seed)
