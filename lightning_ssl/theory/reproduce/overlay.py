"""Theory against a real run: the measured (s_j, p_j) of a linear predictor and the decoupled dynamics' prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from torch import Tensor

from lightning_ssl.theory import linear
from lightning_ssl.theory.linear import ModeDynamics
from lightning_ssl.theory.reproduce.report import Report, Run, Table

SPECTRA = "predictor_spectra.npz"
MOST_EVALUATIONS = 4000  # of the flow, for one trajectory: rates at which it takes more do not describe a run
TAUGHT = ("BYOL", "SimSiam", "BYOLPrime", "RAFT")  # methods of ours whose predictor follows its gradient


class _Plain(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain values and takes whatever is a Python object for None."""


_Plain.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


class Hyperparameters(NamedTuple):
    """What the flow needs of a run.

    Attributes:
        step: Time of one step, lr / (1 - SGD momentum).
        alpha_p: The predictor's learning rate relative to the encoder's.
        beta: EMA rate in time units; None where the target is the online network.
        eta: Weight decay of the encoder.
        eta_p: Weight decay of the predictor (times alpha_p, its own rate).
        normalize: Whether the loss is l2-normalised, which the linear theory has not: then time is in other units.
    """

    step: float
    alpha_p: float
    beta: float | None
    eta: float
    eta_p: float
    normalize: bool


class Spectra(NamedTuple):
    """Measured steps ``[T]``, eigenvalues s_j and predictor values p_j ``[T, modes]``."""

    step: Tensor
    s: Tensor
    p: Tensor


