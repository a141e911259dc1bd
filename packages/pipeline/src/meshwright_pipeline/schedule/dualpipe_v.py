"""Forwards of one half of a V paired with backwards of the other; backwards are split where a bubble would be.

Source: DeepSeek-AI, "DualPipe", 2025, the cut-in-half form DualPipeV (github.com/deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Kind, Shape
from meshwright_pipeline.schedule.zbv import VShaped


class DualPipeV(VShaped):
    """The forward and the backward of a pair run one after the other; every rank holds 2 x ranks + 1 halves at most."""

    name: ClassVar[str] = "dualpipev"

    def refusal(self, shape: Shape) -> str | None:
        """Two stages a rank, and microbatches enough to fill both ways."""
        if super().refusal(shape) is None and shape.microbatches < 2 * shape.ranks:
            return (
                f"it takes at least {2 * shape.ranks} microbatches, two for each rank, and the plan has {shape.microbatches}; "
                "change pipeline.microbatches"
            )
        return super().refusal(shape)

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule. The steps are numbered as in the source."""
        behind, down, up = shape.ranks - 1 - rank, rank, shape.stages - 1 - rank
        found = _Writer()
        for _ in range(2 * behind):  # 1
            found.add("F", down)
        for _ in range(rank + 1):  # 2
            found.add("F", down)
            found.add("F", up)
        for _ in range(behind):  # 3
            found.add("I", up)
            found.weights()
            found.add("F", up)
        for _ in range(shape.microbatches - 2 * shape.ranks + rank + 1):  # 4
            found.add("F", down)
            found.add("B", up)
            found.add("F", up)
            found.add("B", down)
        for _ in range(behind):  # 5
            found.add("B", up)
            found.add("F", up)
            found.add("B", down)
        split: Kind = "B"
        for turn in range(rank + 1):  # 6, the second half split
            if turn == (rank + 1) // 2 and rank % 2 == 1:
                split = "I"
            found.add(split, up)
            if turn == (rank + 1) // 2 and rank % 2 == 0:
                split = "I"
            found.add(split, down)
        for _ in range(behind):  # 7
            found.weights()
            found.add(split, down)
        for _ in range(rank + 1):  # 8
            found.weights()
        return found.actions


class _Writer:
    """Writes actions down in turn; weights of split backwards wait in a line."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[str, int], int] = {}
        self._line: deque[Action] = deque()

    def add(self, kind: Kind, stage: int) -> None:
        """The next microbatch forwards, or backwards whether split or not."""
        key = ("F" if kind == "F" else "B", stage)
        microbatch = self._next.get(key, 0)
        self._next[key] = microbatch + 1
        self.actions.append(Action(kind, stage, microbatch))
        if kind == "I":
            self._line.append(Action("W", stage, microbatch))

    def weights(self) -> None:
        """The weights that have waited longest."""
        if self._line:
            self.actions.append(self._line.popleft())
