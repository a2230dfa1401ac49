"""Makes each mistake in a copy of the tree, runs the tests that must notice, and prints the score."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pkgutil
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import tests.mutants
from tests.mutants import Mutant

ROOT = Path(__file__).parents[2]
# Imported once, before the forks; nothing of ours is among them.
HEAVY = "torch torchvision lightning.pytorch lightning.pytorch.cli torchmetrics sklearn.datasets scipy.optimize pytest"


def all_mutants() -> list[Mutant]:
    parts = sorted(module.name for module in pkgutil.iter_modules(tests.mutants.__path__) if module.name != "__main__")
    return [mutant for part in parts for mutant in importlib.import_module(f"tests.mutants.{part}").MUTANTS]


def copy_tree(folder: Path) -> None:
    """The package as it is installed, and the tests, in a folder of their own."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("lightning_ssl", "tests", "callbacks", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("callbacks", "configs"):
        (folder / "lightning_ssl" / name).symlink_to(folder / name)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)


def start(folder: Path, tests_: str) -> int:
    """Fork a process that runs some tests in a folder; its exit code is pytest's."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    log = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lightning_ssl")]:
        del sys.modules[name]
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-o", "markers=slow: slow"]
    code = pytest.main([*options, *shlex.split(tests_)])
    os._exit(int(code))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("select", nargs="?", default="", help="only mutants with this in their file or text")
    parser.add_argument("-j", type=int, default=1, help="how many at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds; a test that hangs has noticed, too")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in all_mutants() if arguments.select in " ".join(mutant)]
    for mutant in chosen:
        count = (ROOT / mutant.file).read_text().count(mutant.old)
        if count != 1:
            sys.exit(f"{mutant.file} holds {mutant.old!r} {count} times, not once: mend the list")
    os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="offline", MPLBACKEND="Agg", PYTHONDONTWRITEBYTECODE="1")
    for name in HEAVY.split():
        importlib.import_module(name)
    survived = run(chosen, arguments.j, arguments.timeout)
    killed = len(chosen) - len(survived)
    print(f"{killed} of {len(chosen)} mutants killed, {killed / max(1, len(chosen)):.0%}")
    for mutant in survived:
        print(f"survived: {mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r} ({mutant.tests})")
    return bool(survived)


def run(chosen: list[Mutant], jobs: int, timeout: float) -> list[Mutant]:
    """The mutants that no test noticed."""
    survived: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as scratch:
        free = [Path(scratch, str(job)) for job in range(jobs)]
        for folder in free:
            folder.mkdir()
            copy_tree(folder)
        running: dict[int, tuple[Path, Mutant, float]] = {}
        waiting = list(chosen)
        while waiting or running:
            while waiting and free:
                folder, mutant = free.pop(), waiting.pop(0)
                path = folder / mutant.file
                path.write_text(path.read_text().replace(mutant.old, mutant.new))
                running[start(folder, mutant.tests)] = folder, mutant, time.monotonic()
            time.sleep(0.1)
            for process, (folder, mutant, began) in list(running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                late = time.monotonic() - began > timeout
                if not ended and not late:
                    continue
                with contextlib.suppress(ProcessLookupError):  # the ranks that its tests started, too
                    os.killpg(process, signal.SIGKILL)
                if not ended:
                    os.waitpid(process, 0)
                code = os.waitstatus_to_exitcode(status) if ended else 1
                if code not in (0, 1) and ended:
                    sys.exit(f"{mutant} could not be tried:\n{(folder / 'output.txt').read_text()[-3000:]}")
                if code == 0:
                    survived.append(mutant)
                outcome = "survived" if code == 0 else "killed"
                print(f"{outcome:9}{mutant.file}: {' '.join(mutant.new.split())[:90]}", flush=True)
                shutil.copy(ROOT / mutant.file, folder / mutant.file)
                del running[process]
                free.append(folder)
    return survived


if __name__ == "__main__":
    sys.exit(main())
