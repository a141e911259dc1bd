"""One placement change on one mesh axis, as a function on local tensors.

``kind`` is ``"R"`` (replicated), ``"P"`` (partial sum) or an ``int`` tensor dim (sharded, torch.chunk sizes, or an interval shard).
The functions below take a sharded dim as the intervals of each rank; those of a plain shard are its chunks. No autograd and
no layouts here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from meshwright_dtensor._torch.modes import has_tangent
from meshwright_dtensor.comm import group_calls
from meshwright_dtensor.comm.log import CommLog, Site, record
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.sharding.intervals import Intervals, IntervalShard, chunk_intervals, intervals_of
from meshwright_dtensor.sharding.states import State, format_state

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import MeshContext

Tensor = torch.Tensor
Move: TypeAlias = Callable[[Tensor], Tensor]
_SENT = frozenset(
    getattr(torch, name) for name in "float32 float64 float16 bfloat16 int8 uint8 int32 int64 bool".split()
)
"""Dtypes that collectives of gloo and NCCL take as they are."""
FORWARD_MODE = (
    "forward-mode derivatives (functorch's jvp, torch.autograd.forward_ad) of a global tensor are not supported; use "
    "reverse mode, or x.full_tensor(), the whole value"
)
RankIntervals: TypeAlias = tuple[Intervals, ...]


@dataclass(slots=True)
class Step:
    """A change ``source -> target`` of kind on mesh axis ``axis``.

    ``total`` is the size of the sharded dim before it is split over this axis (0 where no dim is involved); for
    ``dim -> other dim`` it is the pair of both.
    """

    context: MeshContext
    axis: int
    source: State
    target: State
    total: int = 0
    total_target: int = 0

    @property
    def collective(self) -> str | None:
        """Name of the collective that this step performs, None when it is local."""
        a, b = self.source, self.target
        if a == "P":
            return "all_reduce" if b == "R" else "reduce_scatter"
        if isinstance(a, int) and b != "P":
            return "all_gather" if b == "R" else "all_to_all"
        return None

    def function(
        self, phase: str, memory_order: tuple[int, ...] | None = None, overwrites: bool = False
    ) -> Callable[[Tensor, Site], Tensor] | None:
        """The step as a function of (local tensor, site); None when nothing has to be done.

        ``memory_order``: the order of the dims in memory on every rank, outermost first; the result has the same order.
        ``overwrites``: an all-reduce overwrites the tensor, which is contiguous.
        """
        run = self._local() if memory_order is None else self._local_in(memory_order)
        if run is not None and overwrites:
            run = partial(group_calls.all_reduce_, group=self.context.group(self.axis))
        name = self.collective
        if run is None or name is None:
            return None if run is None else (lambda t, site: run(t))
        axis, calls = self.context.axes[self.axis], self.context.calls
        why = f"{format_state(self.source)}->{format_state(self.target)}"
        dim = int(self.source) if isinstance(self.source, int) else None

        call = f"{name} over {axis}, {why}"

        def logged(t: Tensor, site: Site) -> Tensor:
            calls.follow(call)
            if CommLog._active:
                # the value before it is split over this axis, of which t is the local part
                rows = 1 if dim is None else self.total
                nbytes = rows * math.prod(n for d, n in enumerate(t.shape) if d != dim) * t.element_size()
                record(name, axis, nbytes, phase, site.module, site.function, why)
            return run(t) if t.dtype in _SENT else _in_other_dtype(run, t, sums=self.source == "P")

        return logged

    def _local_in(self, memory_order: tuple[int, ...]) -> Move | None:
        """The step on the dims in the order of memory, in which a dense tensor is contiguous."""
        back = [memory_order.index(dim) for dim in range(len(memory_order))]
        source, target = (
            back[state] if isinstance(state, int) else state for state in (self.source, self.target)
        )
        run = replace(self, source=source, target=target)._local()
        return None if run is None else (lambda t: run(t.permute(memory_order)).permute(back))

    def _local(self) -> Move | None:
        a, b, n = self.source, self.target, self.context.sizes[self.axis]
        if a == b or n == 1:
            return None
        group, rank = self.context.group(self.axis), self.context.coords[self.axis]
        have = intervals_of(a, self.total, n) if isinstance(a, int) else ()
        want = intervals_of(b, self.total_target, n) if isinstance(b, int) else ()
        if isinstance(a, int) and isinstance(b, int):
            intervals = isinstance(a, IntervalShard) or isinstance(b, IntervalShard)
            if intervals or self.total % n or self.total_target % n:
                return _exchanger((int(a), have), (int(b), want), rank, group)
            return lambda t: _all_to_all(t, a, b, n, group)
        if isinstance(a, int):
            return _gatherer(int(a), have, group) if b == "R" else _spreader(int(a), have[rank], self.total)
        if isinstance(b, int):
            if a == "P":
                return _scatterer(int(b), want, rank, group)
            return _selector(int(b), want[rank])
        if a == "P":
            return partial(group_calls.all_reduce, group=group)
        # a Partial of a replicated value
        return (lambda t: t) if rank == 0 else _zeros_in_memory_of


def refuse_tangent(t: Tensor) -> None:
    """Raise UnsupportedError for a tensor with a forward-mode derivative: a collective sends values alone."""
    if has_tangent(t):
        raise UnsupportedError(FORWARD_MODE)


def _in_other_dtype(run: Move, t: Tensor, sums: bool) -> Tensor:
    """Run a collective on a dtype that backends do not know: on its bits, or, to sum, on wider numbers."""
    if t.is_complex():
        # a lazy conjugate is sent as the values that it stands for
        return run(t.resolve_conj())
    if sums:
        wider = torch.float32 if t.is_floating_point() else torch.int64
        return run(t.to(wider)).to(t.dtype)
    bits = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return run(t.contiguous().view(bits)).view(t.dtype)


def _zeros_in_memory_of(t: Tensor) -> Tensor:
    """Zeros with the strides of ``t``: where it is expanded, zeros_like would have others than the rank that keeps it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.new_zeros(extent).as_strided(t.shape, t.stride()) if t.numel() else torch.zeros_like(t)


