"""The gradient of one batch on one process and on several, and what the ranks do to each other's weights."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ssl.doctor.batches import Path, at, count_rows, divisible, parts, rebuilt
from lightning_ssl.doctor.isolate import Isolation, Outcome
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.slope import slope
from lightning_ssl.doctor.steady import Collective, OtherDraws, Steady
from lightning_ssl.doctor.trial import Fit, Patient, batch_norms, hold_norms, listed, sampled, still_dropout
from lightning_ssl.doctor.trial import step_line as where_steps
from lightning_ssl.doctor.verdict import Judged


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    """Compare one process with several on the same batch."""
    batch, world = patient.steps[0], patient.ranks
    if problem := divisible(batch):
        return [], problem
    shares = parts(batch, world)
    if shares is None:
        return [], f"the batch has too few rows for {world} ranks: two for each are needed"
    whole, precision = None, "64-true"
    for precision in ("64-true", "32-true"):
        (outcome,) = isolation.several(_measure, 1, patient, [_joined(shares)], precision, 1, 1, False)
        whole = outcome.value
        if whole is not None:
            break
    if whole is None:
        return [], f"the step could not be run on one process: {outcome.problem}"
    alone = isolation.several(_measure, world, patient, shares, precision, 1, 1, False)
    if any(part.value is None for part in alone):
        problem = next(part.problem for part in alone if part.problem)
        return [], f"the step could not be run on one rank's share of the rows: {problem}"
    together = isolation.several(_measure, world, patient, shares, precision, world, 3, False)
    held = info_on_held(patient, whole)
    if any(rank.value is None for rank in together):
        refused = [rank.problem for rank in together if "mark a variable ready" in rank.problem]
        if refused:  # DDP's own restriction on gradient checkpoints that run twice
            return held, f"DDP refuses this module without static_graph=True: {refused[0][:200]}"
        return [*held, _ended(patient, together)], ""
    ranks = [rank.value for rank in together]
    judged = Judged(patient, whole, [part.value for part in alone], ranks, precision)
    findings = [*held, *judged.drift(), *judged.unused(), *judged.batch_buffers()]
    verdict, untold = judged.gradient(
        lambda: _disturbed(patient, isolation, shares, precision, world),
        lambda one, way: slope(patient, isolation, [_joined(shares)] if one else shares, way, join_group),
    )
    return [*findings, *verdict], untold


def _joined(shares: list[Any]) -> Any:
    """The shares' rows in one batch again; what is no rows is the first's."""
    n = count_rows(shares[0])

    def join(path: Path, leaf: Any) -> Any:
        found = [at(share, path) for share in shares]
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n:
            return torch.cat(found)
        if isinstance(leaf, (list, tuple)) and len(leaf) == n:
            return type(leaf)(item for part in found for item in part)
        return leaf

    return rebuilt(shares[0], join)


def _measure(
    rank: int,
    note: Callable[[Any], None],
    patient: Patient,
    shares: list[Any],
    precision: str,
    world: int,
    steps: int,
    disturb: bool,
) -> dict[str, Any]:
    """Train for a step or some; with several ranks, under DDP on gloo. In a process of its own."""
    module: Any = patient.module
    held = hold_norms(module, patient.moments)
    dropped = still_dropout(module)
    settings: dict[str, Any] = {"precision": precision, "gradient_clip_val": None, "accumulate_grad_batches": 1}
    if world > 1:
        settings.update(join_group(patient, rank, world))
    mode = Steady(note=lambda one: note(("collective", one)), disturb=disturb)
    others = OtherDraws()
    seen: dict[str, Any] = {"held": held, "dropped": dropped, "gradients": {}, "unused": [], "drawn": False}
    names = {id(p): name for name, p in module.named_parameters()}

    def caught(optimizer: Any, *args: Any) -> None:
        note(("step", None))
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names.get(id(p))
                if p.grad is not None and name and name not in seen["gradients"]:
                    seen["gradients"][name] = sampled(p.grad)

    def on_before_optimizer_step(_: Any, trainer: Any, module: Any, optimizer: Any) -> None:
        caught(optimizer)

    def on_train_start(_: Any, trainer: Any, *args: Any) -> None:
        if not module.automatic_optimization:  # else the closure has yet to run when the step begins
            for optimizer in trainer.optimizers:
                optimizer.register_step_pre_hook(caught)

    def on_train_batch_end(_: Any, trainer: Any, *args: Any) -> None:
        if "first" not in seen:
            seen["first"] = list(fit.losses)
            seen["drawn"] = others.happened()
            seen["logged"] = {key: float(value) for key, value in trainer.callback_metrics.items()}
            trains = [p for o in trainer.optimizers for g in o.param_groups for p in g["params"]]
            seen["unused"] = [names[id(p)] for p in trains if p.requires_grad and names.get(id(p), "") not in got]

    got: set[str] = set()
    for name, p in module.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda grad, name=name: got.add(name))
    share = shares[rank] if world > 1 or len(shares) > 1 else shares[0]
    hooks = {
        "on_train_start": on_train_start,
        "on_before_optimizer_step": on_before_optimizer_step,
        "on_train_batch_end": on_train_batch_end,
    }
    fit = Fit(patient, steps=steps, feed=[share], around=lambda: mode, hooks=hooks, settings=settings)
    trainer = fit.run()
    return {
        **seen,
        "got": got,
        "collectives": mode.collectives,
        "unsteady": mode.unsteady,
        "logged_then": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "parameters": {name: sampled(p) for name, p in module.named_parameters()},
        "buffers": {name: sampled(b) for name, b in module.named_buffers() if b.is_floating_point() or b.numel() > 0},
        "probes": _outside(trainer, module),
        "norms": list(batch_norms(module)),
        "rest": fit.losses,
    }


def _outside(trainer: Any, module: Any) -> dict[str, Tensor]:
    """Weights that callbacks train beside the module."""
    found = {}
    for callback in trainer.callbacks:
        for name, value in vars(callback).items():
            if isinstance(value, torch.nn.Module) and value is not module:
                path = f"{type(callback).__name__}.{name}"
                found.update({f"{path}.{inner}": sampled(p) for inner, p in value.named_parameters()})
    return found


def join_group(patient: Patient, rank: int, world: int) -> dict[str, Any]:
    """Make this process one of several; gloo finds the others through a file that goes with them."""
    names = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world, "MASTER_PORT": 29500}
    os.environ.update({key: str(value) for key, value in names.items()}, MASTER_ADDR="localhost")
    dist.init_process_group("gloo", init_method=f"file://{tempfile.gettempdir()}/group", rank=rank, world_size=world)
    strategies = importlib.import_module(f"{patient.package.__name__}.strategies")
    return {"devices": world, "strategy": strategies.DDPStrategy(find_unused_parameters=True)}


def _disturbed(patient: Patient, isolation: Isolation, shares: list[Any], precision: str, world: int) -> Any:
    outcomes = isolation.several(_measure, world, patient, shares, precision, world, 1, True)
    return None if any(outcome.value is None for outcome in outcomes) else outcomes[0].value


def _ended(patient: Patient, outcomes: list[Outcome]) -> Finding:
    """What it means that the ranks together did not come to an end where each alone did."""
    heard: list[list[Collective]] = [[c for kind, c in outcome.notes if kind == "collective"] for outcome in outcomes]
    counts = [len(mine) for mine in heard]
    raised = {r: o.problem for r, o in enumerate(outcomes) if o.problem and not o.hung}
    own = {r: text for r, text in raised.items() if "gloo" not in text.lower() and "Connection" not in text}
    if own and any(not r for r in own):
        own = own if len(own) < len(outcomes) else {0: own[0]}
    names = [[(c.name, c.shape) for c in mine] for mine in heard]
    depth = next((i for i in range(max(counts, default=0)) if len({str(n[i : i + 1]) for n in names}) > 1), None)
    if depth is not None:
        entered = [f"rank {r}: {mine[depth].name if depth < len(mine) else 'none'}" for r, mine in enumerate(heard)]
        place = next(mine[depth].where for mine in heard if depth < len(mine))
        return alarm(
            "collective_skipped",
            f"one process runs through, {len(outcomes)} ranks do not: at collective {depth + 1} of the step the ranks "
            f"part ways ({', '.join(entered)}); collectives entered: {counts}",
            "a collective waits for all ranks: where some skip it, or send another shape, the others wait for ever or "
            "get each other's numbers",
            "let every rank enter the same collectives in the same order: no collective behind a condition on the "
            "rank, the data or the loss",
            place,
        )
    if own:
        rank, text = next(iter(own.items()))
        return alarm(
            "ranks_crash",
            f"one process runs through, {len(outcomes)} ranks do not: rank {rank} ended with {text}",
            "the run would end, or hang, as soon as it is started on several devices",
            "mend what this rank ran into",
            where_steps(patient.module),
        )
    stepped = [sum(kind == "step" for kind, _ in outcome.notes) for outcome in outcomes]
    return alarm(
        "ranks_hang",
        f"one process runs through, {len(outcomes)} ranks hang; optimizer steps reached: {stepped}, collectives "
        f"entered in forward passes: {counts}; {listed(sorted({o.problem for o in outcomes if o.problem}))}",
        "some rank waits in a collective, perhaps DDP's own in the backward pass, that another never enters",
        "let every rank run forward, backward and the optimizer the same number of times: return no None and skip no "
        "batch on some ranks only",
        where_steps(patient.module),
    )


def info_on_held(patient: Patient, whole: dict[str, Any]) -> list[Finding]:
    found = []
    if whole["held"]:
        names = whole["held"]
        found.append(
            info(
                "batch_norm_held",
                f"{len(names)} batch normalisation{'s' if len(names) > 1 else ''} ({listed(names, 2)}) held at the "
                "statistics of one batch: they are not part of this comparison",
                "each rank normalises by its own rows unless they are SyncBatchNorms, which CPUs do not have",
                "set sync_batchnorm=True in the Trainer for more than one device, if the statistics shall be global",
            )
        )
    if whole["dropped"]:
        found.append(
            info("dropout_off", f"dropout was off in this comparison: {listed(whole['dropped'], 2)}", where="")
        )
    return found
