"""What a summary says, in sentences."""

from __future__ import annotations

from typing import Any, NamedTuple

Summary = dict[str, Any]


# What a healthy verdict rests on, as far as it was logged.
GROUNDS = ("collapse/deviation", "collapse/variance_rank", "collapse/alive", "train/effective_rank", "train/uniformity")


class Answer(NamedTuple):
    """What came of a run.

    Attributes:
        grade: "bad" (a collapse), "doubt" (none was seen, but the features got worse), "good", or "unknown".
        title: A few words.
        sentences: What was seen, when, on which evidence, the likely cause, the remedy.
    """

    grade: str
    title: str
    sentences: list[str]


def answer(summary: Summary) -> Answer:
    """What came of a run, from its verdicts and from what its probes say."""
    verdicts = summary["verdicts"]
    broken = [verdict for verdict in verdicts if not verdict["healthy"] and verdict["main"]]
    beside = [f"Beside it: {part}" for v in verdicts if not v["healthy"] and not v["main"] for part in _told(v)[:1]]
    worse, better = probes(summary)
    worse += signs(summary)
    if broken:
        first = min(broken, key=lambda verdict: (verdict["step"] is None, verdict["step"] or 0))
        since = "" if first["step"] is None else f" since step {first['step']}"
        title = f"{first['kind'].capitalize()} of {first['place']}{since}"
        return Answer("bad", title, [part for verdict in broken for part in _told(verdict)] + beside + worse + better)
    forecasts = [verdict["forecast"] for verdict in verdicts if verdict["forecast"]]
    if worse:
        seen = "No collapse was flagged, but the features got worse" if verdicts else "The features got worse"
        return Answer("doubt", seen, worse + better + forecasts + beside + _why_healthy(summary))
    if not verdicts:
        missing = "No CollapseMonitor watched this run: what follows are its curves, without a verdict."
        return Answer("unknown", "No verdict", [missing, *better])
    title = "Healthy so far" if summary["run"]["state"] == "running" else "Healthy: no collapse"
    if forecasts:
        return Answer("doubt", "Healthy, but on its way to collapse", [*forecasts, *_why_healthy(summary), *better])
    return Answer("good", title, [*_why_healthy(summary), *better, *beside])


def _told(verdict: dict[str, Any]) -> list[str]:
    since = "" if verdict["step"] is None else f" from step {verdict['step']} on"
    parts = [f"{verdict['kind'].capitalize()} of {verdict['place']}{since}: {verdict['evidence']}."]
    if verdict["cause"]:
        parts.append(f"Likely cause: {verdict['cause']}.")
    if verdict["remedy"]:
        parts.append(f"Remedy: {verdict['remedy']}.")
    return [part.replace("..", ".") for part in parts]


def probes(summary: Summary) -> tuple[list[str], list[str]]:
    """Sentences on probes that fell below their start, and on the others'."""
    worse, better = [], []
    for key, entry in summary["quantities"].items():
        about = summary["declared"].get(entry["declared"] or "", {})
        if not (about.get("section") == "learning" and about["best"] and about["headline"]):
            continue
        first, best, last = entry["first"], entry["best"], entry["last"]
        if "loss" in key or first["step"] == last["step"] or None in (first["value"], last["value"]):
            continue
        fell = (first["value"] - last["value"]) * (1 if about["better"] == "higher" else -1)
        words = f"{about['title']} {{}} from {_at(first, about)} to {_at(last, about)}"
        if fell > 0.1 * abs(first["value"]):
            worse.append(words.format("fell" if about["better"] == "higher" else "rose") + ".")
        else:
            peak = "" if best["step"] == last["step"] else f"; its best was {_at(best, about)}"
            verb = "stayed where it was:" if fell >= 0 else "rose" if about["better"] == "higher" else "fell"
            better.append(words.format(verb) + peak + ".")
    return worse, better


def signs(summary: Summary) -> list[str]:
    """Sentences on geometry that no healthy run has, whatever a monitor says."""
    found = []
    for key, point in (("train/uniformity", "one point"), ("train/effective_rank", "a line")):
        entry = summary["quantities"].get(key)
        about = summary["declared"].get(entry["declared"] or "", {}) if entry else {}
        if not entry or not about or None in (entry["first"]["value"], entry["last"]["value"]):
            continue
        first, last = entry["first"]["value"], entry["last"]["value"]
        flat = last > -0.05 if key.endswith("uniformity") else last < min(3.0, first / 10)
        if flat:
            moved = f"went from {_at(entry['first'], about)} to {_at(entry['last'], about)}"
            found.append(f"{about['title'].capitalize()} {moved}: the watched features are close to {point}.")
    return found


def _why_healthy(summary: Summary) -> list[str]:
    """What the verdict rests on where nothing is wrong."""
    found = [
        f"{verdict['place']} is {verdict['kind']}: {verdict['evidence']}."
        for verdict in summary["verdicts"]
        if verdict["healthy"] and verdict["evidence"]
    ]
    for key in GROUNDS:
        entry = summary["quantities"].get(key)
        about = summary["declared"].get(entry["declared"] or "", {}) if entry else {}
        if entry and about and entry["first"]["step"] != entry["last"]["step"]:
            lies = f"; healthy: {about['healthy']}" if about["healthy"] else ""
            moved = f"went from {_at(entry['first'], about)} to {_at(entry['last'], about)}"
            found.append(f"{about['title'].capitalize()} {moved}{lies}.")
    return found


def _at(point: dict[str, Any], about: dict[str, Any]) -> str:
    return f"{value(point, about)} (step {point['step']})"


def value(point: dict[str, Any] | None, about: dict[str, Any]) -> str:
    """A value as its quantity is printed."""
    if point is None:
        return ""
    if point["value"] is None:
        return "not finite"
    return str(about.get("form", "{:.4g}").format(point["value"]))


def table(summary: Summary, headlines: bool) -> list[tuple[str, str, str, str, str]]:
    """Rows of key, title, first, best and last, each with its step: the headlines, or everything."""
    rows = []
    for key, entry in summary["quantities"].items():
        about = summary["declared"].get(entry["declared"] or "", {})
        if headlines and not (about.get("headline") and is_headline(key, about)):
            continue
        best = entry["best"] if about.get("best") else None  # of a geometry a collapse may be "best"
        cells = [
            f"{value(point, about)} @{point['step']}" if point else ""
            for point in (entry["first"], best, entry["last"])
        ]
        rows.append((key, about.get("title", key), *cells))
    order = {name: i for i, name in enumerate(("learning", "geometry", "predictor", "operator", "health"))}

    def rank(row: tuple[str, ...]) -> tuple[int, str]:
        declared = summary["quantities"][row[0]]["declared"]
        return order.get(summary["declared"].get(declared or "", {}).get("section", ""), 9), row[0]

    return sorted(rows, key=rank)  # type: ignore[arg-type, return-value]


def is_headline(key: str, about: dict[str, Any]) -> bool:
    """Of probes the held-out values, of everything else those of training."""
    return key.startswith("val" if about["section"] == "learning" and "loss" not in key else ("train", "predictor"))
