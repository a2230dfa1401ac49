"""Patterns of the papers' image tables at small scale, on the embedded digits.

The published figures are of ResNet-18 on STL-10 or CIFAR-10 for hundreds of epochs: only the order of the settings can
be compared, and the reports give the rank correlation.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_ssl import functional
from lightning_ssl.data import ImageDataModule
from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, SimSiam
from lightning_ssl.nn import SmallConv
from lightning_ssl.theory.reproduce.report import Claim, Report, Run, Table, greater_test, rank_test, sign_test


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=4e-4)


HEADS = {"projector_hidden": 128, "projector_dim": 64}
MLP = {**HEADS, "optimizer": _adam, "momentum": 0.98}
LINEAR = {**HEADS, "optimizer": _sgd, "momentum": 0.97, "predictor": "linear", "predictor_lr_scale": 10.0}
NONE = {**MLP, "predictor": "none"}
BN = {"predictor_norm": "batch"}

# RAFT Table 1: alignment (per coordinate there: 128 of them), uniformity, linear evaluation.
RAFT_TABLE1 = {
    "BYOL, mlp": (BYOL, MLP, (25.03e-4, -2.22, 64.32)),
    "BYOL', mlp": (BYOLPrime, {**MLP, **BN}, (22.09e-4, -2.07, 69.21)),
    "RAFT, mlp": (RAFT, {**MLP, **BN}, (18.90e-4, -2.04, 71.31)),
    "BYOL, linear": (BYOL, LINEAR, (7.71e-4, -2.16, 67.64)),
    "BYOL', linear": (BYOLPrime, LINEAR, (7.32e-4, -2.19, 68.61)),
    "RAFT, linear": (RAFT, LINEAR, (7.42e-4, -2.23, 67.55)),
    "BYOL, none": (BYOL, NONE, (1.94e-10, -0.14, 20.92)),
    "BYOL', none": (BYOLPrime, NONE, (1.35e-10, -0.10, 16.92)),
    "RAFT, none": (RAFT, NONE, (16.07e-4, -0.006, 11.72)),
}
BASELINE = (78.09e-4, -0.51, 42.74)


def _parts(predictor: bool, ema: bool, norm: bool) -> dict[str, Any]:
    options = {**(MLP if predictor else NONE), "projector_norm": "batch" if norm else "none"}
    if predictor:
        options["predictor_norm"] = "batch" if norm else "none"
    return {**options, "momentum": 0.98 if ema else 0.0}


# DDN-v1 Table 3: predictor, EMA and BatchNorm (in projector and predictor), top-1 on STL-10.
TABLE3 = {
    "-": (_parts(False, False, False), 38.7),
    "EMA": (_parts(False, True, False), 39.3),
    "BN": (_parts(False, False, True), 33.0),
    "EMA, BN": (_parts(False, True, True), 32.8),
    "P": (_parts(True, False, False), 39.5),
    "P, EMA": (_parts(True, True, False), 44.4),
    "P, BN": (_parts(True, False, True), 63.6),
    "P, EMA, BN": (_parts(True, True, True), 78.1),
}
# DDN-v1 Table 4: which parts of BatchNorm are kept, and through which the gradient passes.
TABLE4 = {
    "none": 43.9,
    "mean": 64.8,
    "std": 72.2,
    "mean,std": 78.1,
    "detached_mean": 44.2,
    "detached_std": 54.2,
    "detached_mean,std": 48.3,
    "mean,detached_std": 76.3,
    "detached_mean,detached_std": 47.0,
}


def _data(seed: int) -> ImageDataModule:
    return ImageDataModule(batch_size=64, image_size=16, seed=seed)


def _train(model: L.LightningModule, epochs: int, seed: int, *callbacks: L.Callback) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=list(callbacks),
        )
        try:
            trainer.fit(model, datamodule=_data(seed))
        except SystemExit as error:  # Lightning's answer to Ctrl-C
            raise KeyboardInterrupt from error


@torch.no_grad()
def _measure(model: Any, seed: int) -> dict[str, float]:
    """Linear probe and kNN of the backbone's features; uniformity, alignment and L_bound of the projections."""
    module = _data(seed)
    module.setup("fit")
    (x, y), (x_test, y_test) = (
        (torch.cat([b.image for b in loader]), torch.cat([b.label for b in loader]))
        for loader in module.probe_dataloaders()
    )
    model.eval()
    features, test = model(x), model(x_test)
    weight, bias = functional.fit_linear_probe(features, y, 10, 1e-4)
    neighbours = functional.knn_predict(test, features, y, 10, k=20)[:, 0]
    projected = model.project(x)
    predictor = getattr(model, "predictor", torch.nn.Identity())
    views = module.on_after_batch_transfer(next(iter(module.val_dataloader())), 0).views[:2]
    l_cor = functional.correlation_loss(projected)
    model.train()
    return {
        "probe": 100 * ((test @ weight.T + bias).argmax(1) == y_test).double().mean().item(),
        "knn": 100 * (neighbours == y_test).double().mean().item(),
        "uniformity": functional.uniformity(projected).item(),
        "alignment": functional.alignment(*(predictor(model.project(v)) for v in views)).item(),
        "bound": functional.generalization_bound(l_cor, projected.shape[1], 10).item(),
    }


