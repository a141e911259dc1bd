"""ZeRO: ranks that compute on different rows share one copy of optimizer states, gradients and parameters.

Each parameter is stored in shards along the axis `zero`, so whatever an optimizer makes of it is sharded too.  To compute,
the shards are gathered (`meshwright_parallel.engine.unshard`); gradients are reduce-scattered to the shards.  With an
axis `dp` outside of it, states are shared inside and replicated across ("hybrid").

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.cluster.links import CollectiveKind
from meshwright_dtensor.strategy.strategy import (
    CollectiveUse,
    GradientKind,
    Link,
    ParameterSize,
    Phase,
    SearchRequest,
    Stall,
    Strategy,
    StrategyCost,
    divisors,
    planned_state,
    rows_state,
)
from meshwright_parallel.strategies.data import BUCKET_BYTES, SINGLE_BYTES

if TYPE_CHECKING:
    from meshwright_dtensor.plan.plan import ParallelPlan
    from meshwright_dtensor.sharding.states import State

OUTSIDE = "parameters outside of blocks"
"""Why what lies outside of blocks is gathered, in plans."""

UNEVEN = 4096
"""Elements from which a parameter is cut unevenly where no dim divides; a smaller one is kept whole."""


class Zero(Strategy):
    """Batch inputs are S(0); a parameter is cut along its largest free dim, or whole with a partial gradient."""

    name: ClassVar[str] = "zero"
    axis: ClassVar[str] = "zero"
    order: ClassVar[int] = 15
    gradient: ClassVar[GradientKind] = "deferred"
    gathers: ClassVar[bool] = True
    optional: ClassVar[bool] = True

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the world size that divide the batch."""
        return [d for d in divisors(request.world_size) if request.batch_size % d == 0]

    def batch_factor(self, degree: int) -> int:
        """The local batch is a `degree`-th of the batch."""
        return degree

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """S(0) where dim 0 is the batch and the degree divides it, else replicated."""
        return rows_state(shape, batch_size, degree)

    def state_beside(
        self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int, others: Mapping[str, State]
    ) -> State:
        """What the plan says; else the first dim that no other axis cuts and that divides: the further out, the longer
        the runs of memory that are copied.

        Where none divides, a large parameter is cut unevenly along its largest dim and a small one stays whole (state X).
        """
        said = planned_state(plan, fqn, self.axis)
        if isinstance(said, int):
            return said
        if degree <= 1 or plan.zero is None:
            return "X"
        return _state(tuple(shape), {int(s) for s in others.values() if isinstance(s, int)}, degree)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """All-gathers before use, reduce-scatters of gradients behind the backward pass, and what is left of memory.

        A unit is gathered while the one before it computes, so what is exposed is the first (what lies outside of blocks, and the
        first block: a model begins with an embedding), or what the pass cannot hide.
        Stage 3 gathers again in the backward pass, but for the last block and what lies outside of blocks; with
        several microbatches it gathers all blocks for each.  Where gradients are handed over they are whole, and shared behind
        all of that; the pass of a microbatch hides no gathers but its own.
        """
        least = BUCKET_BYTES if request.accelerated else SINGLE_BYTES
        # most units are one and the same object: to hash one is dearer than all else here
        known = {key: _Unit.of(tuple(unit), degree, least) for key, unit in _by_id(request.units).items()}
        units = [known[id(unit)] for unit in request.units]
        blocks, whole = units[:-1], sum(unit.stored for unit in units)
        if degree <= 1 or not whole:
            return StrategyCost()
        piped = request.microbatches > 1
        often = request.microbatches if request.stage == 3 else 1
        again = (blocks if piped else blocks[:-1]) if request.stage == 3 else []
        uses = [
            *_uses("all_gather", (unit.gathers for unit in blocks), often, "forward", "parameters"),
            *_uses("all_gather", (unit.gathers for unit in units[-1:]), often, "forward", OUTSIDE),
            *_uses("all_gather", (unit.gathers for unit in again), often, "backward", "parameters"),
            *_uses("reduce_scatter", (unit.shares for unit in units), 1, "backward", "gradients"),
        ]
        left = sum(unit.left for unit in units)
        if left:
            uses.append(CollectiveUse("all_reduce", left, 1, "backward", "gradients that are not cut"))
        exposed = total = 0.0
        stall = Stall()
        for phase, seconds in (("forward", request.forward_seconds), ("backward", request.backward_seconds)):
            now = [use for use in uses if use.phase == phase]
            each = [link.seconds(use.kind, use.nbytes, degree) * use.count for use in now]
            total += sum(each)
            outside = _seconds(link, "all_gather", units[-1].gathers, degree) if phase == "forward" else 0.0
            block = _seconds(link, "all_gather", next((u.gathers for u in blocks if u.gathers), ()), degree)
            if request.stages:
                gathered = sum(s for use, s in zip(now, each, strict=True) if use.kind == "all_gather")
                exposed += sum(each) - gathered
                if gathered:  # the pass of a microbatch hides its own gathers, and a stage begins with one
                    every, edge = gathered / often, block * request.stages
                    hides = seconds / request.microbatches
                    first = min(every, max(outside + edge, every - hides))
                    exposed += first * often
                    # what lies outside of blocks is with the first stage, or with the last
                    later = min(every - outside, max(edge, every - outside - hides))
                    beside = every - outside - later
                    stall = Stall(stall.exposed + later, stall.overlapped + beside, often)
            elif each:
                edge = outside + block
                if (
                    phase == "backward"
                ):  # what it ends with is shared behind it, and what is not cut is summed behind that
                    last = next((u.shares for u in reversed(units) if u.shares), ())
                    edge = _seconds(link, "reduce_scatter", last, degree)
                    edge += link.seconds("all_reduce", left, degree) if left else 0.0
                exposed += max(edge, sum(each) - seconds)
        shards = sum(unit.kept for unit in units)
        # one block is computed with while the next is gathered, from a row of this rank's parts
        largest = max((2 * unit.computed + unit.sent for unit in blocks), default=0)
        held = largest + units[-1].computed if request.stage == 3 else sum(unit.computed for unit in units)
        trained = sum(unit.trained for unit in units)
        rest = trained if request.stages else sum(unit.trained_kept for unit in units)
        gradients = rest + max(unit.buffered for unit in units)
        own = sum(unit.trained_kept for unit in units)
        return StrategyCost(
            exposed_seconds=exposed,
            stall=stall,
            # sums of the same in another order differ in the last bit
            overlapped_seconds=max(0.0, total - exposed),
            parameters=(shards + held) / whole,
            gradients=gradients / trained if trained else 1.0,
            optimizer=own / trained if trained else 1.0,
            collectives=tuple(uses),
        )


