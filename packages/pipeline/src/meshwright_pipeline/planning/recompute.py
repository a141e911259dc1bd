"""Chooses which units recompute so that the stages of a rank fit in memory, at the least time (exact dynamic programming).

For a sequence of units, a choice of policies is described by three numbers: seconds, bytes kept for each microbatch in
flight, and peak bytes of the backward in addition. `Choices` lists the Pareto-optimal choices; `cheapest` takes the fastest
that fits.
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
"""Most Pareto-optimal choices of a sequence to continue with. More, which only units that all differ have, are thinned."""

MOST_COMBINATIONS = 1 << 18
"""Most combinations of choices for the stages of one rank; with more, `cheapest` gives none."""

Picks: TypeAlias = "tuple[int, Picks] | None"
"""Linked list: the option of the first unit of a sequence, and those of the rest."""


class UnitOption(NamedTuple):
    """One way to run a unit, without or with recomputation: seconds of forward and backward of a microbatch, bytes kept between the
    two, and peak bytes of the backward beyond those.
    """

    seconds: float
    kept: int
    over: int


class RunChoice(NamedTuple):
    """An option for each unit of a sequence, and the resulting numbers of the sequence; see UnitOption."""

    seconds: float
    kept: int
    over: int
    picks: Picks

    @property
    def options(self) -> list[int]:
        """The index of each unit's option."""
        indices, rest = [], self.picks
        while rest is not None:
            indices.append(rest[0])
            rest = rest[1]
        return indices


NO_UNITS = RunChoice(0.0, 0, 0, None)


@dataclass(frozen=True)
class Choices:
    """Choices of sequences of units. `kinds`: the options of each kind of unit, the first without recomputation."""

    kinds: Sequence[Sequence[UnitOption]]
    cache: dict[tuple[int, ...], list[RunChoice]] = field(default_factory=lambda: {(): [NO_UNITS]})

    def of(self, row: Sequence[int]) -> list[RunChoice]:
        """The Pareto-optimal choices for a sequence of kinds, the fastest first."""
        for start in reversed(range(len(row))):
            key = tuple(row[start:])
            if key not in self.cache:
                self.cache[key] = _extended(self.kinds[key[0]], self.cache[key[1:]])
        return self.cache[tuple(row)]


def _extended(options: Sequence[UnitOption], following: Sequence[RunChoice]) -> list[RunChoice]:
    """Choices with one more unit in front. It runs backward after the kept bytes of the following units are freed."""
    # sums of the same seconds in another order differ in the last bits: rounding makes them equal
    candidates = [
        (round(o.seconds + c.seconds, 12), o.kept + c.kept, max(c.over, o.over - c.kept), index, c)
        # of equal choices, the first units recompute
        for index, o in reversed(list(enumerate(options)))
        for c in following
    ]
    candidates.sort(key=operator.itemgetter(0, 1, 2))
    best: list[RunChoice] = []
    # (kept, kept + over) of the best choices: the first ascends, the second descends
    stairs: list[tuple[int, int]] = []
    for _, kept, over, index, c in candidates:
        full = kept + over
        place = bisect_right(stairs, (kept, math.inf))
        # with n in flight n * kept + over counts; a choice that is no worse for n = 1 and in kept is no worse for any n
        if place and stairs[place - 1][1] <= full:
            continue
        best.append(RunChoice(options[index].seconds + c.seconds, kept, over, (index, c.picks)))
        while place < len(stairs) and stairs[place][1] >= full:
            del stairs[place]
        insort(stairs, (kept, full))
    if len(best) <= MOST_CHOICES:
        return best
    last = len(best) - 1
    spread = {round(n * last / (MOST_CHOICES - 1)) for n in range(MOST_CHOICES)}
    smallest = min(best, key=lambda c: c.kept), min(best, key=lambda c: c.kept + c.over)
    spread.update(map(best.index, smallest))
    return [best[place] for place in sorted(spread)]


class Moment(NamedTuple):
    """A moment of a schedule on one rank, with entries for its stages in ascending order: microbatches in flight, and whether
    gradients exist. `running`: index of the stage that runs backward, -1 for none.
    """

    kept: tuple[int, ...]
    running: int
    has_gradients: tuple[bool, ...]


