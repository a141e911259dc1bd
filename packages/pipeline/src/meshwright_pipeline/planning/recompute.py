"""Which units run again so that a rank has room for its stages, at the least time: exact dynamic programming.

A stage runs its units one after the other and keeps of each microbatch in flight what they keep, so that a choice of how each
unit runs is three numbers: seconds, bytes kept, and the most bytes that are alive beside those while it runs backward.
`Choices` has, for a row of units, every choice that no other one beats in all of them; `cheapest` takes the fastest that fits.
"""

from __future__ import annotations

import functools
import math
import operator
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_pipeline.planning.activation_memory import KINDS
from meshwright_pipeline.planning.simulate import simulated_shapes, steps_of

MOST_CHOICES = 512
"""Choices of a row of units that are gone on with; of more, which only units that all differ have, an even part is."""

MOST_COMBINATIONS = 1 << 18
"""Choices of the stages of one rank together that are looked at, at most; of more, none."""

Picks: TypeAlias = "tuple[int, Picks] | None"
"""The ways of the first unit of a row and of those behind it."""


class UnitOption(NamedTuple):
    """How a unit may run.

    Args:
        seconds: of a microbatch, forward and backward.
        kept: bytes that are kept of it in between.
        over: the most bytes that are alive while it runs backward, beyond what is kept of the unit.
    """

    seconds: float
    kept: int
    over: int


class RunChoice(NamedTuple):
    """How each unit of a row runs, and what the row is then, as in Way."""

    seconds: float
    kept: int
    over: int
    picks: Picks

    @property
    def ways(self) -> list[int]:
        """The place of each unit's way."""
        found, left = [], self.picks
        while left is not None:
            found.append(left[0])
            left = left[1]
        return found


@dataclass(frozen=True)
class Choices:
    """Choices of rows of units; `kinds`: the ways of each kind of unit, the first of which runs nothing again."""

    kinds: Sequence[Sequence[UnitOption]]
    known: dict[tuple[int, ...], list[RunChoice]] = field(default_factory=dict)

    def of(self, row: Sequence[int]) -> list[RunChoice]:
        """Those of a row of kinds that no other one beats, the fastest first."""
        for start in range(len(row), -1, -1):
            key = tuple(row[start:])
            if key not in self.known:
                behind = self.known[key[1:]] if key else []
                self.known[key] = (
                    _extended(self.kinds[key[0]], behind) if key else [RunChoice(0.0, 0, 0, None)]
                )
        return self.known[tuple(row)]


def _extended(ways: Sequence[UnitOption], behind: Sequence[RunChoice]) -> list[RunChoice]:
    """With one more unit in front, which runs backward when what is kept of those behind it is free again."""
    # sums of the same seconds in another order differ in the last bits; most of these are given up at once
    every = [
        (round(way.seconds + c.seconds, 12), way.kept + c.kept, max(c.over, way.over - c.kept), place, c)
        for place, way in reversed(list(enumerate(ways)))  # of equals, the first units run again
        for c in behind
    ]
    every.sort(key=operator.itemgetter(0, 1, 2))
    best: list[RunChoice] = []
    stairs: list[tuple[int, int]] = []  # (kept, kept and over) of the best: one rises, the other falls
    for _, kept, over, way_of, c in every:
        full = kept + over
        place = bisect_right(stairs, (kept, math.inf))
        # with n in flight n * kept + over counts; whoever is no worse for one of them is no worse for more
        if place and stairs[place - 1][1] <= full:
            continue
        best.append(RunChoice(ways[way_of].seconds + c.seconds, kept, over, (way_of, c.picks)))
        while place < len(stairs) and stairs[place][1] >= full:
            del stairs[place]
        insort(stairs, (kept, full))
    if len(best) <= MOST_CHOICES:
        return best
    last = len(best) - 1
    spread = {round(n * last / (MOST_CHOICES - 1)) for n in range(MOST_CHOICES)}
    spread |= {
        best.index(min(best, key=lambda c: c.kept)),
        best.index(min(best, key=lambda c: c.kept + c.over)),
    }
    return [best[place] for place in sorted(spread)]


class Moment(NamedTuple):
    """A moment of a schedule, of the stages of one rank in ascending order.

    Args:
        kept: microbatches in flight on each.
        running: the place of the stage that runs backward, -1 where none does.
        made: whether the gradients of each are there.
    """

    kept: tuple[int, ...]
    running: int
    made: tuple[bool, ...]


