"""Our BYOL LightningModule, made linear, follows the theory; and the overlay reads a run back."""

from __future__ import annotations

import copy
import re
import time
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ssl.callbacks import CovarianceOperatorNorm, EigenspaceAlignment
from lightning_ssl.data import HLTMDataModule, ViewBatch
from lightning_ssl.methods import BYOL, SimCLR
from lightning_ssl.nn.backbones import LinearBackbone
from lightning_ssl.theory import hltm
from lightning_ssl.theory.hltm import HLTMNetwork, HLTMTree
from lightning_ssl.theory.linear import LinearDynamics, ModeDynamics
from lightning_ssl.theory.reproduce import overlay as overlays
from lightning_ssl.theory.reproduce import reproduce

LR, ALPHA_P, BETA, ETA, SIGMA = 0.02, 1.5, 0.4, 0.02, 0.4


class GaussianPairs(IterableDataset):
    """Gaussian data with additive noise as the augmentation, a batch at a time."""

    def __init__(self, root: torch.Tensor, noise: torch.Tensor, batch: int, steps: int) -> None:
        self.root, self.noise, self.batch, self.steps = root, noise, batch, steps

    def __iter__(self):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.steps):
            shape = (self.batch, len(self.root))
            x = torch.randn(shape, generator=generator) @ self.root.T
            views = tuple(x + torch.randn(shape, generator=generator) @ self.noise.T for _ in range(2))
            yield ViewBatch(views, torch.zeros(self.batch), torch.arange(self.batch))


class Record(L.Callback):
    """The three matrices after each step."""

    def __init__(self) -> None:
        self.weights: list[tuple[torch.Tensor, ...]] = []

    def on_train_batch_end(self, trainer, module, *args) -> None:  # type: ignore[no-untyped-def]
        matrices = module.backbone.linear.weight, module.predictor.weight, module.target.backbone.linear.weight
        self.weights.append(tuple(m.detach().double().clone() for m in matrices))


def linear_byol(n_in: int, n_out: int) -> BYOL:
    """BYOL with no heads but the predictor: W is the backbone."""
    model = BYOL(
        LinearBackbone(n_in, n_out),
        projector_hidden=0,
        projector_dim=n_out,
        predictor="linear",
        predictor_bias=False,
        predictor_lr_scale=ALPHA_P,
        weight_decay=ETA,
        predictor_weight_decay=ETA / ALPHA_P,  # torch's decay is times the group's own rate
        momentum=1 - LR * BETA,
        normalize=False,
        optimizer=lambda p: torch.optim.SGD(p, lr=LR),
    )
    model.projector, model.target.projector = nn.Identity(), nn.Identity()
    return model


def train(
    model: BYOL, root: torch.Tensor, noise: torch.Tensor, steps: int, folder: Path, *callbacks: L.Callback
) -> None:
    loader = DataLoader(GaussianPairs(root, noise, 2048, steps), batch_size=None)
    L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    ).fit(model, loader)


def test_linear_byol_follows_the_theory(tmp_path: Path) -> None:
    """Fresh Gaussian batches, non-isotropic data and noise: within 2% over the whole trajectory."""
    L.seed_everything(0)
    root = torch.randn(5, 5) / 5**0.5 + torch.eye(5) * 0.7
    noise = torch.diag(torch.tensor([0.2, 0.3, 0.4, 0.5, 0.6]))
    model = linear_byol(5, 4)
    W, W_p = model.backbone.linear.weight.detach().double(), model.predictor.weight.detach().double()
    W, W_p = W.clone(), W_p.clone()
    record, steps = Record(), 500
    train(model, root, noise, steps, tmp_path, record)
    dynamics = LinearDynamics(root @ root.T, noise @ noise.T, ALPHA_P, BETA, ETA)
    marks = list(range(0, steps + 1, 50))
    path = dynamics.solve(W, W_p, [LR * k for k in marks])
    moved = 0.0
    for name, flow, index in (("W", path.W, 0), ("W_p", path.W_p, 1), ("W_a", path.W_a, 2)):
        for mark, expected in zip(marks[1:], flow[1:], strict=True):
            gap = (record.weights[mark - 1][index] - expected).norm() / expected.norm()
            assert gap < 0.02, (name, mark, gap.item())
        moved = max(moved, float((flow[-1] - flow[0]).norm() / flow[0].norm()))
    assert moved > 0.5  # the weights really went somewhere


