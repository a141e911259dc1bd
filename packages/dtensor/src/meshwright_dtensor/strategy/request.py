"""What the planner tells a strategy when it asks for degrees, options and costs: `SearchRequest` and its parts.

All sizes and times are those of ONE rank after the other axes are applied, for one step, unless a field says otherwise.
Bytes are bytes, times are seconds. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AttentionUse:
    """`count` equal attention calls of one forward pass.

    Args:
        query_bytes, key_value_bytes, output_bytes: sizes of its tensors; keys and values together.
        heads, key_heads: number of each (1 if there is no such dim).
        causal: a query sees keys up to its own position.
        seconds: predicted time of one call, forward and backward, over this rank's part of the sequence alone.
    """

    query_bytes: int
    key_value_bytes: int
    output_bytes: int
    heads: int
    key_heads: int
    causal: bool
    seconds: float = 0.0
    count: int = 1


@dataclass(frozen=True)
class ParameterSize:
    """One parameter on one rank, whole on the axes that gather.

    Args:
        shape: local shape.
        sharded_dims: dims that some axis shards.
        itemsize: bytes of a stored element, and of an element of the compute copy.
        trainable: it gets a gradient.
    """

    shape: tuple[int, ...]
    sharded_dims: tuple[int, ...]
    itemsize: tuple[int, int]
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModuleWork:
    """Consecutive operations of one module in one microbatch, forward and backward, on one rank.

    Args:
        module: its full name; "" for the model itself.
        seconds: predicted time, with the collectives that the operations need.
        saved_bytes: bytes that autograd saves for these operations alone.
        parameters: names of the parameters that they read, the first name of tied ones.
        inputs: (id of a value, module that made it, bytes) of the tensors of any dtype that other modules made before; not the
            inputs of the model.
        shared: (id of a tensor, bytes) of what autograd saves once for these operations and other modules.
        transient_bytes: peak bytes alive while they run, in addition to saved tensors: gradients of values, and of the
            parameter that gets one.
        deferred_bytes: bytes of the gradients that are alive between the two halves of a split backward.
        forward: the fraction of `seconds` that is the forward pass.
        outputs: (id of a value, ids of the `inputs` that it depends on, whether it gets a gradient) of the tensors made here
            that other modules read.
        collectives: of `seconds`, those of collectives in the forward and in the backward pass. Weight gradients need none.
    """

    module: str
    seconds: float = 0.0
    saved_bytes: float = 0.0
    parameters: frozenset[str] = frozenset()
    inputs: frozenset[tuple[int, str, int]] = frozenset()
    shared: frozenset[tuple[int, float]] = frozenset()
    transient_bytes: float = 0.0
    deferred_bytes: float = 0.0
    forward: float = 1 / 3
    outputs: tuple[tuple[int, frozenset[int], bool], ...] = ()
    collectives: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Survey:
    """What a strategy found in a model before the search.

    Args:
        parameters: names of the parameters that it shards on its own axis.
        modules: names of the modules whose input sizes it asks for (`ModelSizes.module_inputs`).
        notes: remarks for the user; they are written in the plan.
        details: for the strategy itself.
    """

    parameters: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    details: Any = None


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model on one rank.

    Args:
        parameter_bytes: bytes of parameters.
        gradient_bytes: bytes of gradients (of parameters that require one).
        activation_bytes: bytes that autograd saves for the backward pass.
        state_bytes: bytes of parameters, gradients and optimizer states of the whole model, before it is cut into stages.
        flops: floating-point operations of matrix products and attention, forward and backward, recomputation included.
        layers: number of repeated blocks (1 when nothing repeats).
        attention: the attention calls.
        units: parameters by unit (see `model.blocks.parameter_units`), those outside of blocks last. For the strategy that sums
            gradients: the parameters whose gradients it sums unsharded, as all axes leave them to one rank.
        surveyed_bytes, surveyed_gradient_bytes: bytes of the parameters that the strategy's own survey names, and of their
            gradients; the totals above include them.
        module_inputs: module of the survey -> (shape, bytes) of each floating-point input tensor.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    state_bytes: int = 0
    flops: float = 0.0
    layers: int = 1
    attention: tuple[AttentionUse, ...] = ()
    units: tuple[tuple[ParameterSize, ...], ...] = ()
    surveyed_bytes: int = 0
    surveyed_gradient_bytes: int = 0
    module_inputs: Mapping[str, tuple[tuple[tuple[int, ...], int], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepContext:
    """One training step of the configuration that is costed.

    Args:
        degrees: degree of each axis; empty before they are decided.
        microbatches: forward and backward passes per step, before gradients are reduced.
        forward_seconds: predicted forward time of the step that communication can overlap with.
        backward_seconds: the same of the backward pass.
        zero_stage: ZeRO stage (see `plan.ZeroRule`), 0 if undecided.
        stages: pipeline stages on one rank, 0 without a pipeline. With a pipeline, gradients are reduced after the last
            backward of all ranks, so no backward is left to overlap with.
        recompute: modules are recomputed in the backward pass, so it cannot be split into halves.
        accelerated: ranks compute on accelerators, not on the cores of the host.
        call_seconds: host time of launching one operation that compute does not hide; 0 if the host runs before the device.
        byte_seconds: time to move one byte between memory and cores.
        interference: fraction of a rank's compute that a concurrent collective takes.
    """

    degrees: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 1
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    zero_stage: int = 0
    stages: int = 0
    recompute: bool = False
    accelerated: bool = True
    call_seconds: float = 0.0
    byte_seconds: float = 0.0
    interference: float = 0.0


@dataclass(frozen=True)
class PipelineQuery:
    """What only a strategy with `divides` (pipeline parallelism) needs: the model as modules.

    Args:
        work: the work of one microbatch by module, in execution order. The last entry is the model itself (""), which reads the
            tensors that the model returns.
        recompute_variants: policy of `plan.RecomputeRule` -> `work` with everything recomputed that this policy can recompute,
            entry by entry.
        bytes_to_free: bytes by which the fullest rank must get below its memory without recomputation; the strategy chooses
            which modules to recompute.
        shared_cores: compute-time factors while only 1, 2, ..., all ranks of the axis compute: ranks that wait leave their cores
            to the others. () if each rank has a device of its own.
        scalar_flows: (producer, consumer) modules of 0-dim tensors that depend on the batch.
        calls: (caller, callee) modules of one forward; None if unknown.
        example: positional and keyword arguments of the example batch, perhaps without values; None if unknown.
        estimate: a rough answer is enough. The strategy may reuse a trial run of a similar model.
        cutoff_seconds: for an estimate, step seconds from which the configuration is rejected. A larger answer may be too low.
    """

    work: tuple[ModuleWork, ...] = ()
    recompute_variants: Mapping[str, tuple[ModuleWork, ...]] = field(default_factory=dict)
    bytes_to_free: int = 0
    shared_cores: tuple[float, ...] = ()
    scalar_flows: frozenset[tuple[str, str]] = frozenset()
    calls: frozenset[tuple[str, str]] | None = None
    example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = field(default=None, repr=False, compare=False)
    estimate: bool = False
    cutoff_seconds: float = math.inf


@dataclass(frozen=True)
class SearchRequest:
    """What a strategy is told when it says which degrees are legal and what they cost.

    Args:
        world_size: number of ranks in the whole mesh.
        batch_size: rows of the global batch (size of dim 0 of its tensors), as the other axes leave them to one rank.
        sequence_length: size of the sequence dim, or None if the batch has none.
        pins: degrees that the user pinned, by axis.
        options: keywords of `plan` that the user gave and a strategy may read.
        survey: what this strategy found in the model.
        exhaustive: list all legal degrees and options, not only those worth trying by default.
        sizes: the model on one rank.
        step: the configuration that is costed.
        pipeline: the model as modules, for strategies that cut it into stages.
    """

    world_size: int
    batch_size: int
    sequence_length: int | None = None
    pins: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    survey: Survey | None = None
    exhaustive: bool = False
    sizes: ModelSizes = field(default_factory=ModelSizes)
    step: StepContext = field(default_factory=StepContext)
    pipeline: PipelineQuery = field(default_factory=PipelineQuery)
