"""What the benchmarks share: turns under one clock, ratios with their spread, and the page they are written to."""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import NAMES

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEADER = """\
# Benchmarks

`python -m benchmarks [NAME...]` (with `pip install -e ".[bench]"`) measures and rewrites the sections it ran;
`python -m benchmarks.NAME` prints one. Contenders do the same work in the same process, threads fixed, in turns, after
a warm-up; that they give the same answer is asserted before the clock starts. Times are medians, of CPU seconds where
there is one thread, else of wall seconds; a ratio is that of the medians, with the smallest and largest of the single
turns behind it. What falls short is printed all the same.
"""


class Row(NamedTuple):
    """A line of a table; `reached` is None where there is no aim."""

    work: str
    against: str
    ours: str
    theirs: str
    ratio: str
    aim: str = ""
    reached: bool | None = None


class Section(NamedTuple):
    """A benchmark's outcome: lines, remarks, and the packages it was measured with."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    peers: Sequence[str] = ()


def race(contenders: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each contender's turns. They alternate, so that a busy moment of the machine meets them all.

    On one thread CPU time, which other processes do not lengthen.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    for turn in range(warm_up + repeats):
        for name, run in contenders.items():
            start = clock()
            run()
            if turn >= warm_up:
                seconds[name].append(clock() - start)
    return seconds


def faster(work: str, against: str, ours: list[float], theirs: list[float], aim: float | None = None) -> Row:
    """How many times as fast ours is; the aim is at least that."""
    ratio = _ratio(theirs, ours)
    reached = None if aim is None else statistics.median(theirs) >= aim * statistics.median(ours)
    return Row(work, against, _time(ours), _time(theirs), f"{ratio} as fast", f">= {aim:g}" if aim else "", reached)


def costs(work: str, against: str, ours: list[float], limit: list[float], aim: float | None = None) -> Row:
    """How many times a limit ours costs; the aim is at most that."""
    reached = None if aim is None else statistics.median(ours) <= aim * statistics.median(limit)
    cost = f"{_ratio(ours, limit)} the cost"
    return Row(work, against, _time(ours), _time(limit), cost, f"<= {aim:g}" if aim else "", reached)


def _ratio(a: list[float], b: list[float]) -> str:
    single = [x / y for x, y in zip(a, b, strict=False)]
    spread = f" ({_number(min(single))}-{_number(max(single))})" if len(single) > 1 else ""
    return f"{_number(statistics.median(a) / statistics.median(b))}x{spread}"


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def _time(seconds: list[float]) -> str:
    value = statistics.median(seconds)
    return (
        f"{_number(value)} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"
    )


def peak_memory(run: Callable[[], object]) -> float:
    """GB by which the process's resident memory rises at its highest point during `run` (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed must not count as there already
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1e6


def in_ranks(worker: str, ranks: int, *arguments: Any) -> list[Any]:
    """What a benchmark's function ("probe_memory.worker") answers on each of some ranks (gloo, one thread each)."""
    code = "import sys; from benchmarks._bench import one_rank; one_rank(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        task = [folder, str(ranks), worker, json.dumps(arguments)]
        started = [subprocess.Popen([sys.executable, "-c", code, str(rank), *task]) for rank in range(ranks)]
        for process in started:
            if process.wait():
                raise RuntimeError(f"a rank of {ranks} ended with {process.returncode}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def one_rank(rank: str, folder: str, ranks: str, worker: str, arguments: str) -> None:
    """One of the processes of :func:`in_ranks`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(ranks))
    module, name = worker.split(".")
    answer = getattr(importlib.import_module(f"benchmarks.{module}"), name)(*json.loads(arguments))
    Path(folder, f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _status(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def machine(peers: Sequence[str], threads: int) -> str:
    """Processor, cores, threads and versions; nothing that names the host."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    versions = ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(["torch", "lightning", *peers]))
    return (
        f"{cpu[1] if cpu else platform.processor()}, {os.cpu_count()} cores, {threads} "
        f"thread{'s' if threads > 1 else ''}; Python {platform.python_version()}, {versions}."
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def table(rows: Sequence[Row]) -> str:
    lines = [list(Row._fields), ["---"] * len(Row._fields)]
    for row in rows:
        lines.append([*row[:-1], {True: "yes", False: "**no**", None: ""}[row.reached]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(name: str, text: str) -> None:
    """Replace one section of the page, and leave the others as they are."""
    page = PAGE.read_text() if PAGE.exists() else HEADER
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    sections[name] = f"\n{text}\n"
    parts = [f"\n## {known}\n{sections[known].rstrip()}\n" for known in NAMES if known in sections]
    PAGE.write_text(HEADER + "".join(parts))


def limit_libraries(threads: int) -> None:
    """The same number of threads for NumPy's and SciPy's linear algebra, on which scikit-learn runs."""
    import numpy  # noqa: F401 (its library must be loaded to be limited)
    import scipy.linalg  # noqa: F401
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads, user_api="blas")


def main(run: Callable[..., Section], threads: int = 2) -> None:
    """The command line of one benchmark; its module's docstring is the section's introduction."""
    module = sys.modules[run.__module__]
    name = Path(str(module.__file__)).stem
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes of a test: shows that it runs, measures nothing")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.parent.name}/{PAGE.name}")
    parser.add_argument("--threads", type=int, default=threads)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    limit_libraries(arguments.threads)
    torch.manual_seed(0)
    section = run(tiny=arguments.tiny)
    text = "\n\n".join([str(module.__doc__).strip(), table(section.rows), *section.notes])
    text += f"\n\n{machine(section.peers, arguments.threads)}"
    print(f"{name}\n{text}\n", flush=True)
    if arguments.write and not arguments.tiny:
        write(name, text)
