"""Shards on one mesh axis: select, gather, scatter and exchange the intervals of a dim.

Like :mod:`collectives`: plain functions on local tensors, no autograd, no layouts.  A dim is given as
the intervals of each rank of the axis; the intervals of a plain shard are its chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from meshwright_dtensor.sharding.intervals import Interval, Intervals, chunk_intervals

Tensor = torch.Tensor
Move: TypeAlias = Callable[[Tensor], Tensor]
RankIntervals: TypeAlias = tuple[Intervals, ...]


def length(intervals: Sequence[Interval]) -> int:
    """Elements in all of the intervals."""
    return sum(n for _, n in intervals)


def join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The pieces one after the other, as a new contiguous tensor."""
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(list(pieces), dim).contiguous()


def selector(dim: int, intervals: Intervals) -> Move:
    """Whole -> the intervals of one rank."""
    if len(intervals) == 1:
        return lambda t: t.narrow(dim, *intervals[0]).clone(memory_format=torch.contiguous_format)
    return lambda t: join([t.narrow(dim, start, n) for start, n in intervals], dim)


def spreader(dim: int, intervals: Intervals, total: int) -> Move:
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


def ordered(by_rank: RankIntervals) -> list[tuple[int, int, int, int]]:
    """(start in the global dim, length, owner rank, start in the owner's tensor), in global order."""
    pieces = []
    for rank, intervals in enumerate(by_rank):
        at = 0
        for start, n in intervals:
            if n:
                pieces.append((start, n, rank, at))
            at += n
    return sorted(pieces)


def gatherer(dim: int, by_rank: RankIntervals, group: dist.ProcessGroup) -> Move:
    """The parts of all ranks -> whole."""
    n, longest, total = len(by_rank), max(map(length, by_rank)), sum(map(length, by_rank))
    pieces = ordered(by_rank)
    chunks = by_rank == chunk_intervals(total, n)

    def gather(t: Tensor) -> Tensor:
        if t.shape[dim] != longest:
            pad = list(t.shape)
            pad[dim] = longest - t.shape[dim]
            t = torch.cat([t, t.new_zeros(pad)], dim)
        if chunks and all(size == 1 for size in t.shape[:dim]):
            # the chunks follow each other in memory
            out = t.new_empty([*t.shape[:dim], n * longest, *t.shape[dim + 1 :]])
            dist.all_gather_single(out.view(-1), t.contiguous().view(-1), group=group)
            return out if n * longest == total else out.narrow(dim, 0, total).contiguous()
        parts = t.new_empty([n, *t.shape])
        dist.all_gather_single(parts.view(-1), t.contiguous().view(-1), group=group)
        return join([parts[rank].narrow(dim, at, size) for _, size, rank, at in pieces], dim)

    return gather


def scatterer(dim: int, by_rank: RankIntervals, group: dist.ProcessGroup) -> Move:
    """Partial sums of the whole -> the sums of the part of one rank; all parts are equally long."""
    order, n = list(itertools.chain.from_iterable(by_rank)), len(by_rank)
    in_order = order == sorted(order)

    def scatter(t: Tensor) -> Tensor:
        if not in_order:
            t = torch.cat([t.narrow(dim, start, size) for start, size in order], dim)
        chunks = torch.cat([c.reshape(-1) for c in t.chunk(n, dim)])
        shape = list(t.shape)
        shape[dim] //= n
        out = t.new_empty(shape)
        dist.reduce_scatter_single(out.view(-1), chunks, group=group)
        return out

    return scatter


def exchanger(
    source: tuple[int, RankIntervals], target: tuple[int, RankIntervals], rank: int, group: dist.ProcessGroup
) -> Move:
    """(dim, intervals per rank) -> another such sharding, with one all-to-all of messages of any length."""
    (dim, have), (goal, want) = source, target
    if dim == goal:
        return _reorder(dim, have, want, rank, group)
    mine = length(want[rank])
    pieces = ordered(have)

    def exchange(t: Tensor) -> Tensor:
        send = [join([t.narrow(goal, start, n) for start, n in to], goal) for to in want]
        shapes = [_with(t, {dim: length(part), goal: mine}) for part in have]
        got = _swap(t, send, shapes, group)
        return join([got[r].narrow(dim, at, n) for _, n, r, at in pieces], dim)

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
        send = [join([t.narrow(dim, at, n) for at, n in plan or ((0, 0),)], dim) for plan in send_plan]
        got = _swap(t, send, [_with(t, {dim: size}) for size in sizes], group)
        return join([got[a].narrow(dim, at, n) for _, n, a, at in arriving] or [got[0]], dim)

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


def _with(t: Tensor, sizes: dict[int, int]) -> list[int]:
    return [sizes.get(d, n) for d, n in enumerate(t.shape)]


def _swap(t: Tensor, send: list[Tensor], shapes: list[list[int]], group: dist.ProcessGroup) -> list[Tensor]:
    """Send ``send[r]`` to rank ``r``; return the tensors received from each rank, in these shapes."""
    counts = [math.prod(shape) for shape in shapes]
    received = t.new_empty(sum(counts))
    dist.all_to_all_single(
        received,
        torch.cat([x.reshape(-1) for x in send]),
        output_split_sizes=counts,
        input_split_sizes=[x.numel() for x in send],
        group=group,
    )
    return [x.view(shape) for x, shape in zip(received.split(counts), shapes, strict=True)]