def _all_to_all(t: Tensor, source: int, target: int, n: int, group: dist.ProcessGroup) -> Tensor:
    shape = list(t.shape)
    shape[target] //= n
    send = _one_after_another(t, target, n)
    counts = [send.numel() // n] * n
    received = group_calls.all_to_all(send, counts, counts, group)
    return torch.cat(received.view([n, *shape]).unbind(0), source)


def _one_after_another(t: Tensor, dim: int, n: int) -> Tensor:
    """The elements of ``n`` equal chunks of a dim, one chunk after the other: those of ``t`` itself where they are so."""
    leading = all(size == 1 for size in t.shape[:dim])
    # torch joins tensors of another memory order in that order; an expanded one is flat without being contiguous
    return (t if leading else torch.cat(t.chunk(n, dim))).reshape(-1).contiguous()


def _length(intervals: Intervals) -> int:
    """Elements in all of the intervals."""
    return sum(n for _, n in intervals)


def _join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The pieces one after the other, as a new contiguous tensor."""
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(list(pieces), dim).contiguous()


def _selector(dim: int, intervals: Intervals) -> Move:
    """Whole -> the intervals of one rank."""
    if len(intervals) == 1:
        return lambda t: t.narrow(dim, *intervals[0]).clone(memory_format=torch.contiguous_format)
    return lambda t: _join([t.narrow(dim, start, n) for start, n in intervals], dim)


def _spreader(dim: int, intervals: Intervals, total: int) -> Move:
    """The intervals of one rank -> whole, zero elsewhere."""

    def spread(t: Tensor) -> Tensor:
        shape = list(t.shape)
        shape[dim] = total
        out, at = t.new_zeros(shape), 0
        for start, n in intervals:
            out.narrow(dim, start, n).copy_(t.narrow(dim, at, n))
            at += n
        return out

    return spread


def _ordered(by_rank: RankIntervals) -> list[tuple[int, int, int, int]]:
    """(start in the global dim, length, owner rank, start in the owner's tensor), in global order."""
    pieces = []
    for rank, intervals in enumerate(by_rank):
        at = 0
        for start, n in intervals:
            if n:
                pieces.append((start, n, rank, at))
            at += n
    return sorted(pieces)


def _gatherer(dim: int, by_rank: RankIntervals, group: dist.ProcessGroup) -> Move:
    """The parts of all ranks -> whole."""
    n, longest, total = len(by_rank), max(map(_length, by_rank)), sum(map(_length, by_rank))
    pieces = _ordered(by_rank)
    chunks = by_rank == chunk_intervals(total, n)

    def gather(t: Tensor) -> Tensor:
        if t.shape[dim] != longest:
            pad = list(t.shape)
            pad[dim] = longest - t.shape[dim]
            t = torch.cat([t, t.new_zeros(pad)], dim)
        if chunks and all(size == 1 for size in t.shape[:dim]):
            # the chunks follow each other in memory
            out = group_calls.all_gather(t, group, [*t.shape[:dim], n * longest, *t.shape[dim + 1 :]])
            return out if n * longest == total else out.narrow(dim, 0, total).contiguous()
        parts = group_calls.all_gather(t, group)
        return _join([parts[rank].narrow(dim, at, size) for _, size, rank, at in pieces], dim)

    return gather


def _scatterer(dim: int, by_rank: RankIntervals, rank: int, group: dist.ProcessGroup) -> Move:
    """Partial sums of the whole -> the sums of the part of one rank; shorter parts are sent with zeros after them."""
    order, n = list(itertools.chain.from_iterable(by_rank)), len(by_rank)
    lengths = [_length(part) for part in by_rank]
    longest, mine = max(lengths), lengths[rank]
    as_it_is = order == sorted(order) and min(lengths) == longest

    def scatter(t: Tensor) -> Tensor:
        shape = list(t.shape)
        if not as_it_is:
            pieces = []
            for part, length in zip(by_rank, lengths, strict=True):
                pieces += [t.narrow(dim, start, size) for start, size in part]
                shape[dim] = longest - length
                pieces += [t.new_zeros(shape)] * (length < longest)
            t = torch.cat(pieces, dim)
        shape[dim] = longest
        result = group_calls.reduce_scatter(_one_after_another(t, dim, n), group, shape)
        if mine == longest:
            return result
        return result.narrow(dim, 0, mine).clone(memory_format=torch.contiguous_format)

    return scatter


def _exchanger(
    source: tuple[int, RankIntervals], target: tuple[int, RankIntervals], rank: int, group: dist.ProcessGroup
) -> Move:
    """(dim, intervals per rank) -> another such sharding, with one all-to-all of messages of any length."""
    (dim, have), (goal, want) = source, target
    if dim == goal:
        return _reorder(dim, have, want, rank, group)
    mine = _length(want[rank])
    pieces = _ordered(have)

    def exchange(t: Tensor) -> Tensor:
        send = [_join([t.narrow(goal, start, n) for start, n in to], goal) for to in want]
        got = _swap(t, send, [{dim: _length(part), goal: mine} for part in have], group)
        return _join([got[r].narrow(dim, at, n) for _, n, r, at in pieces], dim)

    return exchange


def _reorder(dim: int, have: RankIntervals, want: RankIntervals, rank: int, group: dist.ProcessGroup) -> Move:
    """Other intervals of the same dim."""
    # messages from rank a to rank b, in the order of b's tensor: (start at a, start at b, length)
    routes = [[_overlap(a, b) for b in want] for a in have]
    send_plan = [[(at, n) for at, _, n in routes[rank][b]] for b in range(len(want))]
    arriving = sorted(
        (there, n, a, sum(m for _, _, m in routes[a][rank][:k]))
        for a in range(len(have))
        for k, (_, there, n) in enumerate(routes[a][rank])
    )
    sizes = [sum(n for _, _, n in routes[a][rank]) for a in range(len(have))]

    def exchange(t: Tensor) -> Tensor:
        send = [_join([t.narrow(dim, at, n) for at, n in plan or ((0, 0),)], dim) for plan in send_plan]
        got = _swap(t, send, [{dim: size} for size in sizes], group)
        return _join([got[a].narrow(dim, at, n) for _, n, a, at in arriving] or [got[0]], dim)

    return exchange


def _overlap(have: Intervals, want: Intervals) -> list[tuple[int, int, int]]:
    """What the intervals share, as (start in ``have``, start in ``want``, length), in the order of ``want``."""
    overlaps, want_at = [], 0
    for start, size in want:
        shared, have_at = [], 0
        for have_start, n in have:
            low, high = max(start, have_start), min(start + size, have_start + n)
            if low < high:
                shared.append((low, have_at + low - have_start, want_at + low - start, high - low))
            have_at += n
        overlaps += [(source, target, n) for _, source, target, n in sorted(shared)]
        want_at += size
    return overlaps


def _swap(
    t: Tensor, send: list[Tensor], sizes: list[dict[int, int]], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send ``send[r]`` to rank ``r``; return the tensors received, shaped as ``t`` but for these sizes of dims."""
    shapes = [[changed.get(d, n) for d, n in enumerate(t.shape)] for changed in sizes]
    counts = [math.prod(shape) for shape in shapes]
    row = torch.cat([x.reshape(-1) for x in send])
    received = group_calls.all_to_all(row, counts, [x.numel() for x in send], group)
    return [x.view(shape) for x, shape in zip(received.split(counts), shapes, strict=True)]
