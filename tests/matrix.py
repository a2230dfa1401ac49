"""Networks of timm and torchvision by name, at two sizes, with every method: two steps, a probe, a resume, and again.

python -m tests.matrix [WORDS...]     all of it, or what has all of these words in its name; 25 minutes of a core
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from PIL import Image

from lightning_ssl.runs.cli import main

METHODS = ("SimCLR", "BYOL", "SimSiam", "DirectPred", "BarlowTwins", "RAFT", "BYOLPrime")
NETWORKS = (
    "timm/resnet10t",
    "timm/vit_tiny_patch16_224",
    "timm/swin_tiny_patch4_window7_224",
    "timm/convnext_atto",
    "resnet18",
    "vit_b_16",
    "swin_t",
    "convnext_tiny",
)
SIZES = (32, 224)
REFUSED = {("vit_b_16", 32): "set --data.image_size to one that works: 224"}  # its positions are for one size
CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "callbacks": [
            {"class_path": "lightning_ssl.callbacks.KNNProbe", "init_args": {"k": 3}},
            {"class_path": "lightning_ssl.runs.checkpoint.RunCheckpoint", "init_args": {"save_last": True}},
        ],
    }
}


class Case(NamedTuple):
    """One network at one size with one method."""

    network: str
    size: int
    method: str

    def __str__(self) -> str:
        return f"{self.network}-{self.size}-{self.method}"


ALL = [Case(network, size, method) for network in NETWORKS for size in SIZES for method in METHODS]
# Every network at each size, every method at least twice.
DIAGONAL = [Case(*pair, METHODS[i % 7]) for i, pair in enumerate((n, s) for n in NETWORKS for s in SIZES)]


def write_images(folder: Path) -> None:
    """Six images and four more, of two classes."""
    for split, count in (("train", 3), ("test", 2)):
        for name, shade in (("dark", 20), ("light", 200)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.effect_noise((48, 48), 60).point(lambda value, shade=shade: (value + shade) // 2)
                image.convert("RGB").save(folder / split / name / f"{number}.png")


def try_case(case: Case) -> str:
    """In the working directory, which holds the images: returns "trained", or the line of a refusal."""
    Path("quick.yaml").write_text(yaml.safe_dump(CONFIG))
    given = ["--model", case.method, "--model.backbone", case.network, "--model.optimizer", "torch.optim.SGD"]
    given += ["--model.optimizer.lr", "0.01", "--data.root", "images", "--data.image_size", str(case.size)]
    given += ["--data.batch_size", "2", "--config", "quick.yaml"]
    if case.size > 32 and case.network == "resnet18":
        given += ["--model.stem", "imagenet"]
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            main(["fit", *given, "--trainer.max_steps", "2", "--name", "first"])
    except SystemExit as end:
        said = [line for line in words.getvalue().splitlines() if line.startswith("lightning-ssl: error:")]
        assert end.code == 2 and len(said) == 1, words.getvalue()[-2000:]
        assert "Traceback" not in words.getvalue() and not Path("runs/first/checkpoints").exists()
        return said[0]
    config = Path("runs/first/config.yaml").read_text()
    first = _state("first", 2)
    assert all(bool(value.isfinite().all()) for value in first.values() if value.is_floating_point())
    rows = Path("runs/first/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val/knn_top1")
    assert len([row for row in rows[1:] if row.split(",")[column]]) >= 2, "a probe before and after"
    resume = ["--config", "runs/first/config.yaml", "--name", "first", "--ckpt_path", "last"]
    main(["fit", *resume, "--trainer.max_steps", "3"])
    resumed = _state("first", 3)
    assert any(not torch.equal(first[name], resumed[name]) for name in first)
    Path("saved.yaml").write_text(config)
    main(["fit", "--config", "saved.yaml", "--name", "again"])
    again = _state("again", 2)
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    return "trained"


def _state(run: str, step: int) -> dict[str, torch.Tensor]:
    saved = torch.load(f"runs/{run}/checkpoints/last.ckpt", weights_only=True, mmap=True)
    assert saved["global_step"] == step
    return {name: value.clone() for name, value in saved["state_dict"].items()}


def check(case: Case) -> str:
    """Try a case and compare with what is expected of it."""
    found = try_case(case)
    expected = REFUSED.get((case.network, case.size), "trained")
    assert expected in found, f"{case}: {found}"
    return found


if __name__ == "__main__":
    chosen = [case for case in ALL if all(word in str(case) for word in sys.argv[1:])]
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        sys.argv[1:] = []
        write_images(Path("images"))
        for number, case in enumerate(chosen, 1):
            began = time.process_time()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    found = check(case)
            except (Exception, SystemExit) as error:
                found = f"FAILED {type(error).__name__}: {error}"
            shutil.rmtree("runs", ignore_errors=True)
            counts[found.split(":")[0].split(" ")[0]] = counts.get(found.split(":")[0].split(" ")[0], 0) + 1
            print(f"{number}/{len(chosen)} {case}: {found[:300]} ({time.process_time() - began:.0f} s)", flush=True)
    print(counts)
    sys.exit(any(key.startswith("FAILED") for key in counts))
