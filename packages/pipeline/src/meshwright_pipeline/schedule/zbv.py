"""Two stages a rank along a V, split backwards: as little memory as 1f1b, and hardly a bubble.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (ZB-V in "Zero Bubble Pipeline Parallelism", 2023, 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Kind, Schedule, Shape


class VShaped(Schedule):
    """The first and the last stage are on rank 0: stages go down the ranks and come back."""

    stages_each: ClassVar[int] = 2

    def refusal(self, shape: Shape) -> str | None:
        """Two stages a rank."""
        if shape.each != 2 or shape.stages != 2 * shape.ranks:
            return f"it runs two stages a rank, and the plan has {shape.stages} on {shape.ranks} ranks"
        return None

    def owner(self, stage: int, shape: Shape) -> int:
        """See Schedule."""
        return stage if stage < shape.ranks else shape.stages - 1 - stage


class Counted:
    """Writes actions down; each kind takes the microbatches of a stage in turn."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[Kind, int], int] = {}

    def add(self, stage: int, *kinds: Kind) -> None:
        """The next microbatch of each of these kinds."""
        for kind in kinds:
            microbatch = self.count(kind, stage)
            self.actions.append(Action(kind, stage, microbatch))
            self._next[kind, stage] = microbatch + 1

    def count(self, kind: Kind, stage: int) -> int:
        """How many there are already."""
        return self._next.get((kind, stage), 0)


class ZBV(VShaped):
    """Every rank holds 2 x ranks halves at most, which is what the first rank of 1f1b holds."""

    name: ClassVar[str] = "zbv"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        ranks, down, up = shape.ranks, rank, shape.stages - 1 - rank
        total = max(2 * ranks - 1, shape.microbatches)  # fewer leave gaps
        found = Counted()
        for _ in range(2 * (ranks - rank) - 1):
            found.add(down, "F")
        for _ in range(rank):
            found.add(up, "F")
            found.add(down, "F")
        for _ in range(ranks - rank):
            found.add(up, "F", "I", "W")
        while found.count("F", up) < found.count("F", down) or found.count("F", down) < total:
            if found.count("F", down) < total:
                found.add(down, "F")
            found.add(down, "I", "W")
            found.add(up, "F", "I", "W")
        for _ in range(rank):
            found.add(down, "I")
            found.add(up, "I")
        for _ in range(ranks - rank):
            found.add(down, "I", "W")
        for stage in (up, down):
            while found.count("W", stage) < found.count("I", stage):
                found.add(stage, "W")
        return [action for action in found.actions if action.microbatch < shape.microbatches]
