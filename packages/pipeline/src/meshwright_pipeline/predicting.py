"""How long a step of a schedule takes, and what its ranks hold meanwhile, from what its stages cost. Needs no process group."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from meshwright_pipeline.actions import Schedule, Shape, needs, require, timetable

WALKED = 6000
"""Actions that are walked through one by one; of longer steps the steady part is drawn out."""


@dataclass(frozen=True)
class StageCosts:
    """What one microbatch costs on each stage.

    Args:
        forward, backward: seconds; the two halves of a split backward take half of it each.
        saved: bytes that are kept from its forward to the end of its backward.
        sending: seconds of a message over each cut, one fewer than stages; () where they cost nothing.
        over: the most bytes that are alive while it runs backward, beyond what was kept of it; () for none.
        waiting: bytes that the first half of a split backward leaves for the second; () for none.
        gradients: bytes of the gradients of its parameters, there from the end of its first backward on; () for none.
        halving: seconds that each half of a split backward takes longer than half of a whole one; () for none.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved: tuple[float, ...]
    sending: tuple[float, ...] = ()
    over: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()
    halving: tuple[float, ...] = ()

    def silent(self) -> StageCosts:
        """The same without messages."""
        return replace(self, sending=())


@dataclass(frozen=True)
class Fullest:
    """Bytes at the moment at which a rank holds most: kept, alive beside that, and of gradients."""

    kept: float = 0.0
    over: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.kept + self.over + self.gradients


@dataclass(frozen=True)
class Prediction:
    """A step in thought.

    Attributes:
        seconds: from its begin to the end of its last action.
        busy: per rank, the seconds in which it computes.
        held: per rank, the most bytes of activations that it holds at once.
        fullest: per rank, when it holds most, with all that there is beside activations.
    """

    seconds: float
    busy: tuple[float, ...]
    held: tuple[float, ...]
    fullest: tuple[Fullest, ...] = ()

    @property
    def bubble(self) -> float:
        """The part of the step in which the average rank waits."""
        return 1.0 - sum(self.busy) / (self.seconds * len(self.busy)) if self.seconds else 0.0


def predict(schedule: Schedule, shape: Shape, costs: StageCosts) -> Prediction:
    """Run a step in thought.

    Raises:
        UsageError: the schedule refuses the pipeline, is not complete, or would hang.
    """
    require(schedule, shape)  # of a long step, others are walked through
    few, more = 2 * shape.stages, 3 * shape.stages
    if 2 * shape.stages * shape.microbatches <= WALKED or shape.microbatches <= more:
        return _walk(schedule, shape, costs)
    # whatever groups a schedule takes microbatches in, as many as there are stages are whole groups
    short, longer = (_walk(schedule, Shape(shape.ranks, shape.stages, count), costs) for count in (few, more))
    factor = (shape.microbatches - more) / (more - few)

    def drawn(a: float, b: float) -> float:
        return b + factor * (b - a)

    return Prediction(
        drawn(short.seconds, longer.seconds),
        tuple(map(drawn, short.busy, longer.busy)),
        tuple(map(drawn, short.held, longer.held)),
        tuple(
            Fullest(drawn(a.kept, b.kept), drawn(a.over, b.over), drawn(a.gradients, b.gradients))
            for a, b in zip(short.fullest, longer.fullest, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Step:
    """One action: its rank, kind and stage, and (place in the order, cut that a message crosses or -1) of what it waits for."""

    rank: int
    kind: str
    stage: int
    waits: tuple[tuple[int, int], ...]


def _walk(schedule: Schedule, shape: Shape, costs: StageCosts) -> Prediction:
    ends: list[float] = []
    clock, busy = [0.0] * shape.ranks, [0.0] * shape.ranks
    held, most = [0.0] * shape.ranks, [0.0] * shape.ranks
    fullest = [Fullest()] * shape.ranks
    made = [0.0] * shape.ranks
    nothing = (0.0,) * shape.stages
    over, waiting, left = costs.over or nothing, costs.waiting or nothing, list(costs.gradients or nothing)

    def look(rank: int, kept: float, beside: float) -> None:
        if kept + beside + made[rank] > fullest[rank].total:
            fullest[rank] = Fullest(kept, beside, made[rank])

    more = costs.halving or (0.0,) * shape.stages
    half = tuple(b / 2 + longer for b, longer in zip(costs.backward, more, strict=True))
    lengths = {"F": costs.forward, "B": costs.backward, "I": half, "W": half}
    sending = costs.sending or (0.0,) * shape.stages
    for step in _steps(schedule, shape):
        rank, start = step.rank, clock[step.rank]
        for place, cut in step.waits:
            start = max(start, ends[place] + (sending[cut] if cut >= 0 else 0.0))
        length = lengths[step.kind][step.stage]
        busy[rank] += length
        clock[rank] = start + length
        ends.append(clock[rank])
        stage = step.stage
        if step.kind == "F":
            held[rank] += costs.saved[stage]
            most[rank] = max(most[rank], held[rank])
            look(rank, held[rank], 0.0)
            continue
        if step.kind != "W":
            look(rank, held[rank], over[stage])
        if step.kind == "I":
            held[rank] += waiting[stage]
            look(rank, held[rank], 0.0)
        else:
            held[rank] -= costs.saved[stage] + (waiting[stage] if step.kind == "W" else 0.0)
            made[rank], left[stage] = made[rank] + left[stage], 0.0
    return Prediction(max(clock), tuple(busy), tuple(most), tuple(fullest))


@functools.lru_cache(maxsize=256)
def _steps(schedule: Schedule, shape: Shape) -> tuple[_Step, ...]:
    """The actions of a checked schedule; kept, since a search asks for the same ones again and again."""
    table = timetable(schedule, shape)
    split = {(action.stage, action.microbatch) for _, action in table.order if action.kind == "I"}
    places = {action: place for place, (_, action) in enumerate(table.order)}

    def cut(rank: int, stage: int, other: int) -> int:
        return -1 if schedule.owner(other, shape) == rank else min(stage, other)

    return tuple(
        _Step(
            rank,
            action.kind,
            action.stage,
            tuple((places[one], cut(rank, action.stage, one.stage)) for one in needs(action, shape, split)),
        )
        for rank, action in table.order
    )
