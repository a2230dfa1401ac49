"""`lightning-ssl reproduce cifar10`: the papers' contrasts on real images, registered before they were tested."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ssl.theory.reproduce.cifar10 import plan as registered
from lightning_ssl.theory.reproduce.report import Report, Run

Job = tuple[str, int]  # setting and seed


def cifar10(run: Run) -> Report:
    """Run what is missing of the file's settings and seeds, and say what they show of its contrasts."""
    from lightning_ssl.theory.reproduce.cifar10 import report

    options = run.options
    pilot = bool(options.get("pilot"))
    plan = registered.read(run.full, pilot)
    names = _settings(plan, options.get("setting"), options.get("contrast"))
    todo = [(name, seed) for seed in plan.seeds for name in names]  # a whole seed first: pairs are complete early
    root, folder = str(options.get("root") or "data"), run.folder / "runs"
    jobs = int(options.get("jobs") or (1 if run.full else len(os.sched_getaffinity(0))))
    if jobs < 1:
        raise ValueError(f"`jobs` must be at least 1, got {jobs}")
    began = time.time()
    helpers = _helpers(jobs - 1, (plan.text, run.full, pilot, todo, folder, root))
    work(plan, todo, folder, root)
    for helper in helpers:
        helper.join()
    whole = [(name, seed) for seed in plan.seeds for name in plan.settings]
    results = {job: found for job in whole if (found := finished(plan, folder, *job)) is not None}
    kept = report.summary(plan, results, pilot, run.full, time.time() - began)
    (run.folder / "results.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return report.write(kept)


def _settings(plan: registered.Plan, setting: str | None, contrast: str | None) -> list[str]:
    """The settings to run: one, those of a registered contrast, or all."""
    if setting is not None:
        plan.setting(setting)
        return [setting]
    return list(plan.contrast(contrast).names) if contrast is not None else list(plan.settings)


def work(plan: registered.Plan, todo: Sequence[Job], folder: Path, root: str) -> None:
    """Do the jobs that nobody has done or is doing, until all are done; several processes may work side by side."""
    import torch

    threads = torch.get_num_threads()
    if plan.size.get("accelerator", "cpu") == "cpu":
        torch.set_num_threads(1)  # jobs side by side use the cores better, and sums keep their order
    try:
        _work(plan, todo, folder, root)
    finally:
        torch.set_num_threads(threads)


def _work(plan: registered.Plan, todo: Sequence[Job], folder: Path, root: str) -> None:
    from lightning_ssl.theory.reproduce.cifar10.jobs import claimed, run_job

    parent, took = os.getppid(), []
    while left := [job for job in todo if finished(plan, folder, *job) is None]:
        idle = True
        for name, seed in left:
            if os.getppid() != parent:
                return  # whoever started this is gone
            place = folder / f"{name}-{seed}"
            with claimed(place) as mine:
                if not mine or finished(plan, folder, name, seed) is not None:
                    continue
                idle, began = False, time.time()
                result = run_job(plan, name, seed, place, root)
                took.append(time.time() - began)
            _tell(plan, todo, folder, result, took)
        if idle:
            time.sleep(2)  # what is left, others are doing


def _tell(
    plan: registered.Plan, todo: Sequence[Job], folder: Path, result: Mapping[str, Any], took: Sequence[float]
) -> None:
    done = [row for job in todo if (row := finished(plan, folder, *job)) is not None]
    spent, left = sum(row["seconds"] for row in done), len(todo) - len(done)
    remaining = left * sum(took) / len(took)
    print(
        f"{len(done)} of {len(todo)}: {result['setting']}, seed {result['seed']}: linear {result['linear']:.1f} %, "
        f"{result['seconds']:.0f} s; {timedelta(seconds=round(spent))} spent, about "
        f"{timedelta(seconds=round(remaining))} of one process left",
        flush=True,
    )


def finished(plan: registered.Plan, folder: Path, name: str, seed: int) -> dict[str, Any] | None:
    """The result of a job, if it is there and of this very file of contrasts."""
    path = folder / f"{name}-{seed}" / "result.json"
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if result["plan"] != plan.fingerprint:
        raise ValueError(
            f"`out` must hold results of this {registered.FILE} ({plan.fingerprint}), got {path} of another "
            f"({result['plan']}); give another --out"
        )
    return result


def _helpers(count: int, arguments: tuple[Any, ...]) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    helpers = [context.Process(target=_help, args=arguments, daemon=True) for _ in range(count)]
    for helper in helpers:
        helper.start()
    return helpers


def _help(text: str, full: bool, pilot: bool, todo: Sequence[Job], folder: Path, root: str) -> None:
    work(registered.read(full, pilot, text), todo, folder, root)
