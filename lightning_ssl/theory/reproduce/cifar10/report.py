"""What the runs show: tables, a forest plot, and one file with every figure in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from lightning_ssl.theory.reproduce.cifar10.plan import Plan
from lightning_ssl.theory.reproduce.cifar10.statistics import false_discovery, judge, paired_values
from lightning_ssl.theory.reproduce.report import Report, Table

# What is kept of each run in results.json, besides the accuracies: the papers' reasons.
WHY = {
    "uniformity": "uniformity",
    "alignment": "alignment",
    "effective_rank": "effective rank",
    "l_bound": "L_bound",
}
OVER_TIME = {
    "operator": "cov_op/",
    "eigenspace": "predictor/alignment_weighted",
    "asymmetry": "predictor/asymmetry",
}
COLOURS = {"confirmed": "tab:green", "not confirmed": "tab:gray", "reversed": "tab:red"}


def summary(
    plan: Plan, results: Mapping[tuple[str, int], Mapping[str, Any]], pilot: bool, full: bool, seconds: float
) -> dict[str, Any]:
    """Everything that tables and docs say, as plain numbers."""
    rows: list[dict[str, Any]] = []
    for contrast in plan.contrasts.values():
        values = paired_values(contrast, results, plan.seeds)
        if len(values) < 2:
            continue  # no interval
        outcome = judge(contrast, list(values.values()))
        row = {
            "name": contrast.name,
            "paper": contrast.paper,
            "claim": contrast.claim,
            "settings": list(contrast.names),
            "metric": contrast.metric,
            "against": contrast.against,
            "direction": contrast.direction,
            "margin": contrast.margin,
            "published": None if contrast.published is None else list(contrast.published),
            "seeds": list(values),
        }
        rows.append(row | {key: _shortened(value) for key, value in outcome._asdict().items()})
    for row, q in zip(rows, false_discovery([row["p"] for row in rows]) if rows else [], strict=True):
        row["q"] = _short(q)
    spent = [row["seconds"] for row in results.values()]
    return {
        "plan": plan.fingerprint,
        "code": sorted({row["code"] for row in results.values()}),
        "size": {k: v for k, v in plan.size.items() if v is not None},
        "full": full,
        "pilot": pilot,
        "complete": len(results) == len(plan.settings) * len(plan.seeds),
        "runs": len(results),
        "runs_planned": len(plan.settings) * len(plan.seeds),
        "hours_of_one_core": round(sum(spent) / 3600, 2),
        "hours_last_call": round(seconds / 3600, 2),
        "contrasts": rows,
        "settings": {
            name: found
            for name in plan.settings
            if (found := _setting([results[name, seed] for seed in plan.seeds if (name, seed) in results]))
        },
    }


def _setting(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each seed's accuracies, and mean and deviation over the seeds of what explains them."""
    if not runs:
        return {}
    found: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    found |= {key: [_short(run[key]) for run in runs] for key in ("linear", "knn", *WHY)}
    for key, logged in OVER_TIME.items():
        paths = [path for run in runs if (path := _over_time(run["history"], logged))]
        if paths:  # mean over the seeds, at each epoch
            found[key] = [_short(fmean(values)) for values in zip(*paths, strict=True)]
    return found


def _over_time(history: Sequence[Mapping[str, float]], key: str) -> list[float]:
    """A quantity after each epoch; of a key that ends in a slash, the sum over layers."""
    return [sum(found) for row in history if (found := [v for k, v in row.items() if _is(k, key)])]


def _is(key: str, wanted: str) -> bool:
    return key.startswith(wanted) if wanted.endswith("/") else key == wanted


