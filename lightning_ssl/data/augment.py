"""Recipes of augmentation, their random parameters, and their application to a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ssl.data import cached
from lightning_ssl.data.packed import Plans
from lightning_ssl.precision import exact_products
from lightning_ssl.rng import uniforms

_TRIES = 10  # for a crop that fits, as in torchvision; then the largest central one
NUM_UNIFORMS = 2 * _TRIES + 2 + 1 + 9 + 4


@dataclass(frozen=True)
class Augmentation:
    """One view's recipe; the steps happen in the order of the fields. The default is SimCLR's, without blur.

    Attributes:
        crop: Draw a random box and resize it to the image's size.
        crop_scale: Range of the box's area, as a fraction of the image's.
        crop_ratio: Range of the box's width over height.
        flip: Probability of mirroring left to right.
        jitter: Probability of changing the colours, in an order drawn for each image.
        brightness: Factor drawn from [max(0, 1 - b), 1 + b].
        contrast: Likewise.
        saturation: Likewise.
        hue: Turn of the colour circle drawn from [-h, h], h at most 0.5.
        grayscale: Probability of removing the colours.
        blur: Probability of a Gaussian blur.
        blur_sigma: Range of its standard deviation in pixels.
        blur_kernel: Side of its kernel as a fraction of the image's (made odd, at least 3).
        solarize: Probability of inverting the bright pixels.
        solarize_threshold: From where on a pixel is bright, in [0, 1].

    Example:
        >>> Augmentation(blur=0.5, solarize=0.2).flip
        0.5
    """

    crop: bool = True
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.8
    contrast: float = 0.8
    saturation: float = 0.8
    hue: float = 0.2
    grayscale: float = 0.2
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_kernel: float = 0.1
    solarize: float = 0.0
    solarize_threshold: float = 0.5

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grayscale", "blur", "solarize", "solarize_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must lie in [0, 1], got {getattr(self, name)}")
        for name in ("brightness", "contrast", "saturation"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)}")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"`hue` must lie in [0, 0.5], got {self.hue}")
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"`{name}` must be two positive numbers, the smaller first, got {(low, high)}")
        if self.crop_scale[1] > 1:
            raise ValueError(f"`crop_scale` must not exceed 1, the whole image, got {self.crop_scale}")

    def kernel_size(self, size: int) -> int:
        """Side of the blur's kernel, in pixels, for images of this size."""
        return max(3, int(self.blur_kernel * size) | 1)


_SIMCLR = Augmentation(blur=0.5)
_MILD: dict[str, Any] = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
_BYOL = (Augmentation(**_MILD, blur=1.0), Augmentation(**_MILD, blur=0.1, solarize=0.2))
PRESETS: dict[str, tuple[Augmentation, ...]] = {
    # As in each method's paper, for ImageNet.
    "simclr": (_SIMCLR,),
    "byol": _BYOL,
    "barlow_twins": _BYOL,
    "simsiam": (Augmentation(crop_scale=(0.2, 1.0), brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, blur=0.5),),
    # As in the experiments of the DirectPred and dual-network papers.
    "stl10": (_SIMCLR,),
    "cifar10": (Augmentation(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),),
    # A mirrored digit, or a small piece of one, is another digit.
    "digits": (Augmentation(crop_scale=(0.4, 1.0), flip=0.0, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),),
    "none": (Augmentation(crop=False, flip=0.0, jitter=0.0, grayscale=0.0),),
}


