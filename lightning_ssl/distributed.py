"""Every collective there is: differentiable ones, in the convention DDP expects, and one exchange of anything else.

All are the identity in a single process. The differentiable ones sum the gradient over ranks: what arrives is the
derivative of the sum of all ranks' losses. As DDP then averages parameter gradients, training follows the mean of the
ranks' losses. So each rank returns either the loss of the whole batch (computed from gathered rows), or its own rows'
mean times :func:`rank_weight`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ssl._wires import Wires, connect


def world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank(group: Any = None) -> int:
    return dist.get_rank(group) if world_size(group) > 1 else 0


class Collective(NamedTuple):
    """One of ours: its name and its number in this process."""

    name: str
    number: int


_last = Collective("none", 0)


def last_collective() -> Collective:
    """The last collective of this module that was begun; DDP's own are not among them."""
    return _last


def _begin(name: str) -> None:
    global _last
    _last = Collective(name, _last.number + 1)


def all_reduce_sum(x: Tensor, group: Any = None) -> Tensor:
    """The sum over ranks, outside the graph; `x` is left as it was."""
    if world_size(group) == 1:
        return x
    total = x.detach().clone(memory_format=torch.contiguous_format)
    _begin("all_reduce_sum")
    dist.all_reduce(total, group=group)
    return total


def broadcast(x: Tensor) -> Tensor:
    """Rank 0's tensor."""
    if world_size() > 1:
        x = x.contiguous()
        _begin("broadcast")
        dist.broadcast(x, src=0)
    return x


def row_counts(rows: int, device: torch.device) -> list[int]:
    """How many rows each rank holds."""
    if world_size() == 1:
        return [rows]
    counts = torch.zeros(world_size(), dtype=torch.long, device=device)
    counts[rank()] = rows
    _begin("row_counts")
    dist.all_reduce(counts)
    return counts.tolist()


def rank_weight(rows: int, device: torch.device) -> Tensor | float:
    """What a rank's mean over its rows is multiplied by, for the ranks' mean to be the mean over all rows."""
    if world_size() == 1:
        return 1.0
    total = all_reduce_sum(torch.full((), rows, dtype=torch.float32, device=device))
    return rows * world_size() / total.clamp_min(1)


def gather_rows(x: Tensor, counts: list[int] | None = None) -> Tensor:
    """Concatenate the rows of all ranks, in rank order; ranks may hold different numbers of rows, also none.

    Args:
        x: This rank's rows, [n, ...].
        counts: The ranks' row counts, if known (:func:`row_counts`); saves a collective.

    Returns:
        All rows, [sum n, ...], differentiable.
    """
    if world_size() == 1:
        return x
    return _GatherRows.apply(x, counts or row_counts(len(x), x.device))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        ctx.start, ctx.rows = sum(counts[: rank()]), counts[rank()]
        padded = x.contiguous()
        if min(counts) < max(counts):  # all_gather needs equal shapes
            padded = x.new_zeros(max(counts), *x.shape[1:])
            padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        _begin("gather_rows")
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad.contiguous())[ctx.start : ctx.start + ctx.rows], None


def sum_over_ranks(x: Tensor, same_after: bool = False) -> Tensor:
    """The sum of the ranks' tensors of one shape, differentiable.

    Args:
        x: This rank's.
        same_after: What each rank makes of the sum is the same on all of them, down to its loss: the gradient then is
            known without a collective.
    """
    return x if world_size() == 1 else _SumOverRanks.apply(x, same_after)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, same_after: bool) -> Tensor:
        ctx.same_after = same_after
        return all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * world_size() if ctx.same_after else all_reduce_sum(grad), None


# Tensors that a strategy keeps in pieces (FSDP2) ----------------------------------------------------------------------


def is_in_pieces(x: Any) -> bool:
    """Whether each rank holds a piece of a tensor only (a DTensor)."""
    return isinstance(x, Tensor) and hasattr(x, "full_tensor")