def byol_ablations(run: Run) -> Report:
    """RAFT Table 1 and DDN-v1 Tables 3-5 on digits."""
    seeds, epochs = range(run.seed, run.seed + run.pick(3, 5)), int(run.options.get("epochs") or run.pick(30, 60))
    runs: dict[str, tuple[Any, dict[str, Any]]] = {f"raft/{k}": (m, o) for k, (m, o, _) in RAFT_TABLE1.items()}
    runs |= {f"table3/{k}": (BYOL, o) for k, (o, _) in TABLE3.items()}
    runs |= {f"table4/{k}": (BYOL, {**MLP, "projector_norm": k, "predictor_norm": k}) for k in TABLE4}
    runs |= {f"table5/{k}": (BYOL, {**MLP, "predictor_reset_every": k}) for k in (2, 5, 10)}
    run.start((len(runs) + 1) * len(seeds))
    results: dict[str, dict[str, Tensor]] = {}
    for name, (method, options) in {"untrained": (BYOL, MLP), **runs}.items():
        values = []
        for seed in seeds:

            def compute(name: str = name, method: Any = method, options: Any = options, seed: int = seed) -> Any:
                L.seed_everything(seed, verbose=False)
                # The settings were found with affine batch norms in the heads.
                affine = {"norm_affine": True} if method is BYOL else {}
                model = method(backbone=SmallConv(width=16), **options, **affine)
                if name != "untrained":
                    _train(model, epochs, seed)
                return _measure(model, seed)

            values.append(run.stage(f"{name.replace('/', '-').replace(' ', '_')}-{seed}", 1, compute))
        results[name] = {k: torch.tensor([v[k] for v in values]) for k in values[0]}

    def mean(name: str, key: str = "probe") -> float:
        return results[name][key].mean().item()

    base = mean("untrained")
    first = Table(
        f"RAFT Table 1: ours on digits (mean of {len(seeds)}, {epochs} epochs) / published on CIFAR-10. "
        "Published alignment is per coordinate",
        ["method, predictor", "alignment", "uniformity", "linear probe, %"],
    )
    for name, published in [("untrained", BASELINE), *((f"raft/{k}", v[2]) for k, v in RAFT_TABLE1.items())]:
        first.rows.append(
            (
                name.removeprefix("raft/"),
                f"{mean(name, 'alignment'):.1e} / {published[0]:.1e}",
                f"{mean(name, 'uniformity'):.3f} / {published[1]:.3g}",
                f"{mean(name):.1f} / {published[2]}",
            )
        )
    third = Table("DDN-v1 Table 3: top-1, ours on digits / published on STL-10", ["parts", "ours", "published"])
    third.rows = [(k, f"{mean(f'table3/{k}'):.1f}", v) for k, (_, v) in TABLE3.items()]
    fourth = Table("DDN-v1 Table 4: parts of BatchNorm", ["parts", "ours", "published"])
    fourth.rows = [(k, f"{mean(f'table4/{k}'):.1f}", v) for k, v in TABLE4.items()]
    fifth = Table("DDN-v1 Table 5: predictor started anew every T epochs", ["T", "ours", "published (T of 100 epochs)"])
    resets = [("never", mean("table3/P, EMA, BN"), 78.1)]
    resets += [(str(t), mean(f"table5/{t}"), v) for t, v in ((2, 78.6), (5, 79.1), (10, 79.0))]
    fifth.rows = [(t, f"{ours:.1f}", published) for t, ours, published in resets]

    def above(larger: str, smaller: str, key: str = "probe", slack: float = 0.0) -> float:
        return greater_test(results[larger][key] + slack, results[smaller][key])

    learnt = [k for k in RAFT_TABLE1 if not k.endswith("none")]
    rank3, p3 = rank_test([mean(f"table3/{k}") for k in TABLE3], [v for _, v in TABLE3.values()])
    rank4, p4 = rank_test([mean(f"table4/{k}") for k in TABLE4], list(TABLE4.values()))
    whole = "table3/P, EMA, BN"
    others = [f"table3/{k}" for k in TABLE3 if f"table3/{k}" != whole]
    best = max(others, key=mean)
    kept = [f"table4/{k}" for k in TABLE4 if k.startswith("mean")]
    detached = [f"table4/{k}" for k in TABLE4 if k.startswith("detached_mean")]
    worst_kept, best_detached = min(kept, key=mean), max(detached, key=mean)
    claims = [
        Claim(
            "with a predictor every method beats the untrained encoder: "
            + ", ".join(f"{mean(f'raft/{k}'):.0f}" for k in learnt)
            + f" > {base:.0f}",
            all(mean(f"raft/{k}") > base for k in learnt),
            max(above(f"raft/{k}", "untrained") for k in learnt),
        ),
        Claim(
            "and improves uniformity",
            all(mean(f"raft/{k}", "uniformity") < mean("untrained", "uniformity") for k in learnt),
            max(above("untrained", f"raft/{k}", "uniformity") for k in learnt),
        ),
        *[
            Claim(
                f"{k[:-6]} without a predictor falls below it: {mean(f'raft/{k}'):.0f}, uniformity "
                f"{mean(f'raft/{k}', 'uniformity'):.3f}, alignment {mean(f'raft/{k}', 'alignment'):.0e}",
                mean(f"raft/{k}") < base and mean(f"raft/{k}", "uniformity") > mean("untrained", "uniformity"),
                max(above("untrained", f"raft/{k}"), above(f"raft/{k}", "untrained", "uniformity")),
            )
            for k in ("BYOL, none", "BYOL', none")
        ],
        Claim(
            f"RAFT without a predictor does not learn: {mean('raft/RAFT, none'):.0f}",
            mean("raft/RAFT, none") < base,
            above("untrained", "raft/RAFT, none"),
        ),
        Claim(
            "predictor, EMA and BatchNorm together are not 5 points below the best other setting: "
            f"{mean(whole):.1f}, {mean(best):.1f} ({best.removeprefix('table3/')})",
            mean(whole) > mean(best) - 5,
            above(whole, best, slack=5.0),
        ),
        Claim(f"Table 3's order: rank correlation {rank3:.2f} over {len(TABLE3)} settings", rank3 > 0, p3),
        Claim(f"Table 4's order: rank correlation {rank4:.2f} over {len(TABLE4)} settings", rank4 > 0, p4),
        Claim(
            f"a kept mean beats a detached one: {mean(worst_kept):.0f} > {mean(best_detached):.0f}",
            mean(worst_kept) > mean(best_detached),
            above(worst_kept, best_detached),
        ),
        Claim(
            f"starting the predictor anew every 10 epochs does no harm (5 points): {resets[-1][1]:.0f} against "
            f"{resets[0][1]:.0f}",
            resets[-1][1] > resets[0][1] - 5,
            above("table5/10", whole, slack=5.0),
        ),
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 4)
        axes = figure.subplots(1, 3)
        for axis, prefix, published in (
            (axes[0], "raft", {k: v[2][2] for k, v in RAFT_TABLE1.items()}),
            (axes[1], "table3", {k: v for k, (_, v) in TABLE3.items()}),
            (axes[2], "table4", TABLE4),
        ):
            for k, v in published.items():
                axis.plot(v, mean(f"{prefix}/{k}"), "o")
                axis.annotate(k, (v, mean(f"{prefix}/{k}")), fontsize=6)
            axis.axhline(base, color="k", linewidth=0.5)
            axis.set(title=prefix, xlabel="published, %", ylabel="ours on digits, %")

    return Report("BYOL, BYOL', RAFT and their ablations on digits", claims, [first, third, fourth, fifth], draw)


