"""What a schedule is made of, and the check that it can run.

A schedule says, for every rank of the axis, in which order it runs the forwards and backwards of its stages. What is sent
and received follows from that.
"""

from __future__ import annotations

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
    """

    name: ClassVar[str]
    stages_each: ClassVar[int] = 1

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
        order: every one with its rank, behind what it waits for.
        split: (stage, microbatch) whose backward is.
        numbers: as `numbered`.
    """

    ranks: tuple[tuple[Action, ...], ...]
    order: tuple[tuple[int, Action], ...]
    split: set[tuple[int, int]]
    numbers: list[list[tuple[int, int, int]]]


def ordered(schedule: Schedule, shape: Shape) -> Ordered:
    """The actions of a schedule, put into an order in which they can run.

    Raises:
        UsageError: the schedule refuses the pipeline, or its actions are not complete or wait for each other.
    """
    require(schedule, shape)
    ranks = tuple(tuple(schedule.actions(rank, shape)) for rank in range(shape.ranks))
    _check_complete(schedule, shape, ranks)
    split = {(action.stage, action.microbatch) for own in ranks for action in own if action.kind == "I"}
    numbers = numbered(shape, ranks, split)
    return Ordered(ranks, _order(schedule, shape, ranks, split, numbers), split, numbers)


def timetable(schedule: Schedule, shape: Shape) -> Timetable:
    """Run a schedule in thought.

    Raises:
        UsageError: as `ordered`.
    """
    ranks, order, split, _ = ordered(schedule, shape)
    ends: dict[Action, float] = {}
    clock, held, most = [0.0] * shape.ranks, [0] * shape.ranks, [0] * shape.ranks
    for rank, action in order:
        start = max([clock[rank], *(ends[one] for one in needs(action, shape, split))])
        clock[rank] = ends[action] = start + DURATION[action.kind]
        held[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
        most[rank] = max(most[rank], held[rank])
    return Timetable(ranks, tuple(most), ends, order)


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


def numbered(
    shape: Shape, ranks: Sequence[Sequence[Action]], split: set[tuple[int, int]]
) -> list[list[tuple[int, int, int]]]:
    """Per rank, for each action: its number, and those of what it needs on its own stage and on another; the number of
    nothing is 4 x stages x microbatches.  As `needs`, for those who ask of every action.
    """
    count, last = shape.microbatches, shape.stages - 1
    every = shape.stages * count
    nothing = 4 * every
    found = []
    for actions in ranks:
        own: list[tuple[int, int, int]] = []
        for kind, stage, microbatch in actions:
            at = stage * count + microbatch
            if kind == "F":
                own.append((at, nothing, at - count if stage else nothing))
            elif kind == "W":
                own.append((3 * every + at, 2 * every + at, nothing))
            else:
                behind = nothing
                if stage != last:
                    behind = at + count + (2 * every if (stage + 1, microbatch) in split else every)
                own.append((at + (every if kind == "B" else 2 * every), at, behind))
        found.append(own)
    return found


def _order(
    schedule: Schedule,
    shape: Shape,
    ranks: Sequence[Sequence[Action]],
    split: set[tuple[int, int]],
    numbers: Sequence[Sequence[tuple[int, int, int]]],
) -> tuple[tuple[int, Action], ...]:
    found: list[tuple[int, Action]] = []
    done = bytearray(4 * shape.stages * shape.microbatches) + b"\1"
    place = [0] * shape.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            own, here = numbers[rank], place[rank]
            while here < len(own):
                number, same, other = own[here]
                if not (done[same] and done[other]):
                    break
                done[number] = 1
                found.append((rank, actions[here]))
                here += 1
            moved |= here > place[rank]
            place[rank] = here
    stuck = [(rank, actions[place[rank]]) for rank, actions in enumerate(ranks) if place[rank] < len(actions)]
    if stuck:
        past = {action for _, action in found}
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
    return tuple(found)
