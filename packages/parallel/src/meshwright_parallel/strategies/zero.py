"""ZeRO: ranks that compute on different rows share one copy of optimizer states, gradients and parameters.

Each parameter is stored in shards along the axis `zero`, so optimizer states are sharded too. To compute, the shards are
all-gathered (`meshwright_parallel.engine.unshard`). Gradients are reduce-scattered to the shards. With an axis `dp` outside
of `zero`, states are sharded along `zero` and replicated along `dp` ("hybrid").

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.cluster import CollectiveKind
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.ragged import ragged_shard, rows_of_blocks, unit_lengths
from meshwright_dtensor.strategy import CollectiveUse, Stall, StrategyCost, planned_state
from meshwright_parallel.strategies.data import BUCKET_BYTES, SINGLE_BYTES, RowStrategy

if TYPE_CHECKING:
    from meshwright_dtensor.plan import ParallelPlan
    from meshwright_dtensor.sharding.states import State
    from meshwright_dtensor.strategy import Link, ParameterSize, Phase, SearchRequest

OUTSIDE = "parameters outside of blocks"
"""In plans: why the parameters outside of blocks are gathered."""

UNEVEN = 4096
"""Elements from which a parameter is sharded unevenly where no dim divides; a smaller one stays whole."""


class Zero(RowStrategy):
    """Batch inputs are S(0). A parameter is sharded along its largest free dim, or whole with a partial gradient."""

    name: ClassVar[str] = "zero"
    axis: ClassVar[str] = "zero"
    order: ClassVar[int] = 15
    gathers: ClassVar[bool] = True
    optional: ClassVar[bool] = True

    def parameter_state_given(
        self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int, others: Mapping[str, State]
    ) -> State:
        """The plan's placement; else the first dim that the degree divides and no other axis shards.

        An outer dim gives longer contiguous copies. Where no dim divides, a large parameter is sharded unevenly along its
        largest dim and a small one stays whole (state X). With a unit in the plan, rows (dim 0) are sharded, cut at borders of
        units; where another axis cuts through units, as without one. A parameter with an owner in the plan is on that rank,
        but for what other axes shard. Raises PlanError: they shard all of its dims.
        """
        planned = planned_state(plan, fqn, self.axis)
        if isinstance(planned, int):
            return planned
        if degree <= 1 or plan.zero is None:
            return "X"
        if fqn in plan.zero.owners:
            return _state_of_owner(fqn, plan.zero.owners[fqn], shape, plan, others)
        if plan.zero.unit is not None:
            rows = rows_of_unit(shape, plan.zero.unit)
            state = _state_in_units(fqn, tuple(shape), rows, plan, others)
            if state is not None:
                return state
        return _state(tuple(shape), {int(s) for s in others.values() if isinstance(s, int)}, degree)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """All-gathers before use, reduce-scatters of gradients after the backward pass, and memory per rank.

        Stage 3 gathers again in the backward pass, except for the last block and the parameters outside of blocks. With several
        microbatches it gathers all blocks for each.
        """
        alone_bytes = BUCKET_BYTES if request.step.accelerated else SINGLE_BYTES
        # most groups are one and the same object, and hashing one is the most expensive step here
        sizes = {
            key: _GroupBytes.of(tuple(group), degree, alone_bytes)
            for key, group in {id(group): group for group in request.sizes.units}.items()
        }
        groups = [sizes[id(group)] for group in request.sizes.units]
        if degree <= 1 or not sum(group.full for group in groups):
            return StrategyCost()
        exposure = _Exposure(groups, _collectives(groups, request), request, degree, link)
        exposure.add_phase("forward", request.step.forward_seconds)
        exposure.add_phase("backward", request.step.backward_seconds)
        parameters, gradients, optimizer = _memory(groups, request)
        return StrategyCost(
            exposed_seconds=exposure.exposed,
            stall=exposure.stall,
            # the total may be smaller in the last bit, since it is summed in another order
            overlapped_seconds=max(0.0, exposure.total - exposure.exposed),
            slack_seconds=exposure.slack,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            collectives=tuple(exposure.uses),
        )


def _collectives(groups: Sequence[_GroupBytes], request: SearchRequest) -> list[CollectiveUse]:
    """The collectives of one step."""
    blocks = groups[:-1]
    times = request.step.microbatches if request.step.zero_stage == 3 else 1
    again: Sequence[_GroupBytes] = ()
    if request.step.zero_stage == 3:
        again = blocks if request.step.microbatches > 1 else blocks[:-1]
    uses = [
        *_uses("all_gather", (group.all_gathers for group in blocks), times, "forward", "parameters"),
        *_uses("all_gather", (group.all_gathers for group in groups[-1:]), times, "forward", OUTSIDE),
        *_uses("all_gather", (group.all_gathers for group in again), times, "backward", "parameters"),
        *_uses("reduce_scatter", (group.reduce_scatters for group in groups), 1, "backward", "gradients"),
    ]
    all_reduced = sum(group.all_reduced for group in groups)
    if all_reduced:
        uses.append(CollectiveUse("all_reduce", all_reduced, 1, "backward", "gradients that are not cut"))
    return uses


def _memory(groups: Sequence[_GroupBytes], request: SearchRequest) -> tuple[float, float, float]:
    """Factors on one rank's memory of parameters, gradients and optimizer states."""
    if request.step.zero_stage == 3:
        # one block computes while the next is gathered from a row of this rank's shards
        largest = max((2 * group.unsharded + group.row for group in groups[:-1]), default=0)
        unsharded = largest + groups[-1].unsharded
    else:
        unsharded = sum(group.unsharded for group in groups)
    trained = sum(group.trained for group in groups)
    trained_shards = sum(group.trained_shards for group in groups)
    # a stage of a pipeline keeps whole gradients until the last microbatch
    gradients = (trained if request.step.stages else trained_shards) + max(group.buffers for group in groups)
    parameters = sum(group.shards for group in groups) + unsharded
    whole, optimizer = sum(group.full for group in groups), trained_shards / trained if trained else 1.0
    return parameters / whole, gradients / trained if trained else 1.0, optimizer


