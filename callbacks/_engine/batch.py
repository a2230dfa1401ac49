"""What a batch of probe data holds: inputs and labels, under the names and in the shapes that people give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import default_collate

from lightning_ssl.callbacks._engine.record import first_tensor
from lightning_ssl.metrics.evaluation import Targets

_IMAGE_KEYS = ("image", "images", "img", "x", "input", "inputs", "pixel_values", "data")
_LABEL_KEYS = ("label", "labels", "target", "targets", "y", "class")


def collate(samples: list[Any]) -> Any:
    """Torch's own, with pictures as tensors between 0 and 1: a Hugging Face dataset yields them as they are."""
    return default_collate([_without_pictures(sample) for sample in samples])


def _without_pictures(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_pictures(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_without_pictures(item) for item in value]) if type(value) in (tuple, list) else value
    if type(value).__module__.startswith("PIL."):
        from torchvision.transforms.functional import pil_to_tensor

        return pil_to_tensor(value.convert("RGB")).float() / 255
    return value


def taken_apart(batch: Any) -> tuple[Any, Any]:
    """What enters the encoder and the label: the first two of a tuple, or a dict's by name."""
    inputs: Any = None
    label: Any = None
    if isinstance(batch, Mapping):
        label = next((batch[key] for key in _LABEL_KEYS if key in batch), None)
        inputs = next((batch[key] for key in _IMAGE_KEYS if key in batch), None)
        if inputs is None:
            inputs = {key: value for key, value in batch.items() if key not in (*_LABEL_KEYS, "index")}
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        inputs, label = batch[0], batch[1]
    if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
        inputs = inputs[0]
    return inputs, label


def inputs_and_label(
    batch: Any, split: str, targets: Targets | None = "class"
) -> tuple[Tensor | dict[str, Any], Tensor]:
    """What enters the encoder, and the labels [N] or [N, C]: the first two of a tuple, or a dict's by name.

    A dict without an image (token ids, say) enters as keyword arguments, without its labels.
    """
    inputs, label = taken_apart(batch)
    first = first_tensor(inputs, floating=False) if isinstance(inputs, (Tensor, Mapping)) else None
    if first is None or not first.ndim:
        raise MisconfigurationException(
            f"the probe's {split} loader must yield (image, label) or a dict with both, one clean image tensor a "
            f"batch; got {_describe(batch)}"
        )
    if isinstance(label, Tensor) and label.ndim == 1 and targets == "continuous":
        label = label[:, None]
    n = len(first)
    right = {
        "class": f"an integer tensor [{n}]",
        "multilabel": f"a tensor of zeros and ones [{n}, classes]",
        "continuous": f"a floating-point tensor [{n}] or [{n}, targets]",
    }
    if not isinstance(label, Tensor) or not label.ndim or (targets is not None and not _fits(label, targets)):
        raise MisconfigurationException(
            f"the probe's {split} loader yields no labels: {right[targets or 'class']} must follow the image; "
            f"got {_describe(batch)}"
        )
    return dict(inputs) if isinstance(inputs, Mapping) else inputs, label


def _fits(label: Tensor, targets: Targets) -> bool:
    if targets == "class":
        return not label.is_floating_point() and label.ndim == 1
    if targets == "multilabel":
        return label.ndim == 2
    return label.is_floating_point() and label.ndim == 2


def batch_index(batch: Any) -> Tensor | None:
    index = batch.get("index") if isinstance(batch, Mapping) else getattr(batch, "index", None)
    return index if isinstance(index, Tensor) else None


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)} of {batch.dtype}"
    if isinstance(batch, Mapping):
        return "a dict of " + ", ".join(f"{key}: {_describe(value)}" for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of (" + ", ".join(_describe(value) for value in batch[:4]) + ")"
    return type(batch).__name__