def write(kept: Mapping[str, Any]) -> Report:
    """The report of `summary`'s figures."""
    table = Table(
        "Contrasts: first - second in percentage points, or mean rank correlation; 95 % paired interval; sign-flip p",
        ["contrast", "claim", "ours", "interval", "p", "q", "published", "verdict"],
    )
    for row in kept["contrasts"]:
        published = "" if row["published"] is None else f"{row['published'][0] - row['published'][1]:+.2f}"
        table.rows.append(
            (
                f"{row['name']} ({row['paper']})",
                row["claim"],
                f"{row['mean']:+.2f}",
                f"{row['low']:+.2f} to {row['high']:+.2f}",
                f"{row['p']:.3f}",
                f"{row['q']:.3f}",
                published,
                row["verdict"],
            )
        )
    accuracies = Table(
        "Settings: mean and deviation over the seeds",
        ["setting", "seeds", "linear, %", "kNN, %", *WHY.values(), "operator norms over time", "eigenspace"],
    )
    for name, row in kept["settings"].items():
        cells = [_spread(row[key]) for key in ("linear", "knn", *WHY)]
        ends = [_ends(row.get(key)) for key in ("operator", "eigenspace")]
        accuracies.rows.append((name, len(row["seeds"]), *cells, *ends))
    counts = {v: sum(row["verdict"] == v for row in kept["contrasts"]) for v in COLOURS}
    text = (
        f"{kept['runs']} of {kept['runs_planned']} runs, {kept['hours_of_one_core']:.2f} hours of one core. "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + f" of {len(kept['contrasts'])} contrasts; file of contrasts {kept['plan']}."
    )
    if kept["pilot"]:
        text = "Pilot: held-out training images and pilot seeds; not a result. " + text
    return Report("CIFAR-10: the papers' contrasts", [], [table, accuracies], lambda figure: draw(figure, kept), text)


def record(row: Mapping[str, Any]) -> str:
    """A contrast as a row of docs/reproduction.md: paper, claim, run, ours, published, verdict."""
    paper, _, place = row["paper"].partition(" ")
    unit = "" if row["against"] or row["metric"] == "uniformity" else " points"
    ours = f"{row['mean']:+.2f}{unit} ({row['low']:+.2f} to {row['high']:+.2f}), p = {row['p']:.3f}"
    published = "" if row["published"] is None else f"{row['published'][0] - row['published'][1]:+.2f}"
    run = f"`cifar10`, {len(row['seeds'])} seeds"
    return f"| {paper} | {place}: {row['claim']} | {run} | {ours} | {published} | {row['verdict']}, on CIFAR-10 |"


def draw(figure: Any, kept: Mapping[str, Any]) -> None:
    """The forest plot: each contrast's difference with its interval, the published one beside it."""
    rows = [row for row in kept["contrasts"] if not row["against"] and row["metric"] in ("linear", "knn")]
    ranks = [row for row in kept["contrasts"] if row["against"]]
    figure.set_size_inches(10, 1.5 + 0.34 * (len(rows) + len(ranks)))
    axes = figure.subplots(2, 1, height_ratios=[max(1, len(rows)), max(1, len(ranks)) + 0.5])
    for axis, part, label in (
        (axes[0], rows, "difference of accuracy, percentage points"),
        (axes[1], ranks, "mean rank correlation over d"),
    ):
        for place, row in enumerate(reversed(part)):
            colour = COLOURS[row["verdict"]]
            axis.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=2)
            axis.plot(row["mean"], place, "o", color=colour)
            if row["published"] is not None:
                axis.plot(row["published"][0] - row["published"][1], place, "kD", fillstyle="none", markersize=5)
        names = [f"{row['name']} ({ {'greater': '>', 'less': '<', 'equal': '='}[row['direction']] } 0)" for row in part]
        axis.set_yticks(range(len(part)), reversed(names), fontsize=8)
        axis.set_ylim(-0.7, max(1, len(part)) - 0.3)
        axis.axvline(0, color="k", linewidth=0.6)
        axis.set_xlabel(label)
    for verdict, colour in COLOURS.items():
        axes[0].plot([], [], "o-", color=colour, label=verdict)
    axes[0].plot([], [], "kD", fillstyle="none", label="published")
    axes[0].legend(fontsize=8, loc="best")


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def _ends(path: Sequence[float] | None) -> str:
    return f"{path[0]:.3g} → {path[-1]:.3g}" if path else ""


def _shortened(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_short(v) for v in value]
    return _short(value) if isinstance(value, float) else value


def _short(value: float) -> float:
    return float(f"{value:.5g}")
