"""What the gradients of one process, of each share alone and of all ranks together say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Patient, child_of, listed
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


class Judged:
    """What the measurements on one process, on each share alone and on all ranks together say."""

    def __init__(self, patient: Patient, whole: Any, alone: list[Any], ranks: list[Any], precision: str) -> None:
        self.patient, self.whole, self.alone, self.ranks = patient, whole, alone, ranks
        self.world = len(ranks)
        self.tolerance = 1e-6 if precision == "64-true" else 2e-3
        self.exchanges = [c for c in ranks[0]["collectives"] if not c.logging]

    def gradient(
        self, disturbed: Callable[[], Any], slope: Callable[[bool, Gradients], float | None]
    ) -> tuple[list[Finding], str]:
        """What is to be said of the gradient.

        Args:
            disturbed: Measures again while the other ranks send something else.
            slope: On one process or on all, the slope of the loss along a direction.
        """
        one, many = self.whole["gradients"], self.ranks[0]["gradients"]
        if not one:
            return [], "no gradient reached an optimizer in the first step"
        names = [name for name in one if name in many and one[name].isfinite().all()]
        if not names:
            return [], "the gradient of one process is not finite, or none arrived on several"
        local = {}
        for name in names:
            found = [part["gradients"].get(name) for part in self.alone]
            local[name] = torch.stack([torch.zeros_like(one[name]) if g is None else g for g in found]).mean(dim=0)
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
        if self.exchanges and (share := self.of_slope(one, many, names, slope)) is not None:
            return [
                alarm(
                    "gather_detached",
                    f"the gradient on {self.world} ranks is not that of the ranks' mean loss: along itself it is "
                    f"{share:.4f} times the slope of that loss, measured from two losses; on one process it is the "
                    f"slope; {figures}",
                    "no gradient flows back through what the ranks exchange, or only a part of it",
                    GATHER + "; all_reduce does not pass gradients on, torch.distributed.nn.functional.all_reduce does",
                    place,
                )
            ], ""
        if self.exchanges and any(c.graph for c in self.exchanges):
            return [
                info(
                    "gradient_differs",
                    f"the ranks exchange rows, but neither loss ({losses:.6g}, one process {first:.6g}) nor gradient "
                    f"are those of the whole batch: {figures}",
                    "a part of the loss is local to a rank: the run then depends on the number of GPUs",
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

    def of_slope(
        self, one: Gradients, many: Gradients, names: list[str], slope: Callable[[bool, Gradients], float | None]
    ) -> float | None:
        """How the ranks' gradient compares with the slope of their mean loss, where it should be equal and is not.

        A stopped gradient makes them differ by design, but then on one process, too.
        """
        if self.tolerance > 1e-5:
            return None
        way = {name: many[name] for name in names}
        expected, length = (sum(float(g[name] @ way[name]) for name in names) for g in (one, many))
        alone = slope(True, way)
        size = sum(float(one[name].square().sum()) for name in names) ** 0.5 * length**0.5
        if alone is None or abs(alone - expected) > 0.01 * size:
            return None
        together = slope(False, way)
        if together is None or abs(together - length) <= 0.05 * abs(together):
            return None
        return length / together if together else math.inf

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