@dataclass
class _Exposure:
    """Seconds of communication that compute does not hide, added up phase by phase.

    A group is gathered while the one before it computes. So the first gathers are exposed: those of the parameters outside of
    blocks and of the first block, because a model begins with an embedding. So is what a pass is too short to hide.
    """

    groups: Sequence[_GroupBytes]
    uses: Sequence[CollectiveUse]
    request: SearchRequest
    degree: int
    link: Link
    exposed: float = 0.0
    total: float = 0.0
    slack: float = 0.0
    stall: Stall = field(default_factory=Stall)

    def add_phase(self, phase: Phase, compute: float) -> None:
        """Add the collectives of a phase whose compute takes `compute` seconds."""
        uses = [use for use in self.uses if use.phase == phase]
        seconds = [self.link.seconds(use.kind, use.nbytes, self.degree) * use.count for use in uses]
        self.total += sum(seconds)
        root = self._seconds("all_gather", self.groups[-1].all_gathers) if phase == "forward" else 0.0
        first = next((group.all_gathers for group in self.groups[:-1] if group.all_gathers), ())
        block = self._seconds("all_gather", first)
        if self.request.step.stages:
            gathered = sum(s for use, s in zip(uses, seconds, strict=True) if use.kind == "all_gather")
            self.exposed += sum(seconds) - gathered
            if gathered:
                self._add_pipelined(gathered, root, block, compute)
        elif seconds:
            unhidden = root + block if phase == "forward" else self._last_reduction()
            self._expose(sum(seconds), unhidden, compute)

    def _expose(self, seconds: float, unhidden: float, compute: float, times: int = 1) -> None:
        """Add `times` passes, each with so many seconds of communication, of which at least `unhidden` are exposed."""
        exposed = min(seconds, max(unhidden, seconds - compute))
        self.exposed += exposed * times
        slower = self.request.step.interference * (seconds - exposed)
        self.slack += min(max(0.0, exposed - unhidden), slower) * times

    def _last_reduction(self) -> float:
        """The last reduce-scatter and the all-reduce of whole gradients have no compute left to overlap with."""
        last = next((group.reduce_scatters for group in reversed(self.groups) if group.reduce_scatters), ())
        all_reduced = sum(group.all_reduced for group in self.groups)
        seconds = self._seconds("reduce_scatter", last)
        return seconds + (self.link.seconds("all_reduce", all_reduced, self.degree) if all_reduced else 0.0)

    def _add_pipelined(self, gathered: float, root: float, block: float, compute: float) -> None:
        """Add the all-gathers of a pipeline stage: a microbatch hides its own gathers, and each stage begins with one.

        Gradients are whole until the last microbatch, so their reduction hides nothing.
        """
        times = self.request.step.microbatches if self.request.step.zero_stage == 3 else 1
        each, first_blocks = gathered / times, block * self.request.step.stages
        hidden = compute / self.request.step.microbatches
        self._expose(each, root + first_blocks, hidden, times)
        # the parameters outside of blocks are on the first or the last stage: other stages do not wait for them
        stalled = min(each - root, max(first_blocks, each - root - hidden))
        overlapped = each - root - stalled
        self.stall = Stall(self.stall.exposed + stalled, self.stall.overlapped + overlapped, times)

    def _seconds(self, kind: CollectiveKind, sizes: Iterable[int]) -> float:
        """Seconds of one collective of each size."""
        return sum(self.link.seconds(kind, nbytes, self.degree) for nbytes in sizes)


