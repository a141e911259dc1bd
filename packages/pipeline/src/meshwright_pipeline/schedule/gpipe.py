"""All forwards, then all backwards: GPipe, and looped BFS over several stages per rank.

Sources: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019;
Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape


class GPipe(Schedule):
    """Every stage holds the activations of all microbatches. With several stages per rank it runs breadth first."""

    name: ClassVar[str] = "gpipe"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        stages, microbatches = self.own(rank, shape), range(shape.microbatches)
        forwards = [Action("F", stage, m) for stage in stages for m in microbatches]
        return [*forwards, *(Action("B", stage, m) for stage in reversed(stages) for m in microbatches)]


class LoopedBFS(Schedule):
    """All microbatches pass a stage before the next stage starts; backwards in the reverse order."""

    name: ClassVar[str] = "looped-bfs"
    stages_each: ClassVar[int] = 2
    most_each: ClassVar[int] = 4

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        stages, microbatches = self.own(rank, shape), range(shape.microbatches)
        forwards = [Action("F", stage, m) for stage in stages for m in microbatches]
        return [*forwards, *(Action("B", action.stage, action.microbatch) for action in reversed(forwards))]