def bound(run: Run) -> Report:
    """Bound Figs 3-4: L_bound and kNN accuracy, over output dimensions and over training."""
    epochs, every = int(run.options.get("epochs") or run.pick(20, 60)), run.pick(4, 5)
    dims = run.pick((4, 8, 16, 32, 64, 128), (4, 8, 16, 32, 64, 128, 256, 512))
    published = {4: (57.16, 76.05), 8: (62.49, 82.14), 16: (67.94, 83.20), 32: (72.73, 84.56), 64: (77.19, 85.05),
                 128: (78.94, 85.78), 256: (81.05, 85.99), 512: (82.79, 87.63)}  # fmt: skip
    methods = {
        "Barlow Twins": lambda d: BarlowTwins(
            SmallConv(width=16),
            projector_hidden=128,
            projector_bias=True,
            dim=d,
            lambd=0.02,
            optimizer=_adam,
            scheduler="constant",
            warmup_epochs=0,
        ),
        # The paper's projector is linear too; in so short a training on so few images that one collapses.
        "SimSiam": lambda d: SimSiam(
            SmallConv(width=16, depth=4),
            projector_layers=2,
            projector_hidden=128,
            dim=d,
            predictor="linear",
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=4e-4),
            scheduler="constant",
        ),
    }  # fmt: skip
    run.start(len(methods) * len(dims))
    paths: dict[tuple[str, int], Tensor] = {}  # [observations, (L_bound, kNN)]
    table = Table(
        f"After {epochs} epochs on digits; published: kNN on CIFAR-10 (Bound Table 1)",
        ["method", "d", "L_bound", "kNN, %", "published kNN, %", "correlation over training"],
    )
    final: dict[str, list[tuple[float, float, float]]] = {name: [] for name in methods}
    within = []
    for column, (name, build) in enumerate(methods.items()):
        for d in dims:

            def compute(build: Any = build, d: int = d) -> Tensor:
                L.seed_everything(run.seed, verbose=False)
                model = build(d)
                seen = []

                class Watch(L.Callback):
                    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
                        if (trainer.current_epoch + 1) % every == 0 or trainer.current_epoch + 1 == epochs:
                            values = _measure(module, run.seed)
                            seen.append([values["bound"], values["knn"]])

                start = _measure(model, run.seed)
                _train(model, epochs, run.seed, Watch())
                return torch.tensor([[start["bound"], start["knn"]], *seen])

            path = paths[name, d] = run.stage(f"{name.replace(' ', '_')}-{d}", 1, compute)
            rho = torch.corrcoef(path.T)[0, 1].item()
            within.append(rho)
            table.rows.append((name, d, f"{path[-1, 0]:.3f}", f"{path[-1, 1]:.1f}", published[d][column], f"{rho:.2f}"))
            final[name].append((path[-1, 0].item(), path[-1, 1].item(), published[d][column]))
    claims: list[Claim] = []
    for name, rows in final.items():
        b, accuracy, theirs = zip(*rows, strict=True)
        rank, p_rank = rank_test(b, accuracy)
        order, p_order = rank_test(accuracy, theirs)
        claims += [
            Claim(
                f"{name}: a smaller L_bound goes with a higher kNN accuracy over d: rank correlation {rank:.2f}",
                rank < 0,
                p_rank,
            ),
            Claim(f"{name}: accuracy falls with d as published: rank correlation {order:.2f}", order > 0, p_order),
        ]
    falling = sum(r < 0 for r in within)
    text = f"over training L_bound falls as accuracy rises: {falling} of {len(within)} runs"
    claims.append(Claim(text, falling > len(within) / 2, sign_test(falling, len(within))))

    def draw(figure: Any) -> None:
        figure.set_size_inches(9, 4)
        for axis, name in zip(figure.subplots(1, 2), methods, strict=True):
            for d in dims:
                path = paths[name, d]
                axis.plot(path[:, 0], path[:, 1], ".-", linewidth=0.7, label=f"d = {d}")
                axis.plot(path[-1, 0], path[-1, 1], "ko", markersize=4)
            axis.set(title=name, xlabel="L_bound", ylabel="kNN, %")
            axis.legend(fontsize=6)

    return Report("Figs 3-4: L_bound and kNN accuracy on digits (Bound)", claims, [table], draw)


