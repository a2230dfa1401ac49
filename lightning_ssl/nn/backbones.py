"""Encoders: torchvision's by name, a small conv net for CPUs, and the theory's linear and MLP encoders."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

Stem = Literal["cifar", "imagenet"]


def build_backbone(backbone: str | nn.Module, stem: Stem = "cifar", zero_init_residual: bool = False) -> nn.Module:
    """An encoder from images to features [N, num_features].

    Args:
        backbone: "small_conv", "linear", "mlp" (all for 3 x 32 x 32 images; give the classes below other sizes), the
            name of any torchvision classification model, or a module, which is returned as it is.
        stem: For ResNets: "cifar" (3x3 convolution with stride 1, no pooling) or "imagenet" (torchvision's own).
        zero_init_residual: For ResNets: start each residual branch at zero, by the scale of its last norm.
    """
    if isinstance(backbone, nn.Module):
        return backbone
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f'`stem` must be "cifar" or "imagenet", got {stem!r}')
    own = {"small_conv": SmallConv, "linear": LinearBackbone, "mlp": MLPBackbone}
    if backbone in own:
        return own[backbone]()
    known = torchvision.models.list_models(module=torchvision.models)
    if backbone not in known:
        raise ValueError(
            f"`backbone` must be a module, one of {sorted(own)}, or a torchvision model ({', '.join(known[:3])}, ..., "
            f"see torchvision.models.list_models), got {backbone!r}"
        )
    model = torchvision.models.get_model(backbone, weights=None)
    name, classifier = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    if getattr(model, "aux_logits", False):
        raise ValueError(f"backbone={backbone!r} has auxiliary classifiers; build it without them and pass the module")
    model.set_submodule(name, nn.Identity())
    model.num_features = classifier.in_features
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


def num_features(backbone: nn.Module) -> int:
    """How many features a backbone gives: its `num_features` or `out_features`, or found on a blank image."""
    for name in ("num_features", "out_features"):
        value = getattr(backbone, name, None)
        if isinstance(value, int):
            return value
    was_training = backbone.training
    try:
        with torch.no_grad():
            features = backbone.eval()(torch.zeros(2, 3, 32, 32))
        if features.ndim != 2:
            raise ValueError(f"features of shape {tuple(features.shape)}")
        return features.shape[1]
    except Exception as error:
        raise ValueError(
            f"cannot tell how many features `backbone` ({type(backbone).__name__}) gives: a [2, 3, 32, 32] image ended "
            f"in {error!r}; set an integer attribute `num_features` on it, and let it return [N, num_features]"
        ) from error
    finally:
        backbone.train(was_training)


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
