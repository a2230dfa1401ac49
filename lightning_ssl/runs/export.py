"""`lightning-ssl embed` and `export`: a run's features and its backbone, for other people's programs."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

FORMATS = {
    ".pt": "state_dict",
    ".pth": "state_dict",
    ".safetensors": "safetensors",
    ".ts": "torchscript",
    ".onnx": "onnx",
}


def _refuse(words: str) -> NoReturn:
    print(f"lightning-ssl: error: {words}", file=sys.stderr)
    sys.exit(2)


def find_run(given: str) -> tuple[Path, Path]:
    """The config and the checkpoint of a run, given its folder or one of its checkpoints; refuses what is neither."""
    path = Path(given)
    checkpoint = path if path.suffix == ".ckpt" else path / "checkpoints" / "last.ckpt"
    config = checkpoint.parent.parent / "config.yaml"
    for wanted in (checkpoint, config):
        if not wanted.is_file():
            _refuse(
                f"{given!r} must be a run's folder or a checkpoint in it, and {str(wanted)!r} does not exist; "
                "`lightning-ssl runs` lists the runs"
            )
    return config, checkpoint


def embed_arguments(words: list[str]) -> list[str]:
    """The words of `predict` for those of `embed RUN [--FLAG VALUE ...]`: every split, this run's last checkpoint."""
    if not words or words[0].startswith("-"):
        _refuse("embed needs a run: lightning-ssl embed runs/NAME --output features.npz")
    config, checkpoint = find_run(words[0])
    return ["predict", f"--config={config}", f"--ckpt_path={checkpoint}", "--splits=all", *words[1:]]


def main(words: list[str]) -> int:
    """Run `lightning-ssl export` with these words."""
    parser = argparse.ArgumentParser(
        prog="lightning-ssl export",
        description="Writes the backbone of a run and reads it back: .pt or .pth (a state_dict with the names "
        "of torchvision's or timm's model), .safetensors, .ts (TorchScript) or .onnx.",
    )
    parser.add_argument("run", help="the run's folder, or one of its checkpoints")
    parser.add_argument("--output", default="backbone.pt", help="the file that is written; its ending is the format")
    parser.add_argument("--image_size", type=int, default=None, help="side of the images that it is traced with")
    given = parser.parse_args(words)
    form = FORMATS.get(Path(given.output).suffix)
    if form is None:
        parser.error(f"--output must end in one of {', '.join(FORMATS)}, got {given.output!r}")
    if not Path(given.output).absolute().parent.is_dir():
        parser.error(f"--output {given.output!r}: its folder does not exist; make it first")
    config, checkpoint = find_run(given.run)
    try:
        print(export(checkpoint, Path(given.output), form, given.image_size or _size(config)))
    except (ImportError, ValueError, RuntimeError) as error:
        print(f"lightning-ssl: error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


def load_backbone(checkpoint: Path) -> Any:
    """The backbone of a checkpoint, in evaluation mode."""
    from lightning_ssl.runs.checkpoint import CheckpointFiles

    hyperparameters = CheckpointFiles().load_checkpoint(checkpoint)["hyper_parameters"]
    module, _, name = hyperparameters["_class_path"].rpartition(".")
    method = getattr(import_module(module), name)
    return method.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).backbone.eval()


def export(checkpoint: Path, output: Path, form: str, size: int) -> str:
    """Write the backbone of a checkpoint, read it back, and say what was written.

    Args:
        checkpoint: The checkpoint.
        output: The file.
        form: One of the values of `FORMATS`.
        size: The side of the images that TorchScript and ONNX are traced and compared with.
    """
    import torch

    backbone = load_backbone(checkpoint)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = backbone(images)
    state = {name: tensor.contiguous() for name, tensor in backbone.state_dict().items()}
    if form == "state_dict":
        torch.save(state, output)
        back = torch.load(output, weights_only=True)
    elif form == "safetensors":
        try:
            from safetensors.torch import load_file, save_file
        except ImportError:
            raise ImportError("safetensors is not installed: pip install safetensors") from None
        save_file({name: tensor.clone() for name, tensor in state.items()}, output)
        back = load_file(output)
    if form in ("state_dict", "safetensors"):
        backbone.load_state_dict(back)
        with torch.no_grad():
            found = backbone(images)
        what = f"{len(state)} tensors of {type(backbone).__name__}"
    elif form == "torchscript":
        torch.jit.trace(backbone, images, check_trace=False).save(str(output))
        with torch.no_grad():
            found = torch.jit.load(str(output))(images)
        what = f"{type(backbone).__name__} as TorchScript"
    else:
        found = _onnx(backbone, images, output)
        what = f"{type(backbone).__name__} as ONNX"
    error = float((found - expected).abs().max())
    if not error <= 1e-4 * max(1.0, float(expected.abs().max())):
        raise ValueError(f"what was written to {str(output)!r} gives other features, by up to {error:.2g}")
    note = ""
    if (
        "conv1.weight" in state
        and type(backbone).__module__.startswith("torchvision")
        and state["conv1.weight"].shape[-1] == 3
    ):
        note = "; its stem is CIFAR's: give torchvision's model a 3 x 3 conv1 of stride 1 and no maxpool"
    return f"wrote {what} to {output}: {expected.shape[1]} features, read back to within {error:.1g}{note}"


def _onnx(backbone: Any, images: Any, output: Path) -> Any:
    import torch

    try:
        import onnxruntime
    except ImportError:
        raise ImportError("onnxruntime is not installed: pip install onnx onnxscript onnxruntime") from None
    torch.onnx.export(backbone, (images,), str(output), input_names=["images"], output_names=["features"])
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _size(config: Path) -> int:
    """The side of the images that a run was trained on."""
    import yaml

    from lightning_ssl.data import ImageDataModule

    data = yaml.safe_load(config.read_text()).get("data") or {}
    options = data.get("init_args") or {}
    if not str(data.get("class_path", "")).endswith("ImageDataModule"):
        return 32
    return ImageDataModule(
        options.get("dataset"), options.get("root"), image_size=options.get("image_size")
    ).pipeline.size
