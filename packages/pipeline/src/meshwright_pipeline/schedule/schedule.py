"""What a schedule is made of, and the check that it can run.

A schedule says, for every rank of the axis, in which order it runs the forwards and backwards of its stages. What is sent
and received follows from that.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, NoReturn

from meshwright_dtensor.errors import UsageError

Kind = Literal["F", "B", "I", "W"]
NAMES: Mapping[str, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "backward to weights"}
)


class Action(NamedTuple):
    """One forward ("F") or backward ("B") of one microbatch on one stage.

    A backward may be split: into gradients of what the stage received ("I"), for which the stage before it waits, and
    gradients of its weights ("W"), for which nobody does.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a pipeline: ranks along the axis, stages in all, microbatches a step."""

    ranks: int
    stages: int
    microbatches: int

    @property
    def each(self) -> int:
        """Stages of one rank."""
        return self.stages // self.ranks


class Schedule(ABC):
    """An order of forwards and backwards. Stateless; registered by a ScheduleSpec under `name`.

    stages_each: how many stages a planner gives to each rank.
    most_each: up to how many, where that many cut the layers of a model equally and `stages_each` do not.
    """

    name: ClassVar[str]
    stages_each: ClassVar[int] = 1
    most_each: ClassVar[int] = 0

    def refusal(self, shape: Shape) -> str | None:
        """Why the schedule cannot run this pipeline, None where it can."""
        return None

    def owner(self, stage: int, shape: Shape) -> int:
        """The rank that holds a stage: stages are dealt out in turn."""
        return stage % shape.ranks

    def own(self, rank: int, shape: Shape) -> list[int]:
        """The stages that a rank holds, ascending."""
        return [stage for stage in range(shape.stages) if self.owner(stage, shape) == rank]

    @abstractmethod
    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """What `rank` does in one step, in order."""


@dataclass(frozen=True)
class Timetable:
    """A checked schedule.

    Attributes:
        ranks: per rank, its actions in order.
        alive: per rank, the largest number of microbatches of any of its stages whose activations it holds at once.
        ends: when each action ends, where a forward takes 1, a backward 2, each half of one 1, and messages nothing.
        order: every action with its rank, each behind what it waits for.
    """

    ranks: tuple[tuple[Action, ...], ...]
    alive: tuple[int, ...]
    ends: dict[Action, float]
    order: tuple[tuple[int, Action], ...]

    @property
    def length(self) -> float:
        """When the last action ends."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The part of a step in which the average rank waits."""
        busy = sum(DURATION[action.kind] for actions in self.ranks for action in actions)
        return 1.0 - busy / (self.length * len(self.ranks))


_BITS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 2, "I": 4, "W": 8})
_WHOLE = (1 + 2, 1 + 4 + 8)
"""Kinds that take a microbatch forwards and backwards."""

DURATION: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})


def require(schedule: Schedule, shape: Shape) -> None:
    """Ask the schedule alone; what it does is not looked at.

    Raises:
        UsageError: the schedule refuses the pipeline.
    """
    refused = schedule.refusal(shape)
    if refused is not None:
        raise UsageError(f"schedule {schedule.name!r}: {refused}")


class Ordered(NamedTuple):
    """The actions of a schedule that can run.

    Attributes:
        ranks: per rank.
        runs: (rank, place of its first action, of the first behind it): one after the other, every action in them is behind
            what it waits for.
        slots: per rank, for each action, its number as in `_slots`.
        waits: per rank, for each action, the number of what it waits for on another stage.
    """

    ranks: tuple[tuple[Action, ...], ...]
    runs: list[tuple[int, int, int]]
    slots: list[list[int]]
    waits: list[list[int]]

    @property
    def split(self) -> set[tuple[int, int]]:
        """(stage, microbatch) whose backward is."""
        return _split(self.ranks)

    @property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """Every action with its rank, behind what it waits for."""
        return tuple((rank, one) for rank, begin, end in self.runs for one in self.ranks[rank][begin:end])