@dataclass
class _GroupBytes:
    """Bytes of one parameter group.

    Attributes:
        full, shards: parameters, whole and as one rank stores them.
        unsharded: of the buffer that is computed with.
        trained, trained_shards: the same as `full` and `shards`, of trained parameters.
        row: of the row into which this rank's shards are copied for the all-gather.
        all_gathers, reduce_scatters: of each collective, those of a single tensor first.
        buffers: of gradients that are being reduced.
        all_reduced: of gradients of parameters that stay whole.
    """

    full: int = 0
    shards: int = 0
    unsharded: int = 0
    trained: int = 0
    trained_shards: int = 0
    row: int = 0
    all_gathers: tuple[int, ...] = ()
    reduce_scatters: tuple[int, ...] = ()
    buffers: int = 0
    all_reduced: int = 0

    @staticmethod
    # blocks are equal, and every configuration asks for them
    @functools.lru_cache(maxsize=4096)
    def of(group: tuple[ParameterSize, ...], degree: int, alone_bytes: int) -> _GroupBytes:
        """`alone_bytes`: size of a shard from which it has a collective of its own."""
        made = _GroupBytes()
        gathered = scattered = 0
        for p in group:
            stored_size, compute_size = p.itemsize
            dim = _state(p.shape, set(p.sharded_dims), degree)
            local, alone = p.numel, False
            if isinstance(dim, int):
                local = p.numel // p.shape[dim] * -(-p.shape[dim] // degree)
                # shards that are equal, contiguous in the whole, and computed with as they are stored
                in_rows = math.prod(p.shape[:dim]) == 1 and p.shape[dim] % degree == 0
                alone = local * stored_size >= alone_bytes and in_rows and stored_size == compute_size
            made.full += p.numel * stored_size
            made.shards += local * stored_size
            if isinstance(dim, int):
                made.unsharded += p.numel * compute_size
                if alone:
                    made.all_gathers += (local * degree * compute_size,)
                else:
                    gathered += local * degree * compute_size
            elif stored_size != compute_size:
                made.unsharded += p.numel * compute_size
            if not p.trainable:
                continue
            made.trained += p.numel * stored_size
            made.trained_shards += local * stored_size
            # each parameter has one flag, which travels with a bucket
            if not isinstance(dim, int):
                made.all_reduced += (local + 1) * stored_size
                continue
            made.buffers += (local + 1) * degree * stored_size
            if alone:
                made.reduce_scatters += (local * degree * stored_size,)
            scattered += (1 if alone else local + 1) * degree * stored_size
        made.row = gathered // degree
        made.all_gathers += (gathered,) if gathered else ()
        made.reduce_scatters += (scattered,) if scattered else ()
        return made


