"""The interface of a pipeline schedule.

For every rank of the axis, a schedule gives the order in which the rank runs the forwards and
backwards of its stages. The messages between stages follow from that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
NAMES: Mapping[str, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "backward to weights"}
)


class Action(NamedTuple):
    """One forward ("F") or backward ("B") of one microbatch on one stage.

    A backward may be split into two halves: gradients of the stage's inputs ("I"), which the previous
    stage waits for, and gradients of its weights ("W"), which no other stage needs.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a pipeline: ranks along the axis, stages in total, microbatches per step."""

    ranks: int
    stages: int
    microbatches: int

    @property
    def each(self) -> int:
        """Stages per rank."""
        return self.stages // self.ranks


class Schedule(ABC):
    """An order of forwards and backwards. Stateless; registered by a ScheduleSpec under `name`.

    Attributes:
        stages_each: stages per rank that a planner uses.
        most_each: the largest number of stages per rank that a planner tries where `stages_each` does
            not divide the layers of a model equally.
    """

    name: ClassVar[str]
    stages_each: ClassVar[int] = 1
    most_each: ClassVar[int] = 0

    def refusal(self, shape: Shape) -> str | None:
        """Why the schedule cannot run this pipeline; None where it can."""
        return None

    def owner(self, stage: int, shape: Shape) -> int:
        """The rank that holds a stage: round-robin by default."""
        return stage % shape.ranks

    def own(self, rank: int, shape: Shape) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage in range(shape.stages) if self.owner(stage, shape) == rank]

    @abstractmethod
    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """The actions of `rank` in one step, in order."""


@dataclass(frozen=True)
class ForwardsFirst(Schedule):
    """A schedule as it runs when the loss needs the whole batch: all forwards, then all backwards."""

    inner: Schedule

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def refusal(self, shape: Shape) -> str | None:
        return self.inner.refusal(shape)

    def owner(self, stage: int, shape: Shape) -> int:
        return self.inner.owner(stage, shape)

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        return sorted(self.inner.actions(rank, shape), key=lambda action: action.kind != "F")