def ordered(schedule: Schedule, shape: Shape) -> Ordered:
    """The actions of a schedule, put into an order in which they can run.

    Raises:
        UsageError: the schedule refuses the pipeline, or its actions are not complete or wait for each other.
    """
    require(schedule, shape)
    ranks = tuple(tuple(schedule.actions(rank, shape)) for rank in range(shape.ranks))
    slots = _slots(schedule, shape, ranks)
    waits = [_waits(own, shape) for own in slots]
    return Ordered(ranks, _runs(schedule, shape, ranks, slots, waits), slots, waits)


def _split(ranks: Sequence[Sequence[Action]]) -> set[tuple[int, int]]:
    return {(action.stage, action.microbatch) for own in ranks for action in own if action.kind == "I"}


def timetable(schedule: Schedule, shape: Shape) -> Timetable:
    """Run a schedule in thought.

    Raises:
        UsageError: as `ordered`.
    """
    found = ordered(schedule, shape)
    ranks, order, split = found.ranks, found.order, found.split
    ends: dict[Action, float] = {}
    clock, held, most = [0.0] * shape.ranks, [0] * shape.ranks, [0] * shape.ranks
    for rank, action in order:
        start = max([clock[rank], *(ends[one] for one in needs(action, shape, split))])
        clock[rank] = ends[action] = start + DURATION[action.kind]
        held[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
        most[rank] = max(most[rank], held[rank])
    return Timetable(ranks, tuple(most), ends, order)


def _slots(schedule: Schedule, shape: Shape, ranks: Sequence[Sequence[Action]]) -> list[list[int]]:
    """Per rank, a number for each action: forwards first, then whole backwards and first halves of split ones, which nobody
    needs to tell apart, then second halves; of each, stage after stage.  Refuses what is not complete.
    """
    count, every = shape.microbatches, shape.stages * shape.microbatches
    first = {"F": 0, "B": every, "I": every, "W": 2 * every}
    owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
    held = [{stage for stage, owner in enumerate(owners) if owner == rank} for rank in range(shape.ranks)]
    numbers: list[list[int]] = []
    halves: list[list[int]] = [[], []]
    right = True
    for rank, actions in enumerate(ranks):
        kinds, stages, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
        right &= held[rank].issuperset(stages) and first.keys() >= set(kinds)
        right &= not actions or (min(microbatches) >= 0 and max(microbatches) < count)
        if not right:
            break
        numbers.append([first[kind] + stage * count + m for kind, stage, m in actions])
        for kind, found in zip("IW", halves, strict=True):
            if kind in kinds:
                found += [stage * count + m for one, stage, m in actions if one == kind]
    if right:
        met = set(itertools.chain.from_iterable(numbers))
        whole = sum(map(len, numbers)) == len(met) == 2 * every + len(halves[0])
        right = whole and set(halves[0]) == set(halves[1])
    if not right:
        _check_complete(schedule, shape, ranks)
    return numbers


def _check_complete(schedule: Schedule, shape: Shape, ranks: Sequence[Sequence[Action]]) -> None:
    where = f"schedule {schedule.name!r}"
    owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
    kinds = [0] * (shape.stages * shape.microbatches)  # of each microbatch on each stage, a bit for each kind
    for rank, actions in enumerate(ranks):
        for action in actions:
            kind, stage, microbatch = action
            if not (0 <= stage < shape.stages and 0 <= microbatch < shape.microbatches):
                raise UsageError(
                    f"{where}: rank {rank} has {action}, but there are stages 0..{shape.stages - 1} and microbatches "
                    f"0..{shape.microbatches - 1}"
                )
            bit = _BITS.get(kind)
            if bit is None:
                raise UsageError(
                    f"{where}: rank {rank} has {action}; the kinds of actions are {', '.join(NAMES)}"
                )
            place = stage * shape.microbatches + microbatch
            if kinds[place] & bit:
                first = next(number for number, own in enumerate(ranks) if action in own)
                raise UsageError(f"{where}: {action} comes twice, on rank {first} and on rank {rank}")
            if owners[stage] != rank:
                raise UsageError(
                    f"{where}: rank {rank} has {action}, a stage that is on rank {owners[stage]}; give it to that rank"
                )
            kinds[place] |= bit
    for place, found in enumerate(kinds):
        if found not in _WHOLE:
            _check_one(
                where,
                {kind for kind, bit in _BITS.items() if found & bit},
                *divmod(place, shape.microbatches),
            )


def _check_one(where: str, kinds: set[str], stage: int, microbatch: int) -> NoReturn:
    """Say why one microbatch does not go forwards and backwards through one stage, once."""
    if "B" in kinds and kinds & {"I", "W"}:
        twice = _made(min(kinds & {"I", "W"}), stage, microbatch)
        raise UsageError(f"{where}: {twice} is a part of {_made('B', stage, microbatch)}, which is there too")
    wanted = ("F", "I", "W") if kinds & {"I", "W"} else ("F", "B")
    missing = _made(next(kind for kind in wanted if kind not in kinds), stage, microbatch)
    raise UsageError(f"{where}: {missing} is missing; every forward needs its backward")


def _made(kind: str, stage: int, microbatch: int) -> Action:
    return Action(kind, stage, microbatch)  # type: ignore[arg-type]


def needs(action: Action, shape: Shape, split: set[tuple[int, int]]) -> list[Action]:
    """What has to be done before an action can start; `split`: (stage, microbatch) whose backward is."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [Action("I", stage, microbatch)]
    before = Action("F", stage, microbatch)
    if stage + 1 == shape.stages:
        return [before]
    return [before, Action("I" if (stage + 1, microbatch) in split else "B", stage + 1, microbatch)]


def _waits(slots: Sequence[int], shape: Shape) -> list[int]:
    """What actions with these numbers (as in `_slots`) wait for on another stage, as `needs`; 3 x stages x microbatches is
    the number of nothing.
    """
    count, every = shape.microbatches, shape.stages * shape.microbatches
    nothing, last = 3 * every, 2 * every - count
    return [
        nothing if slot < count or slot >= last else slot - count if slot < every else slot + count
        for slot in slots
    ]


def _runs(
    schedule: Schedule,
    shape: Shape,
    ranks: Sequence[Sequence[Action]],
    slots: Sequence[Sequence[int]],
    waits: Sequence[Sequence[int]],
) -> list[tuple[int, int, int]]:
    """As Ordered.runs. Ranks take turns, there as forwards pass by and back as backwards do, each until it would wait."""
    every = shape.stages * shape.microbatches
    found: list[tuple[int, int, int]] = []
    done = bytearray(3 * every) + b"\1\0"  # nothing is done, and nobody gets past the end
    same = [[slot - every for slot in own] for own in slots]  # on its own stage; of forwards, below 0
    waiting = [[*own, 3 * every + 1] for own in waits]
    place = [0] * shape.ranks
    moved, turns = True, range(shape.ranks)
    while moved:
        moved = False
        for rank in turns:
            here = place[rank]
            own, comes, before = slots[rank], waiting[rank], same[rank]
            begin = here
            while done[comes[here]] and (before[here] < 0 or done[before[here]]):
                done[own[here]] = 1
                here += 1
            if here > begin:
                moved = True
                place[rank] = here
                found.append((rank, begin, here))
        turns = turns[::-1]
    stuck = [(rank, actions[place[rank]]) for rank, actions in enumerate(ranks) if place[rank] < len(actions)]
    if stuck:
        split = _split(ranks)
        past = {action for own, end in zip(ranks, place, strict=True) for action in own[:end]}
        missing = {
            rank: next(one for one in needs(action, shape, split) if one not in past)
            for rank, action in stuck
        }
        # the cause, where there is one: a rank that waits for what it does itself later
        itself = [entry for entry in stuck if schedule.owner(missing[entry[0]].stage, shape) == entry[0]]
        rank, action = (itself or stuck)[0]
        others = "; ".join(f"rank {r} at {a}" for r, a in stuck[:4] if r != rank)
        raise UsageError(
            f"schedule {schedule.name!r} would hang: rank {rank} waits at {action} for {missing[rank]}, which never comes"
            f"{f' ({others})' if others else ''}; bring that one forward"
        )
    return found