def _uses(
    kind: CollectiveKind, sizes: Iterable[Iterable[int]], times: int, phase: Phase, why: str
) -> list[CollectiveUse]:
    """Collectives of these sizes, each run `times` times; equal ones as one entry."""
    counts = Counter(itertools.chain.from_iterable(sizes))
    return [CollectiveUse(kind, nbytes, count * times, phase, why) for nbytes, count in counts.items()]


def _state(shape: Sequence[int], taken: Collection[int], degree: int) -> State:
    """How a parameter is stored: see `Zero.parameter_state_given`."""
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] >= degree]
    even = [dim for dim in free if shape[dim] % degree == 0]
    if even:
        return even[0]
    if math.prod(shape) < UNEVEN or not free:
        return "X"

    def padding(dim: int) -> float:
        return -(-shape[dim] // degree) * degree / shape[dim]

    # the longest dim of which torch.chunk leaves every rank a row, else the dim with the least padding
    full = [dim for dim in free if -(-shape[dim] // -(-shape[dim] // degree)) == degree]
    return max(full, key=lambda dim: (shape[dim], -dim)) if full else min(free, key=padding)


def _state_of_owner(
    fqn: str, owner: int, shape: Sequence[int], plan: ParallelPlan, others: Mapping[str, State]
) -> State:
    """All elements of a dim that no other axis shards, on one rank."""
    taken = {int(s) for axis, s in others.items() if isinstance(s, int) and plan.degree(axis) > 1}
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim]]
    if not free:
        rule = f"other axes shard every dim of {fqn!r} with shape {list(shape)}; remove the owner, and zero shards it too"
        raise PlanError(f"zero.owners.{fqn}", owner, rule)
    lengths = [shape[free[0]] if rank == owner else 0 for rank in range(plan.degree("zero"))]
    return ragged_shard(free[0], lengths)


def rows_of_unit(shape: Sequence[int], unit: int | str) -> int:
    """The fewest rows (of dim 0) of a parameter that are whole units: see `plan.ZeroRule.unit`."""
    if isinstance(unit, int):
        return rows_of_blocks(shape, unit)
    return max(1, shape[0]) if unit == "tensor" and shape else 1


def _state_in_units(
    fqn: str, shape: tuple[int, ...], unit: int, plan: ParallelPlan, others: Mapping[str, State]
) -> State | None:
    """Shards of rows that end at multiples of `unit` rows; None where another axis cuts through units.

    Rows that an inner axis shards too are shared by the ranks of `zero` part by part. A small parameter that cannot be shared
    evenly stays whole.
    """
    numel = math.prod(shape)
    if not shape or not numel:
        return "X"
    axes = plan.axes
    # an interval shard of dim 0 is not equal to 0
    of_rows = [
        axis for axis, s in others.items() if plan.degree(axis) > 1 and isinstance(s, int) and int(s) == 0
    ]
    parts = math.prod(map(plan.degree, of_rows))
    rows = shape[0] // parts
    if any(isinstance(others[axis], IntervalShard) for axis in of_rows) or shape[0] % parts:
        return None
    if parts > 1 and rows % unit:
        return None
    lengths = unit_lengths(rows, plan.degree("zero"), unit, fqn)
    if numel < UNEVEN and len(set(lengths)) > 1:
        return "X"
    inner = [axis for axis in of_rows if axes.index(axis) > axes.index("zero")]
    return ragged_shard(0, lengths, math.prod(map(plan.degree, inner)))
