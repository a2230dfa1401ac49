"""The collapse zoo: seeded runs, healthy ones and broken ones, what is true of each, and what the monitor says of it.

    python -m benchmarks.collapse_zoo record --out FOLDER [--images IMAGES]   # trains: an hour or two of one core
    python -m benchmarks.collapse_zoo judge --out FOLDER                      # replays the rules: a minute or two
    python -m benchmarks.collapse_zoo worth --out FOLDER                      # label-free quantities against probes

IMAGES is an image folder with `train` and `test`, one folder a class in each (CIFAR-10 for the figures in the docs);
without it the zoo is that of the embedded digits. `record` goes on where it was interrupted. Thresholds were chosen on
half 0 of settings and seeds; `judge` reports half 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from benchmarks._zoo import Run, digits_data, image_data, record, zoo
from benchmarks._zoo_judge import deadline, judge, load, truth
from lightning_ssl import functional
from lightning_ssl.callbacks._judge import Rules
from lightning_ssl.functional.quality import feature_sums, quality_of_sums, slices


def recorded(folder: Path) -> Iterable[tuple[Run, Path]]:
    for run in zoo(True):
        file = folder / f"{run.name}.npz"
        if file.exists():
            yield run, file


def train(folder: Path, images: Path | None) -> None:
    data = {"digits": digits_data()}
    if images:
        data["images"] = image_data(images)
    folder.mkdir(parents=True, exist_ok=True)
    for run in zoo(bool(images)):
        file = folder / f"{run.name}.npz"
        if not file.exists():
            start = time.process_time()
            with open(f"{file}.part", "wb") as part:
                np.savez(part, **record(run, data[run.data]))  # type: ignore[arg-type]
            Path(f"{file}.part").rename(file)
            print(run.name, f"{time.process_time() - start:.1f} s", flush=True)


def verdicts(folder: Path, half: int, verbose: bool) -> dict[str, float]:
    """The rules on one half of the zoo."""
    kinds: Counter[str] = Counter()
    observations = wrong = forecasts = flagged = right = collapses = 0
    in_time: list[bool] = []
    ahead: list[float] = []
    for run, file in recorded(folder):
        if run.half != half:
            continue
        seen = load(run, file)
        true, said = truth(seen), judge(seen, Rules())
        kinds[true] += 1
        note = ""
        if true == "healthy":
            observations += len(said.kinds)
            alarms = sum(kind != "healthy" for kind in said.kinds)
            wrong, forecasts = wrong + alarms, forecasts + said.wrong_forecasts
            note = f"{alarms} false alarms, {said.wrong_forecasts} false forecasts"
        elif true != "neither":
            collapses, flagged, right = collapses + 1, flagged + (said.kind != "healthy"), right + (said.kind == true)
            first = min((x for x in (said.flagged, said.forecast) if x is not None), default=None)
            in_time.append(first is not None and first < deadline(seen))
            ahead.append(np.inf if first is None else first / run.steps)
            note = f"said {said.kind}, flagged at {said.flagged}, forecast at {said.forecast}, of {run.steps}"
        if verbose:
            print(f"{run.name:64s} {true:12s} kNN {seen.knn[0]:.2f} -> {seen.knn[-1]:.2f}  {note}")
    found = {
        "runs": sum(kinds.values()),
        "collapses": collapses,
        "flagged": flagged / max(collapses, 1),
        "kind right": right / max(collapses, 1),
        "observations of healthy runs": observations,
        "false alarms": wrong / max(observations, 1),
        "false forecasts": forecasts / max(observations, 1),
        "in time": sum(in_time) / max(collapses, 1),
        "median share of the run at the first flag": statistics.median(ahead) if ahead else float("nan"),
    }
    print(f"half {half}: {dict(kinds)}")
    for name, value in found.items():
        print(f"  {name:42s} {value:.4g}")
    return found


def worth(folder: Path) -> None:
    """Rank correlations of each label-free quantity with the probes, over the start, middle and end of every run."""
    rows: list[dict[str, object]] = []
    for run, file in recorded(folder):
        with np.load(file) as arrays:
            for i, step in enumerate(arrays["probe_step"]):
                knn = arrays["knn"][list(arrays["knn_step"]).index(step)]
                row: dict[str, object] = {"data": run.data, "method": run.family.split()[0], "knn": float(knn)}
                row["linear"] = float(arrays["linear"][i])
                for place in ("backbone", "projector"):
                    row |= {f"{place} {k}": v for k, v in _quantities(arrays, place, i).items()}
                rows.append(row)
    names = [name for name in rows[0] if name not in ("data", "method", "knn", "linear")]
    print(f"{len(rows)} checkpoints of {len(rows) // 3} runs")
    print("| quantity | across: linear ρ / τ | kNN ρ / τ | within a method: linear ρ / τ | kNN ρ / τ |")
    print("|---|---|---|---|---|")
    for name in names:
        cells = []
        for by in (("data",), ("data", "method")):
            for probe in ("linear", "knn"):
                found = [_rank_correlations(group, name, probe) for group in _groups(rows, by) if len(group) >= 6]
                mean = np.nanmean(np.array(found), axis=0)
                cells.append(f"{mean[0]:+.2f} / {mean[1]:+.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


def _quantities(arrays: np.lib.npyio.NpzFile, place: str, i: int) -> dict[str, float]:
    x = torch.from_numpy(arrays[f"clean/{place}"][i]).double()
    views = torch.from_numpy(arrays[f"views/{place}"][i]).double()
    if not bool(x.isfinite().all()) or not bool(x.norm(dim=1).min() > 0):
        return {}
    found = quality_of_sums(feature_sums(x, slices(x.shape[1], 64)))
    found["lidar"] = functional.lidar(views)
    found["uniformity"] = functional.uniformity(x)
    unit = torch.nn.functional.normalize(x, dim=1)
    found["variance_rank"] = functional.variance_shape(unit).rank
    found["deviation"] = (unit - unit.mean(0)).square().sum(1).mean().sqrt()
    pairs = torch.nn.functional.normalize(views, dim=2)
    found["noise"] = pairs.var(dim=1).sum(1).mean() / pairs.flatten(0, 1).var(dim=0).sum()
    found["alignment"] = 2 * pairs.var(dim=1).sum(1).mean()
    return {name: float(value) for name, value in found.items() if name != "modes"}


def _groups(rows: list[dict[str, object]], by: tuple[str, ...]) -> list[list[dict[str, object]]]:
    groups: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    return list(groups.values())


def _rank_correlations(rows: list[dict[str, object]], name: str, probe: str) -> tuple[float, float]:
    pairs = [(row[name], row[probe]) for row in rows if name in row and np.isfinite(row[name])]  # type: ignore[call-overload]
    if len(pairs) < 6:
        return float("nan"), float("nan")
    a, b = np.array(pairs, dtype=float).T
    return float(stats.spearmanr(a, b).statistic), float(stats.kendalltau(a, b).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "judge", "worth"])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the recordings")
    parser.add_argument("--images", type=Path, help="an image folder with `train` and `test`; without it, digits only")
    parser.add_argument("--half", type=int, default=1, help="the half that `judge` reports")
    parser.add_argument("--verbose", action="store_true", help="a line for each run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "record":
        train(arguments.out, arguments.images)
    elif arguments.what == "judge":
        verdicts(arguments.out, arguments.half, arguments.verbose)
    else:
        worth(arguments.out)


if __name__ == "__main__":
    main()