def preset(name: str) -> tuple[Augmentation, ...]:
    """The recipes of a preset, one for each view; fewer than there are views are used in turn."""
    if name not in PRESETS:
        raise ValueError(f"`augmentation` must be a preset, got {name!r}; choose one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def recipes_for(augmentation: Any, num_views: int) -> tuple[Augmentation, ...]:
    """One recipe for each view, from whatever names them: see `Augment`."""
    if isinstance(augmentation, str):
        recipes = list(preset(augmentation))
    elif isinstance(augmentation, (list, tuple)):
        recipes = []
        for entry in augmentation:
            recipe = preset(entry) if isinstance(entry, str) else (_recipe(entry),)
            if len(recipe) > 1:
                raise ValueError(
                    f"`augmentation` must list recipes of one view, got {entry!r} of {len(recipe)}; give it alone"
                )
            recipes.append(recipe[0])
    else:
        recipes = [_recipe(augmentation)]
    if not 1 <= len(recipes) <= num_views:
        if isinstance(augmentation, str):
            recipes = recipes[:num_views]
        else:
            raise ValueError(
                f"`augmentation` must have at most a recipe a view, got {len(recipes)} for {num_views}; leave some out"
            )
    return tuple(recipes[view % len(recipes)] for view in range(num_views))


def _recipe(value: Any) -> Augmentation:
    if isinstance(value, Mapping):
        known = {field.name for field in dataclasses.fields(Augmentation)}
        if unknown := sorted(set(value) - known):
            raise ValueError(f"`augmentation` must have known fields, got {unknown}; choose among {sorted(known)}")
        return Augmentation(**value)
    if not isinstance(value, Augmentation):
        raise TypeError(
            f"`augmentation` must be a preset ({', '.join(PRESETS)}), an Augmentation or a list of these, got {value!r}"
        )
    return value


class Plan(NamedTuple):
    """What to do to a batch for one view: drawn on the CPU, carried out on the device without a synchronisation.

    Images are treated in the order `rows`, grouped by the order of their steps, so that each group is a slice.

    Attributes:
        rows: Which image comes where, [B].
        places: Where each image comes, [B].
        box: Top, left, height, width and flip, [5, B]; None if the images are cropped and mirrored already.
        steps: Factors of the three steps of colour jitter other than hue (see `transforms.blend_`), [3, 3, B].
        hue: Turn of the hue, [B].
        ends: Ends of the groups of one order, 144 numbers: for each place of the hue's turn, before step 0, 1, 2 and
            after step 2, six ways in which the channels play their roles in it, and for each of them six orders of the
            other steps. The rest keep their colours.
        grayscale: Positions, in treated order, of the images to turn grey; `blur` and `solarize` likewise.
        sigma: Standard deviations of the blurred ones.
    """

    rows: Tensor
    places: Tensor
    box: Tensor | None
    steps: Tensor
    hue: Tensor
    ends: tuple[int, ...]
    grayscale: Tensor
    blur: Tensor
    sigma: Tensor
    solarize: Tensor

    @property
    def hue_ends(self) -> tuple[int, ...]:
        """Ends of the groups whose hue turns before step 0, 1, 2 and after step 2."""
        return self.ends[35::36]


def draw_boxes(recipe: Augmentation, u: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Random boxes, distributed as torchvision's `RandomResizedCrop`.

    Args:
        recipe: Ranges of area and aspect ratio.
        u: Uniforms, [B, 22].
        height: Heights of the images, [B]; `width` likewise.

    Returns:
        top, left, height, width as whole numbers, [4, B], float64.
    """
    height, width, u = height.double(), width.double(), u.double()
    if not recipe.crop:
        zero = torch.zeros_like(height)
        return torch.stack((zero, zero, height, width))
    area, ratio = u[:, :_TRIES], u[:, _TRIES : 2 * _TRIES]
    low, high = recipe.crop_scale
    area = (low + area * (high - low)) * (height * width)[:, None]
    low, high = (math.log(r) for r in recipe.crop_ratio)
    ratio = (low + ratio * (high - low)).exp()
    w, h = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (w > 0) & (w <= width[:, None]) & (h > 0) & (h <= height[:, None])
    first = fits.int().argmax(1, keepdim=True)
    w, h, found = w.gather(1, first)[:, 0], h.gather(1, first)[:, 0], fits.any(1)
    top, left = (u[:, -2] * (height - h + 1)).floor(), (u[:, -1] * (width - w + 1)).floor()

    low, high = recipe.crop_ratio
    central_w = torch.where(width / height > high, (height * high).round(), width)
    central_h = torch.where(width / height < low, (width / low).round(), height)
    central = torch.stack((((height - central_h) / 2).floor(), ((width - central_w) / 2).floor(), central_h, central_w))
    return torch.where(found, torch.stack((top, left, h, w)), central)


def draw_plan(recipe: Augmentation, u: Tensor, height: Tensor, width: Tensor) -> Plan:
    """Turn uniforms [B, NUM_UNIFORMS] into the parameters of one view of images with these sides, [B]."""
    batch = len(u)
    box = draw_boxes(recipe, u[:, : 2 * _TRIES + 2], height, width)
    flip, jitter, order, factor, rest = u[:, 2 * _TRIES + 2 :].split((1, 1, 4, 4, 4), dim=1)

    # A random order of brightness, contrast, saturation and hue: three steps, and before which of them the hue turns.
    when = order.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    hue_when = when[:, 3]
    step_of = when[:, :3] - (when[:, :3] > hue_when[:, None]).long()  # [B, 3]
    spread = torch.tensor([recipe.brightness, recipe.contrast, recipe.saturation])
    low, high = (1 - spread).clamp(min=0), 1 + spread
    f = low + factor[:, :3] * (high - low)
    zero = torch.zeros(batch)
    # The factors (pixel, luma, mean) of each operation, then put at its step.
    operations = torch.stack(
        (
            torch.stack((f[:, 0], zero, zero)),
            torch.stack((f[:, 1], zero, 1 - f[:, 1])),
            torch.stack((f[:, 2], 1 - f[:, 2], zero)),
        )
    )  # [operation, factor, B]
    steps = torch.empty(3, 3, batch).scatter_(0, step_of.T[:, None].expand(3, 3, batch), operations)
    hue = (factor[:, 3] * 2 - 1) * recipe.hue

    others = step_of[:, 0] * 2 + (step_of[:, 1] > step_of[:, 2]).long()  # the number of their order
    thirds = (hue * 3).round()
    roles = thirds.long() % 3 * 2 + (hue * 6 < thirds * 2)  # see `transforms.hue_roles`
    group = torch.where(jitter[:, 0] < recipe.jitter, (hue_when * 6 + roles) * 6 + others, 144)
    rows = group.argsort(stable=True)
    ends = torch.bincount(group, minlength=145)[:144].cumsum(0).tolist()
    grayscale, blur, sigma, solarize = rest[rows].unbind(1)
    least, most = recipe.blur_sigma
    blurred = (blur < recipe.blur).nonzero()[:, 0]
    return Plan(
        rows=rows,
        places=rows.argsort(),
        box=torch.cat((box, flip.T.lt(recipe.flip).double()))[:, rows].float(),
        steps=steps[:, :, rows],
        hue=hue[rows],
        ends=tuple(ends),
        grayscale=(grayscale < recipe.grayscale).nonzero()[:, 0],
        blur=blurred,
        sigma=(least + sigma * (most - least))[blurred],
        solarize=(solarize < recipe.solarize).nonzero()[:, 0],
    )


def carry_out(
    plan: Plan,
    recipe: Augmentation,
    image: Tensor,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Tensor:
    """Make one view of a batch.

    Args:
        plan: What to do.
        recipe: What it was drawn from.
        image: Bytes, [B, C, H, W].
        size: Side of the view.
        mean: Channel means, by which the view is normalised.
        std: Channel standard deviations, likewise.

    Returns:
        Views, [B, 3, size, size].
    """
    return make_views(Plans([plan], [recipe], size, mean, std).to(image.device), image)[0]


def make_views(plans: Plans, image: Tensor) -> list[Tensor]:
    """Make the views of a batch from bytes [B, C, H, W], or from those of each view, [V, B, 3, size, size]."""
    with exact_products():
        if image.device.type != "cpu":
            return plans.make(image)
        given = image if image.ndim == 5 else [image] * len(plans)
        return [
            cached.carry_out(plan, recipe, pixels, plans.size, plans.mean, plans.std)
            for plan, recipe, pixels in zip(plans.views, plans.recipes, given, strict=True)
        ]


def all_at_once(
    plan: Plan, recipe: Augmentation, image: Tensor, size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Make one view of a batch as a device does, the whole batch at a time."""
    return Plans([plan], [recipe], size, mean, std).pack().make(image)[0]


class Augment(nn.Module):
    """Views of a batch of images, all made at once on the device the batch is on: what `ImageDataModule` does.

    The images' parameters are drawn on the CPU, from torch's generator (`torch.manual_seed`) or, where the call names
    the samples, from (`seed`, epoch, sample, view) alone: then a sample's views are the same in any batch, on any rank.

    Args:
        augmentation: A preset ("simclr", "byol", "simsiam", "barlow_twins", "stl10", "cifar10", "digits", "none"), one
            recipe for all views, or a list with one (recipe or single-view preset) for each, used in turn if shorter.
        num_views: Views of each image.
        size: Side of the views; by default the images' shorter side.
        mean: Channel means to normalise by; by default views stay in [0, 1].
        std: Channel standard deviations, likewise.
        seed: Seed of the views of samples that are named.

    Example:
        >>> images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
        >>> views = Augment("simclr")(images)
        >>> [tuple(view.shape) for view in views], views[0].dtype
        ([(8, 3, 32, 32), (8, 3, 32, 32)], torch.float32)
        >>> augment = Augment("simclr", seed=1)
        >>> first, _ = augment(images, index=torch.arange(8))
        >>> alone, _ = augment(images[5:6], index=torch.tensor([5]))
        >>> torch.equal(first[5:6], alone)
        True
    """

    def __init__(
        self,
        augmentation: str | Augmentation | list[str | Augmentation] = "simclr",
        num_views: int = 2,
        size: int | None = None,
        mean: tuple[float, float, float] = (0.0, 0.0, 0.0),
        std: tuple[float, float, float] = (1.0, 1.0, 1.0),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_views < 1:
            raise ValueError(f"`num_views` must be at least 1, got {num_views}; give the number of views you want")
        if size is not None and size < 1:
            raise ValueError(f"`size` must be at least 1, got {size}; leave it out to keep the images' own")
        self.recipes = recipes_for(augmentation, num_views)
        self.size, self.mean, self.std, self.seed = size, tuple(mean), tuple(std), seed

    @torch.no_grad()
    def forward(self, image: Tensor, index: Tensor | None = None, epoch: int = 0) -> list[Tensor]:
        """Make the views.

        Args:
            image: Bytes, [B, C, H, W], C being 1 or 3.
            index: Which samples these are, [B]; without it the views are drawn from torch's generator.
            epoch: A new epoch draws new views of the same samples.

        Returns:
            The views, each [B, 3, size, size] in float32.
        """
        if image.dtype != torch.uint8 or image.ndim != 4 or image.shape[1] not in (1, 3):
            raise ValueError(
                f"`image` must be bytes of shape [B, 3, H, W] or [B, 1, H, W], got {tuple(image.shape)} of "
                f"{image.dtype}; give pixels 0 to 255 as torch.uint8, before any normalisation"
            )
        if index is not None and index.shape != image.shape[:1]:
            raise ValueError(f"`index` must have one entry an image, got {tuple(index.shape)} for {len(image)} images")
        height, width = (torch.full((len(image),), side) for side in image.shape[2:])
        plans = []
        for view, recipe in enumerate(self.recipes):
            if index is None:
                u = torch.rand(len(image), NUM_UNIFORMS)
            else:
                u = uniforms(index.cpu(), NUM_UNIFORMS, self.seed, 0, epoch, view)
            plans.append(draw_plan(recipe, u, height, width))
        drawn = Plans(plans, self.recipes, self.size or min(image.shape[2:]), self.mean, self.std)
        return make_views(drawn.to(image.device, non_blocking=True), image)

    def extra_repr(self) -> str:
        return f"{len(self.recipes)} views, size={self.size}, seed={self.seed}"