def _dominant(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """The moments at which no other moment holds at least as much of everything."""
    best: list[Moment] = []
    sizes: list[tuple[int, tuple[int, ...]]] = []
    for moment in sorted(moments, key=lambda m: (-sum(m.kept), -m.running, -sum(m.has_gradients))):
        running, size = moment.running, (*moment.kept, *moment.has_gradients)
        for other, whole in sizes:
            if (running == other or running < 0) and all(map(operator.ge, whole, size)):
                break
        else:
            best.append(moment)
            sizes.append((running, size))
    return tuple(best)


@functools.lru_cache(maxsize=256)
def moments(schedule: Schedule, shape: Shape) -> tuple[tuple[Moment, ...], ...]:
    """For each rank, the moments at which its memory may peak. No backward is split. Raises UsageError as `predict`."""
    shapes = simulated_shapes(shape)
    if len(shapes) > 1 and not any(map(schedule.refusal, shapes)):
        # if two shorter steps have the same moments, so does a long one
        short, longer = (_moments(schedule, simulated) for simulated in shapes)
        if short == longer:
            return longer
    return _moments(schedule, shape)


@functools.lru_cache(maxsize=256)
def _moments(schedule: Schedule, shape: Shape) -> tuple[tuple[Moment, ...], ...]:
    stages = (schedule.own(rank, shape) for rank in range(shape.ranks))
    return tuple(map(_of_rank, stages, steps_of(schedule, shape).by_rank, [shape.stages] * shape.ranks))


def _of_rank(stages: Sequence[int], actions: Sequence[int], count: int) -> tuple[Moment, ...]:
    """The moments of a rank with these stages (of `count`) and action numbers, see Steps."""
    index_of = {stage: index for index, stage in enumerate(stages)}
    kept, made = [0] * len(stages), [False] * len(stages)
    moments: set[tuple[tuple[int, ...], int, tuple[bool, ...]]] = set()
    late = KINDS.index("W") * count
    # memory does not fall between a forward and the next backward: that backward peaks
    for action in actions:
        if action < count:
            kept[index_of[action]] += 1
        elif action < late:
            # the first half of a backward does all of it
            index = index_of[action % count]
            moments.add((tuple(kept), index, tuple(made)))
            kept[index] -= 1
            made[index] = True
    return _dominant(Moment(*moment) for moment in moments)


def cheapest(
    stages: Sequence[Sequence[RunChoice]],
    memory: Callable[[int, RunChoice], Sequence[float]],
    free: Sequence[float],
) -> tuple[RunChoice, ...] | None:
    """One choice for each stage of a rank, with the least total seconds that fit in memory; None if none fit.

    `stages`: choices of each stage, the fastest first. `memory`: (stage, choice) -> its bytes at each moment.
    `free`: bytes free for all stages at the same moments.
    """
    if len(stages) == 1:
        return next(((c,) for c in stages[0] if not any(map(operator.gt, memory(0, c), free))), None)
    if math.prod(map(len, stages)) > MOST_COMBINATIONS:
        return None
    bytes_of = [[memory(stage, choice) for choice in choices] for stage, choices in enumerate(stages)]
    # lower bounds for the following stages
    least, quickest = [[0.0] * len(free)], [0.0]
    for choices, sizes in zip(reversed(stages), reversed(bytes_of), strict=True):
        columns = zip(*sizes, strict=True)
        least.append([after + min(column) for after, column in zip(least[-1], columns, strict=True)])
        quickest.append(quickest[-1] + min(choice.seconds for choice in choices))
    best: tuple[float, tuple[RunChoice, ...] | None] = (math.inf, None)

    def extend(chosen: tuple[RunChoice, ...], seconds: float, left: Sequence[float]) -> None:
        """Branch and bound over the stages."""
        nonlocal best
        stage = len(chosen)
        following = len(stages) - stage - 1
        for choice, sizes in zip(stages[stage], bytes_of[stage], strict=True):
            longer = seconds + choice.seconds
            if longer + quickest[following] >= best[0]:
                # the fastest come first
                break
            rest = [*map(operator.sub, left, sizes)]
            if any(map(operator.lt, rest, least[following])):
                continue
            if following:
                extend((*chosen, choice), longer, rest)
            else:
                best = longer, (*chosen, choice)
                break

    extend((), 0.0, free)
    return best[1]
