"""What a planner expects of one step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright_dtensor.plan.field_types import (
    AxisProduct,
    Count,
    Frozen,
    FrozenDict,
    Model,
    Seconds,
    Share,
    Text,
)


class StageTime(Model):
    """Seconds that ONE microbatch computes on one stage of a pipeline, on one rank; communication is not in it.

    What running in stages takes (adding gradients up, the host) is, but for what comes once a step.  Without a pipeline the
    whole model is the stage, and the batch the microbatch. What runs again counts as backward.
    """

    forward_seconds: Seconds
    backward_seconds: Seconds


class StepSplit(Model):
    """Where the seconds of a predicted step go, on one rank.

    optimizer_seconds: the optimizer's step.
    bubble_seconds: a pipeline's rank waiting for others.
    exposed: mesh axis (or several, joined by "+") -> seconds of communication that add to the step.
    hidden: the same -> seconds of communication that pass while the rank computes.
    stages: per stage of a pipeline, what one microbatch takes; one without a pipeline.
    between_seconds: what the last stage does once, behind all forwards and before all backwards, where the loss does not add up
        over microbatches.
    """

    optimizer_seconds: Seconds = 0.0
    bubble_seconds: Seconds = 0.0
    exposed: Annotated[dict[AxisProduct, Seconds], Frozen] = Field(default_factory=FrozenDict)
    hidden: Annotated[dict[AxisProduct, Seconds], Frozen] = Field(default_factory=FrozenDict)
    stages: tuple[StageTime, ...] = ()
    between_seconds: Seconds = 0.0


class Prediction(Model):
    """What the planner expects of one step.

    step_seconds is what a step takes; compute_seconds and communication_seconds (what is exposed of it) are its parts, and
    split says more of them.
    memory_bytes: bytes per rank by part ("parameters", "gradients", "optimizer", "activations", ...), and "total" for
    the peak, where that is not the sum of the parts.
    limit_bytes: what a rank could have at the time of planning: the limit that was asked for, else what its device has.
    gap: by what part of the step a plan that was not evaluated may be faster, proven; 0 where none can be, None where nothing
        is known.
    proof: how that is known, in a line.
    """

    step_seconds: Seconds
    compute_seconds: Seconds = 0.0
    communication_seconds: Seconds = 0.0
    split: StepSplit | None = None
    memory_bytes: Annotated[dict[Text, Count], Frozen] = Field(default_factory=FrozenDict)
    limit_bytes: Count | None = None
    gap: Share | None = None
    proof: Text | None = None

    @property
    def total_bytes(self) -> int:
        """Peak bytes per rank: "total" where it is given, else the sum of the parts."""
        parts = self.memory_bytes
        return parts["total"] if "total" in parts else sum(parts.values())
