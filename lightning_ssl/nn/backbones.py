"""Encoders: anybody's, by name or path, a small conv net for CPUs, and the theory's linear and MLP encoders."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import math
import warnings
from typing import Any, Literal

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

Stem = Literal["cifar", "imagenet"]
CLASSES = 1000  # of the heads that come with torchvision's and timm's models


def build_backbone(backbone: str | nn.Module, stem: Stem = "cifar", zero_init_residual: bool = False) -> nn.Module:
    """An encoder from images to features [N, num_features].

    Args:
        backbone: "small_conv", "linear", "mlp" (all for 3 x 32 x 32 images; give the classes below other sizes), the
            name of any torchvision classification model, "timm/NAME" for one of timm's, the import path of a class or
            function that makes a network without arguments, "package.module.Net", or a module. A classifier of 1,000
            classes, as torchvision's and timm's models are born with, is taken off.
        stem: For ResNets made by name: "cifar" (3x3 convolution with stride 1, no pooling) or "imagenet"
            (torchvision's own).
        zero_init_residual: For ResNets: start each residual branch at zero, by the scale of its last norm.
    """
    if isinstance(backbone, nn.Module):
        return _without_classifier(backbone)
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f'`stem` must be "cifar" or "imagenet", got {stem!r}')
    own = {"small_conv": SmallConv, "linear": LinearBackbone, "mlp": MLPBackbone}
    if backbone in own:
        return own[backbone]()
    if backbone.startswith("timm/"):
        return _from_timm(backbone.removeprefix("timm/"))
    if "." in backbone:
        return _without_classifier(_from_path(backbone))
    known = torchvision.models.list_models(module=torchvision.models)
    if backbone not in known:
        raise ValueError(
            f"`backbone` must be a module, one of {sorted(own)}, a torchvision model ({', '.join(known[:3])}, ..., "
            f"see torchvision.models.list_models), timm/NAME or an import path package.module.Net, got {backbone!r}"
            f"{_nearest(backbone, [*own, *known])}"
        )
    options = {"init_weights": True, "aux_logits": False} if backbone in ("googlenet", "inception_v3") else {}
    model = _without_classifier(torchvision.models.get_model(backbone, weights=None, **options))
    if isinstance(model, torchvision.models.ResNet) and stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    if isinstance(model, torchvision.models.ResNet) and zero_init_residual:
        for block in model.modules():
            last = {BasicBlock: "bn2", Bottleneck: "bn3"}.get(type(block))
            if last is not None:
                nn.init.zeros_(getattr(block, last).weight)
    return model


def _from_timm(name: str) -> nn.Module:
    try:
        import timm
    except ModuleNotFoundError:
        raise ValueError(f"`backbone` must be installed, got 'timm/{name}' without timm: pip install timm") from None
    if not timm.is_model(name):
        raise ValueError(f"`backbone`: timm has no model {name!r}{_nearest(name, timm.list_models())}")
    for flexible in ({"dynamic_img_size": True}, {"strict_img_size": False}, {}):  # images of other sizes, where it can
        with contextlib.suppress(TypeError):
            return timm.create_model(name, num_classes=0, **flexible)  # type: ignore[arg-type]
    raise ValueError(f"`backbone`: timm cannot make {name!r} without a classifier; make it yourself, pass the module")


def _from_path(path: str) -> nn.Module:
    """Import a class or function and call it."""
    module, _, name = path.rpartition(".")
    try:
        model = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise ValueError(
            f"`backbone` must name a class or function that makes a network without arguments, got {path!r}: "
            f"{type(error).__name__}: {error}; give arguments as --model.backbone.ARGUMENT"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"`backbone` must make a torch.nn.Module, got {type(model).__name__} from {path!r}")
    return model


def _without_classifier(model: nn.Module) -> nn.Module:
    """Take off the head of 1,000 classes that torchvision's and timm's classification models are born with."""
    package = type(model).__module__.partition(".")[0]
    if package == "timm" and getattr(model, "num_classes", 0) == CLASSES and hasattr(model, "reset_classifier"):
        model.reset_classifier(0)  # type: ignore[operator]
    elif package == "torchvision":
        if getattr(model, "aux_logits", False):
            raise ValueError(f"`backbone` ({type(model).__name__}) has auxiliary classifiers; make it without them")
        ends = [(name, part) for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
        name, head = ends[-1]
        if getattr(head, "out_features", 0) == CLASSES:
            model.set_submodule(name, nn.Identity())
        elif getattr(head, "out_channels", 0) == CLASSES:
            raise ValueError(
                f"`backbone` ({type(model).__name__}) must end in a linear classifier, which can be taken off, got a "
                "convolution; pass a module without it"
            )
    return model


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def num_features(backbone: nn.Module) -> int:
    """How many features a backbone gives, seen on a blank image; its own word where it takes no image."""
    outcomes = []
    for size in _sizes(backbone):
        features = _try(backbone, (3, size, size))
        if isinstance(features, Tensor) and features.ndim == 2:
            return features.shape[1]
        outcomes.append(f"{size} x {size}: {_words(features)}")
    for name in ("num_features", "out_features"):
        value = getattr(backbone, name, None)
        if isinstance(value, int):
            return value
    raise ValueError(
        f"`backbone` ({type(backbone).__name__}) must map images [N, 3, H, W] to features [N, num_features], got "
        f"{outcomes[0]}; wrap it so that it does, or set an integer attribute `num_features` on it"
    )


def check_input(backbone: nn.Module, shape: tuple[int, ...], features: int) -> None:
    """Refuse a backbone that cannot take what the data holds, or gives something else than its heads expect.

    Args:
        backbone: The encoder.
        shape: The shape of a sample.
        features: How many features its projector takes.
    """
    if any(p.is_meta for p in backbone.parameters()):
        return
    found = _try(backbone, shape)
    if isinstance(found, Tensor) and found.shape[1:] == (features,):
        return
    remedy = f"give it inputs of that shape, or make it for {_product(shape)} of them"
    if len(shape) == 3:
        works = [
            size
            for size in (32, 64, 96, 128, 160, 192, 224, 256, 384)
            if isinstance(out := _try(backbone, (3, size, size)), Tensor) and out.shape[1:] == (features,)
        ]
        remedy = f"set --data.image_size to one that works: {', '.join(map(str, works))}" if works else remedy
    elif hasattr(backbone, "in_features") or isinstance(backbone, (LinearBackbone, MLPBackbone)):
        remedy = f"set --model.backbone.in_features {_product(shape)}"
    raise ValueError(
        f"`backbone` ({type(backbone).__name__}) must take samples of shape {list(shape)} and give {features} "
        f"features, got {_words(found)}; {remedy}"
    )


def _product(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _sizes(backbone: nn.Module) -> list[int]:
    """Sides of images to try a backbone with: what it says itself first."""
    declared = getattr(backbone, "image_size", None) or getattr(backbone, "img_size", None)
    config = getattr(backbone, "pretrained_cfg", None) or {}
    declared = declared or (config.get("input_size") or [None])[-1]
    first = [declared] if isinstance(declared, int) else []
    return [*first, *(size for size in (32, 224, 96, 64) if size not in first)]


def _try(backbone: nn.Module, shape: tuple[int, ...]) -> Any:
    """What a backbone makes of two blank samples, or the error; it is left as it was."""
    modes = [(module, module.training) for module in backbone.modules()]
    like = next(itertools.chain(backbone.parameters(), backbone.buffers()), torch.empty(0))
    dtype = like.dtype if like.dtype.is_floating_point else torch.float32
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return backbone.eval()(torch.zeros(2, *shape, device=like.device, dtype=dtype))
    except Exception as error:
        return error
    finally:
        for module, training in modes:
            module.training = training


def _words(outcome: Any) -> str:
    if isinstance(outcome, Exception):
        return (
            f"{type(outcome).__name__} ({str(outcome).strip().splitlines()[0][:120] if str(outcome).strip() else ''})"
        )
    if isinstance(outcome, Tensor):
        return f"features of shape {list(outcome.shape)}"
    return f"a {type(outcome).__name__}"


class SmallConv(nn.Module):
    """Strided 3x3 convolutions with ReLU and a global mean: fast on a CPU.

    Args:
        in_channels: Channels of the image.
        width: Channels of the first layer; each further one has twice as many.
        depth: Number of layers; each halves the image.
        norm: "batch", "group" (4 channels a group; independent of the rest of the batch), or "none".

    Example:
        >>> SmallConv(width=8, depth=2)(torch.randn(4, 3, 16, 16)).shape
        torch.Size([4, 16])
    """

    def __init__(
        self,
        in_channels: int = 3,
        width: int = 32,
        depth: int = 3,
        norm: Literal["batch", "group", "none"] = "batch",
    ) -> None:
        super().__init__()
        if norm not in ("batch", "group", "none"):
            raise ValueError(f"`norm` must be batch, group or none, got {norm!r}")
        if norm == "group" and width % 4:
            raise ValueError(f'norm="group" makes groups of 4 channels: `width` must be a multiple of 4, got {width}')
        layers: list[nn.Module] = []
        channels = in_channels
        for out in [width * 2**i for i in range(depth)]:
            layers.append(nn.Conv2d(channels, out, kernel_size=3, stride=2, padding=1, bias=norm == "none"))
            if norm == "batch":
                layers.append(nn.BatchNorm2d(out))
            elif norm == "group":
                layers.append(nn.GroupNorm(out // 4, out))
            layers.append(nn.ReLU())
            channels = out
        self.layers = nn.Sequential(*layers)
        self.num_features = channels

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(dim=(2, 3))


class LinearBackbone(nn.Module):
    """One linear map of the flattened input: the online network W of DirectPred's analysis.

    Args:
        in_features: Size of the flattened input.
        out_features: Number of features.
        bias: Whether to add a bias; the theory has none.

    Example:
        >>> LinearBackbone(in_features=12, out_features=5)(torch.randn(2, 3, 2, 2)).shape
        torch.Size([2, 5])
    """

    def __init__(self, in_features: int = 3 * 32 * 32, out_features: int = 128, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.num_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


class MLPBackbone(nn.Module):
    """A ReLU network of the flattened input without normalisation: the deep ReLU network of DDN.

    Args:
        in_features: Size of the flattened input.
        hidden_features: Width of each hidden layer.
        out_features: Number of features.
        depth: Number of linear layers.
        bias: Whether the linear layers have biases.

    Example:
        >>> MLPBackbone(in_features=12, hidden_features=8, out_features=5)(torch.randn(2, 3, 2, 2)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        in_features: int = 3 * 32 * 32,
        hidden_features: int = 512,
        out_features: int = 128,
        depth: int = 2,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"`depth` must be at least 1, got {depth}")
        dims = [in_features, *[hidden_features] * (depth - 1), out_features]
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise(dims):
            layers += [nn.Linear(n_in, n_out, bias=bias), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.num_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))
