"""Two gloo ranks under DistributedDataParallel take the gradient of one process on the concatenated batch."""

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ssl.data import ImageDataModule
from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, DirectPred, SimCLR, SimSiam
from tests.ddp import run_ranks
from tests.methods.helpers import make_batch, norm_free, rows_of

CASES = [
    *((SimCLR, {"loss": loss, "beta": 0.3}) for loss in ("simple", "triplet", "nce", "exact_simple", "exact_nce")),
    (SimCLR, {"negatives": 3}),
    (SimCLR, {"negatives": 3, "loss": "exact_triplet", "normalize": False}),
    (BYOL, {}),
    (BYOL, {"predictor": "none", "momentum": 0.0, "stop_gradient": False}),
    (BYOL, {"predictor": "linear", "normalize": False, "tangential": True}),
    (SimSiam, {}),
    (DirectPred, {"partitions": 3, "predictor_bias": True}),
    (DirectPred, {"mode": "optimal"}),
    (BarlowTwins, {"lambd": 0.02}),
    (RAFT, {}),
    (BYOLPrime, {"predictor": "linear", "cross_model_weight": 2.0}),
]


class Step(nn.Module):
    """The loss as a forward pass, as Lightning's strategy wraps a training step."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model._weighted_losses(batch)["loss"]


def take_steps(step, model, batch, steps=2):
    """Loss and gradients of the last of a few steps with everything that follows a step."""
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(batch)
        loss.backward()
        gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        model.after_optimizer_step()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return loss.item(), gradients, state


def on_rank(rank, world_size, case, cut):
    method, options = CASES[case]
    model = norm_free(method, **options).double()
    batch = rows_of(make_batch(rows=8, dtype=torch.float64), slice(0, cut) if rank == 0 else slice(cut, None))
    return take_steps(DistributedDataParallel(Step(model)), model, batch)


@pytest.mark.parametrize("cut", [4, 3], ids=["equal", "unequal"])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{m.__name__}-{o}" for m, o in CASES])
def test_gradients_on_two_ranks_equal_one_process(case, cut):
    method, options = CASES[case]
    model = norm_free(method, **options).double()
    loss, gradients, state = take_steps(Step(model), model, make_batch(rows=8, dtype=torch.float64))
    results = run_ranks(2, on_rank, case, cut)
    assert sum(r[0] for r in results) / 2 == pytest.approx(loss, rel=1e-9)  # the mean over ranks is the loss
    for _, rank_gradients, rank_state in results:
        assert rank_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(rank_gradients[name], gradient, rtol=1e-7, atol=1e-10, msg=name)
        for name, tensor in state.items():
            torch.testing.assert_close(rank_state[name], tensor, rtol=1e-7, atol=1e-10, msg=name)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def train(method, options, **trainer):
    model = norm_free(method, **options)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    data = ImageDataModule(batch_size=16 // trainer.get("devices", 1), image_size=16)
    trainer = L.Trainer(accelerator="cpu", max_steps=6, limit_val_batches=0, **quiet, **trainer)
    trainer.fit(model, datamodule=data)
    return model.state_dict(), trainer.callback_metrics["train/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [SimCLR, DirectPred])
def test_a_trainer_on_two_ranks_ends_where_one_process_does(method):
    state, loss = train(method, {"optimizer": sgd}, devices=1)
    ranks_state, ranks_loss = train(method, {"optimizer": sgd}, devices=2, strategy="ddp_spawn")
    torch.testing.assert_close(ranks_loss, loss, rtol=1e-4, atol=1e-6)
    for name, tensor in state.items():
        torch.testing.assert_close(ranks_state[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