def overlay(run: Run) -> Report:
    """Measured trajectories of a run beside those predicted from its start and hyperparameters."""
    if "run" not in run.options:
        raise ValueError("overlay needs --run LOGDIR: the log folder of a run with the EigenspaceAlignment callback.")
    folder = Path(run.options["run"])
    if folder.is_dir() and (reasons := not_covered(folder)):
        return still_comparable(folder, read_spectra(folder, least=1), reasons)
    spectra = read_spectra(folder)
    hyper = read_hyperparameters(folder, run.options)
    run.start(2)
    sigma2, stretch = run.options.get("sigma2"), 1.0
    if sigma2 is None or hyper.normalize:
        sigma2, stretch = fit(spectra, hyper)
    run.advance()
    p, s = predict(spectra, hyper, sigma2, stretch)
    run.advance()
    scale_p, scale_s = spectra.p.abs().amax(), spectra.s.amax()
    error_p = (p - spectra.p).abs().amax(0) / scale_p
    error_s = (s - spectra.s).abs().amax(0) / scale_s
    table = Table(
        f"Modes of {folder.name}: measured / predicted at the last step, and the largest gap over the run relative to "
        "the largest mode",
        ["mode", "p start", "p end", "s start", "s end", "gap in p", "gap in s"],
    )
    shown = range(min(16, spectra.p.shape[1]))
    for j in shown:
        table.rows.append(
            (
                j,
                f"{spectra.p[0, j]:.3f}",
                f"{spectra.p[-1, j]:.3f} / {p[-1, j]:.3f}",
                f"{spectra.s[0, j]:.3g}",
                f"{spectra.s[-1, j]:.3g} / {s[-1, j]:.3g}",
                f"{error_p[j]:.1%}",
                f"{error_s[j]:.1%}",
            )
        )
    weight = spectra.s[-1] / spectra.s[-1].sum().clamp_min(1e-30)
    mean_gap = (weight * torch.maximum(error_p, error_s)).sum().item()
    how = "one fitted number" if not hyper.normalize else "two fitted numbers: the loss is l2-normalised"
    claims = [
        (
            f"the decoupled dynamics follow the run within 10%: the gap, weighted by s_j, is {mean_gap:.1%} "
            f"(alpha_p {hyper.alpha_p:g}, beta {hyper.beta if hyper.beta is None else round(hyper.beta, 4)}, eta "
            f"{hyper.eta:g}; {how}: sigma^2 {sigma2:.3g}, time x{stretch:.3g})",
            mean_gap < 0.10,
        )
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(11, 3.6)
        left, middle, right = figure.subplots(1, 3)
        colors = [f"C{j % 10}" for j in shown]
        for j in shown:
            for axis, seen, predicted in ((left, spectra.p, p), (middle, spectra.s, s)):
                axis.plot(spectra.step, seen[:, j], color=colors[j])
                axis.plot(spectra.step, predicted[:, j], "--", color=colors[j], linewidth=0.8)
            right.plot(spectra.p[:, j], spectra.s[:, j], color=colors[j])
            right.plot(p[:, j], s[:, j], "--", color=colors[j], linewidth=0.8)
        left.set(title="p_j: measured, predicted (dashed)", xlabel="step")
        middle.set(title="s_j", xlabel="step")
        grid = torch.linspace(0, max(0.1, float(spectra.p.max())) * 1.1, 100)
        right.plot(grid, (1 + sigma2) * grid**2 / hyper.alpha_p, "k:", label="invariant parabola")
        if 0 < hyper.eta < linear.critical_weight_decay(1.0, sigma2):
            edge = linear.separatrix(hyper.eta, 1.0, sigma2, hyper.alpha_p)
            right.plot(edge[:, 0], (1 + sigma2) * edge[:, 1], color="tab:red", label="collapse basin (τ = 1)")
        right.set(title="phase plane", xlabel="p_j", ylabel="s_j", ylim=(0, float(spectra.s.max()) * 1.2 + 1e-9))
        right.set_xlim(min(0.0, float(spectra.p.min())), float(grid.max()))
        right.legend(fontsize=7)

    return Report("Theory over a real run: decoupled modes", claims, [table], draw)


def not_covered(folder: Path) -> list[str]:
    """Why the theory does not speak of a run, from its config; empty where it does, or where nothing is known."""
    model, config = read_model(folder)
    optimizer, predictor = config.get("optimizer"), config.get("predictor")
    kind = str(optimizer.get("class_path", "")).rpartition(".")[2] if isinstance(optimizer, dict) else ""
    name = model.rpartition(".")[2]
    found = []
    if name == "DirectPred":
        found.append("DirectPred sets its predictor from F, so that it does not follow the gradient of Eqs. 11-12")
    elif predictor not in (None, "linear"):
        found.append(f"its predictor ({predictor}) is not linear")
    if kind and kind != "SGD":
        found.append(f"it was trained with {kind}, and the theory is of SGD")
    if config.get("scheduler") not in (None, "constant") or config.get("warmup_epochs"):
        found.append("its learning rate is scheduled, and the flow's time is of a constant one")
    if name and name not in (*TAUGHT, "DirectPred") and model.startswith("lightning_ssl."):
        found.append(f"{name} has no predictor")
    return found


def still_comparable(folder: Path, spectra: Spectra, reasons: list[str]) -> Report:
    """What holds of any run with a predictor: that eigenspaces align, and that s_j grows like p_j^2."""
    title = f"Theory over {folder.name}: the decoupled dynamics do not cover this run"
    cosines = _cosines(folder, spectra)
    weight = spectra.s / spectra.s.sum(1, keepdim=True).clamp_min(1e-30)
    aligned = (weight * cosines).sum(1)
    ends = Table("What can still be compared", ["quantity", "theory", "first", "last"])
    ends.rows.append(("eigenspaces of W along F's (mean cosine, by s_j)", "1", *(f"{aligned[i]:.3f}" for i in (0, -1))))
    powers = [_power(spectra.p[i], spectra.s[i]) for i in (0, -1)]
    ends.rows.append(("s_j grows like p_j to the power", "2 (invariant parabola)", *(f"{x:.2f}" for x in powers)))
    modes = Table(f"Modes of {folder.name}", ["mode", "p first", "p last", "s first", "s last"])
    for j in range(min(8, spectra.p.shape[1])):
        values = (spectra.p[0, j], spectra.p[-1, j], spectra.s[0, j], spectra.s[-1, j])
        modes.rows.append((j, *(f"{value:.3g}" for value in values)))
    return Report(title, [], [ends, modes], None, f"Not covered: {'; '.join(reasons)}. Nothing was fitted.")


def _cosines(folder: Path, spectra: Spectra) -> Tensor:
    with np.load(sorted(folder.rglob("*_spectra.npz"))[0]) as file:
        return torch.from_numpy(file["cosines"]).double() if "cosines" in file.files else torch.zeros_like(spectra.s)


def _power(p: Tensor, s: Tensor) -> float:
    """The slope of log s over log p, of the modes that have both."""
    seen = (p > 1e-6) & (s > 1e-9 * s.amax())
    if int(seen.sum()) < 3 or float(p[seen].std()) < 1e-9:
        return float("nan")
    return float(np.polyfit(p[seen].log().numpy(), s[seen].log().numpy(), 1)[0])


def page_charts(folder: Path, modes: int = 6) -> list[dict[str, Any]]:
    """Measured and predicted modes as charts of a run's page; none where the theory does not cover the run."""
    try:
        spectra = read_spectra(folder)
        if not_covered(folder):
            return []
        hyper = read_hyperparameters(folder, {})
        sigma2, stretch = fit(spectra, hyper)
        p, s = predict(spectra, hyper, sigma2, stretch)
    except ValueError:  # no spectra, no rates, or rates that no flow describes: the page goes without
        return []
    found = []
    for symbol, measured, predicted in (("p", spectra.p, p), ("s", spectra.s, s)):
        lines, steps = {}, [int(step) for step in spectra.step]
        for j in range(min(modes, measured.shape[1])):
            lines[f"{symbol}{j} measured"] = list(zip(steps, measured[:, j].tolist(), strict=True))
            lines[f"{symbol}{j} predicted"] = list(zip(steps, predicted[:, j].tolist(), strict=True))
        found.append(
            {
                "title": f"{symbol}_j: measured, and predicted by the theory (dashed)",
                "section": "predictor",
                "read": "The decoupled dynamics (DirectPred Eqs. 11-13) from the run's own start and rates; fitted: "
                f"sigma^2 {sigma2:.3g}, time x{stretch:.3g}. `lightning-ssl reproduce overlay` has the gaps.",
                "lines": lines,
                "dashed": [label for label in lines if "predicted" in label],
            }
        )
    return found


def predict(spectra: Spectra, hyper: Hyperparameters, sigma2: float, stretch: float = 1.0) -> tuple[Tensor, Tensor]:
    """p and s over the measured steps, from the measured start; a copied target starts at tau = 1.

    The measured F = E[f f^T] is over single views, (1 + sigma^2) times the F of Eqs. 11-12. Rates at which the flow is
    too stiff to be a run's raise ValueError.
    """
    times = (spectra.step * hyper.step * stretch).numpy()
    beta = None if hyper.beta is None else hyper.beta / stretch
    mode = ModeDynamics(1 + sigma2, 1.0, hyper.alpha_p, beta, hyper.eta, hyper.eta_p)
    w, p = (spectra.s[0].clamp_min(0) / (1 + sigma2)).sqrt().numpy(), spectra.p[0].numpy()
    evaluations = 0

    def flow(_: float, state: NDArray[np.float64]) -> NDArray[np.float64]:
        nonlocal evaluations
        evaluations += 1
        if evaluations > MOST_EVALUATIONS:
            raise ValueError("the flow is too stiff")
        # Plain arrays go through the same lines as tensors.
        return np.concatenate(mode.triplet_field(*state.reshape(3, -1)))  # type: ignore[arg-type, call-overload]

    with np.errstate(over="ignore", invalid="ignore"):
        found = solve_ivp(
            flow,
            (times[0], times[-1]),
            np.concatenate([w, p, w]),
            "BDF",
            times,
            rtol=1e-5,
            atol=1e-8,
            jac=_jacobian(mode),
        )
    if not found.success or not np.isfinite(found.y).all():
        raise ValueError(f"the flow could not be followed: {found.message}")
    w, p, _ = found.y.reshape(3, -1, len(times))
    return torch.from_numpy(p.T.copy()), torch.from_numpy(w.T**2) * (1 + sigma2)


def _jacobian(mode: ModeDynamics) -> Any:
    """d(w, w_p, w_a)'/d(w, w_p, w_a) of the decoupled modes: nine diagonals."""

    def jacobian(_: float, state: NDArray[np.float64]) -> NDArray[np.float64]:
        w, p, a = state.reshape(3, -1)
        error, alpha = a * mode.lambda_d - p * w * mode.lambda_s, mode.alpha_p
        eta_p = mode.eta if mode.eta_p is None else mode.eta_p
        d_w = (-p * p * mode.lambda_s - mode.eta, error - p * w * mode.lambda_s, p * mode.lambda_d)
        d_p = (
            alpha * (error - p * w * mode.lambda_s),
            -alpha * w * w * mode.lambda_s - eta_p,
            alpha * w * mode.lambda_d,
        )
        d_a = d_w if mode.beta is None else (mode.beta + 0 * w, 0 * w, -mode.beta + 0 * w)
        return np.block([[np.diag(part) for part in row] for row in (d_w, d_p, d_a)])

    return jacobian


def fit(spectra: Spectra, hyper: Hyperparameters) -> tuple[float, float]:
    """sigma^2, and for a normalised loss the time's unit, that predict the run best (least squares, coarse to fine)."""
    rows = torch.linspace(0, len(spectra.step) - 1, min(25, len(spectra.step))).round().long()
    few = Spectra(spectra.step[rows], spectra.s[rows][:, :8], spectra.p[rows][:, :8])

    def cost(sigma2: float, stretch: float) -> float:
        try:
            p, s = predict(few, hyper, sigma2, stretch)
        except ValueError:
            return float("inf")
        return float(
            (p - few.p).square().mean() / few.p.square().mean() + (s - few.s).square().mean() / few.s.square().mean()
        )

    sigmas, stretches = (
        torch.logspace(-3, 1, 13).tolist(),
        torch.logspace(-2, 3, 11).tolist() if hyper.normalize else [1.0],
    )
    best = min(((a, b) for a in sigmas for b in stretches), key=lambda ab: cost(*ab))
    width_a, width_b = 10 ** (4 / 12), 10**0.5
    for _ in range(5):  # zoom in around the best
        width_a, width_b = width_a**0.5, width_b**0.5
        near = [
            (best[0] * width_a**i, best[1] * (width_b**k if hyper.normalize else 1.0))
            for i in (-1, 0, 1)
            for k in ((-1, 0, 1) if hyper.normalize else (0,))
        ]
        best = min(near, key=lambda ab: cost(*ab))
    return best


def read_spectra(folder: Path, least: int = 3) -> Spectra:
    """The spectra that EigenspaceAlignment wrote below a log folder."""
    if not folder.is_dir():
        raise ValueError(f"--run {folder} is not a folder: give the log folder of a run.")
    found = sorted(folder.rglob("*_spectra.npz"))
    if not found:
        reasons = "; ".join(not_covered(folder))
        raise ValueError(
            f"no {SPECTRA} below {folder}: train with the EigenspaceAlignment callback and a linear predictor."
            + (f" The theory does not cover this run: {reasons}." if reasons else "")
        )
    with np.load(found[0]) as file:
        step, s, p = (torch.from_numpy(file[k]).double() for k in ("step", "eigenvalues", "predictor_values"))
    if len(step) < least:
        raise ValueError(f"{found[0]} holds {len(step)} observations: train longer, or with a smaller every_n_steps.")
    return Spectra(step, s, p)


def read_model(folder: Path) -> tuple[str, dict[str, Any]]:
    """The model's class, empty where it is not known, and its options, from hparams.yaml and config.yaml."""
    name, config = "", {}
    for path in [*sorted(folder.rglob("hparams.yaml")), *sorted(folder.rglob("config.yaml"))]:
        loaded = yaml.load(path.read_text(), _Plain) or {}
        model = loaded.get("model", loaded)
        if isinstance(model, dict):
            name = str(model.get("class_path", name))
            config.update(model.get("init_args", model))
    return name, config


def read_hyperparameters(folder: Path, options: dict[str, Any]) -> Hyperparameters:
    """From the run's config.yaml or hparams.yaml; ``options`` (lr, momentum, weight_decay, ...) win."""
    _, config = read_model(folder)
    optimizer = config.get("optimizer") or {}
    settings = optimizer.get("init_args", {}) if isinstance(optimizer, dict) else {}

    def pick(name: str, *fallbacks: Any) -> Any:
        return next((v for v in (options.get(name), *fallbacks) if v is not None), None)

    lr = pick("lr", settings.get("lr"))
    if lr is None:
        raise ValueError(f"no learning rate in {folder}'s config.yaml or hparams.yaml: pass --lr.")
    sgd_momentum = pick("sgd_momentum", settings.get("momentum"), 0.0)
    step = lr / (1 - sgd_momentum)
    momentum = pick("momentum", config.get("momentum"), 0.0)  # SimSiam has none
    alpha_p = pick("alpha_p", config.get("predictor_lr_scale"), 1.0)
    eta = pick("weight_decay", config.get("weight_decay"), settings.get("weight_decay"), 0.0)
    eta_p = pick("predictor_weight_decay", config.get("predictor_weight_decay"), settings.get("weight_decay"), eta)
    normalize = bool(config.get("normalize", True))
    return Hyperparameters(
        float(step), float(alpha_p), None if momentum == 0 else (1 - momentum) / step, eta, alpha_p * eta_p, normalize
    )
