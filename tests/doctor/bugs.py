"""The mistakes: each in an otherwise right module, with the check that must find it and a word that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn

from tests.doctor import data
from tests.doctor.modules import WIDTH, Barlow, Contrast, Moded, Optimized, Queued, Siamese


@dataclass
class Bug:
    """One mistake.

    Args:
        name: The test's id.
        module: Makes the module.
        check: Who must find it.
        kind: What it must be called.
        words: What the finding must say.
        loader: Makes the data.
        options: The Trainer's.
        fast: Whether it is tried in the fast suite.
        limit: Seconds.
    """

    name: str
    module: Callable[[], Any]
    check: str
    kind: str
    words: str
    loader: Callable[[], Any] = data.loader
    options: dict[str, Any] = field(default_factory=dict)
    fast: bool = False
    limit: float = 60.0


class OnlineProbe(L.Callback):
    """Trains a linear probe beside the module, on each rank's own rows."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        torch.manual_seed(0)
        self.probe = nn.Linear(WIDTH, 4)
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.5)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        start = 6 * trainer.global_rank
        x, labels = data.images()[start : start + 6], torch.arange(6) % 4
        with torch.no_grad():
            features = module.backbone(x.to(next(module.parameters()))).float()
        loss = F.cross_entropy(self.probe.float()(features), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class InStep(Contrast):
    """Draws its views in the step: once, for both."""

    def views(self, batch: Any) -> Any:
        x = batch[0][0]
        x = x + 0.1 * torch.randn_like(x)
        return x, x.clone()


def one_view() -> Any:
    """Batches with a single view."""

    class Single(torch.utils.data.Dataset):
        pairs = data.Pairs()

        def __len__(self) -> int:
            return data.SIZE

        def __getitem__(self, i: int) -> Any:
            return [self.pairs[i][0][0]], i % 4

    return torch.utils.data.DataLoader(Single(), batch_size=data.BATCH)


BUGS = [
    # Ranks
    Bug("detached_gather", lambda: Barlow("detached"), "ranks", "gradient_scaled", "1/2 of", fast=True),
    Bug("own_slice_gather", lambda: Barlow("own_slice"), "ranks", "gradient_scaled", "1/2 of"),
    Bug("backward_of_own_slice", lambda: Barlow("slice_backward"), "ranks", "gradient_scaled", "1/2 of"),
    Bug("reduced_in_place", lambda: Barlow("reduced"), "ranks", "gradient_scaled", "1/2 of"),
    Bug(
        "reduced_after_local_statistics",
        lambda: Barlow("reduced", "standardised"),
        "ranks",
        "gather_detached",
        "0.5000 times the slope",
    ),
    Bug("negatives_detached", lambda: Contrast("detached"), "ranks", "gather_detached", "gradient"),
    Bug("gather_dropped", lambda: Contrast("dropped"), "ranks", "gather_dropped", "dropped"),
    Bug("times_ranks", lambda: Barlow(bug="times_ranks"), "ranks", "gradient_scaled", "2 times"),
    Bug("divided_by_all", lambda: Contrast(bug="divided_by_all"), "ranks", "gradient_scaled", "1/2 of"),
    Bug(
        "probe_callback",
        Barlow,
        "ranks",
        "parameters_drift",
        "OnlineProbe.probe",
        options={"callbacks": [OnlineProbe()]},
    ),
    Bug("probe_beside", lambda: Barlow(bug="probe_beside"), "ranks", "parameters_drift", "probe.weight"),
    Bug("rank_zero_collective", lambda: Barlow(bug="rank_zero_collective"), "ranks", "collective_skipped", "rank 1"),
    Bug("none_on_some_ranks", lambda: Barlow(bug="none_on_some_ranks"), "ranks", "ranks_crash", "rank 1"),
    Bug(
        "backward_on_some_ranks",
        lambda: Barlow("none", bug="backward_on_some_ranks"),
        "ranks",
        "ranks_hang",
        "hang",
        limit=12.0,
    ),
    Bug("local_centre", lambda: Barlow(bug="local_centre"), "ranks", "buffers_drift", "centre"),
    # Views
    Bug("identical", Contrast, "views", "identical_views", "equal", lambda: data.loader("identical"), fast=True),
    Bug("identical_in_step", lambda: InStep("none"), "views", "identical_views", "backbone", one_view),
    Bug("other_sample", Contrast, "views", "views_of_different_samples", "draws", lambda: data.loader("other_sample")),
    Bug("shuffled_view", Contrast, "views", "views_of_different_samples", "row", lambda: data.loader("shuffled_view")),
    Bug(
        "same_in_workers",
        Contrast,
        "views",
        "same_draw_in_workers",
        "two workers",
        lambda: data.loader("own_generator", num_workers=2),
    ),
    Bug(
        "same_in_epochs",
        Contrast,
        "views",
        "same_draw_in_epochs",
        "every epoch",
        lambda: data.loader("own_generator", num_workers=1),
    ),
    Bug("seeded_by_index", Contrast, "views", "same_draw_in_epochs", "seeds", lambda: data.loader("seeded_by_index")),
    Bug("same_on_ranks", Contrast, "views", "same_samples_on_ranks", "same batch", data.stream),
    Bug(
        "same_stream_in_workers",
        Contrast,
        "views",
        "same_samples_in_workers",
        "two workers",
        lambda: data.stream(num_workers=2),
    ),
    Bug("bytes", Contrast, "views", "raw_bytes", "0 to 255", lambda: data.loader("bytes")),
    Bug("normalised_twice", Contrast, "views", "normalised_twice", "twice", lambda: data.loader("twice")),
    Bug("not_a_number", Contrast, "views", "non_finite_input", "not finite", lambda: data.loader("not_a_number")),
    # Pairing
    Bug("one_view_twice", lambda: Contrast(bug="one_view_twice"), "pairing", "view_unused", "view 1", fast=True),
    Bug("no_positives", lambda: Contrast(bug="no_positives"), "pairing", "pairing_unseen", "belong together"),
    Bug("reversed_pairs", lambda: Contrast(bug="reversed_pairs"), "pairing", "mispaired", "reversed"),
    Bug("neighbours_paired", lambda: Contrast(bug="neighbours_paired"), "pairing", "mispaired", "neighbours"),
    Bug("wrong_sign", lambda: Contrast(bug="sign"), "pairing", "pushes_apart", "apart"),
    # Gradients
    Bug("detached_features", lambda: Contrast(bug="detached_features"), "gradients", "cut_off", "backbone", fast=True),
    Bug("no_predictor", lambda: Siamese("no_predictor"), "gradients", "never_used", "predictor"),
    Bug("target_learns", lambda: Siamese("target_learns"), "gradients", "target_gradient", "target"),
    Bug("thawed", lambda: Siamese("thawed"), "gradients", "frozen_gradient", "backbone.0"),
    Bug("square_root", lambda: Contrast(bug="square_root"), "gradients", "non_finite", "the gradient of"),
    # Target
    Bug("never_moves", lambda: Siamese("never_moves"), "target", "target_never_moves", "did not change", fast=True),
    Bug("swapped", lambda: Siamese("swapped"), "target", "momentum_swapped", "momentum is 0.9"),
    Bug("twice", lambda: Siamese("twice"), "target", "target_moves_twice", "power 2"),
    Bug(
        "micro_batch",
        lambda: Siamese("micro_batch"),
        "target",
        "target_moves_per_micro_batch",
        "each micro-batch",
        options={"accumulate_grad_batches": 2},
    ),
    Bug("target_is_trained", lambda: Siamese("target_learns"), "target", "target_in_optimizer", "another direction"),
    # Optimizer
    Bug(
        "forgotten_projector",
        lambda: Optimized("forgotten_projector"),
        "optimizer",
        "in_no_group",
        "projector",
        fast=True,
    ),
    Bug("two_optimizers", lambda: Optimized("two_optimizers"), "optimizer", "in_two_groups", "projector"),
    Bug("no_step", lambda: Optimized("no_step"), "optimizer", "nothing_moves", "no parameter"),
    Bug("zero_rate", lambda: Optimized("zero_rate"), "optimizer", "nothing_moves", "every learning rate is 0"),
    Bug("decay_missed", lambda: Optimized("decay_missed"), "optimizer", "decay_missed", "backbone.1.weight"),
    Bug("decay_reversed", lambda: Optimized("decay_reversed"), "optimizer", "decay_reversed", "bias"),
    Bug(
        "cosine_in_steps",
        lambda: Optimized("cosine_in_steps"),
        "optimizer",
        "schedule_never_moves",
        "T_max is 1000",
        options={"max_epochs": 20},
    ),
    Bug(
        "cosine_in_epochs",
        lambda: Optimized("cosine_in_epochs"),
        "optimizer",
        "schedule_ends_early",
        "rises again",
        options={"max_epochs": 20},
    ),
    # Resume
    Bug("plain_queue", lambda: Queued("plain_queue"), "resume", "not_resumed", "attribute queue", fast=True),
    Bug("listed_queue", lambda: Queued("listed_queue"), "resume", "not_resumed", "attribute memory"),
    Bug("refuses_its_own", lambda: Queued("refuses_its_own"), "resume", "cannot_resume", "KeyError"),
    Bug("counter", lambda: Siamese("counter"), "resume", "not_resumed", "attribute steps"),
    # Modes
    Bug("still_norm", lambda: Moded("still_norm"), "modes", "statistics_never_updated", "backbone.1"),
    Bug(
        "target_in_eval", lambda: Siamese("target_in_eval", norm=True), "modes", "statistics_never_updated", "eval mode"
    ),
    Bug("functional_dropout", lambda: Moded("functional_dropout"), "modes", "random_in_eval", "forward"),
    Bug("left_in_eval", lambda: Moded("left_in_eval"), "modes", "left_in_eval", "backbone"),
    Bug("half_overflow", lambda: Moded("half_overflow"), "modes", "half_not_finite", "bf16-mixed"),
    # Start
    Bug("constant_output", lambda: Moded("constant_output"), "start", "constant_output", "projector"),
    Bug("zero_loss", lambda: Contrast(bug="zero_loss"), "start", "loss_zero", "exactly 0"),
]
