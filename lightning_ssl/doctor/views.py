"""The views: whether they differ, belong together, are drawn anew, and have a range that networks expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ssl.doctor import draws
from lightning_ssl.doctor.batches import find_views, tensors
from lightning_ssl.doctor.calls import Calls
from lightning_ssl.doctor.isolate import Ended, Isolation
from lightning_ssl.doctor.report import Finding, alarm, info
from lightning_ssl.doctor.trial import Fit, Patient, step_line


def check(patient: Patient, isolation: Isolation) -> tuple[list[Finding], str]:
    findings: list[Finding] = []
    untold: list[str] = []
    inside = isolation.one(_what_enters, patient)
    found = find_views(patient.whole[0])
    if found is not None:
        pairs = [found.of(batch)[:2] for batch in patient.whole if find_views(batch) == found]
        findings += on_pairs(pairs, "of the batch")
    else:
        findings += _on_calls(patient, inside)
    findings += on_range(inside["first"])
    findings += _on_finite(patient)
    if patient.given:
        untold.append("one batch was given: how views are drawn over workers, epochs and ranks needs the loader")
    else:
        for part in (draws.over_time, draws.over_ranks):
            try:
                more, why = part(patient, isolation)
                findings += more
                untold += [why] if why else []
            except Ended as ended:
                untold.append(str(ended))
    return findings, "; ".join(untold)


def _what_enters(patient: Patient) -> dict[str, Any]:
    """What goes into the networks in one step; in a process of its own."""
    calls = Calls(patient.module)
    Fit(patient, steps=1, feed=patient.steps[:1]).run()
    entries = [(c.path, c.entered) for c in calls.made if c.entry and c.entered is not None and c.grad]
    dropout = any("Dropout" in type(m).__name__ and getattr(m, "p", 0) for m in patient.module.modules())
    return {
        "entries": [(path, x.cpu()) for path, x in entries][:8],
        "first": [(path, x.cpu()) for path, x in calls.first][:4],
        "random": dropout,
    }


def on_pairs(pairs: list[list[Tensor]], whose: str) -> list[Finding]:
    """What can be said of two views, batch by batch."""
    equal = [(a == b).flatten(1).all(dim=1) for a, b in pairs]
    share = float(torch.cat(equal).float().mean())
    rows = sum(len(e) for e in equal)
    if share == 1.0:
        return [
            alarm(
                "identical_views",
                f"the two views {whose} are equal, number for number, in all {rows} rows",
                "each sample is compared with itself: nothing is learnt about what augmentation leaves alone",
                "draw the augmentation once for each view; a transform that is called once, or seeded alike, gives "
                "the same view twice",
            )
        ]
    findings = []
    if share > 0.5 and rows >= 8:
        findings.append(info("equal_rows", f"{share:.0%} of the rows have two equal views"))
    flat = [torch.cat([pair[k].flatten(1).double() for pair in pairs]) for k in range(2)]
    if rows >= 4 and float(flat[0].std(dim=0).max()) == 0 and float(flat[1].std(dim=0).max()) == 0:
        findings.append(
            alarm(
                "constant_views",
                f"all {rows} rows hold the same numbers",
                "the data does not reach the network",
                "look at the dataset and its transform",
            )
        )
    order = permuted(*pairs[0])
    if order is not None:
        findings.append(
            alarm(
                "views_of_different_samples",
                f"views of different samples are paired: row i of the second view is closest to another row of the "
                f"first for nearly all i (rows 0 to 3 to {order[:4]})",
                "the loss pulls together what does not belong together",
                "keep both views of a sample at the same index; look for a shuffle, flip or sort of one of them",
            )
        )
    return findings


def permuted(a: Tensor, b: Tensor) -> list[int] | None:
    """The order in which the rows of one view are found in the other, where it is clear and not the given one."""
    n = len(a)
    if n < 6 or a.shape != b.shape:
        return None
    x, y = a.flatten(1).double(), b.flatten(1).double()
    distances = torch.cdist(y, x)
    two = distances.topk(2, dim=1, largest=False)
    nearest = two.indices[:, 0]
    clear = two.values[:, 0] < 0.8 * two.values[:, 1]
    back = distances.argmin(dim=0)
    mutual = back[nearest] == torch.arange(n)
    elsewhere = nearest != torch.arange(n)
    # The view's own row must be no nearer than any other: else something else explains it.
    own = distances.diagonal()
    far = own > 0.8 * (distances.sum(dim=1) - own) / (n - 1)
    good = clear & mutual
    if float(good.float().mean()) > 0.7 and float((good & elsewhere & far).float().mean()) > 0.6:
        return [int(i) for i in nearest]
    return None


def _on_calls(patient: Patient, inside: dict[str, Any]) -> list[Finding]:
    """Views that are made in the step: what enters one network twice."""
    entries: list[tuple[str, Tensor]] = inside["entries"]
    if inside["random"] or not entries or not patient.module.automatic_optimization:
        return []
    path, first = entries[0]
    alike = [x for other, x in entries if other == path and x.shape == first.shape]
    half = len(first) // 2
    equal = len(alike) > 1 and all(torch.equal(x, first) for x in alike[1:])
    halves = len(alike) == 1 and half >= 2 and len(first) % 2 == 0 and torch.equal(first[:half], first[half:])
    if not equal and not halves:
        return []
    return [
        alarm(
            "identical_views",
            f"what enters {path} as two views is equal, number for number, in all rows",
            "each sample is compared with itself",
            "draw the augmentation once for each view",
            step_line(patient.module),
        )
    ]


def on_range(first: list[tuple[str, Tensor]]) -> list[Finding]:
    """Whether images have the range that networks expect where they enter the first layer with weights."""
    for path, x in first:
        if x.ndim != 4 or x.shape[1] not in (1, 3) or "Norm" in path or not bool(x.isfinite().all()):
            continue
        x = x.double()
        mean, std = x.mean(dim=(0, 2, 3)), x.std(dim=(0, 2, 3))
        low, high = float(x.min()), float(x.max())
        figures = f"mean {_row(mean)}, standard deviation {_row(std)}, range {low:.3g} to {high:.3g}"
        if low >= 0 and high > 60 and float(mean.mean()) > 10:
            return [_range("raw_bytes", f"images enter {path} as bytes, 0 to 255: {figures}", path)]
        if low >= 0 and 0 < high < 0.02:
            return [_range("scaled_twice", f"images enter {path} divided by 255 twice: {figures}", path)]
        ratio = -mean / std.clamp_min(1e-12)
        twice = bool(((ratio > 0.2) & (ratio < 0.7) & (std > 1.6) & (std < 6) & (mean < -0.6)).all())
        if twice:
            return [_range("normalised_twice", f"images enter {path} normalised twice, as it seems: {figures}", path)]
        if float(std.max()) > 30 or float(mean.abs().max()) > 100:
            return [info("wide_range", f"images enter {path} with an unusual range: {figures}", where=path)]
        return [info("range", f"images enter {path} with {figures}")]
    return []


def _range(kind: str, seen: str, path: str) -> Finding:
    return alarm(
        kind,
        seen,
        "weights are initialised, and rates chosen, for inputs of mean 0 and standard deviation 1: others saturate or "
        "vanish in the first layers",
        "scale to [0, 1] and normalise with the dataset's mean and standard deviation, each once: in the transform, "
        "the DataModule or the module, not in two of them",
        path,
    )


def _row(values: Tensor) -> str:
    return " ".join(f"{value:.2f}" for value in values.tolist())


def _on_finite(patient: Patient) -> list[Finding]:
    for path, x in tensors(patient.whole[0]):
        if x.is_floating_point() and not bool(x.isfinite().all()):
            bad = int((~x.isfinite()).sum())
            return [
                alarm(
                    "non_finite_input",
                    f"the batch holds {bad} numbers that are not finite, at {'.'.join(map(str, path))}",
                    "they make the loss and all weights NaN",
                    "look at the dataset and its transform",
                )
            ]
    return []
