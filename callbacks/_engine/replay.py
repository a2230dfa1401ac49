"""Replay: a step's own calls run again, row by row, with the statistics that the step normalised by held constant."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ssl.callbacks._engine.observation import Observatory, Spec
from lightning_ssl.callbacks._engine.pair import Declared, Evidence, Reading, gather_evidence, sample_rows
from lightning_ssl.callbacks._engine.places import find_module
from lightning_ssl.callbacks._engine.record import Call, Moments, first_tensor, normalises_by_batch, tensors_in
from lightning_ssl.distributed import deal

WATCHABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

KEPT = 4  # tensors of an encoder's output that a head may take


def pooled(x: Tensor) -> Tensor:
    """Features [N, d]: positions of a map [N, d, positions...] and tokens of a sequence [N, tokens, d] are averaged."""
    if x.ndim > 2:
        x = x.mean(dim=1) if x.ndim == 3 else x.flatten(2).mean(dim=2)
    return x.reshape(len(x), -1)


# What steps do to an encoder's output before a head gets it, and the numbers of dimensions to which that applies.
_BETWEEN: list[tuple[Callable[[Tensor], Tensor], range]] = [
    (lambda x: x, range(1, 6)),
    (lambda x: x.flatten(1), range(3, 6)),
    (pooled, range(3, 6)),
    (lambda x: x[:, 0], range(3, 4)),  # the first token of [N, tokens, d]
    (lambda x: x[:, 1:].mean(dim=1), range(3, 4)),  # the mean of the others
    (lambda x: x.mean(dim=2), range(3, 4)),  # the mean over the length of [N, d, length]
    (lambda x: x.mean(dim=0), range(3, 4)),  # over that of [length, N, d]
    (lambda x: x[-1], range(3, 4)),  # its last step
    (lambda x: x[:, -1], range(3, 4)),  # the last step of [N, length, d]
    (lambda x: x.mean(dim=(1, 2)), range(4, 5)),  # the mean over the positions of [N, H, W, d]
]


def find_between(encoder: Sequence[Call], head: Sequence[Call]) -> int | None:
    """How the head's inputs come from the encoder's outputs, seen in one step: a number for `Network`, or None."""
    entered = [x for call in head if (x := call.entered) is not None]
    left = [list(islice(tensors_in(call.output), KEPT)) for call in encoder]
    if not left or not entered or not all(left):
        return None
    for number in range(len(_BETWEEN) * min(len(outputs) for outputs in left)):
        pieces = [between(number, outputs) for outputs in left]
        # Calls one by one, or gathered into one call of the head; a head may see fewer of them.
        if any(_same(a, b) for a, b in ((pieces, entered), (pieces[:1], entered[:1]))):
            return number
    return None


def between(number: int, outputs: Sequence[Tensor]) -> Tensor | None:
    which, how = divmod(number, len(_BETWEEN))
    step, dims = _BETWEEN[how]
    return step(outputs[which]) if outputs[which].ndim in dims else None


def _same(pieces: Sequence[Tensor | None], entered: Sequence[Tensor]) -> bool:
    found = [piece for piece in pieces if piece is not None]
    if len(found) < len(pieces) or len({x.shape[1:] for x in (*found, *entered)}) > 1:
        return False
    one, other = (torch.cat([x.float() for x in rows]) for rows in (found, entered))
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-6)


class Network(nn.Module):
    """Numbers of recorded rows to an output, through two parts of a module under their own dotted names.

    Args:
        pl_module: The module.
        encoder: Dotted path of the part the samples enter.
        output: Dotted path of the part whose output counts.
        step: What `find_between` found: how the one's output becomes the other's input.
        arguments: What entered the encoder: positional and keyword arguments, those with a row for each sample cut
            to the samples that are kept.
        samples: How many rows that is.
        context: The precision's forward context.
        rows: From what leaves the output to features [N, d].
    """

    def __init__(
        self,
        pl_module: nn.Module,
        encoder: str,
        output: str,
        step: int,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        samples: int,
        context: Any,
        rows: Callable[[Any], Tensor],
    ) -> None:
        super().__init__()
        # Private names, so that any name is left to the parts.
        self.__encoder = [find_module(pl_module, encoder, "encoder")]  # in a list: not registered twice
        self.__output = [find_module(pl_module, output, "output")]
        self.__is_encoder, self.__inside = output == encoder, f"{output}.".startswith(f"{encoder}.")
        self.__context, self.__step, self.__rows = context, step, rows
        self.__arguments, self.__samples = arguments, samples
        self.asked = torch.arange(samples)  # the rows of the pass at hand
        for path, part in ((encoder, self.__encoder[0]), (output, self.__output[0])):
            if path == output and self.__inside and not self.__is_encoder:
                continue
            *parents, last = path.split(".")
            node: nn.Module = self
            for parent in parents:
                if parent not in node._modules:
                    setattr(node, parent, nn.Module())
                node = node.get_submodule(parent)
            setattr(node, last, part)

    def forward(self, rows: Tensor) -> Tensor:
        context: AbstractContextManager[Any] = self.__context()
        self.asked = rows
        args, kwargs = _taken(self.__arguments, rows, self.__samples)
        with context, self._inner_output() as inner:
            outputs = list(islice(tensors_in(left := self.__encoder[0](*args, **kwargs)), KEPT))
            if not outputs:
                raise ValueError("the encoder returned no features")
            if self.__inside:
                features: Any = inner[-1] if inner else left
            else:
                entering = between(self.__step, outputs)
                assert entering is not None
                features = self.__output[0](entering)
        found = self.__rows(features)
        # The network's own precision or single: the graph's gradients need no more.
        return found.to(torch.promote_types(first_tensor(features).dtype, torch.float32))  # type: ignore[union-attr]

    @contextmanager
    def _inner_output(self) -> Iterator[list[Any]]:
        """What leaves a submodule inside the encoder, with its graph."""
        seen: list[Any] = []
        if not self.__inside or self.__is_encoder:
            yield seen
            return

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            left = first_tensor(output)
            if left is not None:
                seen.append(left.clone())  # the next layer may work in place

        handle = self.__output[0].register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()


def _taken(value: Any, rows: Tensor, of: int) -> Any:
    """The arguments of a call with `of` samples, of which only those at `rows` are kept."""
    if isinstance(value, Tensor):
        return value[rows.to(value.device, non_blocking=True)] if value.ndim and len(value) == of else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_taken(item, rows, of) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_taken(item, rows, of) for item in value)
    if isinstance(value, dict):
        return {key: _taken(item, rows, of) for key, item in value.items()}
    return value


def joined(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """The arguments of several calls, with `counts` samples each, as those of one; what has no row must be equal."""
    first = parts[0]
    if isinstance(first, Tensor):
        if first.ndim and all(len(part) == count for part, count in zip(parts, counts, strict=True)):
            if len({part.shape[1:] for part in parts}) > 1:
                raise ValueError("its calls had arguments of different shapes")
            return torch.cat(list(parts))
        if not all(torch.equal(first, part) for part in parts):
            raise ValueError("its calls had other arguments, and not one for each sample")
        return first
    if isinstance(first, (list, tuple)):
        if any(len(part) != len(first) for part in parts):
            raise ValueError("its calls had different numbers of arguments")
        items = [joined([part[i] for part in parts], counts) for i in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise ValueError("its calls had different keyword arguments")
        return {key: joined([part[key] for part in parts], counts) for key in first}
    if any(type(part) is not type(first) for part in parts):
        raise ValueError("its calls had arguments of different types")
    return first


class Calls(NamedTuple):
    """One rank's calls of an encoder and of the part whose output counts, in one step.

    Attributes:
        encoder: The encoder's calls that are views; where it saw one view only, the target encoder's follow.
        head: The calls of the part whose output counts.
        online: How many of `encoder` are the online encoder's own.
        counts: Samples of each of `encoder`.
        recorded: The rows that left the head, of all its calls.
        between: How the head's inputs come from the encoder's outputs.
    """

    encoder: list[Call]
    head: list[Call]
    online: int
    counts: list[int]
    recorded: list[Tensor]
    between: int

    @classmethod
    def of(cls, watched: Observatory, encoder: Spec, output: Spec, between: int | None = None) -> Calls | None:
        """What a step showed; None where the encoder was not called.

        Args:
            watched: What was recorded.
            encoder: The place the samples enter.
            output: The place whose output counts.
            between: What an earlier step showed of what lies between them, and its replay confirmed.
        """
        calls, head = (watched.places[spec.path].views() for spec in (encoder, output))
        calls = [call for call in calls if call.entered is not None and call.left is not None]
        if not calls:
            return None
        inside = f"{output.path}.".startswith(f"{encoder.path}.")
        step = 0 if inside else find_between(calls, head) if between is None else between
        if step is None:
            raise ValueError(
                f"the training step does something between {encoder.path!r} and {output.path!r} that is not repeated "
                "here; name an `output=` whose input is the encoder's output, as it is, flattened, pooled or a token"
            )
        online = len(calls)
        if encoder.target is not None and online == 1:
            calls = calls + [call for call in watched.places[encoder.target].calls if call.entered is not None]
        counts = [len(call.entered) for call in calls if call.entered is not None and call.entered.ndim]
        recorded = [watched.rows_of(call, output) for call in head]
        if sum(len(rows) for rows in recorded) % counts[0] or len(counts) < len(calls):
            raise ValueError(
                f"{tuple(calls[0].entered.shape)} entered {encoder.path!r}: samples must be on the first axis there; "  # type: ignore[union-attr]
                "name another `encoder=`, one that they enter before sequences are put first"
            )
        return cls(calls, head, online, counts, recorded, step)

    def evidence(self, batch: Any, declared: Declared) -> Evidence:
        entered = [call.entered for call in self.encoder]
        return gather_evidence(entered, self.counts, batch, declared, self.online)

    def samples(self, reading: Reading, declared: Declared, most: int) -> dict[str, Any]:
        """What another rank needs to run at most so many samples again."""
        ids = sample_rows(reading, self.counts, declared)
        call_of = torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))
        shapes = [call.entered.shape[1:] for call in self.encoder if call.entered is not None]
        # Of several sizes of crops, the first.
        ids = ids[:, [shapes[int(call_of[row])] == shapes[int(call_of[ids[0, 0]])] for row in ids[0]]]
        if ids.shape[1] < 2:
            raise ValueError(
                "the covariance operator needs two views of each sample, it saw one; pass `views=2` if a call holds "
                "both, `target=` if the other view enters the target network"
            )
        rows = ids[:most].flatten()
        used = sorted({int(call) for call in call_of[rows]})
        start = {call: sum(self.counts[c] for c in used if c < call) for call in used}
        shift = torch.tensor([start.get(c, 0) - sum(self.counts[:c]) for c in range(len(self.counts))])
        counts = [self.counts[call] for call in used]
        whole = joined([(self.encoder[call].args, self.encoder[call].kwargs) for call in used], counts)
        left = torch.cat(self.recorded)
        head_rows = torch.tensor([len(x) for x in self.recorded])
        head_of = torch.repeat_interleave(torch.arange(len(head_rows)), head_rows)
        known = (rows < len(left)) & (call_of[rows] < self.online)
        at = rows.clamp_max(len(left) - 1)
        return {
            "arguments": _taken(whole, rows + shift[call_of[rows]], sum(counts)),
            "views": ids.shape[1],
            "recorded": left[at.to(left.device, non_blocking=True)],
            # As plain numbers: tensors would travel by the device, and be waited for there.
            "known": known.tolist(),
            # A target's view is run with the statistics of the online network's own.
            "call": torch.where(call_of[rows] < self.online, call_of[rows], 0).tolist(),
            "head_call": head_of[at].tolist(),
            "moments": [_plain(call.moments) for call in self.encoder[: self.online]],
            "head_moments": [_plain(call.moments) for call in self.head],
            "between": self.between,
        }


def _plain(moments: dict[str, list[Moments]]) -> dict[str, list[list[Any]]]:
    return {name: [list(found) for found in calls] for name, calls in moments.items()}


class Replay:
    """Samples of all ranks, ready to run again.

    Args:
        pl_module: The module.
        encoder: Dotted path of the part the samples enter.
        output: Dotted path of the part whose output counts.
        parts: What `Calls.samples` made on each rank that has samples.
        context: The precision's forward context.
        read: From what leaves the output to features [N, d].

    Attributes:
        network: From numbers of rows to outputs.
        table: The row of each sample's views, ``[N, V]``, samples as they were dealt to the ranks.
    """

    def __init__(
        self,
        pl_module: nn.Module,
        encoder: str,
        output: str,
        parts: Sequence[dict[str, Any]],
        context: Any,
        read: Callable[[Any], Tensor],
    ) -> None:
        counts = [len(part["call"]) for part in parts]
        starts = [sum(counts[:r]) for r in range(len(counts))]
        views = {part["views"] for part in parts}
        if len(views) > 1:
            raise ValueError(f"ranks saw different numbers of views: {sorted(views)}")
        self._module, self._paths = pl_module, (encoder, output)
        tables = [
            torch.arange(n).view(-1, part["views"]) + at for n, at, part in zip(counts, starts, parts, strict=True)
        ]
        self.table = deal(tables)
        arguments = joined([tuple(part["arguments"]) for part in parts], counts)
        step = parts[0]["between"]
        self.network = Network(pl_module, encoder, output, step, tuple(arguments), sum(counts), context, read)
        self._recorded = torch.cat([part["recorded"] for part in parts])
        self._known = [row for row, known in enumerate(known for part in parts for known in part["known"]) if known]
        self._constants = []
        places = [(encoder, "moments", "call"), (output, "head_moments", "head_call")]
        for path, moments, calls in places[: 1 if f"{output}.".startswith(f"{encoder}.") else 2]:
            groups = [group for part in parts for group in part[moments]]
            numbers = [number for part in parts for number in range(len(part[moments]))]
            before = [sum(len(part[moments]) for part in parts[:r]) for r in range(len(parts))]
            group = torch.cat([torch.tensor(part[calls]) + at for part, at in zip(parts, before, strict=True)])
            module = pl_module.get_submodule(path)
            synced = {name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)}
            self._constants.append((module, stacked(groups, numbers, synced), group))

    @contextmanager
    def as_in_the_step(self) -> Iterator[list[str]]:
        """Inside, the network is that of the step, which `deviation` tells; yields layers that draw at random."""
        random = [
            f"{path}.{name}" if name else path
            for path in dict.fromkeys(self._paths)
            for name in random_layers(self._module.get_submodule(path))
        ]
        with ExitStack() as stack:
            stack.enter_context(evaluation_mode(self._module))
            for module, statistics, group in self._constants:
                stack.enter_context(held_constant(self.network, module, statistics, group))
            yield random

    def deviation(self) -> Tensor:
        """How far outputs are from what the step gave, as a share of the largest; read late, it makes nobody wait."""
        known = torch.tensor(self._known, dtype=torch.long).to(self._recorded.device, non_blocking=True)
        with torch.no_grad():
            outputs = torch.cat([self.network(some) for some in known.split(64)])
        recorded = self._recorded[known].to(outputs.dtype)
        if outputs.shape != recorded.shape:
            raise ValueError(f"run again it gives {tuple(outputs.shape)}, in the step it gave {tuple(recorded.shape)}")
        scale = recorded.abs().max().clamp_min(torch.finfo(recorded.dtype).tiny)
        return (outputs - recorded).abs().max() / scale

    def check(self, off: float) -> None:
        """Refuse a network that does not give what the step gave."""
        half = self._recorded.dtype in (torch.float16, torch.bfloat16)
        if not off <= (5e-2 if half else 1e-3):
            raise ValueError(
                f"run again, {' and '.join(map(repr, dict.fromkeys(self._paths)))} give other outputs than in the step "
                f"(by {off:.1%} of the largest); samples may depend on each other there, or on what the step did "
                "around them: name other `encoder=` and `output=`"
            )


Statistics = dict[str, list[tuple[Tensor, Tensor]]]  # by path of a normalisation, for each of its calls: [groups, C]


def stacked(groups: Sequence[Mapping[str, Sequence[Any]]], calls: Sequence[int], synced: Container[str]) -> Statistics:
    """The moments of several calls of a place, by normalisation.

    Synchronised ones normalised by all ranks' rows: by the moments of all groups of the same number in `calls`.
    """
    found: Statistics = {}
    for name in groups[0] if groups else ():
        found[name] = []
        for number in range(min(len(group.get(name, ())) for group in groups)):
            moments = [Moments(*group[name][number]) for group in groups]
            mean = torch.stack([m.mean for m in moments])
            variance = torch.stack([m.variance for m in moments])
            if name in synced:
                rows = torch.tensor([float(m.rows) for m in moments]).to(mean)
                order = torch.tensor(calls)
                share = (order[:, None] == order).to(mean) * rows
                share = share / share.sum(dim=1, keepdim=True).clamp_min(1)
                square = share @ (variance + mean.square())
                mean = share @ mean
                variance = square - mean.square()
            found[name].append((mean, variance))
    return found


@contextmanager
def held_constant(network: Network, part: nn.Module, statistics: Statistics, group: Tensor) -> Iterator[None]:
    """Inside, batch normalisations of a part normalise each row by what its call in the step was normalised by.

    Args:
        network: What runs; it knows which rows a pass is about.
        part: The encoder or the head.
        statistics: What `stacked` made of the part's calls.
        group: For each recorded row, the number of its call.
    """
    numbers: dict[str, int] = {}
    handles, buffers = [], []
    device = next((mean.device for calls in statistics.values() for mean, _ in calls), group.device)
    group = group.to(device, non_blocking=True)

    def constants(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        calls = statistics[name]
        mean, variance = calls[min(numbers.get(name, 0), len(calls) - 1)]
        numbers[name] = numbers.get(name, 0) + 1
        rows = group.to(mean.device)[network.asked.to(mean.device, non_blocking=True)]
        rows = rows.repeat_interleave(len(x) // len(rows)) if len(x) != len(rows) else rows
        shape = len(x), -1, *[1] * (x.ndim - 2)
        return mean[rows].view(shape), variance[rows].view(shape)

    def standardise(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any) -> Any:
            mean, variance = constants(name, args[0])
            eps = float(module.eps)  # type: ignore[arg-type]
            x = (args[0].to(mean.dtype) - mean) * torch.rsqrt(variance + eps) * (1 + eps) ** 0.5
            return x.to(args[0].dtype), *args[1:]

        return hook

    def normalise(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return module.normalise(args[0], *constants(name, args[0]))  # type: ignore[operator]

        return hook

    def start(module: nn.Module, args: Any) -> None:
        numbers.clear()

    handles.append(network.register_forward_pre_hook(start))
    try:
        for name, module in part.named_modules():
            if name not in statistics or not normalises_by_batch(module):
                continue
            if hasattr(module, "normalise"):
                handles.append(module.register_forward_hook(normalise(name)))
                continue
            width = statistics[name][0][0]
            buffers.append((module, dict(module._buffers)))
            module._buffers["running_mean"] = torch.zeros_like(width[0])
            module._buffers["running_var"] = torch.ones_like(width[0])
            handles.append(module.register_forward_pre_hook(standardise(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, kept in buffers:
            module._buffers.clear()
            module._buffers.update(kept)


def random_layers(part: nn.Module) -> list[str]:
    """The paths of layers that draw at random while they train: dropout, stochastic depth."""
    found = []
    for name, module in part.named_modules():
        rates = [getattr(module, attribute, 0.0) for attribute in ("p", "drop_prob", "dropout", "drop_rate")]
        kind = type(module).__name__.lower()
        drops = "drop" in kind or isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) or "attention" in kind
        if module.training and drops and any(isinstance(rate, float) and rate > 0 for rate in rates):
            found.append(name)
    return found


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put all of a module into eval mode, checkpointing off; afterwards modes and buffers are as they were.

    Buffers too: somebody's own hooks run as well, and may move statistics of parts that nobody named.
    """
    modes = [(part, part.training) for part in module.modules()]
    switches = [
        (part, name, value)
        for part, _ in modes
        for name in ("grad_checkpointing", "gradient_checkpointing")
        if isinstance(value := vars(part).get(name), bool)
    ]
    buffers = [(part, name, value, None if value is None else value.clone()) for part, name, value in _buffers(module)]
    try:
        for part, _ in modes:
            part.training = False  # not .eval(): some modules override it
        for part, name, _ in switches:
            setattr(part, name, False)
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, name, value in switches:
            setattr(part, name, value)
        with torch.no_grad():
            for part, name, value, kept in buffers:
                part._buffers[name] = value
                # On the host only what has changed is written; asking a device whether it has would wait for it.
                if (
                    value is not None
                    and kept is not None
                    and not (value.device.type == "cpu" and torch.equal(value, kept))
                ):
                    value.copy_(kept)


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor | None]]:
    for part in module.modules():
        for name, value in part._buffers.items():
            yield part, name, value
