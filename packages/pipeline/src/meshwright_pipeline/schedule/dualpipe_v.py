"""DualPipeV: forwards of one half of a V paired with backwards of the other, some backwards split to fill the bubble.

Source: DeepSeek-AI, "DualPipe", 2025, the cut-in-half form DualPipeV (github.com/deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Kind, Shape
from meshwright_pipeline.schedule.zbv import ActionWriter, VShaped


class DualPipeV(VShaped):
    """The forward and the backward of a pair run one after the other; a rank holds at most 2 x ranks + 1 microbatches."""

    name: ClassVar[str] = "dualpipev"

    def refusal(self, shape: Shape) -> str | None:
        """Two stages per rank, and enough microbatches to fill both directions."""
        if super().refusal(shape) is None and shape.microbatches < 2 * shape.ranks:
            return (
                f"it takes at least {2 * shape.ranks} microbatches, two for each rank, and the plan has {shape.microbatches}; "
                "change pipeline.microbatches"
            )
        return super().refusal(shape)

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule. The steps are numbered as in the source."""
        later_ranks, down, up = shape.ranks - 1 - rank, rank, shape.stages - 1 - rank
        writer = _Writer()
        # 1
        for _ in range(2 * later_ranks):
            writer.add(down, "F")
        # 2
        for _ in range(rank + 1):
            writer.add(down, "F")
            writer.add(up, "F")
        # 3
        for _ in range(later_ranks):
            writer.add(up, "I")
            writer.add_weights()
            writer.add(up, "F")
        # 4
        for _ in range(shape.microbatches - 2 * shape.ranks + rank + 1):
            writer.add(down, "F")
            writer.add(up, "B", "F")
            writer.add(down, "B")
        # 5
        for _ in range(later_ranks):
            writer.add(up, "B", "F")
            writer.add(down, "B")
        backward: Kind = "B"
        # 6, the second half split
        for turn in range(rank + 1):
            if turn == (rank + 1) // 2 and rank % 2 == 1:
                backward = "I"
            writer.add(up, backward)
            if turn == (rank + 1) // 2 and rank % 2 == 0:
                backward = "I"
            writer.add(down, backward)
        # 7
        for _ in range(later_ranks):
            writer.add_weights()
            writer.add(down, backward)
        # 8
        for _ in range(rank + 1):
            writer.add_weights()
        return writer.actions


class _Writer(ActionWriter):
    """Whole and split backwards of a stage take turns in one sequence; weight gradients of split ones wait in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred: deque[Action] = deque()

    def count(self, kind: Kind, stage: int) -> int:
        if kind == "F":
            return super().count(kind, stage)
        return super().count("B", stage) + super().count("I", stage)

    def add(self, stage: int, *kinds: Kind) -> None:
        super().add(stage, *kinds)
        self._deferred.extend(a._replace(kind="W") for a in self.actions[-len(kinds) :] if a.kind == "I")

    def add_weights(self) -> None:
        """Append the weight gradients that have waited longest."""
        if self._deferred:
            self.actions.append(self._deferred.popleft())
