"""The gradient of one batch on one process and on several, and what the ranks do to each other's weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ssl.doctor.batches import divisible, parts
from lightning_ssl.doctor.isolate import Isolation, Outcome
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.steady import Collective, OtherDraws, Steady
from lightning_ssl.doctor.trial import Fit, Patient, batch_norms, child_of, hold_norms, listed, sampled, still_dropout
from lightning_ssl.doctor.trial import step_line as where_steps

Gradients = dict[str, Tensor]
WHY_SCALED = (
    "DDP averages the ranks' gradients, so that each rank must hand it the gradient of the whole batch's loss; this "
    "one is scaled with the number of ranks: the learning rate, the balance with weight decay, clipping and other "
    "losses all change with the number of GPUs, without a word"
)
GATHER = (
    "gather with a differentiable collective whose backward sums over ranks (lightning_ssl.distributed.gather_rows, "
    "torch.distributed.nn.functional.all_gather, or self.all_gather(x, sync_grads=True))"
)


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
        joined = [torch.cat([torch.arange(len(shares))])] and _joined(shares)
        (outcome,) = isolation.several(_measure, 1, patient, [joined], precision, 1, 1, False)
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
    judged = _Judged(patient, whole, [part.value for part in alone], ranks, precision)
    findings = [*held, *judged.drift(), *judged.unused(), *judged.batch_buffers()]
    verdict, untold = judged.gradient(lambda: _disturbed(patient, isolation, shares, precision, world))
    return [*findings, *verdict], untold


def _joined(shares: list[Any]) -> Any:
    """The shares' rows in one batch again; what is no rows is the first's."""
    from lightning_ssl.doctor.batches import Path, at, count_rows, rebuilt

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
    import tempfile

    dist.init_process_group("gloo", init_method=f"file://{tempfile.gettempdir()}/group", rank=rank, world_size=world)
    strategies = __import__(f"{patient.package.__name__}.strategies", fromlist=["DDPStrategy"])
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
                "each rank normalises by its own rows unless they are converted to SyncBatchNorm, which CPUs do not have",
                "set sync_batchnorm=True in the Trainer for more than one device, if the statistics shall be global",
            )
        )
    if whole["dropped"]:
        found.append(
            info("dropout_off", f"dropout was off in this comparison: {listed(whole['dropped'], 2)}", where="")
        )
    return found


class _Judged:
    """What the measurements on one process, on each share alone and on all ranks together say."""

    def __init__(self, patient: Patient, whole: Any, alone: list[Any], ranks: list[Any], precision: str) -> None:
        self.patient, self.whole, self.alone, self.ranks = patient, whole, alone, ranks
        self.world = len(ranks)
        self.tolerance = 1e-6 if precision == "64-true" else 2e-3
        self.exchanges = [c for c in ranks[0]["collectives"] if not c.logging]

    def gradient(self, disturbed: Callable[[], Any]) -> tuple[list[Finding], str]:
        one, many = self.whole["gradients"], self.ranks[0]["gradients"]
        if not one:
            return [], "no gradient reached an optimizer in the first step"
        names = [name for name in one if name in many and one[name].isfinite().all()]
        if not names:
            return [], "the gradient of one process is not finite, or none arrived on several"
        local = {}
        for name in names:
            found = [part["gradients"].get(name) for part in self.alone]
            local[name] = sum(g if g is not None else torch.zeros_like(one[name]) for g in found) / self.world
        ratio, cosine = compare(many, one, names)
        figures = f"norm ratio {ratio:.4f}, cosine {cosine:.5f} against the gradient of the whole batch on one process"
        if self.close(many, one, names):
            return [info("gradient_exact", f"the gradient on {self.world} ranks is that of one process: {figures}")], ""
        # Which parts of the module are wrong: each its own verdict, told together where they agree.
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(child_of(name), []).append(name)
        wrong = [g for g, mine in groups.items() if not self.close(many, one, mine)]
        mine = [name for g in wrong for name in groups[g]]
        place = f"{', '.join(wrong)}; {where_steps(self.patient.module)}"
        if self.exchanges:
            place += f"; collective at {self.exchanges[0].where}"
        for scale, words in ((1 / self.world, f"1/{self.world} of"), (float(self.world), f"{self.world} times")):
            for name, reference in (("that of one process", one), ("the mean of the ranks' own gradients", local)):
                if self.close(many, {k: v * scale for k, v in reference.items()}, mine):
                    return [
                        alarm(
                            "gradient_scaled",
                            f"the gradient on {self.world} ranks is {words} {name}: {figures}",
                            WHY_SCALED,
                            f"where rows are gathered, {GATHER}; where a sum is divided by the whole batch, divide by "
                            "the rank's own rows instead",
                            place,
                        )
                    ], ""
        if self.drawn():
            return [], (
                f"the step draws random numbers that differ between one process and {self.world} ranks "
                f"({self.drawn()}), so that their gradients cannot be compared; {figures}"
            )
        losses = sum(rank["first"][0] for rank in self.ranks) / self.world if self.ranks[0]["first"] else math.nan
        first = self.whole["first"][0] if self.whole["first"] else math.nan
        same_loss = abs(losses - first) <= self.tolerance * max(1.0, abs(first))
        if self.close(many, local, mine):
            if same_loss and any(c.gathers for c in self.exchanges):
                pass  # the loss is the whole batch's, its gradient is not: a backward pass that forgets the others
            else:
                return self.local(figures, place, disturbed), ""
        if self.exchanges and same_loss:
            return [
                alarm(
                    "gather_detached",
                    f"the ranks' mean loss is that of the whole batch ({losses:.6g} and {first:.6g}), but its gradient "
                    f"is not: {figures}",
                    "the loss is computed from gathered rows, but no gradient flows back to the ranks they came from, "
                    "or only to a part of them: what each rank does to the others' losses is missing",
                    GATHER,
                    place,
                )
            ], ""
        if self.exchanges and any(c.graph for c in self.exchanges):
            return [
                info(
                    "gradient_differs",
                    f"the ranks exchange rows, but neither loss ({losses:.6g}, one process {first:.6g}) nor gradient "
                    f"are those of the whole batch: {figures}",
                    "a part of the loss is local to a rank; if that is not meant, the run depends on the number of GPUs",
                    where=place,
                )
            ], ""
        return [
            info(
                "gradient_local",
                f"the gradient on {self.world} ranks is not that of one process: {figures}",
                "statistics of a rank's own rows enter the loss",
                where=place,
            )
        ], ""

    def local(self, figures: str, place: str, disturbed: Callable[[], Any]) -> list[Finding]:
        """The gradient is the mean of what each rank would do alone: meant so, or a gather without effect?"""
        rows = [c for c in self.exchanges if c.graph and len(c.shape) > 0 and c.shape and math.prod(c.shape) > 1]
        if rows:
            other = disturbed()
            mine = self.ranks[0]
            if other is not None and self.without_effect(other, mine):
                return [
                    alarm(
                        "gather_dropped",
                        f"the ranks exchange tensors of shape {rows[0].shape}, and nothing depends on what they get: "
                        "changing what the other ranks send changes neither loss nor log nor buffers; the gradient is "
                        f"the mean of the ranks' own: {figures}",
                        "negatives or statistics are those of one rank's rows, in spite of the exchange: its result is "
                        "dropped, or another variable is used in its place",
                        "use what the gather returns in the loss, and " + GATHER,
                        f"{rows[0].where}; {where_steps(self.patient.module)}",
                    )
                ]
        return [
            info(
                "local_loss",
                f"negatives or statistics are local: the gradient on {self.world} ranks is the mean of what each rank "
                f"would compute from its own rows ({figures})",
                "legitimate, and the default of many packages; but the loss then depends on the rows a device holds, "
                "not on the whole batch",
                "if the whole batch is meant: " + GATHER + "; in lightly, gather_distributed=True",
                place,
            )
        ]

    def without_effect(self, other: Any, mine: Any) -> bool:
        same_loss = all(
            abs(a - b) <= 1e-12 * max(1, abs(b)) for a, b in zip(other["first"], mine["first"], strict=False)
        )
        same_log = all(other["logged"].get(key) == value or math.isnan(value) for key, value in mine["logged"].items())
        return same_loss and same_log

    def close(self, a: Gradients, b: Gradients, names: list[str]) -> bool:
        """Equal to rounding, relative to the largest gradient in the same part of the module."""
        scale = max((float(b[name].abs().max()) for name in names if b[name].numel()), default=0.0)
        return all(
            torch.allclose(a[name], b[name], rtol=self.tolerance * 10, atol=self.tolerance * scale) for name in names
        )

    def drawn(self) -> str:
        if self.whole["drawn"]:
            return "Python's or NumPy's"
        return listed(sorted(set(self.whole["unsteady"])), 2)

    def drift(self) -> list[Finding]:
        """Parameters that differ between the ranks after some steps."""
        findings = []
        for kind, what in (("parameters", "parameters"), ("probes", "weights that a callback trains")):
            first = self.ranks[0][kind]
            apart = [n for n in first if any(not self.equal(r[kind].get(n), first[n]) for r in self.ranks[1:])]
            if apart:
                worst = max(float((r[kind][n] - first[n]).abs().max()) for r in self.ranks[1:] for n in apart)
                findings.append(
                    alarm(
                        "parameters_drift",
                        f"after 3 steps {len(apart)} {what} differ between the ranks, by up to {worst:.3g}: "
                        f"{listed(apart)}",
                        "each rank trains a network of its own there; what is saved and logged is that of rank 0, "
                        "which saw only its own rows",
                        "let the loss of these weights go through DDP (in training_step, from the module's own "
                        "parameters), or average their gradients over ranks before their optimizer's step",
                        ", ".join(sorted({child_of(n) for n in apart})),
                    )
                )
        return findings

    def equal(self, a: Tensor | None, b: Tensor) -> bool:
        return a is not None and torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True)

    def batch_buffers(self) -> list[Finding]:
        """Buffers other than batch normalisation's that differ between the ranks."""
        first = self.ranks[0]["buffers"]
        norms = tuple(f"{name}." for name in self.ranks[0]["norms"])
        apart = [
            n
            for n in first
            if not (norms and n.startswith(norms))
            and any(not self.equal(r["buffers"].get(n), first[n]) for r in self.ranks[1:])
        ]
        if not apart:
            return []
        texts = (
            f"after 3 steps these buffers differ between the ranks: {listed(apart)}",
            "each rank fills them from its own rows, and DDP puts rank 0's in place of the others' before the next "
            "forward pass: what the other ranks saw is lost",
            "fill them from gathered rows, or reduce what goes into them over ranks (lightning_ssl.distributed)",
            ", ".join(sorted({child_of(n) for n in apart})),
        )
        meant = [c for c in self.exchanges if c.graph]
        return [alarm("buffers_drift", *texts)] if meant else [info("buffers_local", *texts)]

    def unused(self) -> list[Finding]:
        names = [name for name in self.whole["unused"] if name not in self.whole["got"]]
        if not names:
            return []
        return [
            info(
                "unused_parameters",
                f"{len(names)} trainable parameters in the optimizer have no part in the step: {listed(names)}",
                "plain DDP stops at the second step when a parameter gets no gradient",
                'set strategy="ddp_find_unused_parameters_true", or leave them out',
                ", ".join(sorted({child_of(n) for n in names})),
            )
        ]


def compare(a: Gradients, b: Gradients, names: list[str]) -> tuple[float, float]:
    """The ratio of the norms and the cosine of the angle of two gradients."""
    x, y = (torch.cat([g[name] for name in names]) for g in (a, b))
    norms = float(x.norm()), float(y.norm())
    if not norms[1]:
        return (1.0, 1.0) if not norms[0] else (math.inf, 0.0)
    cosine = float(x @ y) / (norms[0] * norms[1]) if norms[0] else 0.0
    return norms[0] / norms[1], cosine