LPI = {**LINEAR, "predictor_init": "identity", "predictor_bias": False}
# RAFT Fig. 1: BYOL with an MLP predictor, a linear one, a linear one that starts as the identity, and none.
FIG1 = {"MLPP": MLP, "LP": {**LINEAR, "predictor_bias": False}, "LPI": LPI, "NP": NONE}
# RAFT Fig. 4: what the weight of the cross-model loss does.
FIG4: dict[str, tuple[Any, dict[str, Any]]] = {
    "BYOL'-NP": (BYOLPrime, NONE),
    "RAFT-NP": (RAFT, NONE),
    "RAFT-LP": (RAFT, {**LINEAR, "predictor_bias": False}),
}
BETAS = (1.0, 10.0, 100.0)


def raft_figures(run: Run) -> Report:
    """RAFT Figs 1 and 4: loss, alignment and uniformity over training, by predictor and by the weight beta."""
    seeds, epochs = range(run.seed, run.seed + run.pick(3, 5)), int(run.options.get("epochs") or run.pick(30, 60))
    settings: dict[str, tuple[Any, dict[str, Any]]] = {f"BYOL-{k}": (BYOL, o) for k, o in FIG1.items()}
    settings |= {
        f"{name}, beta {beta:g}": (method, {**options, "cross_model_weight": beta})
        for name, (method, options) in FIG4.items()
        for beta in BETAS
    }
    run.start(len(settings) * len(seeds))
    paths: dict[str, Tensor] = {}  # [seeds, epochs + 1, (loss, alignment, uniformity, probe)]
    for name, (method, options) in settings.items():
        curves = []
        for seed in seeds:

            def compute(method: Any = method, options: Any = options, seed: int = seed) -> Tensor:
                L.seed_everything(seed, verbose=False)
                model = method(backbone=SmallConv(width=16), **options)
                trace = Trace(seed)
                _train(model, epochs, seed, trace)
                probe = _measure(model, seed)["probe"]
                return torch.tensor([[*values, probe] for values in trace.seen])

            key = name.replace(", ", "-").replace(" ", "").replace("'", "p")
            curves.append(run.stage(f"{key}-{seed}", 1, compute))
        paths[name] = torch.stack(curves)

    def last(name: str, column: int) -> Tensor:
        return paths[name][:, -1, column]

    table = Table(
        f"First epoch and last of {epochs} on digits, mean of {len(seeds)} seeds: training loss, alignment of the "
        "predictions, uniformity of the projections, and the final linear probe",
        ["run", "loss", "alignment", "uniformity", "probe, %"],
    )
    for name, path in paths.items():
        ends = path[:, [0, -1]].mean(0)
        cells = [f"{ends[0, c]:.3g} → {ends[1, c]:.3g}" for c in range(3)]
        table.rows.append((name, *cells, f"{ends[1, 3]:.1f}"))
    lowest = paths["BYOL-LPI"][:, :, 0].min(1).values
    recovers = paths["BYOL-LPI"][:, -1, 2], paths["BYOL-LPI"][:, :, 2].max(1).values
    strong, weak = f"beta {BETAS[-1]:g}", f"beta {BETAS[0]:g}"
    claims = [
        Claim(
            "Fig 1: without a predictor the loss goes to 0, with one it does not: "
            f"{last('BYOL-NP', 0).mean():.1e} against {last('BYOL-MLPP', 0).mean():.2g} and "
            f"{last('BYOL-LP', 0).mean():.2g}",
            bool(last("BYOL-NP", 0).mean() < min(last("BYOL-MLPP", 0).mean(), last("BYOL-LP", 0).mean())),
            max(greater_test(last(f"BYOL-{k}", 0), last("BYOL-NP", 0)) for k in ("MLPP", "LP")),
        ),
        Claim(
            "Fig 1: a linear predictor that starts as the identity first nears collapse, then recovers its uniformity: "
            f"highest {recovers[1].mean():.2f}, last {recovers[0].mean():.2f} (lowest loss {lowest.mean():.1e})",
            bool(recovers[0].mean() < recovers[1].mean() - 0.05),
            greater_test(recovers[1], recovers[0]),
        ),
        Claim(
            "Fig 1: every predictor ends more uniform than none: "
            + ", ".join(f"{k} {last(f'BYOL-{k}', 2).mean():.2f}" for k in FIG1),
            all(last(f"BYOL-{k}", 2).mean() < last("BYOL-NP", 2).mean() for k in ("MLPP", "LP", "LPI")),
            max(greater_test(last("BYOL-NP", 2), last(f"BYOL-{k}", 2)) for k in ("MLPP", "LP", "LPI")),
        ),
        Claim(
            "Fig 4a: BYOL' without a predictor: alignment goes to 0 at any beta: "
            + ", ".join(f"{last(f'BYOL{chr(39)}-NP, beta {b:g}', 1).mean():.1e}" for b in BETAS),
            all(float(last(f"BYOL'-NP, beta {b:g}", 1).max()) < 1e-2 for b in BETAS),
        ),
        Claim(
            "Fig 4b: RAFT without a predictor: a larger beta keeps alignment from vanishing: "
            f"{last(f'RAFT-NP, {strong}', 1).mean():.2g} at {BETAS[-1]:g}, "
            f"{last(f'RAFT-NP, {weak}', 1).mean():.2g} at {BETAS[0]:g}",
            bool(last(f"RAFT-NP, {strong}", 1).mean() > last(f"RAFT-NP, {weak}", 1).mean()),
            greater_test(last(f"RAFT-NP, {strong}", 1), last(f"RAFT-NP, {weak}", 1)),
        ),
        Claim(
            "Fig 4c: RAFT with a linear predictor improves uniformity over training: "
            f"{paths[f'RAFT-LP, {weak}'][:, 0, 2].mean():.2f} to {last(f'RAFT-LP, {weak}', 2).mean():.2f}",
            bool(last(f"RAFT-LP, {weak}", 2).mean() < paths[f"RAFT-LP, {weak}"][:, 0, 2].mean()),
            greater_test(paths[f"RAFT-LP, {weak}"][:, 0, 2], last(f"RAFT-LP, {weak}", 2)),
        ),
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 6)
        axes = figure.subplots(2, 3)
        for name, path in paths.items():
            mean = path.mean(0)
            if name.startswith("BYOL-"):
                axes[0, 0].plot(mean[:, 0].clamp_min(1e-8), label=name)
                axes[0, 1].plot(mean[:, 2], label=name)
            else:
                column = list(FIG4).index(name.split(",")[0])
                axes[1, column].plot(mean[:, 1].clamp_min(1e-10), mean[:, 2], ".-", label=name)
                axes[1, column].set(xlabel="alignment", ylabel="uniformity", xscale="log")
        axes[0, 0].set(title="loss (Fig 1a)", yscale="log", xlabel="epoch")
        axes[0, 1].set(title="uniformity (Fig 1b)", xlabel="epoch")
        axes[0, 2].axis("off")
        for axis in axes.flat[[0, 1, 3, 4, 5]]:
            axis.legend(fontsize=6)

    return Report("Figs 1 and 4: predictors and weights over training, on digits (RAFT)", claims, [table], draw)


class Trace(L.Callback):
    """(training loss, alignment, uniformity) after each epoch, of one and the same held-out batch."""

    def __init__(self, seed: int) -> None:
        self.seen: list[list[float]] = []
        self.losses: list[float] = []
        self.seed = seed

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if not hasattr(self, "views"):
            data = _data(self.seed)
            data.setup("fit")
            self.views = data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0).views[:2]
        module.eval()
        projections = [module.project(view) for view in self.views]
        predictor = getattr(module, "predictor", torch.nn.Identity())
        alignment = functional.alignment(*(predictor(z) for z in projections)).item()
        module.train()
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        self.seen.append([loss, alignment, functional.uniformity(projections[0]).item()])
