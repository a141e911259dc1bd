"""The predicted step of a plan: time and memory."""

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
    """Compute seconds of ONE microbatch on one stage of a pipeline, on one rank, without communication.

    The overhead of stages (accumulating gradients, the host) is included, except for what comes once a step. Without a
    pipeline the model is the stage and the batch the microbatch. Recomputation counts as backward.
    """

    forward_seconds: Seconds
    backward_seconds: Seconds


class StepSplit(Model):
    """The parts of a predicted step on one rank.

    optimizer_seconds: the optimizer step.
    bubble_seconds: waiting for other ranks of the pipeline.
    exposed: mesh axis (or several, joined by "+") -> seconds of communication that add to the step.
    hidden: the same -> seconds of communication that overlap with compute.
    stages: per pipeline stage, the time of one microbatch; one entry without a pipeline.
    between_seconds: what the last stage computes once, after all forwards and before all backwards, if the loss is not
        additive over microbatches.
    """

    optimizer_seconds: Seconds = 0.0
    bubble_seconds: Seconds = 0.0
    exposed: Annotated[dict[AxisProduct, Seconds], Frozen] = Field(default_factory=FrozenDict)
    hidden: Annotated[dict[AxisProduct, Seconds], Frozen] = Field(default_factory=FrozenDict)
    stages: tuple[StageTime, ...] = ()
    between_seconds: Seconds = 0.0


class Prediction(Model):
    """The predicted step.

    step_seconds: the whole step; compute_seconds and communication_seconds (exposed) are its parts, split has the details.
    memory_bytes: bytes per rank by part ("parameters", "gradients", "optimizer", "activations", ...), and "total" for the
        peak if it is not the sum of the parts.
    limit_bytes: memory limit of a rank when it was planned: the requested limit, else the memory of its device.
    gap: proven bound on the fraction of the step by which a plan that was not evaluated may be faster; 0 if none can be
        faster, None if unknown.
    proof: how the gap was proven, in one line.
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
        """Peak bytes per rank: "total" if given, else the sum of the parts."""
        parts = self.memory_bytes
        return parts["total"] if "total" in parts else sum(parts.values())
