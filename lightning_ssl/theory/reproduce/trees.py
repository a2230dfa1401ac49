"""DDN-v2 Table 6 and Figs 13-14: networks on hierarchical latent trees."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.theory import hltm
from lightning_ssl.theory.reproduce.report import Report, Run, Table, z_score

LOWERS = (0.7, 0.8, 0.9)
LATENTS = ("root", "s0", "s1", "s101", "s0111")
MOMENTS = ("initial", "epoch 1", "converged")

# DDN-v2 Table 6: {latent: {lower: (three moments of |N| = 2, three of |N| = 10)}}, each (mean, sd of 10 trials).
TABLE6: dict[str, dict[float, tuple[tuple[float, float], ...]]] = {
    "root": {
        0.7: ((0.35, 0.20), (0.39, 0.20), (0.62, 0.29), (0.62, 0.10), (0.82, 0.06), (0.85, 0.05)),
        0.8: ((0.48, 0.23), (0.57, 0.30), (0.72, 0.31), (0.75, 0.08), (0.90, 0.03), (0.91, 0.03)),
        0.9: ((0.66, 0.28), (0.73, 0.30), (0.80, 0.29), (0.88, 0.05), (0.95, 0.02), (0.96, 0.01)),
    },
    "s0": {
        0.7: ((0.52, 0.20), (0.53, 0.20), (0.62, 0.21), (0.68, 0.07), (0.83, 0.06), (0.86, 0.05)),
        0.8: ((0.65, 0.19), (0.65, 0.18), (0.70, 0.14), (0.79, 0.05), (0.90, 0.03), (0.91, 0.03)),
        0.9: ((0.80, 0.13), (0.81, 0.12), (0.84, 0.09), (0.90, 0.02), (0.95, 0.02), (0.96, 0.01)),
    },
    "s1": {
        0.7: ((0.45, 0.13), (0.50, 0.20), (0.64, 0.22), (0.64, 0.10), (0.78, 0.08), (0.82, 0.06)),
        0.8: ((0.60, 0.16), (0.62, 0.16), (0.79, 0.20), (0.76, 0.07), (0.87, 0.04), (0.89, 0.04)),
        0.9: ((0.72, 0.08), (0.78, 0.12), (0.86, 0.09), (0.88, 0.04), (0.94, 0.02), (0.95, 0.02)),
    },
    "s101": {
        0.7: ((0.66, 0.24), (0.69, 0.24), (0.72, 0.24), (0.87, 0.06), (0.90, 0.04), (0.92, 0.04)),
        0.8: ((0.74, 0.25), (0.75, 0.24), (0.77, 0.25), (0.91, 0.04), (0.93, 0.03), (0.95, 0.02)),
        0.9: ((0.83, 0.22), (0.84, 0.22), (0.86, 0.22), (0.96, 0.02), (0.97, 0.01), (0.97, 0.01)),
    },
    "s0111": {
        0.7: ((0.83, 0.19), (0.83, 0.19), (0.84, 0.19), (0.93, 0.03), (0.93, 0.03), (0.93, 0.03)),
        0.8: ((0.87, 0.16), (0.88, 0.15), (0.88, 0.15), (0.95, 0.02), (0.95, 0.02), (0.96, 0.02)),
        0.9: ((0.93, 0.10), (0.93, 0.10), (0.93, 0.10), (0.98, 0.01), (0.98, 0.01), (0.98, 0.01)),
    },
}


def train_grid(run: Run, key: str, depth: int, width: int, seeds: int, epochs: int, measure: Any, work: int) -> Any:
    """Train 3 polarities x seeds at once; what ``measure(network, tree, epoch)`` gives is kept after each epoch."""
    tree = hltm.HLTM(depth, [low for low in LOWERS for _ in range(seeds)], runs=3 * seeds, seed=run.seed)
    network = hltm.HLTMNetwork(depth, width, 3 * seeds, seed=run.seed + 1)
    state = run.load(key)
    if state is None:
        state = {"epoch": 0, "network": None, "history": [measure(network, tree, 0)]}
    else:
        network.load_state_dict(state["network"])
        run.advance(work * state["epoch"])

    def on_epoch(epoch: int, loss: Tensor) -> None:
        state["history"].append(measure(network, tree, epoch))
        run.save(key, {**state, "epoch": epoch, "network": network.state_dict()})
        run.advance(work)

    loss = run.options.get("loss", "nce")
    hltm.train(network, tree, epochs, loss=loss, seed=run.seed, start_epoch=state["epoch"], on_epoch=on_epoch)
    return state["history"]


def table6(run: Run) -> Report:
    """Normalised correlations at initialisation, after epoch 1 and converged (50 epochs of 64,000 draws)."""
    seeds, epochs = 10, int(run.options.get("epochs") or 50)
    run.start(5 * epochs)
    measured: dict[int, dict[str, Tensor]] = {}  # width -> latent -> [3 moments, 3 polarities, seeds]
    curves: dict[int, Tensor] = {}
    for width, work in ((2, 1), (10, 4)):

        def measure(network: hltm.HLTMNetwork, tree: hltm.HLTM, epoch: int) -> dict[str, Tensor]:
            names = LATENTS if epoch in (0, 1, epochs) else ("root",)
            generator = torch.Generator().manual_seed(run.seed + 7919)
            return hltm.normalized_correlation(network, tree, names, generator)

        history = train_grid(run, f"width{width}", 5, width, seeds, epochs, measure, work)
        moments = [history[0], history[1], history[-1]]
        measured[width] = {n: torch.stack([m[n].view(3, seeds) for m in moments]) for n in LATENTS}
        curves[width] = torch.stack([h["root"].view(3, seeds) for h in history])

    header = ["latent", "rho"] + [f"N={w} {m}" for w in (2, 10) for m in MOMENTS]
    figures = Table("Normalised correlation, ours (mean ± sd of 10) / published, and z", header)
    scores, gaps = [], []
    for latent in LATENTS:
        for row, lower in enumerate(LOWERS):
            cells = []
            for column, (width, moment) in enumerate((w, m) for w in (2, 10) for m in range(3)):
                ours, published = measured[width][latent][moment, row], TABLE6[latent][lower][column]
                score = z_score(ours.tolist(), published)
                scores.append(score)
                if width == 10:
                    gaps.append(abs(ours.mean().item() - published[0]))
                cells.append(
                    f"{ours.mean():.2f}±{ours.std():.2f} / {published[0]:.2f}±{published[1]:.2f} ({score:+.1f})"
                )
            figures.rows.append((latent, f"U[{lower},1]", *cells))
    within = sum(abs(s) <= 3 for s in scores)
    claims = [
        (f"|z| <= 3 in at least 85 of 90 cells: {within} of {len(scores)}", within >= 85),
        (
            f"median absolute difference at N=10 at most 0.03: {statistics.median(gaps):.3f}",
            statistics.median(gaps) <= 0.03,
        ),
        *[
            (
                f"N={w}: training raises the root's: {curves[w][0].mean():.2f} to {curves[w][-1].mean():.2f}",
                bool(curves[w][-1].mean() > curves[w][0].mean()),
            )
            for w in (2, 10)
        ],
        (
            "over-parameterisation raises it at every moment: "
            + ", ".join(
                f"{measured[2]['root'][m].mean():.2f} < {measured[10]['root'][m].mean():.2f}" for m in range(3)
            ),
            all(measured[2]["root"][m].mean() < measured[10]["root"][m].mean() for m in range(3)),
        ),
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(9, 3.5)
        for axis, width in zip(figure.subplots(1, 2, sharey=True), (2, 10), strict=True):
            for row, lower in enumerate(LOWERS):
                mean, sd = curves[width][:, row].mean(-1), curves[width][:, row].std(-1)
                line = axis.plot(mean, label=f"U[{lower}, 1]")[0]
                axis.fill_between(range(len(mean)), mean - sd, mean + sd, alpha=0.15, color=line.get_color())
                for epoch, column in ((0, 0), (1, 1), (len(mean) - 1, 2)):
                    published = TABLE6["root"][lower][column + (0 if width == 2 else 3)][0]
                    axis.plot(epoch, published, "o", color=line.get_color(), markerfacecolor="none")
            axis.set(title=f"root, |N| = {width}", xlabel="epoch", ylabel="normalised correlation", ylim=(0, 1))
        axis.legend(title="ours (lines), published (circles)")

    return Report("Table 6: normalised correlation of latents and units (DDN-v2)", claims, [figures], draw)


def _pool(depth: int, width: int) -> int:
    """Networks to start, so that 30 of them have an operator at every node: see `covop_growth`."""
    return {2: {3: 45, 4: 70, 5: 90}[depth], 5: 36, 10: 32}[width]


def covop_growth(run: Run) -> Report:
    """Frobenius norm of the covariance operator during training, median over 30 seeds.

    With two units a node, PyTorch's default initialisation often leaves some node on the way to the root without a
    unit that any input activates. No gradient ever passes such a node: the operators below it are zero, before and
    after training. The medians are over the first 30 seeds whose operator is not zero from the start.
    """
    seeds, epochs = 30, int(run.options.get("epochs") or run.pick(8, 50))
    settings = [(depth, width) for depth in (3, 4, 5) for width in (2, 5, 10)]
    work = {(depth, width): 2**depth * (width + 3) * _pool(depth, width) for depth, width in settings}
    run.start(sum(work.values()) * epochs)
    table = Table(
        f"Median over {seeds} runs with an operator of its Frobenius norm: initial → epoch 1 → epoch {epochs} "
        "(ratio of last to first). Published: it grows in every setting. Cut off: runs whose operator is zero, first "
        f"and last; all runs: in how many ranges of rho the median of the first {seeds} runs grows, cut off or not",
        ["depth", "N", "latent", *[f"U[{low},1]" for low in LOWERS], "cut off", "all runs"],
    )
    curves: dict[tuple[int, int, str], Tensor] = {}
    grown: dict[int, list[bool]] = {2: [], 5: [], 10: []}
    grown_of_all: dict[int, list[bool]] = {2: [], 5: [], 10: []}
    for depth, width in settings:
        names = [n for n in ("s0", "s1", "s010", "s1100") if len(n) - 1 < depth]

        def measure(network: hltm.HLTMNetwork, tree: hltm.HLTM, epoch: int, names: Any = names) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(run.seed + 7919)
            return hltm.covariance_operator_norm(network, tree, names, generator, samples=1024)

        pool = _pool(depth, width)
        history = train_grid(run, f"depth{depth}-width{width}", depth, width, pool, epochs, measure, work[depth, width])
        for name in names:
            every = torch.stack([h[name].view(3, pool) for h in history])  # [epochs + 1, 3, pool]
            chosen = [e[:, e[0] > 0][:, :seeds] for e in every.unbind(1)]
            norm = torch.stack([c.quantile(0.5, dim=1) for c in chosen], dim=1)  # [epochs + 1, 3]
            curves[depth, width, name] = norm
            grown[width] += (norm[-1] > norm[0]).tolist()
            zero = (every == 0).flatten(1).sum(1)
            whole = every[:, :, :seeds].quantile(0.5, dim=2)
            grown_of_all[width] += (whole[-1] > whole[0]).tolist()
            cells = [f"{c[0]:.2g} → {c[1]:.2g} → {c[-1]:.2g} (x{c[-1] / c[0]:.2g})" for c in norm.T]
            lost = f"{zero[0]} → {zero[-1]} of {3 * pool}"
            table.rows.append((depth, width, name, *cells, lost, f"{int((whole[-1] > whole[0]).sum())} of 3"))
    claims = [
        (f"N={w}: the median norm of {which} grows during training in every setting: {sum(g)} of {len(g)}", all(g))
        for which, kind in ((f"the first {seeds} runs", grown_of_all), (f"{seeds} runs with an operator", grown))
        for w, g in kind.items()
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(11, 9)
        axes = figure.subplots(4, 3, sharex=True)
        for row, name in enumerate(("s0", "s1", "s010", "s1100")):
            for column, depth in enumerate((3, 4, 5)):
                axis = axes[row, column]
                for width in (2, 5, 10):
                    for i, style in enumerate((":", "--", "-")):
                        if (depth, width, name) in curves:
                            label = f"N={width}, U[{LOWERS[i]},1]"
                            axis.plot(
                                curves[depth, width, name][:, i],
                                style,
                                color=f"C{(2, 5, 10).index(width)}",
                                label=label,
                            )
                axis.set(title=f"{name}, depth {depth}", yscale="log")
                axis.set_visible(len(name) - 1 < depth)
        axes[0, 0].legend(fontsize=5)

    return Report("Figs 13-14: growth of the covariance operator's norm (DDN-v2)", claims, [table], draw)