class Logged(L.Callback):
    """The last logged values of the operators' norms, and the network they belong to."""

    def __init__(self) -> None:
        self.norms: dict[str, float] = {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:  # type: ignore[no-untyped-def]
        if trainer.global_step == 150:
            self.tree = copy.deepcopy(module.backbone)

    def on_train_batch_end(self, trainer, module, *args) -> None:  # type: ignore[no-untyped-def]
        if trainer.global_step == 151:
            values = trainer.callback_metrics.items()
            self.norms = {k.removeprefix("cov_op/"): float(v) for k, v in values if k.startswith("cov_op/")}


def test_simclr_learns_the_latent_tree_and_the_callback_sees_its_operators(tmp_path: Path) -> None:
    """Our SimCLR on HLTMDataModule: InfoNCE with one negative on the tree's own output, no projector."""
    L.seed_everything(0)
    data = HLTMDataModule(depth=3, lower=0.9, batch_size=512, draws=512 * 160)
    model = SimCLR(
        HLTMTree(3, 6), tau=0.1, negatives=1, projector_dim=6, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    model.projector = nn.Identity()
    network = HLTMNetwork(3, 6)

    def correlation() -> float:
        network.load_module(model.backbone)
        generator = torch.Generator().manual_seed(0)
        return hltm.normalized_correlation(network, data.tree, ["root"], generator)["root"].item()

    before, logged = correlation(), Logged()
    # Before `logged` in the list, so that its values are there when `logged` looks.
    operators = CovarianceOperatorNorm(samples=512, directions=6, principal=4, every_n_steps=150)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=tmp_path,
        callbacks=[operators, logged],
    )
    trainer.fit(model, datamodule=data)
    assert correlation() > max(before, 0.85)
    network.load_module(logged.tree)
    seen = {k.rpartition(".")[2].rpartition("/")[2]: v for k, v in logged.norms.items()}
    for name in ("root", "s0", "s1", "s01"):
        generator = torch.Generator().manual_seed(1)
        ours = hltm.covariance_operator_norm(network, data.tree, [name], generator, samples=20_000)[name].item()
        assert seen[name] == pytest.approx(ours, rel=0.15), seen


def test_overlay_of_a_linear_run(tmp_path: Path) -> None:
    L.seed_everything(0)
    n = 4
    model = linear_byol(n, n)
    with torch.no_grad():  # aligned from the start, so that modes are decoupled
        basis = torch.linalg.qr(torch.randn(n, n)).Q
        model.backbone.linear.weight.copy_(basis @ torch.diag(torch.tensor([0.9, 0.6, 0.4, 0.2])))
        model.predictor.weight.copy_(basis @ torch.diag(torch.tensor([0.5, 0.4, 0.3, 0.2])) @ basis.T)
        model.target.backbone.linear.weight.copy_(model.backbone.linear.weight)
    log = tmp_path / "run"
    log.mkdir()
    train(model, torch.eye(n), SIGMA * torch.eye(n), 400, log, EigenspaceAlignment(every_n_steps=20, picture_every=0))
    (log / "hparams.yaml").write_text(
        f"momentum: {1 - LR * BETA}\npredictor_lr_scale: {ALPHA_P}\nweight_decay: {ETA}\n"
        f"predictor_weight_decay: {ETA / ALPHA_P}\nnormalize: false\nbackbone: !!python/object:x.Y {{}}\n"
    )
    spectra = overlays.read_spectra(log)
    hyper = overlays.read_hyperparameters(log, {"lr": LR})
    assert hyper.beta == pytest.approx(BETA) and hyper.eta_p == pytest.approx(ETA)
    p, s = overlays.predict(spectra, hyper, SIGMA**2)
    assert (p - spectra.p).abs().max() < 0.03 * spectra.p.max()
    assert (s - spectra.s).abs().max() < 0.1 * spectra.s.max()  # a batch's F is itself a sample
    text = reproduce("overlay", out=tmp_path / "out", run=str(log), lr=LR)
    assert "holds: the decoupled dynamics follow the run within 10%" in text
    fitted, stretch = overlays.fit(spectra, hyper)
    assert fitted == pytest.approx(SIGMA**2, abs=0.06) and stretch == 1.0
    assert (tmp_path / "out" / "overlay-seed0" / "figure.png").stat().st_size > 5000


def test_the_overlays_solver_is_the_theorys_own(tmp_path: Path) -> None:
    """A stiff solver at 1e-5 against the explicit one at 1e-9, with and without a moving target."""
    torch.manual_seed(0)
    p, s = torch.rand(1, 5, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64)
    step = torch.arange(0, 400, 20, dtype=torch.float64)
    spectra = overlays.Spectra(step, s.expand(20, 5), p.expand(20, 5))
    for beta in (None, 0.4):
        hyper = overlays.Hyperparameters(0.05, 1.3, beta, 0.02, 0.03, False)
        mine = overlays.predict(spectra, hyper, 0.2)
        exact = ModeDynamics(1.2, 1.0, 1.3, beta, 0.02, 0.03).solve(p[0], s[0] / 1.2, step * 0.05)
        torch.testing.assert_close(mine[0], exact.p, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(mine[1], exact.s * 1.2, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("DirectPred, init_args: {predictor: linear, optimizer: {class_path: torch.optim.SGD}}", "DirectPred sets its"),
        ("BYOL, init_args: {predictor: linear, optimizer: {class_path: torch.optim.Adam}}", "trained with Adam"),
        ("BYOL, init_args: {predictor: mlp, optimizer: {class_path: torch.optim.SGD}}", r"predictor \(mlp\) is not"),
        ("BYOL, init_args: {predictor: linear, scheduler: cosine}", "learning rate is scheduled"),
    ],
)
def test_overlay_says_at_once_what_the_theory_does_not_cover(tmp_path: Path, model: str, said: str) -> None:
    """A run's spectra at the scale of the quick start's, on which the fit used to stand still."""
    (tmp_path / "config.yaml").write_text(f"model: {{class_path: lightning_ssl.methods.{model}}}\n")
    s = np.geomspace(126, 1e-3, 64) * np.ones((10, 1))
    spectra = {"eigenvalues": s, "predictor_values": np.sqrt(s / 126), "cosines": np.ones_like(s)}
    np.savez(tmp_path / "predictor_spectra.npz", step=np.arange(10) * 100, **spectra)
    begun = time.process_time()
    text = reproduce("overlay", out=tmp_path / "out", run=str(tmp_path))
    assert re.search(f"Not covered: .*{said}", text) and "DOES NOT HOLD" not in text
    assert "| 1 | 1.000 | 1.000 |" in text and "| 2 (invariant parabola) | 2.00 | 2.00 |" in text
    assert overlays.page_charts(tmp_path) == []
    assert time.process_time() - begun < 5


def test_overlay_answers_in_seconds_on_any_scale(tmp_path: Path) -> None:
    """Rates and sizes at which the flow is stiff; and the page of a run that is covered shows its modes."""
    (tmp_path / "config.yaml").write_text(
        "model: {class_path: lightning_ssl.methods.BYOL, init_args: {predictor: linear, momentum: 0.97,"
        " normalize: true, optimizer: {class_path: torch.optim.SGD,"
        " init_args: {lr: 0.05, momentum: 0.9, weight_decay: 0.0004}}}}\n"
    )
    growth = np.linspace(1, 40, 30)[:, None]
    s = np.geomspace(3, 1e-3, 64) * growth
    np.savez(
        tmp_path / "predictor_spectra.npz", step=np.arange(30) * 100, eigenvalues=s, predictor_values=np.sqrt(s) / 3
    )
    begun = time.process_time()
    drawn = overlays.page_charts(tmp_path)
    assert time.process_time() - begun < 20
    assert [len(chart["lines"]) for chart in drawn] == [12, 12] and "p0 predicted" in drawn[0]["dashed"]
    assert [step for step, _ in drawn[1]["lines"]["s0 measured"]] == list(range(0, 3000, 100))


def test_overlay_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs --run"):
        reproduce("overlay", out=tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        reproduce("overlay", out=tmp_path, run=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="EigenspaceAlignment"):
        reproduce("overlay", out=tmp_path, run=str(tmp_path))
    with pytest.raises(ValueError, match="pass --lr"):
        overlays.read_hyperparameters(tmp_path, {})