def to_pieces(*modules: Any) -> None:
    """Let modules cut by FSDP2 hold their pieces: after a forward pass some hold whole copies, to write into which is
    of no use."""
    for module in modules:
        for part in module.modules():
            if hasattr(part, "reshard"):
                part.reshard()


def whole(x: Tensor) -> Tensor:
    """All of a tensor on each rank, outside the graph; a collective where it is in pieces."""
    x = x.detach()
    if not is_in_pieces(x):
        return x
    _begin("whole")
    return x.full_tensor()  # type: ignore[attr-defined]


@torch.no_grad()
def put_(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, the same on all ranks, into one that may be in pieces: each rank takes its own."""
    if is_in_pieces(target):
        from torch.distributed.tensor import DTensor, Replicate

        mesh: Any = target.device_mesh  # type: ignore[attr-defined]
        everywhere = DTensor.from_local(value.to(target.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
        value = everywhere.redistribute(placements=target.placements)  # type: ignore[attr-defined]
    target.copy_(value)


# What the ranks tell each other outside of the graph ------------------------------------------------------------------


class RankError(RuntimeError):
    """What went wrong on some ranks, raised on all of them."""


def exchange(
    value: Any, device: torch.device | None = None, problem: BaseException | None = None, group: Any = None
) -> list[Any]:
    """Give every rank every rank's value: shapes and plain data first, then the bytes of all tensors at once.

    Args:
        value: Tensors of any shape and type in nested dicts and lists, with plain Python data beside them.
        device: Where the tensors of the result are, and what the process group talks through.
        problem: What kept this rank from making its value; it is then raised on all ranks.
        group: The process group; by default all ranks.

    Returns:
        The values, ordered by rank.

    Raises:
        RankError: Some rank had a problem; it names the ranks and their words.

    Example:
        >>> exchange({"rows": torch.ones(2, 3), "note": "from one process"})[0]["note"]
        'from one process'
    """
    if world_size(group) == 1:
        if problem is not None:
            raise RankError(str(problem)) from problem
        tensors: list[Tensor] = []
        plain = _take_out(value, tensors)
        return [_put_back(plain, [x.to(device or x.device) for x in tensors])]
    parcel = _Parcel(value, None if problem is None else str(problem), device or torch.device("cpu"), group)
    if words := parcel.problems:
        one = next(iter(words.values()))
        told = one if set(words.values()) == {one} and len(words) == world_size(group) else _by_rank(words)
        raise RankError(told) from problem
    parcel.load()
    # Copies: what is kept of one rank's value is not to keep all of them in memory.
    return [_put_back(plain, [x.clone() for x in tensors]) for plain, tensors in parcel.send()]


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value, pickled whole; :func:`exchange` is for tensors."""
    values: list[Any] = [value] * world_size(group)
    if len(values) > 1:
        group = host_group() if group is None else group
        _begin("gather_objects")
        dist.all_gather_object(values, value, group=group)
    return values


_host_groups: dict[Any, Any] = {}  # of the process group that all ranks are in, the one for the hosts


def host_group() -> Any:
    """Collective at its first call: all ranks' hosts, without their devices; None where all ranks' own group can.

    Through a group of NCCL alone plain data would be copied to the device and back, and waited for three times.
    """
    everybody = dist.group.WORLD
    if "cpu:" in dist.get_backend_config(everybody):
        return None
    if everybody not in _host_groups:
        _host_groups.clear()
        _host_groups[everybody] = dist.new_group(backend="gloo")
    return _host_groups[everybody]


class Together:
    """Work on rows that stay where they are: each rank adds what it makes of its own, all get the sum.

    What goes wrong on any rank, before a sum or in work that all do alike, is raised on all of them as a
    :class:`RankError`, so that none is left waiting. In one process errors pass through as they are.

    Args:
        device: Where the sums are.
        sharded: Whether rows are spread over the ranks; otherwise this process has them all.
        group: The process group; by default all ranks.

    Example:
        >>> together = Together(torch.device("cpu"))
        >>> together.sum(lambda: [torch.ones(2), torch.tensor(3.0)], [(2,), ()])
        [tensor([1., 1.], dtype=torch.float64), tensor(3., dtype=torch.float64)]
    """

    def __init__(self, device: torch.device, sharded: bool = True, group: Any = None) -> None:
        self.device, self.group = device, group
        self.ranks = world_size(group) if sharded else 1
        self.rank = rank(group) if self.ranks > 1 else 0
        self.wide = torch.float32 if device.type == "mps" else torch.float64

    def sum(
        self,
        make: Callable[[], Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Collective: the sums of tensors of these shapes over the ranks, by default in double precision."""
        dtype = dtype or self.wide
        if self.ranks == 1:
            return [part.to(self.device, dtype) for part in make()]
        sizes = [math.prod(shape) for shape in shapes]

        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=self.device)

        problem: Exception | None = None
        parts: list[Tensor] = []
        try:
            parts = [part.to(self.device, dtype).flatten() for part in make()]
            if [part.numel() for part in parts] not in ([], sizes):
                raise ValueError(f"parts of {[part.numel() for part in parts]} numbers where {sizes} are to be summed")
            flat = torch.cat([*(parts or [zeros(sum(sizes))]), zeros(1)])  # and a last number: what went wrong
        except Exception as error:
            problem = error
            parts.clear()  # room for zeros: the other ranks wait for as many numbers
            flat = zeros(sum(sizes) + 1)
            flat[-1] = 1.0
        _begin("together")
        _add_up(flat, self.group)
        if bool(flat[-1] > 0):
            self._raise(problem)
        return [part.view(shape) for part, shape in zip(flat[:-1].split(sizes), shapes, strict=True)]

    def each(self, make: Callable[[], Sequence[Tensor]], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Collective: every rank's tensors of these shapes, stacked by rank, ``[W, ...]``: small ones, by one sum."""

        def own() -> list[Tensor]:
            parts = []
            for part, shape in zip(make(), shapes, strict=True):
                parts.append(torch.zeros(self.ranks, *shape, dtype=self.wide, device=self.device))
                parts[-1][self.rank] = part
            return parts

        return self.sum(own, [(self.ranks, *shape) for shape in shapes])

    def run(self, work: Callable[[], Any]) -> Any:
        """Collective: the result of work that every rank does alike."""
        found: list[Any] = []

        def make() -> Sequence[Tensor]:
            found.append(work())
            return ()

        self.sum(make, ())
        return found[0]

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        """Collective: what every rank made, by rank; see :func:`exchange`.

        The tensors of all of them are parts of one piece of memory.
        """
        if self.ranks == 1:
            return [make()]
        problem: Exception | None = None
        value: Any = None
        try:
            value = make()
        except Exception as error:
            problem = error
        parcel = _Parcel(value, None if problem is None else _words(problem), self.device, self.group)
        if parcel.problems:
            raise RankError(_by_rank(parcel.problems)) from problem
        del value
        try:
            parcel.load()
        except Exception as error:
            problem = error
        if not self._all_well(problem):
            self._raise(problem)
        return [_put_back(plain, tensors) for plain, tensors in parcel.send()]

    def _all_well(self, problem: Exception | None) -> bool:
        flag = torch.tensor(float(problem is not None), device=self.device)
        _begin("together")
        dist.all_reduce(flag, group=self.group)
        return not bool(flag > 0)

    def _raise(self, problem: Exception | None) -> None:
        told = gather_objects(None if problem is None else _words(problem), self.group)
        raise RankError(_by_rank({rank: words for rank, words in enumerate(told) if words is not None})) from problem


# Bytes up to which a sum over ranks of one host goes by wires: what is larger goes by less traffic.
_SHORT = 2**24
_wires: WeakKeyDictionary[Any, Wires | None] = WeakKeyDictionary()


def _add_up(x: Tensor, group: Any) -> None:
    """Sum over ranks in place."""
    wires = _wires_of(group) if x.device.type == "cpu" else None
    plain = x.dtype in (torch.float32, torch.float64)
    if wires is None or not plain or x.nbytes * (world_size(group) - 1) > _SHORT:
        dist.all_reduce(x, group=group)
    else:
        wires.add_up(x)


def _wires_of(group: Any) -> Wires | None:
    """Collective at its first call for a group: the sockets between its ranks, where they can be had."""
    group = dist.group.WORLD if group is None else group
    if group not in _wires:
        timeout = getattr(getattr(group._get_backend(torch.device("cpu")), "options", None), "_timeout", None)
        seconds = (timeout or timedelta(minutes=30)).total_seconds()
        _wires[group] = connect(rank(group), world_size(group), lambda value: gather_objects(value, group), seconds)
    return _wires[group]


def agree(ok: bool, number: int = 0, device: torch.device | None = None) -> tuple[bool, int]:
    """Whether all ranks are `ok`, and the largest `number`."""
    if world_size() == 1:
        return ok, number
    votes = torch.tensor([0 if ok else 1, number], device=device)
    _begin("agree")
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    failed, largest = votes.tolist()
    return not failed, largest


def deal(pieces: Sequence[Tensor]) -> Tensor:
    """The ranks' rows in the order in which a DistributedSampler deals them: all first rows, then all second ones.

    What depends on the order of rows is then the same at any number of ranks.

    Example:
        >>> deal([torch.tensor([0, 2, 4]), torch.tensor([1, 3])])
        tensor([0, 1, 2, 3, 4])
    """
    if len(pieces) == 1:
        return pieces[0]
    turns = [torch.arange(len(piece), device=piece.device) * len(pieces) + r for r, piece in enumerate(pieces)]
    return torch.cat(list(pieces))[torch.cat(turns).argsort()]


class Vote:
    """What any rank asks for, known to all of them one call later, and waited for by none.

    A call hands in this rank's numbers and returns the largest in size of all ranks' numbers of the call before: by
    then they have arrived. So all ranks see the same at the same call. In one process a call returns its own numbers.

    Example:
        >>> Vote().cast(15, 0)
        [15, 0]
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._work: Any = None
        self._numbers: Tensor | None = None

    def open(self, timeout: timedelta) -> None:
        """Collective: begin, with a process group of its own that does not touch the device."""
        self._work = self._numbers = None
        if world_size() > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def cast(self, *numbers: int) -> list[int]:
        """Collective."""
        if world_size() == 1:
            return list(numbers)
        found = self._result(len(numbers))
        # Both signs, as the largest and as the smallest of all; always in the same tensor, which outlives the group: a
        # thread of gloo that holds one alone waits for the interpreter, which may be waiting for the thread to end.
        values = torch.tensor([*numbers, *(-n for n in numbers)])
        self._numbers = values if self._numbers is None else self._numbers.copy_(values)
        self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return found

    def _result(self, count: int) -> list[int]:
        if self._work is None or self._numbers is None:
            return [0] * count
        _begin("vote")
        self._work.wait()
        values = self._numbers.tolist()
        return [high if high > 0 else -low for high, low in zip(values[:count], values[count:], strict=True)]

    def close(self) -> None:
        """Collective: the end, of ranks that are all alive."""
        if self._group is not None and world_size() > 1:
            if self._work is not None:
                self._work.wait()
            dist.destroy_process_group(self._group)
        self._group = None
        self._work = self._numbers = None


class Board:
    """Notes for the other ranks in the store at which they met: it answers where a collective would wait.

    Args:
        name: Of this run, the same on all ranks and not used before.
    """

    def __init__(self, name: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]

    def collect(self, note: str, timeout: timedelta) -> dict[int, str]:
        """Every rank's note, by rank; of those that handed in theirs within the time."""
        found, end = {rank(): note}, time.monotonic() + timeout.total_seconds()

        def gather() -> None:
            self._store.set(f"note/{rank()}", note)
            while len(found) < world_size() and time.monotonic() < end:
                for other in set(range(world_size())) - set(found):
                    if self._store.check([f"note/{other}"]):
                        found[other] = self._store.get(f"note/{other}").decode()
                time.sleep(0.02)

        _within(timeout.total_seconds(), gather)
        return dict(sorted(found.items()))

    def post(self, words: str, seconds: float = 2.0) -> None:
        """Leave the last words of this rank, unless another was first or the store is out of reach."""
        _within(seconds, lambda: self._store.compare_set("ended", "", words))

    def read(self, seconds: float = 2.0) -> str | None:
        """The last words of the rank that ended first: empty while there are none, None from a store out of reach."""
        return _within(seconds, lambda: self._store.get("ended").decode() if self._store.check(["ended"]) else "")


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call to the store returns, or None: behind a link that is cut it would wait for ever."""
    found: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


class _Slot(NamedTuple):
    number: int


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    """The value with its tensors replaced by their numbers in the list, to which they are added."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_take_out(item, tensors) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value


def _put_back(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    return [_put_back(item, tensors) for item in value] if isinstance(value, list) else value


class _Parcel:
    """Collective: a rank's value on its way to the others.

    Shapes and plain data go first, so that every rank knows what it needs room for. :meth:`load`, which is no
    collective, makes that room; :meth:`send` needs none.

    Args:
        value: See :func:`exchange`.
        problem: What kept this rank from making its value.
        device: Where the tensors of the result are.
        group: The process group.
    """

    def __init__(self, value: Any, problem: str | None, device: torch.device, group: Any) -> None:
        self._device, self._group = device, group
        self._tensors: list[Tensor] = []
        plain = _take_out(value, self._tensors)
        layout = [(x.dtype, tuple(x.shape)) for x in self._tensors]
        heads = gather_objects((plain, layout, problem), group)
        self.problems = {rank: words for rank, (_, _, words) in enumerate(heads) if words is not None}
        self._heads = [(plain, layout) for plain, layout, _ in heads]
        self._size = max(sum(_room(*one) for one in layout) for _, layout in self._heads)

    def load(self) -> None:
        self._everything = torch.empty(len(self._heads), self._size, dtype=torch.uint8, device=self._device)
        self._own = torch.zeros(self._size, dtype=torch.uint8, device=self._device)
        for place, x in zip(_cut(self._own, self._heads[rank(self._group)][1]), self._tensors, strict=True):
            place.copy_(x.detach())

    def send(self) -> list[tuple[Any, list[Tensor]]]:
        """Of every rank the plain data and the tensors, which are parts of one piece of memory."""
        if self._size:
            _begin("all_gather")
            dist.all_gather(list(self._everything.unbind(0)), self._own, group=self._group)
        return [
            (plain, _cut(part, layout)) for part, (plain, layout) in zip(self._everything, self._heads, strict=True)
        ]


def _room(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a message: the next one begins where any type of number may."""
    return -(-math.prod(shape) * dtype.itemsize // 16) * 16


def _cut(message: Tensor, layout: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """The tensors that stand one after another in a message."""
    tensors, at = [], 0
    for dtype, shape in layout:
        size = math.prod(shape) * dtype.itemsize
        part = message[at : at + size].view(dtype) if size else message.new_empty(0, dtype=dtype)
        tensors.append(part.view(shape))
        at += _room(dtype, shape)
    return tensors


def _words(problem: BaseException) -> str:
    return ": ".join(filter(None, (type(problem).__name__, str(problem))))


def _by_rank(words: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {error}" for rank, error in words.items())
