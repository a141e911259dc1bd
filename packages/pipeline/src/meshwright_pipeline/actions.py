"""What a schedule is made of, and the check that it can run.

A schedule says, for every rank of the axis, in which order it runs the forwards and backwards of its stages. What is sent
and received follows from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from meshwright_dtensor.errors import UsageError

Kind = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class Action:
    """One forward ("F") or backward ("B") of one microbatch on one stage."""

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
        ends: when each action ends, where a forward takes 1, a backward 2 and messages nothing.
    """

    ranks: tuple[tuple[Action, ...], ...]
    alive: tuple[int, ...]
    ends: dict[Action, float]

    @property
    def length(self) -> float:
        """When the last action ends."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The part of a step in which the average rank waits."""
        busy = sum(_DURATION[action.kind] for actions in self.ranks for action in actions)
        return 1.0 - busy / (self.length * len(self.ranks))


_DURATION = {"F": 1.0, "B": 2.0}
BUSY = sum(_DURATION.values())
"""How long the forward and the backward of one microbatch take on a stage."""


def timetable(schedule: Schedule, shape: Shape) -> Timetable:
    """Run a schedule in thought.

    Raises:
        UsageError: the schedule refuses the pipeline, or its actions are not complete or wait for each other.
    """
    refused = schedule.refusal(shape)
    if refused is not None:
        raise UsageError(f"schedule {schedule.name!r}: {refused}")
    ranks = tuple(tuple(schedule.actions(rank, shape)) for rank in range(shape.ranks))
    _check_complete(schedule, shape, ranks)
    return Timetable(ranks, *_simulate(schedule, shape, ranks))


def _check_complete(schedule: Schedule, shape: Shape, ranks: Sequence[Sequence[Action]]) -> None:
    where = f"schedule {schedule.name!r}"
    seen: dict[Action, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if not (0 <= action.stage < shape.stages and 0 <= action.microbatch < shape.microbatches):
                raise UsageError(
                    f"{where}: rank {rank} has {action}, but there are stages 0..{shape.stages - 1} and microbatches "
                    f"0..{shape.microbatches - 1}"
                )
            if action in seen:
                raise UsageError(f"{where}: {action} comes twice, on rank {seen[action]} and on rank {rank}")
            if schedule.owner(action.stage, shape) != rank:
                owner = schedule.owner(action.stage, shape)
                raise UsageError(
                    f"{where}: rank {rank} has {action}, a stage that is on rank {owner}; give it to that rank"
                )
            seen[action] = rank
    for stage in range(shape.stages):
        for microbatch in range(shape.microbatches):
            for kind in ("F", "B"):
                if Action(kind, stage, microbatch) not in seen:  # type: ignore[arg-type]
                    raise UsageError(
                        f"{where}: {Action(kind, stage, microbatch)} is missing; every forward needs its backward"  # type: ignore[arg-type]
                    )


def _needs(action: Action, shape: Shape) -> list[Action]:
    """What has to be done before an action can start."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    later = [Action("B", stage + 1, microbatch)] if stage + 1 < shape.stages else []
    return [Action("F", stage, microbatch), *later]


def _simulate(
    schedule: Schedule, shape: Shape, ranks: Sequence[Sequence[Action]]
) -> tuple[tuple[int, ...], dict[Action, float]]:
    ends: dict[Action, float] = {}
    clock = [0.0] * shape.ranks
    place = [0] * shape.ranks
    held: list[int] = [0] * shape.ranks
    most = [0] * shape.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                needed = _needs(action, shape)
                if not all(one in ends for one in needed):
                    break
                start = max([clock[rank], *(ends[one] for one in needed)])
                clock[rank] = ends[action] = start + _DURATION[action.kind]
                held[rank] += 1 if action.kind == "F" else -1
                most[rank] = max(most[rank], held[rank])
                place[rank] += 1
                moved = True
    stuck = [(rank, actions[place[rank]]) for rank, actions in enumerate(ranks) if place[rank] < len(actions)]
    if stuck:
        missing = {
            rank: next(one for one in _needs(action, shape) if one not in ends) for rank, action in stuck
        }
        # the cause, where there is one: a rank that waits for what it does itself later
        itself = [entry for entry in stuck if schedule.owner(missing[entry[0]].stage, shape) == entry[0]]
        rank, action = (itself or stuck)[0]
        others = "; ".join(f"rank {r} at {a}" for r, a in stuck[:4] if r != rank)
        raise UsageError(
            f"schedule {schedule.name!r} would hang: rank {rank} waits at {action} for {missing[rank]}, which never comes"
            f"{f' ({others})' if others else ''}; bring that one forward"
        )
    return tuple(most), ends
