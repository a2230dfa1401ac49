"""DDN-v1 Figs 7-8: two-layer ReLU networks on a mixture of ten Gaussians."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ssl.theory.mixture import GaussianMixture, TwoLayer
from lightning_ssl.theory.reproduce.report import Claim, Report, Run, Table, greater_test, sign_test

SETTINGS = [(loss, normalize) for normalize in (False, True) for loss in ("simple", "nce")]


def two_layer(run: Run) -> Report:
    """Growth of the weights without output normalisation, and selectivity of the units with it."""
    steps, runs, dim, units, every = 5000, 30, 10, 20, 10
    run.start(len(SETTINGS) * steps)
    results: dict[tuple[str, bool], dict[str, Tensor]] = {}
    for loss, normalize in SETTINGS:

        def compute(loss: str = loss, normalize: bool = normalize) -> dict[str, Tensor]:
            mixture = GaussianMixture(10, dim, 0.1, runs, seed=run.seed)
            network = TwoLayer(dim, units, runs, loss, normalize, tau=0.05, seed=run.seed + 1)
            generator = torch.Generator().manual_seed(run.seed + 2)
            norms = [torch.stack([network.w1.flatten(1).norm(dim=1), network.w2.norm(dim=1)])]
            for step in range(1, steps + 1):
                same, other = (mixture.sample_component(128, generator) for _ in range(2))
                network.step(*(mixture.sample(c, generator) for c in (same, same, other)), lr=0.01)  # type: ignore[arg-type,misc]
                if step % every == 0:
                    norms.append(torch.stack([network.w1.flatten(1).norm(dim=1), network.w2.norm(dim=1)]))
            return {"norms": torch.stack(norms), "w2": network.w2, "active": network.active_clusters(mixture.means)}

        results[loss, normalize] = run.stage(f"{loss}-{'normalized' if normalize else 'plain'}", steps, compute)

    growth = Table(
        f"Without normalisation: the top layer's norm over {steps} steps, {runs} seeds (Fig 7)",
        ["loss", "start (median)", "end (median)", "runs that diverged", "median step of divergence"],
    )
    diverged: dict[str, Tensor] = {}
    for loss in ("simple", "nce"):
        norm = results[loss, False]["norms"][:, 1]  # [times, runs]
        gone = ~torch.isfinite(norm) | (norm > 1e4)
        diverged[loss] = gone.any(0)
        when = gone.float().argmax(0)[diverged[loss]].float() * every
        end = norm[-1].nan_to_num(float("inf")).median().item()
        growth.rows.append(
            (
                loss,
                f"{norm[0].median():.2f}",
                f"{end:.3g}",
                f"{int(diverged[loss].sum())} of {runs}",
                f"{when.median():.0f}" if len(when) else "-",
            )
        )
    norm = results["simple", False]["norms"][:, 1]
    convex = _super_exponential(norm)
    nce = results["nce", False]["norms"][:, 1]
    ratio = (nce[-1] / nce[0]).median().item()

    selective = Table(
        "With normalisation: mean |w_2j| of units by the number of cluster centres that activate them (Fig 8)",
        ["loss", "none", "1-2", "3-5", "6-10", "correlation of |w_2j| and the number (active units)"],
    )
    few_many: dict[str, tuple[float, float, float]] = {}
    share: dict[str, Tensor] = {}  # of selective units among a run's active ones
    for loss in ("nce", "simple"):
        each_w2, each = results[loss, True]["w2"].abs(), results[loss, True]["active"]
        few = (each > 0) & (each <= 2)
        share[loss] = few.sum(1) / (each > 0).sum(1).clamp_min(1)
        larger = sum(
            bool(a.any() and b.any() and w[a].mean() > w[b].mean())
            for w, a, b in zip(each_w2, few, each > 2, strict=True)
        )
        w2, active = each_w2.flatten(), each.flatten()
        groups = [w2[(active >= low) & (active <= high)] for low, high in ((0, 0), (1, 2), (3, 5), (6, 10))]
        alive = active > 0
        rho = torch.corrcoef(torch.stack([w2[alive], active[alive].float()]))[0, 1].item()
        means = w2[alive & (active <= 2)].mean().item(), w2[active > 2].mean().item()
        few_many[loss] = (*means, sign_test(larger, runs))
        selective.rows.append(
            (loss, *(f"{g.mean():.3f} (n={len(g)})" if len(g) else "-" for g in groups), f"{rho:.2f}")
        )
    claims: list[Claim | tuple[Any, ...]] = [
        (
            f"L_simp, not normalised, blows up in every run: {int(diverged['simple'].sum())} of {runs}",
            bool(diverged["simple"].all()),
            sign_test(int(diverged["simple"].sum()), runs),
        ),
        (
            f"and faster than exponentially: log norm convex in {convex} of {runs} runs",
            convex == runs,
            sign_test(convex, runs),
        ),
        (
            f"L_nce stays stable: no run diverges, median growth x{ratio:.2f}",
            not diverged["nce"].any(),
            sign_test(int((~diverged["nce"]).sum()), runs),
        ),
        *[
            (
                f"Fig 8, L_{loss}, normalised: units of 1-2 clusters have the larger |w_2j|: {few:.3f} > {many:.3f}",
                few > many,
                p,
            )
            for loss, (few, many, p) in few_many.items()
        ],
        (
            "Fig 8: L_nce makes more units selective (of 1-2 clusters, among the active) than L_simp: "
            f"{share['nce'].mean():.2f} against {share['simple'].mean():.2f} of a run's units",
            bool(share["nce"].mean() > share["simple"].mean()),
            greater_test(share["nce"], share["simple"]),
        ),
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 7)
        axes = figure.subplots(2, 2)
        for column, loss in enumerate(("simple", "nce")):
            time = torch.arange(len(results[loss, False]["norms"])) * every
            axes[0, column].plot(time, results[loss, False]["norms"][:, 1].clamp(max=1e6), linewidth=0.6)
            axes[0, column].set(title=f"|W_2|, L_{loss}, no normalisation", yscale="log", xlabel="minibatch")
            w2, active = results[loss, True]["w2"].abs().flatten(), results[loss, True]["active"].flatten()
            jitter = torch.rand(len(w2), generator=torch.Generator().manual_seed(0)) * 0.5 - 0.25
            axes[1, column].plot(active + jitter, w2, ".", markersize=2)
            axes[1, column].set(
                title=f"L_{loss}, normalised", xlabel="cluster centres that activate j", ylabel="|w_2j|"
            )

    return Report("Figs 7-8: two-layer networks on a mixture of Gaussians (DDN-v1)", claims, [growth, selective], draw)


def _super_exponential(norm: Tensor) -> int:
    """Runs whose log norm grows faster in the second half of its (finite) growth than in the first."""
    count = 0
    for series in norm.T:
        finite = series[torch.isfinite(series) & (series < 1e4)].log()
        half = len(finite) // 2
        count += int(len(finite) > 3 and (finite[-1] - finite[half]) > (finite[half] - finite[0]))
    return count
