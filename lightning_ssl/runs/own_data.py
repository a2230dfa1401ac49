"""What `--data.root FOLDER` alone stands for: the images in it, with a recipe that suits their size and number."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

BATCH = 64
STEPS = 2000  # of a run on a CPU, about
LONGEST = 100  # epochs

DATASET = ("--data.dataset", "--data.init_args.dataset")
ROOT = ("--data.root", "--data.init_args.root")
FOUND = ("image_folder", "hf", "wds")  # data whose size and number are looked at


def chosen(flags: list[tuple[str, str]], configs: list[Any]) -> list[str]:
    """The flags that a folder of one's own adds before those that were given, and says what it chose.

    Args:
        flags: The command's flags with their values.
        configs: What the files of its --config hold.
    """
    root = next((value for flag, value in flags if flag in ROOT), None)
    if root is None or any(flag in (*DATASET, "--data", "--data.class_path") for flag, _ in flags):
        return []
    if any(_names_data(config) for config in configs):
        return []
    from lightning_ssl.data.folders import kind_of, recipe_for

    kind = kind_of(root)
    added = [f"--data.dataset={kind}"]
    if kind not in FOUND or (kind == "image_folder" and not Path(root).is_dir()):
        return added
    try:
        found = _look(kind, root)
    except (FileNotFoundError, ValueError):
        return added  # the DataModule says what is wrong, and what to do
    side = int(next((value for flag, value in flags if flag == "--data.image_size" and value.isdigit()), 0))
    side = side or found.side
    words = [
        f"{found.train + found.test:,} images in {root!r}, "
        + (f"of {found.classes} classes" if found.classes > 1 else "without classes: the probes are left out")
    ]
    if found.held_out:
        words.append(f"{found.test:,} of them held out")
    words.append(f"views of {side} x {side} by the recipe of {recipe_for(side)}")
    if not configs:
        batch = min(BATCH, max(2, found.train // 4))
        added.append(f"--data.batch_size={batch}")
        if not on_gpu():
            epochs = max(1, min(LONGEST, STEPS * batch // found.train))
            added.append(f"--trainer.max_epochs={epochs}")
            words.append(f"a small network, as there is no GPU, {epochs} epochs of {found.train // batch} steps")
        words.append("--data, --model.backbone and --trainer.max_epochs choose otherwise")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"lightning-ssl: {'; '.join(words)}", flush=True)
    return added


def beneath(root: str) -> str:
    """The shipped configs that suit images of a folder: small networks on a CPU, a ResNet-18 on a GPU."""
    from lightning_ssl.data.folders import kind_of

    if not on_gpu():
        return "digits"
    try:
        side = _look(kind_of(root), root).side
    except (FileNotFoundError, ValueError):
        side = 224
    return "cifar10" if side <= 40 else "stl10"


class Found(NamedTuple):
    """What is in somebody's data: how many images to train on and to test with, how many classes, the views' side."""

    train: int
    test: int
    classes: int
    held_out: bool
    side: int


@lru_cache(maxsize=1)
def _look(kind: str, root: str) -> Found:
    from lightning_ssl.data import hub
    from lightning_ssl.data.folders import read_folder, side_of

    if kind in hub.KINDS:
        source = hub.load(kind, root)
        sizes = len(source.train), len(source.test), len(source.classes)
        return Found(*sizes, source.held_out, hub.side_of(source, 224))
    folder = read_folder(root)
    return Found(len(folder.train), len(folder.test), len(folder.classes), folder.held_out, side_of(root, 224))


def on_gpu() -> bool:
    """Whether a run would be on a GPU."""
    import torch

    return torch.cuda.is_available()


def _names_data(config: Any) -> bool:
    data = config.get("data") if isinstance(config, dict) else None
    return isinstance(data, str) or (
        isinstance(data, dict) and bool({"dataset", "class_path", "init_args"} & set(data))
    )
