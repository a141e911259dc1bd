"""What a strategy answers when it is asked what a degree costs; `strategy` has these names too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright_dtensor.cluster.links import CollectiveKind

Phase = Literal["forward", "backward"]

TIED = "gradients that several ranks hold"
"""Why of the messages in which ranks that hold different modules sum gradients of what they both have."""


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
    """The moment at which a rank holds most, but for the optimizer's step.

    Args:
        gradients: the part of its gradients that is there.
        beside: bytes of what is alive beside parameters, gradients, states and what autograd keeps.
        at_once: microbatches whose losses are computed as one.
    """

    gradients: float
    transient_bytes: float
    at_once: int = 1


@dataclass(frozen=True)
class Stall:
    """Communication inside of the forward and the backward of a microbatch.

    Args:
        exposed, overlapped: its seconds, of one.
        microbatches: in how many of them it is: the first, or all.
    """

    exposed: float = 0.0
    overlapped: float = 0.0
    microbatches: int = 1


@dataclass(frozen=True)
class StrategyCost:
    """What a degree of a strategy costs per step, beside what the searched placements cost.

    Args:
        exposed_seconds: time added to the step.
        overlapped_seconds: communication time hidden behind compute (not added to the step).
        parameters, gradients, optimizer, activations: factors on one rank's memory of that kind (1.0: unchanged).
        collectives: what is communicated.
        fields: fields of the plan that say which way was costed, such as {"context": {...}}.
        compute: factor on the time that one rank computes, waiting for others included.
        idle: the part of that factor that is waiting.
        stages: per stage, what a microbatch takes on it as part of the time that the whole model computes, with what running it
            in stages takes; for strategies that divide a model.
        forwards: per stage, the part of its time that is the forward pass; () for a third of each.
        holds: names of the parameters that the fullest rank holds, None for all.
        peak: when the fullest rank holds most; None where that is when the whole model would.
        recompute: module -> policy by which it runs again, for PipelineQuery.bytes_to_free; empty where nothing relieves enough.
        notes: what users should know of what was costed, a line each; they stand in the plan.
        lasting: the part of one rank's gradients whose memory stays from step to step.
        bucket: bytes of gradients that are there as soon as the first of them is; 0 where each comes by itself.
        stall: what of it lies inside of forwards and backwards: where ranks hold different modules, the others wait for it.
        between: what the last stage does once between all forwards and all backwards, as part of the time that the whole model
            computes; `stages` are without it.
        late: seconds that ranks wait for each by which every one of them takes longer with a microbatch, gradients of weights
            aside: with the first microbatch alone, and with all of them.
        early: the part of a backward pass that is done before its gradients of weights are left for later.
        operations: of what the rank with most work computes, the part that is the model's own operations.
    """

    exposed_seconds: float = 0.0
    overlapped_seconds: float = 0.0
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
    holds: frozenset[str] | None = None
    peak: Peak | None = None
    recompute: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lasting: float = 0.0
    bucket: int = 0
    stall: Stall = Stall()
    late: tuple[float, float] = (0.0, 0.0)
    early: float = 1.0
    between: float = 0.0
    operations: float = 1.0
