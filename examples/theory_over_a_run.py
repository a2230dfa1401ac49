"""DirectPred's theory over a run: a linear BYOL trained by SGD, and what the equations say it does.

Gaussian data with additive noise as the augmentation. The three matrices are integrated from the run's own start by
`LinearDynamics`, and printed beside the run: the weights agree within a percent or two, and eigenspaces align.
"""

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ssl.callbacks import EigenspaceAlignment
from lightning_ssl.data import ViewBatch
from lightning_ssl.functional import eigenspace_alignment
from lightning_ssl.methods import BYOL
from lightning_ssl.nn import LinearBackbone
from lightning_ssl.theory.linear import LinearDynamics

LR, ALPHA_P, BETA, ETA, STEPS = 0.02, 1.0, 0.4, 0.02, 1500
DATA = torch.diag(torch.tensor([1.4, 1.2, 1.0, 0.8, 0.6]))  # square roots of X and X'
NOISE = torch.diag(torch.tensor([0.2, 0.3, 0.4, 0.5, 0.6]))


class Pairs(IterableDataset):
    """Fresh batches of two noisy copies."""

    def __iter__(self):
        for _ in range(STEPS):
            x = torch.randn(1024, 5) @ DATA
            views = tuple(x + torch.randn(1024, 5) @ NOISE for _ in range(2))
            yield ViewBatch(views, torch.zeros(1024), torch.arange(1024))


class Record(L.Callback):
    """W and W_p after each step."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, module, *rest):
        self.weights.append(
            [w.detach().double().clone() for w in (module.backbone.linear.weight, module.predictor.weight)]
        )


def main():
    L.seed_everything(0, verbose=False)
    method = BYOL(
        LinearBackbone(5, 4),
        projector_hidden=0,
        projector_dim=4,
        predictor="linear",
        predictor_bias=False,
        predictor_lr_scale=ALPHA_P,
        weight_decay=ETA,
        predictor_weight_decay=ETA / ALPHA_P,  # torch's decay is times the group's own rate
        momentum=1 - LR * BETA,
        normalize=False,
        optimizer=lambda p: torch.optim.SGD(p, lr=LR),
    )
    method.projector, method.target.projector = nn.Identity(), nn.Identity()  # W is the backbone
    start = [w.detach().double().clone() for w in (method.backbone.linear.weight, method.predictor.weight)]
    record = Record()
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[record, EigenspaceAlignment("predictor", every_n_steps=100)],
    )
    trainer.fit(method, DataLoader(Pairs(), batch_size=None))
    marks = [0, 100, 300, 600, 1000, STEPS]
    dynamics = LinearDynamics(DATA @ DATA.T, NOISE @ NOISE.T, ALPHA_P, BETA, ETA)
    path = dynamics.solve(*start, [LR * mark for mark in marks])
    print("step   |W| run  theory   |W_p| run  theory   off by    alignment  largest p, p² and s")
    for mark, W, W_p in zip(marks[1:], path.W[1:], path.W_p[1:], strict=True):
        ran, predictor = record.weights[mark - 1]
        off = max((ran - W).norm() / W.norm(), (predictor - W_p).norm() / W_p.norm())
        F = ran @ (DATA @ DATA.T + NOISE @ NOISE.T).double() @ ran.T
        found = eigenspace_alignment(F, predictor)
        p, s = found.predictor_values[0], found.eigenvalues[0]
        print(
            f"{mark:5} {ran.norm():9.3f} {W.norm():7.3f} {predictor.norm():11.3f} {W_p.norm():7.3f} {100 * off:7.1f} % "
            f"{found.cosines.abs().mean():11.3f}  {p:.3f} {p**2:.3f} {s:.3f}"
        )


if __name__ == "__main__":
    main()
