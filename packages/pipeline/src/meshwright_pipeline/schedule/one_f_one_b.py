"""One forward, one backward.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019 (with a flush each step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape


class OneForwardOneBackward(Schedule):
    """After a warm-up, forwards and backwards take turns: stage s of n holds at most n - s microbatches."""

    name: ClassVar[str] = "1f1b"

    def refusal(self, shape: Shape) -> str | None:
        """One stage per rank."""
        if shape.each != 1:
            return f"it runs one stage per rank, and the plan has {shape.each}; use interleaved, or as many stages as ranks"
        return None

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        count = shape.microbatches
        warmup = min(count, shape.ranks - 1 - rank)
        actions = [Action("F", rank, m) for m in range(warmup)]
        for m in range(count):
            if m + warmup < count:
                actions.append(Action("F", rank, m + warmup))
            actions.append(Action("B", rank, m))
        return actions
