"""The order in which each rank of a pipeline runs its forwards and backwards, and the messages between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Action, ForwardsFirst, Schedule, Shape

PARTS: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5})
"""Kind of action -> its part of a whole forward or backward pass."""

PARTS_RECOMPUTED: Mapping[str, float] = MappingProxyType({**PARTS, "I": 1.0, "W": 0.0})
"""The same with recomputation: the first half of a backward then does all of it."""


@dataclass(frozen=True)
class Step:
    """One action of a rank.

    Args:
        kind: "F", "B", "I" or "W".
        stage, microbatch: see Action.
        part: its part of a whole forward or backward pass of the stage.
        needs: (kind, stage, microbatch) of the message that it waits for.
        gives: the same of the message that it sends.
        local: that message stays on the rank.
    """

    kind: str
    stage: int
    microbatch: int
    part: float = 1.0
    needs: tuple[str, int, int] | None = None
    gives: tuple[str, int, int] | None = None
    local: bool = False

    @property
    def needs_what(self) -> str:
        """The message that it waits for, in words."""
        return f"{'activations' if self.kind == 'F' else 'gradients'} for stage {self.stage}"

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


def steps_of(plan: ParallelPlan, host: PluginHost | None = None) -> list[list[Step]]:
    """The actions of each rank along pp in one step; without a pipeline, one forward and one backward.

    Raises:
        PluginError: no installed schedule has the plan's name.
        UsageError: the schedule is no Schedule, or has actions of an unknown kind.
    """
    rule = plan.pipeline
    if rule is None:
        return [[Step("F", 0, 0), Step("B", 0, 0)]]
    schedule = schedule_named(rule.schedule, host)
    if rule.loss == "batch":
        schedule = ForwardsFirst(schedule)
    shape = Shape(plan.degree("pp"), len(rule.stages), rule.microbatches)
    parts = PARTS_RECOMPUTED if plan.recompute else PARTS
    return [
        [_step(action, schedule, shape, parts) for action in schedule.actions(rank, shape)]
        for rank in range(shape.ranks)
    ]


def _step(action: Action, schedule: Schedule, shape: Shape, parts: Mapping[str, float]) -> Step:
    kind, stage, microbatch = action
    if kind not in PARTS:
        raise UsageError(
            f"schedule {schedule.name!r} has actions of kind {kind!r}; the kinds of actions are {', '.join(PARTS)}"
        )
    message, after = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
    receives, sends = (kind != "W" and 0 <= s < shape.stages for s in (2 * stage - after, after))
    return Step(
        kind,
        stage,
        microbatch,
        parts[kind],
        needs=(message, stage, microbatch) if receives else None,
        gives=(message, after, microbatch) if sends else None,
        local=sends and schedule.owner(after, shape) == schedule.owner(stage, shape),
    )
