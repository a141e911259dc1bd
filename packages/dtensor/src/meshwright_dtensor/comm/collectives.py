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
from meshwright_dtensor.sharding.intervals import IntervalShard, intervals_of
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
            # messages between interval shards may differ in length
            any_length = isinstance(a, IntervalShard) or isinstance(b, IntervalShard)
            return "all_to_all" if any_length or (self._even(a) and self._even(b)) else "all_gather"
        return None

    def _even(self, kind: State) -> bool:
        if isinstance(kind, IntervalShard):
            return kind.even
        return (self.total_target if kind == self.target else self.total) % self.context.sizes[self.axis] == 0

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
                # the value before it is split over this axis, of which t is the local part
                rows = 1 if dim is None else self.total
                nbytes = rows * math.prod(n for d, n in enumerate(t.shape) if d != dim) * t.element_size()
                record(name, axis, nbytes, phase, site.module, site.function, why)
            return run(t)

        return logged

    def _local(self) -> Callable[[Tensor], Tensor] | None:
        a, b, n = self.source, self.target, self.context.sizes[self.axis]
        if a == b or n == 1:
            return None
        group, rank = self.context.group(self.axis), self.context.coords[self.axis]
        have = intervals_of(a, self.total, n) if isinstance(a, int) else ()
        want = intervals_of(b, self.total_target, n) if isinstance(b, int) else ()
        if isinstance(a, int) and isinstance(b, int):
            if self.collective == "all_gather":
                gather, select = gatherer(a, have, group), selector(b, want[rank])
                return lambda t: select(gather(t))
            if isinstance(a, IntervalShard) or isinstance(b, IntervalShard):
                return exchanger((int(a), have), (int(b), want), rank, group)
            return lambda t: _all_to_all(t, a, b, n, group)
        if isinstance(a, int):
            return gatherer(int(a), have, group) if b == "R" else spreader(int(a), have[rank], self.total)
        if isinstance(b, int):
            if self.collective == "reduce_scatter":
                return scatterer(int(b), want, group)
            select = selector(int(b), want[rank])
            return select if a == "R" else (lambda t: select(_all_reduce(t, group)))
        if a == "P":
            return lambda t: _all_reduce(t, group)
        # a Partial of a replicated value
        return (lambda t: t) if rank == 0 else torch.zeros_like


def _all_reduce(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = t.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _all_to_all(t: Tensor, source: int, target: int, n: int, group: dist.ProcessGroup) -> Tensor:
    shape = list(t.shape)
    shape[target] //= n
    send = torch.cat([c.reshape(-1) for c in t.chunk(n, target)])
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return torch.cat(received.view([n, *shape]).unbind(0), source)
