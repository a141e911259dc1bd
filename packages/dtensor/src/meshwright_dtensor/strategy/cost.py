"""What a strategy answers when the planner asks for the cost of a degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright_dtensor.cluster.links import CollectiveKind

Phase = Literal["forward", "backward"]

TIED = "gradients that several ranks hold"
"""The reason of the messages in which pipeline stages sum the gradients of tied parameters."""


@dataclass(frozen=True)
class CollectiveUse:
    """`count` collectives of `nbytes` each (bytes of the full tensor) that one step runs on the strategy's axis."""

    kind: CollectiveKind
    nbytes: int
    count: int = 1
    phase: Phase = "backward"
    why: str = ""
    module: str = ""


@dataclass(frozen=True)
class Peak:
    """The moment of most memory on a rank outside of the optimizer step.

    Args:
        gradients: fraction of its gradients that exist then.
        transient_bytes: bytes alive then in addition to parameters, gradients, optimizer states and saved tensors.
        loss_microbatches: microbatches whose losses are computed together.
    """

    gradients: float
    transient_bytes: float
    loss_microbatches: int = 1


@dataclass(frozen=True)
class Stall:
    """Communication inside of the forward and the backward of a microbatch.

    Args:
        exposed, overlapped: seconds in one microbatch.
        microbatches: in how many microbatches it happens: 1 is the first one only.
    """

    exposed: float = 0.0
    overlapped: float = 0.0
    microbatches: int = 1


@dataclass(frozen=True)
class StrategyCost:
    """What a degree of a strategy costs per step, in addition to the placements that the planner searches.

    Args:
        exposed_seconds: communication time added to the step.
        overlapped_seconds: communication time that overlaps with compute (not added to the step).
        slack_seconds: of the seconds by which collectives slow this compute (StepContext.interference), those that it would
            otherwise wait for communication.
        parameters, gradients, optimizer, activations: factors on one rank's memory of that kind (1.0: unchanged).
        collectives: the communication.
        fields: fields of the plan that describe the option that was costed, such as {"context": {...}}.
        compute: factor on one rank's compute time, waiting included. Collectives of the model's operations are no compute.
        idle: the part of that factor that is waiting.
        stages: for a strategy that cuts the model into stages, per stage the compute time of one microbatch as a fraction of the
            whole model's, overhead of the pipeline included.
        forwards: per stage, the fraction of its time that is the forward pass; () for a third of each.
        held_parameters: names of the parameters on the fullest rank, None for all.
        peak: the fullest rank's moment of most memory; None if it is that of the whole model.
        recompute: module -> recompute policy, answers `PipelineQuery.bytes_to_free`; empty if no choice frees enough.
        notes: remarks for the user on the option that was costed, a line each; they are written in the plan.
        persistent_gradients: fraction of one rank's gradients whose memory is kept from step to step.
        bucket_bytes: bytes of a gradient bucket, which is allocated with its first gradient; 0 without buckets.
        stall: the part of the communication that is inside of forwards and backwards, so that other stages wait for it.
        full_batch_share: compute time of what the last stage runs once between all forwards and all backwards, as a fraction of
            the whole model's for one microbatch; not part of `stages`.
        straggler_delay: seconds of waiting per second by which a microbatch takes longer on every rank (gradients of weights
            not counted): if only the first microbatch does, and if all do.
        input_gradient_share: fraction of a backward pass that runs before its weight gradients are postponed.
        communication: factor on one rank's time in collectives of the model's operations (ModuleWork.collectives). None: that on
            its compute, without waiting (`compute` less `idle`).
        stage_communication: per stage, the time of those in the forward and in the backward of one microbatch, as fractions of
            the whole model's.
        full_batch_communication: the same of what `full_batch_share` is about.
    """

    exposed_seconds: float = 0.0
    overlapped_seconds: float = 0.0
    slack_seconds: float = 0.0
    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    activations: float = 1.0
    collectives: tuple[CollectiveUse, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    compute: float = 1.0
    idle: float = 0.0
    stages: tuple[float, ...] = ()
    forwards: tuple[float, ...] = ()
    held_parameters: frozenset[str] | None = None
    peak: Peak | None = None
    recompute: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    persistent_gradients: float = 0.0
    bucket_bytes: int = 0
    stall: Stall = Stall()
    straggler_delay: tuple[float, float] = (0.0, 0.0)
    input_gradient_share: float = 1.0
    full_batch_share: float = 0.0
    communication: float | None = None
    stage_communication: tuple[tuple[float, float], ...] = ()
    full_batch_communication: float = 0.0