@dataclass(frozen=True)
class _Unit:
    """Bytes of one unit: stored whole, kept by one rank, computed with; whole and kept of what is trained; and moved.

    `sent`: of the row that this rank's parts are copied into; `gathers` and `shares`: of each collective, what is moved
    together first; `buffered`: of gradients on their way.
    """

    stored: int
    kept: int
    computed: int
    trained: int
    trained_kept: int
    sent: int
    gathers: tuple[int, ...]
    shares: tuple[int, ...]
    buffered: int
    left: int

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # blocks are alike, and are asked about for every configuration
    def of(unit: tuple[ParameterSize, ...], degree: int, least: int) -> _Unit:
        """`least`: bytes of a shard from which it is moved alone."""
        stored = kept = computed = trained = trained_kept = gathered = shared = buffered = left = 0
        gathers, shares = [], []
        for p in unit:
            state = _state(p.shape, set(p.taken), degree)
            own, used = p.itemsize
            row = p.numel
            alone = False
            if isinstance(state, int):
                row = p.numel // p.shape[state] * -(-p.shape[state] // degree)
                outermost = math.prod(p.shape[:state]) == 1
                even = p.shape[state] % degree == 0
                alone = outermost and even and own == used and row * own >= least
                if alone:
                    gathers.append(row * degree * used)
                else:
                    gathered += row * degree * used
            stored += p.numel * own
            kept += row * own
            computed += p.numel * used if isinstance(state, int) or own != used else 0
            if p.trainable:
                trained += p.numel * own
                trained_kept += row * own
                # a flag for each parameter travels along
                if isinstance(state, int):
                    buffered += (row + 1) * degree * own
                    if alone:
                        shares.append(row * degree * own)
                    shared += (1 if alone else row + 1) * degree * own
                else:
                    left += (row + 1) * own
        gathers += [gathered] if gathered else []
        shares += [shared] if shared else []
        return _Unit(
            stored,
            kept,
            computed,
            trained,
            trained_kept,
            gathered // degree,
            tuple(gathers),
            tuple(shares),
            buffered,
            left,
        )


def _seconds(link: Link, kind: CollectiveKind, sizes: Iterable[int], degree: int) -> float:
    """Of one collective of each size."""
    return sum(link.seconds(kind, nbytes, degree) for nbytes in sizes)


def _by_id(units: Iterable[Sequence[ParameterSize]]) -> dict[int, Sequence[ParameterSize]]:
    return {id(unit): unit for unit in units}


def _uses(
    kind: CollectiveKind, sizes: Iterable[Iterable[int]], often: int, phase: Phase, what: str
) -> list[CollectiveUse]:
    """Collectives of these sizes, each as `often`; equal ones as one."""
    every = Counter(itertools.chain.from_iterable(sizes))
    return [CollectiveUse(kind, nbytes, number * often, phase, what) for nbytes, number in every.items()]


def _state(shape: Sequence[int], taken: Collection[int], degree: int) -> State:
    """How a parameter is stored: see `Zero.state_beside`."""
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] >= degree]
    even = [dim for dim in free if shape[dim] % degree == 0]
    if even:
        return even[0]
    if math.prod(shape) < UNEVEN or not free:
        return "X"

    def padded(dim: int) -> float:
        return -(-shape[dim] // degree) * degree / shape[dim]

    # where torch.chunk leaves every rank a row the longest, else the one with the least that is empty
    full = [dim for dim in free if -(-shape[dim] // -(-shape[dim] // degree)) == degree]
    return max(full, key=lambda dim: (shape[dim], -dim)) if full else min(free, key=padded)