def _uncovered(found: Iterable[Moment]) -> tuple[Moment, ...]:
    """Those of different moments that no other one covers: at which there is more of something than at any other."""
    best: list[Moment] = []
    sizes: list[tuple[int, tuple[int, ...]]] = []
    for one in sorted(found, key=lambda one: (-sum(one.kept), -one.running, -sum(one.made))):
        running, size = one.running, (*one.kept, *one.made)
        for other, whole in sizes:
            if (running == other or running < 0) and all(map(operator.ge, whole, size)):
                break
        else:
            best.append(one)
            sizes.append((running, size))
    return tuple(best)


@functools.lru_cache(maxsize=256)
def moments(schedule: Schedule, shape: Shape) -> tuple[tuple[Moment, ...], ...]:
    """Per rank, the moments at which it may be fullest; no backward is split, as where modules run again.

    Raises:
        UsageError: as `predict`.
    """
    shorter = simulated_shapes(shape)
    if len(shorter) > 1 and not any(schedule.refusal(one) for one in shorter):
        # of a long step the steady part is like that of a shorter one, where it is steady
        short, longer = (_moments(schedule, one) for one in shorter)
        if short == longer:
            return longer
    return _moments(schedule, shape)


@functools.lru_cache(maxsize=256)
def _moments(schedule: Schedule, shape: Shape) -> tuple[tuple[Moment, ...], ...]:
    own = (schedule.own(rank, shape) for rank in range(shape.ranks))
    return tuple(map(_of_rank, own, steps_of(schedule, shape).ranks, [shape.stages] * shape.ranks))


def _of_rank(stages: Sequence[int], actions: Sequence[int], count: int) -> tuple[Moment, ...]:
    """Of a rank with these stages (of `count`) and actions, as in Steps."""
    own = {stage: place for place, stage in enumerate(stages)}
    kept, made = [0] * len(own), [False] * len(own)
    found: set[tuple[tuple[int, ...], int, tuple[bool, ...]]] = set()
    late = KINDS.index("W") * count
    # whatever follows a forward, up to the next backward, holds no less: that backward is fuller
    for action in actions:
        if action < count:
            kept[own[action]] += 1
        elif action < late:  # the first half of a backward is all of it
            place = own[action % count]
            found.add((tuple(kept), place, tuple(made)))
            kept[place] -= 1
            made[place] = True
    return _uncovered(Moment(*one) for one in found)


def cheapest(
    stages: Sequence[Sequence[RunChoice]],
    taking: Callable[[int, RunChoice], Sequence[float]],
    room: Sequence[float],
) -> tuple[RunChoice, ...] | None:
    """One choice for each stage of a rank, in all of the least seconds that leave room; None where none do.

    Args:
        stages: choices of each, the fastest first.
        taking: stage and choice -> bytes that it takes, moment by moment.
        room: bytes that there are for all of them, of the same moments.
    """
    if len(stages) == 1:
        return next(((c,) for c in stages[0] if not any(map(operator.gt, taking(0, c), room))), None)
    if math.prod(map(len, stages)) > MOST_COMBINATIONS:
        return None
    bytes_of = [[taking(place, choice) for choice in choices] for place, choices in enumerate(stages)]
    # what stages further on take at the least
    least, quickest = [[0.0] * len(room)], [0.0]
    for choices, sizes in zip(reversed(stages), reversed(bytes_of), strict=True):
        least.append(
            [after + min(column) for after, column in zip(least[-1], zip(*sizes, strict=True), strict=True)]
        )
        quickest.append(quickest[-1] + min(choice.seconds for choice in choices))
    best: tuple[float, tuple[RunChoice, ...] | None] = (math.inf, None)

    def go(taken: tuple[RunChoice, ...], seconds: float, left: Sequence[float]) -> None:
        nonlocal best
        place = len(taken)
        behind = len(stages) - place - 1
        for choice, sizes in zip(stages[place], bytes_of[place], strict=True):
            longer = seconds + choice.seconds
            if longer + quickest[behind] >= best[0]:
                break  # the fastest come first
            rest = [*map(operator.sub, left, sizes)]
            if any(map(operator.lt, rest, least[behind])):
                continue
            if behind:
                go((*taken, choice), longer, rest)
            else:
                best = longer, (*taken, choice)
                break

    go((), 0.0, room)
    return best[1]
