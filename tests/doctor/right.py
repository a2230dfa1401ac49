"""Right modules, on which nothing may be called wrong: ours with their ablations, by hand, and other people's.

``python -m tests.doctor.right`` examines all of them, with every check, and prints what it finds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_ssl.doctor import examine
from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, BYOLPrime, DirectPred, SimCLR, SimSiam
from tests.doctor import data
from tests.doctor.modules import Barlow, Contrast, Moded, Optimized, Queued, Siamese
from tests.foreign import data as foreign_data
from tests.foreign import zoo
from tests.methods.helpers import loader as own_loader
from tests.methods.helpers import norm_free, small

Right = tuple[Callable[[], Any], Callable[[Any], Any]]  # makes the module, or what it is built with; its data


def own(method: Any, **options: Any) -> Right:
    return lambda: small(method, **options), lambda _: own_loader(4, rows=12)


def plain(build: Callable[[], Any], **options: Any) -> Right:
    return build, lambda _: data.loader(**options)


def compiled() -> Any:
    module = Siamese()
    module.backbone = torch.compile(module.backbone)
    module.target["backbone"] = torch.compile(module.target["backbone"])
    return module


RIGHT: dict[str, Right] = {
    "simclr": own(SimCLR),
    "simclr_norm_free": (lambda: norm_free(SimCLR), lambda _: own_loader(4, rows=12)),
    "simclr_triplet": own(SimCLR, loss="triplet", beta=0.2),
    "simclr_exact": own(SimCLR, loss="exact_nce"),
    "simclr_few_negatives": own(SimCLR, negatives=4),
    "simclr_noise": own(SimCLR, gradient_noise=0.1),
    "byol": own(BYOL),
    "byol_no_predictor": own(BYOL, predictor="none"),
    "byol_no_ema": own(BYOL, momentum=0.0),
    "byol_no_stop_gradient": own(BYOL, momentum=0.0, stop_gradient=False),
    "byol_fixed_target": own(BYOL, momentum=1.0, target_init="independent"),
    "byol_cosine": own(BYOL, momentum_schedule="cosine", scheduler="cosine"),
    "byol_symmetric_predictor": own(BYOL, predictor="linear", symmetric_predictor=True),
    "byol_norm_parts": own(BYOL, projector_norm="mean,detached_std"),
    "byol_tangential": own(BYOL, tangential=True),
    "byol_not_normalised": own(BYOL, normalize=False),
    "simsiam": own(SimSiam),
    "directpred": own(DirectPred),
    "barlow_twins": own(BarlowTwins),
    "barlow_twins_norm_free": (lambda: norm_free(BarlowTwins), lambda _: own_loader(4, rows=12)),
    "raft": own(RAFT),
    "byol_prime": own(BYOLPrime),
    "plain_barlow": plain(Barlow),
    "plain_barlow_local": plain(lambda: Barlow("none")),
    "plain_contrast": plain(Contrast),
    "plain_contrast_local": plain(lambda: Contrast("none")),
    "plain_siamese": plain(Siamese),
    "plain_siamese_norm": plain(lambda: Siamese(norm=True), num_workers=2),
    "plain_micro_batch": plain(lambda: Siamese("micro_batch")),
    "plain_target_listed": plain(lambda: Siamese("target_in_optimizer")),  # without a gradient it does no harm
    "plain_queue": plain(Queued),
    "plain_queue_not_saved": plain(lambda: Queued("lost_queue")),
    "plain_schedule": plain(Optimized),
    "plain_modes": plain(Moded),
    "plain_compiled": plain(compiled),
}
FOREIGN = [
    "two_calls", "batch_norm", "dropout", "feature_map", "manual", "two_optimizers", "clean_first_no_grad",
    "wrapped", "checkpointed", "dict_batch", "nested_outputs", "unlabelled", "blocked", "interleaved",
    "augmented_inside_blocked", "normalising_module", "normalising_datamodule", "recurrent", "series_gelu",
    "masked_keyword", "masked_transformer", "lightly_simclr", "lightly_simclr_calls", "lightly_barlow_twins",
    "lightly_vicreg", "lightly_byol", "lightly_simsiam", "lightly_nnclr", "lightly_moco", "lightly_swav",
    "lightly_dino", "lightly_mae", "lightly_benchmark_module", "lightly_embedding", "lightly_byol_pl",
    "torchgeo_simclr_v2", "torchgeo_moco_v2", "torchgeo_byol", "timm_vit", "timm_swin", "timm_convnext",
    "timm_resnet", "hf_vit", "hf_bert_simcse", "hf_bert_calls",
]  # fmt: skip


def foreign(name: str) -> Right:
    case = zoo.CASES[name]
    return case.build, lambda built: built.datamodule or foreign_data.loader(built.train, case.batch or None)


RIGHT.update({name: foreign(name) for name in FOREIGN})


def build(name: str) -> tuple[Any, Any]:
    """The module and its data."""
    make, feed = RIGHT[name]
    torch.manual_seed(7)
    made = make()
    return getattr(made, "module", made) if name in FOREIGN else made, feed(made)


def main(names: list[str]) -> int:
    wrong = 0
    for name in names or RIGHT:
        if name in FOREIGN and zoo.absent(zoo.CASES[name]):
            print(f"skipped  {name}: {zoo.absent(zoo.CASES[name])} not installed")
            continue
        began = time.perf_counter()
        report = examine(*build(name))
        wrong += not report.healthy
        print(f"{'fine' if report.healthy else 'WRONG':<8} {name} ({time.perf_counter() - began:.1f} s)", flush=True)
        for result in report.results:
            for finding in result.findings:
                if finding.severity == "alarm":
                    print(f"    {result.check} {finding.kind}: {finding.seen}", flush=True)
            if result.untold:
                print(f"    {result.check} could not tell: {result.untold}", flush=True)
    print(f"{wrong} of {len(names or RIGHT)} right modules were called wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
