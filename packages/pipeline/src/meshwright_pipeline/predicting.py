"""How long a step of a schedule takes, and what its ranks hold meanwhile, from what its stages cost. Needs no process group."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from meshwright_pipeline.actions import Schedule, Shape, needs, ordered, require

WALKED = 6000
"""Actions that are walked through one by one; of longer steps the steady part is drawn out."""


@dataclass(frozen=True)
class StageCosts:
    """What one microbatch costs on each stage.

    Args:
        forward, backward: seconds; the two halves of a split backward take half of it each.
        saved: bytes that are kept from its forward to the end of its backward; () where nobody asks for bytes.
        sending: seconds of a message over each cut, one fewer than stages; () where they cost nothing.
        over: the most bytes that are alive while it runs backward, beyond what was kept of it; () for none.
        waiting: bytes that the first half of a split backward leaves for the second; () for none.
        gradients: bytes of the gradients of its parameters, there from the end of its first backward on; () for none.
        split: False where the first half of a backward is all of it, as in stages that run modules again.
        halving: seconds that each half of a split backward takes longer than half of a whole one; () for none.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved: tuple[float, ...] = ()
    sending: tuple[float, ...] = ()
    over: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()
    halving: tuple[float, ...] = ()
    split: bool = True

    def silent(self) -> StageCosts:
        """The same seconds without messages; nothing is kept."""
        return StageCosts(self.forward, self.backward, halving=self.halving)


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


_Step: TypeAlias = tuple[int, str, int, tuple[tuple[int, int], ...]]
"""One action: its rank, kind and stage, and (place in the order, cut that a message crosses or -1) of what it waits for."""


def _walk(schedule: Schedule, shape: Shape, costs: StageCosts) -> Prediction:
    steps = _steps(schedule, shape)
    ends: list[float] = []
    clock, busy = [0.0] * shape.ranks, [0.0] * shape.ranks
    more = costs.halving or (0.0,) * shape.stages
    half = tuple(b / 2 + longer for b, longer in zip(costs.backward, more, strict=True))
    lengths = {"F": costs.forward, "B": costs.backward, "I": half, "W": half}
    if not costs.split:
        lengths |= {"I": costs.backward, "W": (0.0,) * shape.stages}
    sending = (*(costs.sending or (0.0,) * shape.stages), 0.0)  # the last one is that of no message, -1
    for rank, kind, stage, waits in steps:
        start = clock[rank]
        for place, cut in waits:
            arrival = ends[place] + sending[cut]
            if arrival > start:
                start = arrival
        length = lengths[kind][stage]
        busy[rank] += length
        clock[rank] = end = start + length
        ends.append(end)
    held, fullest = _held(steps, shape, costs) if costs.saved else ((0.0,) * shape.ranks, ())
    return Prediction(max(clock), tuple(busy), held, fullest)


def _held(
    steps: Iterable[_Step], shape: Shape, costs: StageCosts
) -> tuple[tuple[float, ...], tuple[Fullest, ...]]:
    """What ranks hold, from action to action, as in Prediction."""
    held, most, made = ([0.0] * shape.ranks for _ in range(3))
    fullest = [(0.0, 0.0, 0.0, 0.0)] * shape.ranks  # of all, then as in Fullest
    nothing = (0.0,) * shape.stages
    saved, over, waiting = costs.saved, costs.over or nothing, costs.waiting or nothing
    left = list(costs.gradients or nothing)
    for rank, kind, stage, _ in steps:
        now, beside = held[rank], 0.0
        if not costs.split and kind in "IW":
            if kind == "W":
                continue
            kind = "B"
        if kind == "F":
            held[rank] = now = now + saved[stage]
            if now > most[rank]:
                most[rank] = now
        elif kind == "W":
            held[rank] = now - (saved[stage] + waiting[stage])
            made[rank], left[stage] = made[rank] + left[stage], 0.0
            continue
        else:
            beside = over[stage]
        total = now + beside + made[rank]
        if total > fullest[rank][0]:
            fullest[rank] = (total, now, beside, made[rank])
        if kind == "B":
            held[rank] = now - saved[stage]
            made[rank], left[stage] = made[rank] + left[stage], 0.0
        elif kind == "I":
            held[rank] = now = now + waiting[stage]
            if now + made[rank] > fullest[rank][0]:
                fullest[rank] = (now + made[rank], now, 0.0, made[rank])
    return tuple(most), tuple(Fullest(*parts) for _, *parts in fullest)


@functools.lru_cache(maxsize=256)
def _steps(schedule: Schedule, shape: Shape) -> tuple[_Step, ...]:
    """The actions of a checked schedule; kept, since a search asks for the same ones again and again."""
    _, order, split = ordered(schedule, shape)
    places = {action: place for place, (_, action) in enumerate(order)}

    def cut(rank: int, stage: int, other: int) -> int:
        return -1 if schedule.owner(other, shape) == rank else min(stage, other)

    return tuple(
        (
            rank,
            action.kind,
            action.stage,
            tuple((places[one], cut(rank, action.stage, one.stage)) for one in needs(action, shape, split)),
        )
        for rank, action in order
    )
