"""The same views, bit for bit, on a device: all numbers cross in one copy, and a few calls treat all images.

The images of several views are one batch. Of brightness, contrast and saturation each image has an order of its own,
and its hue turns before, between or after them; four rounds of the former with two turns of the hue, after the first
round and after the third, hold every order, if an image takes part in the right ones. Sorted by when their hue turns,
those who take part in a round or a turn are a slice, but for the last round, in which others are multiplied by 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ssl.data import transforms

if TYPE_CHECKING:
    from lightning_ssl.data.augment import Augmentation, Plan

_TOGETHER = 2**28  # bytes of views up to which they are made together; beyond, calls cost nothing beside their work
_ROUNDS = ((1, 2, 3), (0, 1, 2), (0, 1, 3), (0, 1, 2))  # of the three steps, by how many come before the hue's turn
_RANK = (0, 1, 3, 2, 4)  # how images are sorted, by the same; 4 keeps its colours


class Plans:
    """What to do to a batch for all its views: a part of a batch that moves to a device as one tensor.

    Args:
        views: The plan of each view.
        recipes: What they were drawn from.
        size: Side of the views.
        mean: Channel means to normalise by.
        std: Channel standard deviations, likewise.
    """

    def __init__(
        self,
        views: Sequence[Plan],
        recipes: Sequence[Augmentation],
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        self.views, self.recipes, self.size, self.mean, self.std = tuple(views), tuple(recipes), size, mean, std
        self._parts: list[Part] = []
        self._numbers: Tensor | None = None

    def __len__(self) -> int:
        return len(self.views)

    def pack(self) -> Plans:
        """The same with all numbers in one tensor."""
        if self._numbers is None:
            batch = len(self.views[0].rows) if self.views else 0
            most = max(1, _TOGETHER // max(1, batch * 3 * self.size**2 * 4))
            numbers = []
            for first in range(0, len(self.views), most):
                chosen = slice(first, first + most)
                part = Part(self.views[chosen], self.recipes[chosen], self.size, self.mean, self.std)
                self._parts.append(part)
                numbers += part.numbers
            self._numbers = torch.cat(numbers)
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Plans:
        """The same on a device, by one copy; on the CPU the plans themselves serve."""
        if torch.device(device).type == "cpu" or not self.views:
            return self
        return self._with(self.pack()._packed.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: str | None = None) -> Plans:
        """The same in pinned memory."""
        return self._with(self.pack()._packed.pin_memory()) if self.views else self

    @property
    def _packed(self) -> Tensor:
        assert self._numbers is not None
        return self._numbers

    def _with(self, numbers: Tensor) -> Plans:
        other = Plans(self.views, self.recipes, self.size, self.mean, self.std)
        other._parts, other._numbers = self._parts, numbers
        return other

    def make(self, image: Tensor) -> list[Tensor]:
        """Make the views on the device of the numbers, each [B, 3, size, size].

        Args:
            image: Bytes, [B, C, H, W]; or of each view, [V, B, 3, size, size], where they are cropped already.
        """
        views: list[Tensor] = []
        numbers = self._packed.split([part.length for part in self._parts])
        for part, given in zip(self._parts, numbers, strict=True):
            chosen = image[len(views) : len(views) + part.num_views].flatten(0, 1) if image.ndim == 5 else image
            views += part.make(chosen, given)
        return views


class Part:
    """Views that are made together.

    Attributes:
        numbers: On the CPU: whole ones and then the bits of the others, int32.
        length: How many they are.
        ends: Ends of the images that turn their hue after no step, after one, three and two.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        recipes: Sequence[Augmentation],
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        self.size, self.num_views = size, len(plans)
        self.turns = any(recipe.hue > 0 for recipe in recipes)
        batch = len(plans[0].rows)
        when = torch.cat(
            [torch.bucketize(torch.arange(batch), torch.tensor(plan.hue_ends), right=True) for plan in plans]
        )
        rank = torch.tensor(_RANK)[when]
        order = rank.argsort(stable=True)
        self.ends = torch.bincount(rank, minlength=5)[:4].cumsum(0).tolist()
        where = order.argsort()  # in the common order
        rows = torch.cat([plan.rows for plan in plans])[order]
        target = torch.cat([plan.rows + view * batch for view, plan in enumerate(plans)])[order]
        self.crops = plans[0].box is not None

        steps = torch.cat([plan.steps for plan in plans], dim=2)[:, :, order]
        rounds = torch.tensor([1.0, 0.0, 0.0])[None, :, None].repeat(4, 1, len(order))
        place = torch.tensor([*_ROUNDS, (0, 1, 2)])[when[order]].T  # of each step; the rest take part in none
        rounds.scatter_(0, place[:, None].expand_as(steps), steps)
        amount, *roles = transforms.hue_roles(torch.cat([plan.hue for plan in plans])[order])

        grayscale, blur, solarize = (
            torch.cat([where[getattr(plan, name) + view * batch] for view, plan in enumerate(plans)])
            for name in ("grayscale", "blur", "solarize")
        )
        self.kernel = max(recipe.kernel_size(size) for recipe in recipes)
        weights = [
            torch.nn.functional.pad(transforms.blur_weights(plan.sigma, kernel), ((self.kernel - kernel) // 2,) * 2)
            for plan, kernel in zip(plans, (recipe.kernel_size(size) for recipe in recipes), strict=True)
        ]
        threshold = [
            torch.full((len(plan.solarize),), recipe.solarize_threshold)
            for plan, recipe in zip(plans, recipes, strict=True)
        ]
        span = torch.empty(0)
        if self.crops:
            boxes = torch.cat([plan.box for plan in plans if plan.box is not None], dim=1)[:, order]
            span = transforms.spans(boxes, size)
        whole = [
            rows if self.crops else target,
            target.argsort(),
            torch.arange(3),
            torch.stack(roles),
            grayscale,
            blur,
            solarize,
            transforms.reflected(size, self.kernel) if len(blur) else torch.empty(0, dtype=torch.int64),
        ]
        others = [
            span,
            rounds,
            amount,
            torch.cat(weights),
            torch.cat(threshold),
            torch.tensor(mean),
            torch.tensor(std),
            torch.tensor(transforms.LUMA),
        ]
        self.shapes = [tuple(x.shape) for x in whole], [tuple(x.shape) for x in others]
        self.numbers = [x.flatten().to(torch.int32) for x in whole]
        self.numbers += [x.flatten().float().view(torch.int32) for x in others]
        self.counts = sum(x.numel() for x in whole), sum(x.numel() for x in others)
        self.length = sum(self.counts)

    def make(self, image: Tensor, numbers: Tensor) -> list[Tensor]:
        """Make the views, each [B, 3, size, size]."""
        first, second = numbers.split(self.counts)
        source, places, planes, roles, grayscale, blur, solarize, reflected = _unpack(first.long(), self.shapes[0])
        span, rounds, amount, weights, threshold, mean, std, luma = _unpack(second.view(torch.float32), self.shapes[1])
        if self.crops:
            x = transforms.cut(image, source, planes, span, self.size)  # N x 3 x S x S
        else:
            x = image.index_select(0, source) / 255
        self._jitter_(x.transpose(0, 1), rounds, amount, roles, luma)
        if len(grayscale):
            gray = transforms.gray(x.index_select(0, grayscale).transpose(0, 1), luma)
            x.index_copy_(0, grayscale, gray[:, None].expand(-1, 3, -1, -1))
        if len(blur):
            x.index_copy_(0, blur, transforms.blurred(x.index_select(0, blur), weights, reflected, reflected))
        if len(solarize):
            chosen = x.index_select(0, solarize)
            x.index_copy_(0, solarize, transforms.solarize_(chosen, threshold[:, None, None, None]))
        x.sub_(mean[:, None, None]).div_(std[:, None, None])
        return list(x.index_select(0, places).chunk(self.num_views))

    def _jitter_(self, x: Tensor, rounds: Tensor, amount: Tensor, roles: Tensor, luma: Tensor) -> None:
        one, two, three, four = self.ends
        for step, (start, end) in enumerate(((one, four), (0, four), (0, three), (0, four))):
            if end > start:
                pixel, gray, mean = rounds[step, :, start:end]
                transforms.blend_(x[:, start:end], pixel, gray, mean, luma)
            if step in (0, 2) and self.turns:
                start, end = (0, two) if step == 0 else (two, four)
                if end > start:
                    transforms.turn_hue_(x[:, start:end], amount[start:end], *roles[:, :, start:end])


def _unpack(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = numbers.split([torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
