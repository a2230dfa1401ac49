"""DirectPred Figs 3-5 and 7-10: phase portraits, EMA and weight decay, symmetry, and the commutator."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from lightning_ssl.theory import linear
from lightning_ssl.theory.linear import CorrelationDynamics, LinearDynamics, ModeDynamics
from lightning_ssl.theory.reproduce.report import Report, Run, Table

D = torch.float64
STEP = 0.01  # the papers' learning rate: time t is t / STEP training steps


def phase_portraits(run: Run) -> Report:
    """Figs 3, 4 and 10: where the modes go, and the points at which they stop."""
    etas, tau, sigma2 = (0.0, 0.01, 1.0), 1.0, 0.0
    side = run.pick(9, 21)
    grid = torch.logspace(-4, 0.2, side, dtype=D)  # dense near the origin, where the basin is
    p0, s0 = (g.reshape(-1) for g in torch.meshgrid(grid, grid, indexing="ij"))
    times = torch.linspace(0, run.pick(800.0, 3000.0), 201, dtype=D)
    run.start(len(etas) + 1)
    paths = {
        eta: run.stage(
            f"eta{eta:g}",
            1,
            lambda eta=eta: torch.stack(  # type: ignore[misc]
                ModeDynamics.isotropic(sigma2, 1.0, None, eta).solve(p0, s0, times, tau, freeze_tau=True)[:2]
            ),
        )
        for eta in etas
    }
    table = Table(
        "Where the modes end (Fig 3; tau = alpha_p = 1): integrated, and in closed form",
        ["eta", "quantity", "ours", "closed form", "difference"],
    )
    claims = []

    free_p, free_s = paths[0.0][:, -1]
    above = s0 > p0.square()
    ends = free_p[above]
    table.rows.append(
        (
            0.0,
            "p at the end, starts above the parabola",
            f"{ends.mean():.6f}",
            f"{tau / (1 + sigma2):.6f}",
            f"{(ends - tau / (1 + sigma2)).abs().max():.1e}",
        )
    )
    drift = ((free_s - free_p.square()) - (s0 - p0.square())).abs().max().item()
    table.rows.append((0.0, "drift of s - p^2", f"{drift:.1e}", "0", f"{drift:.1e}"))
    claims.append(
        (
            f"no decay: starts above the parabola avoid collapse and end at p = tau/(1+sigma^2) ({len(ends)} starts)",
            bool((ends - 1).abs().max() < 1e-4),
        )
    )

    zero, saddle, stable = linear.fixed_points(0.01, tau, sigma2)
    weak_p, weak_s = paths[0.01][:, -1]
    survived = weak_s > 0.1
    for name, value, closed in (
        ("p of survivors", weak_p[survived].mean().item(), stable.p),
        ("s of survivors", weak_s[survived].mean().item(), stable.s),
        ("s of the collapsed", weak_s[~survived].max().item() if (~survived).any() else 0.0, zero.s),
    ):
        table.rows.append((0.01, name, f"{value:.6f}", f"{closed:.6f}", f"{abs(value - closed):.1e}"))
    boundary = linear.separatrix(0.01, tau, sigma2)
    table.rows.append((0.01, "saddle p_- (basin boundary on the parabola)", f"{saddle.p:.6f}", f"{saddle.p:.6f}", "0"))
    claims.append(
        (
            f"weak decay: two stable points, {int(survived.sum())} of {len(survived)} starts survive",
            bool(survived.any() and (weak_p[survived] - stable.p).abs().max() < 1e-3),
        )
    )
    strong_s = paths[1.0][1, -1].max().item()
    claims.append(
        (
            f"strong decay (eta = 1 > {linear.critical_weight_decay(tau, sigma2)}): all collapse, s {strong_s:.0e}",
            strong_s < 1e-6,
        )
    )

    figure4 = Table("Fixed points of p on the parabola (Fig 4)", ["eta", "p*", "stable", "eigenvalues of the flow"])
    for eta in (0.01, 0.1, 0.2, 0.3):
        for f in linear.fixed_points(eta, tau, sigma2):
            figure4.rows.append(
                (eta, f"{f.p:.4f}", "yes" if f.stable else "no", f"{f.eigenvalues[0]:.3f}, {f.eigenvalues[1]:.3f}")
            )

    tied = ModeDynamics(1.0, 0.5, 1.0, 1.0)  # Fig 10: lambda_s 1, lambda_d 1/2

    def figure10() -> dict[str, Tensor]:
        one = torch.tensor([0.05, 0.3, 1.2], dtype=D)
        target = torch.tensor([1.0, 0.1, 0.6], dtype=D)
        w, _, w_a = linear.integrate(lambda y: tied.triplet_field(*y), (one, one, target), [0.0, 500.0])
        eye = torch.ones(1, 1, dtype=D)
        without = LinearDynamics(0.5 * eye, 0.5 * eye, 1.0, 1.0, train_predictor=False).solve(eye, eye, [0.0, 100.0])
        a, b = torch.tensor([0.4, 1.5, 0.1], dtype=D), torch.tensor([0.1, 0.3, 0.8], dtype=D)

        def fixed_target(y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tied.triplet_field(y[0], y[1], torch.ones_like(y[0]))[:2]

        x, y = linear.integrate(fixed_target, (a, b), [0.0, 200.0])
        return {"tied": w[-1], "target": w_a[-1], "product": x[-1] * y[-1], "without": without.W[-1].flatten()}

    ten = run.stage("figure10", 1, figure10)
    fig10 = Table(
        "Fig 10: lambda_s = 1, lambda_d = 1/2, alpha_p = beta = 1", ["panel", "ours", "published", "difference"]
    )
    for name, values, published in (
        ("fixed target: w w_p", ten["product"], 0.5),
        ("tied: w = w_p", ten["tied"], 0.5),
        ("tied: w_a", ten["target"], 0.5),
        ("no predictor: w", ten["without"], 0.0),
    ):
        gap = (values - published).abs().max().item()
        fig10.rows.append((name, f"{values.mean():.6f}", published, f"{gap:.1e}"))
        claims.append((f"Fig 10, {name} = {published}: within {gap:.1e}", gap < 1e-3))

    def draw(figure: Any) -> None:
        figure.set_size_inches(12, 3.6)
        for axis, eta in zip(figure.subplots(1, 3), etas, strict=True):
            p, s = paths[eta]
            axis.plot(p[:, ::3], s[:, ::3], color="tab:blue", linewidth=0.5)
            x = torch.linspace(0, 1.6, 100)
            axis.plot(x, x**2, "k--", label="s = p²/α_p")
            if eta == 0:
                axis.axvline(1.0, color="tab:red", label="fixed points")
            else:
                for f in linear.fixed_points(eta, tau, sigma2):
                    axis.plot(f.p, f.s, "o", color="tab:red" if f.stable else "tab:green")
                if eta < linear.critical_weight_decay(tau, sigma2):
                    axis.plot(boundary[:, 0], boundary[:, 1], color="tab:orange", label="basin's boundary")
            axis.set(title=f"η = {eta:g}", xlabel="p", ylabel="s", xlim=(0, 1.6), ylim=(0, 1.6))
            axis.legend(fontsize=7)

    return Report("Figs 3, 4, 10: phase portraits (DirectPred)", claims, [table, figure4, fig10], draw)


def ema_weight_decay(run: Run) -> Report:
    """Fig 5: weight decay and EMA raise K's eigenvalue, at the price of small features or slow training."""
    sigma2, start = 0.03**2, torch.tensor([0.3], dtype=D)
    times = torch.linspace(0, run.pick(100.0, 400.0), 1001, dtype=D)
    sweeps: dict[str, Any] = {
        "eta": [(eta, 0.4) for eta in (0.0, 0.01, 0.04, 0.1, 0.3)],
        "beta": [(0.04, beta) for beta in (0.1, 0.2, 0.4, 1.0, None)],
    }
    run.start(10)
    paths: dict[tuple[float, float | None], Tensor] = {}
    table = Table(
        "One mode on the invariant parabola from p = 0.3 with W_a(0) = 0 (beta none: no EMA); least eigenvalue of K",
        ["sweep", "eta", "beta", "least K", "p end", "s end", "steps to half of p's end"],
    )
    summary: dict[str, list[tuple[float, float, float]]] = {"eta": [], "beta": []}
    for name, settings in sweeps.items():
        for eta, beta in settings:

            def compute(eta: float = eta, beta: float | None = beta) -> Tensor:
                modes = ModeDynamics.isotropic(sigma2, 1.0, beta, eta).solve(
                    start, start.square(), times, 1.0 if beta is None else 0.0
                )
                return torch.stack([m[:, 0] for m in modes])

            p, s, tau = paths[eta, beta] = run.stage(f"{name}-{eta:g}-{beta}", 1, compute)
            k = (1 + sigma2) * (s / 2 + p.square()) - tau * p + 1.5 * eta
            risen = (p > 0.3 + 0.5 * (p[-1] - 0.3)).nonzero()
            half = times[risen[0, 0]].item() / STEP if len(risen) and p[-1] > 0.5 else float("nan")
            table.rows.append(
                (
                    name,
                    eta,
                    "none" if beta is None else beta,
                    f"{k.min():.4f}",
                    f"{p[-1]:.4f}",
                    f"{s[-1]:.4f}",
                    f"{half:.0f}",
                )
            )
            summary[name].append((k.min().item(), p[-1].item(), half))
    least, final, _ = zip(*summary["eta"], strict=True)
    claims = [
        ("a larger eta raises the least eigenvalue of K: " + ", ".join(f"{v:.3f}" for v in least), _rising(least)),
        ("and lowers the final p: " + ", ".join(f"{v:.3f}" for v in final), _rising([-f for f in final])),
        (f"a large eta drags the mode to zero: p = {final[-1]:.1e} at eta = {sweeps['eta'][-1][0]}", final[-1] < 1e-2),
    ]
    least, _, halves = zip(*summary["beta"], strict=True)
    claims += [
        (
            "a smaller beta raises the least eigenvalue of K: " + ", ".join(f"{v:.3f}" for v in least),
            _rising([-v for v in least]),
        ),
        (
            "and trains more slowly, steps to half: " + ", ".join(f"{v:.0f}" for v in halves),
            _rising([-v for v in halves]),
        ),
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(12, 6)
        axes = figure.subplots(2, 3)
        for row, (name, settings) in enumerate(sweeps.items()):
            for eta, beta in settings:
                p, s, tau = paths[eta, beta]
                k = (1 + sigma2) * (s / 2 + p.square()) - tau * p + 1.5 * eta
                label = f"η = {eta:g}" if name == "eta" else f"β = {beta}"
                for axis, values in zip(axes[row], (k, p, tau), strict=True):
                    axis.plot(times / STEP, values, label=label)
            for axis, title in zip(axes[row], ("eigenvalue of K", "p", "τ"), strict=True):
                axis.set(title=title, xlabel="step")
            axes[row, 0].axhline(0, color="k", linewidth=0.5)
            axes[row, 2].legend(fontsize=7)

    return Report("Fig 5: the roles of weight decay and EMA (DirectPred)", claims, [table], draw)


def ema_assumption(run: Run) -> Report:
    """Fig 7: the target stays proportional to the online network (Assumption 1)."""
    runs, n, sigma2 = 10, run.pick(8, 16), 0.03**2
    etas, gammas = (0.0, 0.01, 0.1), (0.9, 0.99, 0.996)
    times = torch.linspace(0, 60.0, 121, dtype=D)
    run.start(len(etas) * len(gammas) * runs)
    eye = torch.eye(n, dtype=D)
    curves: dict[tuple[float, float], Tensor] = {}
    for eta in etas:
        for gamma in gammas:

            def compute(eta: float = eta, gamma: float = gamma) -> Tensor:
                dynamics = LinearDynamics(eye, sigma2 * eye, beta=(1 - gamma) / STEP, eta=eta)
                out = []
                for trial in range(runs):
                    generator = torch.Generator().manual_seed(run.seed * 1000 + trial)
                    W, W_p = (torch.randn(n, n, generator=generator, dtype=D) / n**0.5 for _ in range(2))
                    path = dynamics.solve(W, W_p, times, torch.zeros_like(W), rtol=1e-7, atol=1e-9)
                    a, b = path.W.flatten(1), path.W_a.flatten(1)
                    out.append(torch.nn.functional.cosine_similarity(a[1:], b[1:]))
                return torch.stack(out)

            curves[eta, gamma] = run.stage(f"eta{eta:g}-gamma{gamma:g}", runs, compute)
    table = Table(
        f"Normalised correlation of W_a and W, {n} x {n}, mean ± sd of {runs} runs. Published: about 0.9 or more, "
        "also at gamma_a = 0.996 and large eta",
        ["eta", "gamma_a", "least mean over time", "at the end"],
    )
    claims: list[tuple[str, bool]] = []
    for (eta, gamma), c in curves.items():
        low = c.mean(0).min().item()
        table.rows.append((eta, gamma, f"{low:.3f}", f"{c[:, -1].mean():.3f} ± {c[:, -1].std():.3f}"))
    worst = min(c.mean(0).min().item() for c in curves.values())
    claims.append((f"the mean correlation never falls below 0.85 (published: about 0.9): {worst:.3f}", worst > 0.85))

    def draw(figure: Any) -> None:
        figure.set_size_inches(11, 3.4)
        for axis, eta in zip(figure.subplots(1, 3, sharey=True), etas, strict=True):
            for gamma in gammas:
                mean, sd = curves[eta, gamma].mean(0), curves[eta, gamma].std(0)
                line = axis.plot(times[1:] / STEP, mean, label=f"γ_a = {gamma}")[0]
                axis.fill_between(times[1:] / STEP, mean - sd, mean + sd, alpha=0.2, color=line.get_color())
            axis.set(title=f"η = {eta:g}", xlabel="step", ylabel="corr(W_a, W)")
        axis.legend()

    return Report("Fig 7: the target is proportional to the online network (DirectPred)", claims, [table], draw)


def symmetry(run: Run) -> Report:
    """Fig 8: the predictor's asymmetric part vanishes."""
    n, etas, taus, sigma2 = run.pick(8, 20), (0.001, 0.01, 0.05), (0.2, 0.4, 0.6, 0.8, 1.0), 0.03**2
    times = torch.linspace(0, run.pick(400.0, 2000.0), 401, dtype=D)
    run.start(len(etas) * len(taus))
    generator = torch.Generator().manual_seed(run.seed)
    start = torch.randn(n, n, generator=generator, dtype=D) * 0.5 / n**0.5 + 0.3 * torch.eye(n, dtype=D)
    curves: dict[tuple[float, float], Tensor] = {}
    table = Table(
        "Norms of W_p's symmetric and asymmetric part at the end, with F = W_p^T W_p",
        ["eta", "tau", "|A| start", "|A| end", "|B| start", "|B| end"],
    )
    for eta in etas:
        for tau in taus:

            def compute(eta: float = eta, tau: float = tau) -> Tensor:
                dynamics = CorrelationDynamics(sigma2, eta=eta, symmetric=False, tied=True)
                _, W_p, _ = dynamics.solve(start.T @ start, start, times, tau)
                parts = (W_p + W_p.mT) / 2, (W_p - W_p.mT) / 2
                return torch.stack([part.flatten(1).norm(dim=1) for part in parts])

            A, B = curves[eta, tau] = run.stage(f"eta{eta:g}-tau{tau:g}", 1, compute)
            table.rows.append((eta, tau, *(f"{v:.3g}" for v in (A[0], A[-1], B[0], B[-1]))))
    worst = max((c[1, -1] / c[1, 0]).item() for c in curves.values())
    dead = [key for key, c in curves.items() if c[0, -1] < 1e-2 * c[0, 0]]
    claims = [
        (f"|B| vanishes in every setting: at most {worst:.1e} of its start", worst < 0.1),
        (
            "large eta with small tau drags |A| to zero too: " + ", ".join(f"({e:g}, {t:g})" for e, t in dead),
            (0.05, 0.2) in dead and (0.001, 1.0) not in dead,
        ),
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(9, 7)
        axes = figure.subplots(3, 2, sharex=True)
        for row, eta in enumerate(etas):
            for tau in taus:
                for axis, values in zip(axes[row], curves[eta, tau], strict=True):
                    axis.plot(times, values, label=f"τ = {tau:g}")
            axes[row, 0].set(title=f"symmetric part, η = {eta:g}")
            axes[row, 1].set(title=f"asymmetric part, η = {eta:g}")
        axes[0, 0].legend(fontsize=7)

    return Report("Fig 8: the predictor becomes symmetric (DirectPred)", claims, [table], draw)


def commutator(run: Run) -> Report:
    """Fig 9: the commutator of F and W_p shrinks, or shoots up first without decay and with a large tau."""
    n, etas, taus, sigma2 = run.pick(8, 20), (0.0, 0.01, 0.05, 0.1), (0.2, 0.4, 0.6, 0.8, 1.0), 0.03**2
    times = torch.linspace(0, run.pick(60.0, 200.0), 301, dtype=D)
    run.start(len(etas) * len(taus))
    generator = torch.Generator().manual_seed(run.seed)
    # A small start, as in training: near zero the commutator is third order in it and has room to grow.
    W, W_p = (0.05 * torch.randn(n, n, generator=generator, dtype=D) / n**0.5 for _ in range(2))
    F, W_p = W @ W.T, (W_p + W_p.T) / 2 + 0.05 * torch.eye(n, dtype=D)
    curves: dict[tuple[float, float], Tensor] = {}
    table = Table(
        "Frobenius norm of [F, W_p] relative to its start, and the least eigenvalue of K over time",
        ["eta", "tau", "highest", "end", "least K"],
    )
    sound = True
    for eta in etas:
        for tau in taus:

            def compute(eta: float = eta, tau: float = tau) -> Tensor:
                F_t, W_t, _ = CorrelationDynamics(sigma2, eta=eta).solve(F, W_p, times, tau)
                norm = (F_t @ W_t - W_t @ F_t).flatten(1).norm(dim=1)
                K = linear.alignment_matrix(F_t, W_t, sigma2, 1.0, eta, tau)
                return torch.stack([norm / norm[0], torch.linalg.eigvalsh(K)[:, 0]])

            norm, least = curves[eta, tau] = run.stage(f"eta{eta:g}-tau{tau:g}", 1, compute)
            table.rows.append((eta, tau, f"{norm.max():.3g}", f"{norm[-1]:.2g}", f"{least.min():.3f}"))
            if least.min() > 0:
                sound &= bool((norm <= torch.exp(-2 * least.min() * times) + 1e-6).all())
    peaks = {key: c[0].max().item() for key, c in curves.items()}
    claims = [
        (f"without decay and with tau = 1 it shoots up: x{peaks[0.0, 1.0]:.3g}", peaks[0.0, 1.0] > 2),
        (f"a strong decay and a small tau prevent it: x{peaks[0.1, 0.2]:.3g}", peaks[0.1, 0.2] <= 1.0 + 1e-9),
        (
            "a larger eta lowers the peak at tau = 1: " + ", ".join(f"{peaks[e, 1.0]:.3g}" for e in etas),
            _rising([-peaks[e, 1.0] for e in etas]),
        ),
        (
            "a smaller tau lowers the peak at eta = 0: " + ", ".join(f"{peaks[0.0, t]:.3g}" for t in taus),
            _rising([peaks[0.0, t] for t in taus]),
        ),
        ("where K stays positive the norm keeps below exp(-2 lambda_0 t) (Theorem 3)", sound),
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(12, 3.2)
        for axis, eta in zip(figure.subplots(1, len(etas)), etas, strict=True):
            for tau in taus:
                axis.plot(times, curves[eta, tau][0], label=f"τ = {tau:g}")
            axis.set(title=f"η = {eta:g}", xlabel="time", yscale="log", ylim=(1e-4, None))
        axis.legend(fontsize=7)

    return Report("Fig 9: the commutator of F and W_p (DirectPred)", claims, [table], draw)


def _rising(values: Any) -> bool:
    return all(a <= b + 1e-9 for a, b in itertools.pairwise(values))
