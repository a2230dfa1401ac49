"""One pass over a probe's images for whoever asks: each rank keeps the features of its own shard, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_ssl.callbacks._engine.batch import inputs_and_label
from lightning_ssl.callbacks._engine.layout import Layouts
from lightning_ssl.callbacks._engine.places import find_module
from lightning_ssl.callbacks._engine.probe_data import own_samples, shard, transferred
from lightning_ssl.callbacks._engine.record import copied, first_tensor
from lightning_ssl.distributed import Together, is_in_pieces
from lightning_ssl.metrics.evaluation import Shard, Targets


class Features(NamedTuple):
    """Features [N, d] and labels [N] of a whole split, each sample once, ordered by dataset index."""

    rows: Tensor
    labels: Tensor


class Reader(NamedTuple):
    """What one probe asks of the pass."""

    encoder: str
    features: str
    dtype: torch.dtype
    key: tuple[Any, ...]  # readers with the same key get the same rows
    rows: Callable[[Any, str | None, int], Tensor]
    needs_layout: Callable[[], bool]


class _Store:
    """Rows that come in batches, in one tensor that is not copied at the end."""

    def __init__(self, expected: int | None) -> None:
        self._expected, self._rows, self._count = expected, torch.zeros(0, 0), 0

    def add(self, batch: Tensor) -> None:
        if not self._rows.numel() and len(batch):
            self._rows = batch.new_empty(max(self._expected or 0, len(batch)), *batch.shape[1:])
        needed = self._count + len(batch)
        if needed > len(self._rows):  # nobody said how many there are
            larger = batch.new_empty(needed + needed // 4, *batch.shape[1:])
            larger[: self._count] = self._rows[: self._count]
            self._rows = larger
        if len(batch):
            self._rows[self._count : needed] = batch
        self._count = needed

    def get(self) -> Tensor:
        return self._rows[: self._count]


def embed(
    trainer: L.Trainer,
    pl_module: L.LightningModule,
    holder: Any,
    loader: Any,
    split: str,
    readers: Sequence[Reader],
    targets: Targets,
    pieces: int = 1,
    batches: int | None = None,
) -> dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]:
    """Rows, labels and dataset indices of this rank's samples, for each different reader; no collectives.

    Args:
        trainer: Which knows ranks and precision.
        pl_module: Which has the encoders.
        holder: The DataModule whose transfer hooks apply, if any.
        loader: What :func:`shard` takes.
        split: For errors: "train" or "test".
        readers: What is asked for.
        targets: What kind of labels there are.
        pieces: Into how many parts a batch is cut for the encoders.
        batches: At most how many batches are read.
    """
    precision = trainer.precision_plugin
    wanted = {reader.key: reader for reader in readers}
    expected = own_samples(trainer, loader) if batches is None else None
    stores = {key: _Store(expected) for key in wanted}
    labels, indices = _Store(expected), _Store(expected)
    for batch, index in islice(shard(trainer, loader), batches):
        moved = transferred(batch, pl_module, holder, precision.convert_input)
        inputs, label = inputs_and_label(moved, split, targets)
        labelled = (label >= 0) if targets == "class" else torch.ones(len(label), dtype=torch.bool, device=label.device)
        labelled &= (index >= 0).to(label.device)
        size = -(-len(label) // pieces)
        for start in range(0, len(label), max(1, size)):
            part = (
                {k: _cut(v, start, size, len(label)) for k, v in inputs.items()}
                if isinstance(inputs, Mapping)
                else (inputs[start : start + size])
            )
            samples = len(label[start : start + size])
            found = _run(pl_module, part, samples, list(wanted.values()), precision)
            for key, rows in found.items():
                if len(rows) != samples:
                    raise ValueError(f"{len(rows)} rows of features for {samples} labels; pass `layout=`")
                stores[key].add(rows[labelled[start : start + size].to(rows.device)])
        device = next(iter(stores.values())).get().device
        labels.add(label[labelled].to(device))
        indices.add(index.to(label.device)[labelled].to(device))
    every_label, every_index = labels.get(), indices.get()
    return {key: (store.get().to(wanted[key].dtype), every_label, every_index) for key, store in stores.items()}


def _cut(value: Any, start: int, size: int, rows: int) -> Any:
    return value[start : start + size] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value


def _run(
    pl_module: L.LightningModule, inputs: Any, samples: int, readers: Sequence[Reader], precision: Any
) -> dict[tuple[Any, ...], Tensor]:
    """Each encoder once, whatever parts of it are asked for."""
    found: dict[tuple[Any, ...], Tensor] = {}
    for path in dict.fromkeys(reader.encoder for reader in readers):
        encoder, asked = find_module(pl_module, path, "encoder"), [r for r in readers if r.encoder == path]
        layouts = Layouts()
        left: dict[str, list[tuple[Any, str | None]]] = {}
        handles = layouts.follow(encoder) if any(reader.needs_layout() for reader in asked) else []
        for place in dict.fromkeys(reader.features for reader in asked):
            left[place] = []
            part = find_module(pl_module, place, "features")
            handles.append(part.register_forward_hook(partial(_keep, left[place], layouts)))
        try:
            with precision.forward_context():
                encoder(**inputs) if isinstance(inputs, Mapping) else encoder(inputs)
        finally:
            for handle in handles:
                handle.remove()
        for reader in asked:
            if not left[reader.features]:
                raise ValueError(f"`features={reader.features!r}` was not called when {path!r} ran")
            output, seen = left[reader.features][-1]
            found[reader.key] = reader.rows(output, seen, samples).to(reader.dtype)
    return found


def gathered(together: Together, shard: Shard) -> Features:
    """Collective: the whole split on every rank, ordered by dataset index; it must fit into memory there."""
    if together.ranks == 1:
        return Features(shard.rows.float(), shard.labels)
    parts = together.gather(lambda: {"rows": shard.rows, "labels": shard.labels, "at": shard.positions})

    def ordered() -> Features:
        filled = [part for part in parts if len(part["at"])]
        rows, labels, at = (torch.cat([part[name] for part in filled]) for name in ("rows", "labels", "at"))
        order = at.argsort()
        return Features(rows[order].float(), labels[order])

    return together.run(ordered)  # type: ignore[no-any-return]


def fingerprint(module: nn.Module) -> tuple[float, ...]:
    """Changes when any weight or buffer does, however it was written."""
    every = (x.detach() for x in (*module.parameters(), *module.buffers()) if x.numel())
    tensors = [x.to_local() if is_in_pieces(x) else x for x in every]  # type: ignore[attr-defined]
    sums = [y for x in tensors for y in (x.sum(dtype=torch.float32), x.float().norm())]
    return tuple(torch.stack(sums).tolist()) if sums else ()


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Let hooks that ask the trainer find it in validation: they would augment in training."""
    stage = trainer.state.stage
    if stage is not None:
        trainer.state.stage = type(stage).VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = stage


def _keep(left: list[tuple[Any, str | None]], layouts: Layouts, module: nn.Module, args: Any, output: Any) -> None:
    first = first_tensor(output)
    left.append((copied(output), None if first is None else layouts.of(first, module, args)))
