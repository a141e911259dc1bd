"""Two stages per rank along a V, with split backwards: the memory of 1F1B and hardly a bubble.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (ZB-V in "Zero Bubble Pipeline Parallelism", 2023, 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Kind, Schedule, Shape


class VShaped(Schedule):
    """Stages go from the first rank to the last and back: the first and the last stage are on rank 0."""

    stages_each: ClassVar[int] = 2

    def refusal(self, shape: Shape) -> str | None:
        """Two stages per rank."""
        if shape.each != 2 or shape.stages != 2 * shape.ranks:
            return f"it runs two stages per rank, and the plan has {shape.stages} on {shape.ranks} ranks"
        return None

    def owner(self, stage: int, shape: Shape) -> int:
        return stage if stage < shape.ranks else shape.stages - 1 - stage


class ActionWriter:
    """Writes the actions of a rank; each kind takes the microbatches of a stage in turn."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts = Counter[tuple[Kind, int]]()

    def add(self, stage: int, *kinds: Kind) -> None:
        """Append the next microbatch of each of these kinds."""
        for kind in kinds:
            self.actions.append(Action(kind, stage, self.count(kind, stage)))
            self._counts[kind, stage] += 1

    def count(self, kind: Kind, stage: int) -> int:
        """How many actions of a kind a stage has."""
        return self._counts[kind, stage]


class ZBV(VShaped):
    """Every rank holds at most 2 x ranks microbatches of its two half-size stages: as much as the first rank of 1F1B."""

    name: ClassVar[str] = "zbv"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        ranks, down, up = shape.ranks, rank, shape.stages - 1 - rank
        # with fewer microbatches, those beyond are dropped at the end
        total = max(2 * ranks - 1, shape.microbatches)
        writer = ActionWriter()
        for _ in range(2 * (ranks - rank) - 1):
            writer.add(down, "F")
        for _ in range(rank):
            writer.add(up, "F")
            writer.add(down, "F")
        for _ in range(ranks - rank):
            writer.add(up, "F", "I", "W")
        while writer.count("F", up) < writer.count("F", down) or writer.count("F", down) < total:
            if writer.count("F", down) < total:
                writer.add(down, "F")
            writer.add(down, "I", "W")
            writer.add(up, "F", "I", "W")
        for _ in range(rank):
            writer.add(down, "I")
            writer.add(up, "I")
        for _ in range(ranks - rank):
            writer.add(down, "I", "W")
        for stage in (up, down):
            while writer.count("W", stage) < writer.count("I", stage):
                writer.add(stage, "W")
        return [action for action in writer.actions if action.microbatch < shape.microbatches]
