"""All forwards, then all backwards, over several stages per rank.

Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape


class LoopedBFS(Schedule):
    """All microbatches pass a stage before the next stage starts; backwards in the reverse order."""

    name: ClassVar[str] = "looped-bfs"
    stages_each: ClassVar[int] = 2
    most_each: ClassVar[int] = 4

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        forwards = [
            Action("F", stage, m) for stage in self.own(rank, shape) for m in range(shape.microbatches)
        ]
        return [*forwards, *(Action("B", action.stage, action.microbatch) for action in reversed(forwards))]
