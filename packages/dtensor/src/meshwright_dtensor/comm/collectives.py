"""One placement change on one mesh axis, as a function on local tensors.

``kind`` is ``"R"`` (replicated), ``"P"`` (partial sum) or an ``int`` tensor dim (sharded, torch.chunk sizes, or an interval shard).
No autograd and no layouts here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright_dtensor.comm.interval_exchange import exchanger, gatherer, scatterer, selector, spreader
from meshwright_dtensor.comm.log import CommLog, Site, record
from meshwright_dtensor.sharding.intervals import Intervals, IntervalShard, intervals_of
from meshwright_dtensor.sharding.states import State, format_state

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import MeshContext

Tensor = torch.Tensor


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
            return "all_reduce" if b == "R" or not self._even(b) else "reduce_scatter"
        if isinstance(a, int) and b == "R":
            return "all_gather"
        if isinstance(a, int) and isinstance(b, int):
            if isinstance(a, IntervalShard) or isinstance(b, IntervalShard):
                # its messages may differ in length
                return "all_to_all"
            return "all_to_all" if self._even(a) and self._even(b) else "all_gather"
        return None

    def _even(self, kind: State) -> bool:
        if isinstance(kind, IntervalShard):
            return kind.even
        total = self.total_target if kind == self.target and isinstance(self.target, int) else self.total
        return total % self.context.sizes[self.axis] == 0

    def function(self, phase: str) -> Callable[[Tensor, Site], Tensor] | None:
        """The step as a function of (local tensor, site); None when nothing has to be done."""
        run = self._local()
        name = self.collective
        if run is None or name is None:
            return None if run is None else (lambda t, site: run(t))
        axis = self.context.axes[self.axis]
        why = f"{format_state(self.source)}->{format_state(self.target)}"
        dim = int(self.source) if isinstance(self.source, int) else None

        def logged(t: Tensor, site: Site) -> Tensor:
            if CommLog.listening():
                record(name, axis, self._whole_bytes(t, dim), phase, site.module, site.function, why)
            return run(t)

        return logged

    def _whole_bytes(self, t: Tensor, dim: int | None) -> int:
        """Bytes of the value before it is split over this axis, of which ``t`` is the local part."""
        rows = 1 if dim is None else self.total
        return rows * math.prod(n for d, n in enumerate(t.shape) if d != dim) * t.element_size()

    def _intervals(self, kind: State, total: int) -> tuple[Intervals, ...]:
        assert isinstance(kind, int)
        return intervals_of(kind, total, self.context.sizes[self.axis])

    def _between_intervals(self) -> Callable[[Tensor], Tensor]:
        """A step from or to an interval shard."""
        a, b = self.source, self.target
        group, rank = self.context.group(self.axis), self.context.coords[self.axis]
        if isinstance(a, int) and isinstance(b, int):
            have, want = self._intervals(a, self.total), self._intervals(b, self.total_target)
            return exchanger((int(a), have), (int(b), want), rank, group)
        if isinstance(a, int):
            have = self._intervals(a, self.total)
            return gatherer(int(a), have, group) if b == "R" else spreader(int(a), have[rank], self.total)
        assert isinstance(b, int)
        want = self._intervals(b, self.total_target)
        if a == "P" and self._even(b):
            return scatterer(int(b), want, group)
        select = selector(int(b), want[rank])
        return select if a == "R" else (lambda t: select(_all_reduce(t, group)))

    def _local(self) -> Callable[[Tensor], Tensor] | None:
        a, b, n = self.source, self.target, self.context.sizes[self.axis]
        if a == b or n == 1:
            return None
        if isinstance(a, IntervalShard) or isinstance(b, IntervalShard):
            return self._between_intervals()
        group, rank = self.context.group(self.axis), self.context.coords[self.axis]
        if isinstance(a, int):
            return self._from_shard(a, b)
        if isinstance(b, int):
            select = _slicer(b, *_chunk(self.total_target, n, rank))
            if a == "R":
                return select
            if self.total_target % n:
                return lambda t: select(_all_reduce(t, group))
            return lambda t: _reduce_scatter(t, b, n, group)
        if a == "P":
            return lambda t: _all_reduce(t, group)
        # a Partial of a replicated value
        return (lambda t: t) if rank == 0 else torch.zeros_like

    def _from_shard(self, a: int, b: State) -> Callable[[Tensor], Tensor]:
        n, rank, group = (
            self.context.sizes[self.axis],
            self.context.coords[self.axis],
            self.context.group(self.axis),
        )
        if b == "P":
            return _padder(a, self.total, *_chunk(self.total, n, rank))
        gather = _gatherer(a, self.total, n, group)
        if not isinstance(b, int):
            return gather
        if self.total % n or self.total_target % n:
            select = _slicer(b, *_chunk(self.total_target, n, rank))
            return lambda t: select(gather(t))
        return lambda t: _all_to_all(t, a, b, n, group)


def _chunk(total: int, n: int, rank: int) -> tuple[int, int]:
    size = -(-total // n)
    start = min(rank * size, total)
    return start, min(size, total - start)


def _slicer(dim: int, start: int, length: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _padder(dim: int, total: int, start: int, length: int) -> Callable[[Tensor], Tensor]:
    def pad(t: Tensor) -> Tensor:
        shape = list(t.shape)
        shape[dim] = total
        out = t.new_zeros(shape)
        out.narrow(dim, start, length).copy_(t)
        return out

    return pad


def _all_reduce(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = t.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _gatherer(dim: int, total: int, n: int, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    size = -(-total // n)

    def gather(t: Tensor) -> Tensor:
        # the last rank of an uneven shard
        if t.shape[dim] != size:
            pad = list(t.shape)
            pad[dim] = size - t.shape[dim]
            t = torch.cat([t, t.new_zeros(pad)], dim)
        shape = list(t.shape)
        if dim == 0 or all(s == 1 for s in shape[:dim]):
            shape[dim] *= n
            out = t.new_empty(shape)
            dist.all_gather_single(out.view(-1), t.contiguous().view(-1), group=group)
        else:
            parts = t.new_empty([n, *shape])
            dist.all_gather_single(parts.view(-1), t.contiguous().view(-1), group=group)
            out = torch.cat(parts.unbind(0), dim)
        return out if size * n == total else out.narrow(dim, 0, total).contiguous()

    return gather


def _reduce_scatter(t: Tensor, dim: int, n: int, group: dist.ProcessGroup) -> Tensor:
    chunks = torch.cat([c.reshape(-1) for c in t.chunk(n, dim)])
    shape = list(t.shape)
    shape[dim] //= n
    out = t.new_empty(shape)
    dist.reduce_scatter_single(out.view(-1), chunks, group=group)
    return out


def _all_to_all(t: Tensor, source: int, target: int, n: int, group: dist.ProcessGroup) -> Tensor:
    shape = list(t.shape)
    shape[target] //= n
    send = torch.cat([c.reshape(-1) for c in t.chunk(n, target)])
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return torch.cat(received.view([n, *shape]).unbind(0), source)
