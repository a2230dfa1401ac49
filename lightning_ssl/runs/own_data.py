"""What `--data.root FOLDER` alone stands for: the images in it, with a recipe that suits their size and number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

BATCH = 64
STEPS = 2000  # of a run on a CPU, about
LONGEST = 100  # epochs

DATASET = ("--data.dataset", "--data.init_args.dataset")
ROOT = ("--data.root", "--data.init_args.root")


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
    from lightning_ssl.data.folders import kind_of, read_folder, recipe_for, side_of

    kind = kind_of(root)
    added = [f"--data.dataset={kind}"]
    if kind != "image_folder" or not Path(root).is_dir():
        return added
    try:
        found = read_folder(root)
    except FileNotFoundError:
        return added  # the DataModule says what is wrong, and what to do
    side = int(next((value for flag, value in flags if flag == "--data.image_size" and value.isdigit()), 0))
    side = side or side_of(root, 224)
    words = [
        f"{len(found.train) + len(found.test):,} images in {root!r}, "
        + (f"of {len(found.classes)} classes" if len(found.classes) > 1 else "without classes: the probes are left out")
    ]
    if found.held_out:
        words.append(f"{len(found.test):,} of them held out")
    words.append(f"views of {side} x {side} by the recipe of {recipe_for(side)}")
    if not configs:
        batch = min(BATCH, max(2, len(found.train) // 4))
        added.append(f"--data.batch_size={batch}")
        if not on_gpu():
            epochs = max(1, min(LONGEST, STEPS * batch // len(found.train)))
            added.append(f"--trainer.max_epochs={epochs}")
            words.append(f"a small network, as there is no GPU, {epochs} epochs of {len(found.train) // batch} steps")
        words.append("--data, --model.backbone and --trainer.max_epochs choose otherwise")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"lightning-ssl: {'; '.join(words)}", flush=True)
    return added


def beneath(root: str) -> str:
    """The shipped configs that suit images of a folder: small networks on a CPU, a ResNet-18 on a GPU."""
    from lightning_ssl.data.folders import side_of

    if not on_gpu():
        return "digits"
    return "cifar10" if side_of(root, 224) <= 40 else "stl10"


def on_gpu() -> bool:
    """Whether a run would be on a GPU."""
    import torch

    return torch.cuda.is_available()


def _names_data(config: Any) -> bool:
    data = config.get("data") if isinstance(config, dict) else None
    return isinstance(data, str) or (
        isinstance(data, dict) and bool({"dataset", "class_path", "init_args"} & set(data))
    )
