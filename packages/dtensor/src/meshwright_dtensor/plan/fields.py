"""The fields of a plan: its rules by kind, the predicted step, and `PlanFields`, which holds all of them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, StrictBool, field_validator

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan.field_types import (
    Axis,
    AxisProduct,
    Count,
    Frozen,
    FrozenDict,
    Given,
    Model,
    ParameterState,
    Positive,
    Seconds,
    ShardUnit,
    Share,
    States,
    Text,
    Word,
    listed_rules,
)
from meshwright_dtensor.sharding.states import State, parse_state
from meshwright_dtensor.utils.names import count_of


class ParameterRule(Model):
    """The placement of the parameters whose name matches `pattern`.

    pattern: a shell-style pattern (fnmatch, case counts) on the parameter's full name, "*.q_proj.weight".
    placement: mesh axis -> "I" (replicated), "S(d)" (sharded on tensor dim d) or intervals of a dim ("S(0; 64+32+32)":
        the parts of a fused projection, each sharded). Axes left out are "I".
    """

    pattern: Word
    placement: Annotated[dict[Axis, ParameterState], Frozen] = Field(default_factory=FrozenDict)

    def matches(self, fqn: str) -> bool:
        """Whether the rule applies to this parameter."""
        return fnmatchcase(fqn, self.pattern)


def call_text(function: str, occurrence: int, forward: int | None) -> str:
    """A call of a module in words: "linear #0", "dropout #0 of forward 1"."""
    return f"{function} #{occurrence}{'' if forward is None else f' of forward {forward}'}"


class ActivationRule(Model):
    """Target states for one call of a torch function.

    module: a shell-style pattern on the full name of the module whose forward makes the call ("" is the root).
    function: the function's name as the trace gives it, "linear".
    occurrence: which such call of that module's forward, from 0.
    forward: which forward of the module, within one of the model and from 0, where the rule is for one of several; None: each.
    inputs: per tensor input, mesh axis -> "I", "X", "P" or "S(d)"; None keeps the input's states.
    outputs: the same for the outputs; None (for all or for one output) keeps the derived states.
    """

    module: Text
    function: Word
    occurrence: Count = 0
    forward: Count | None = None
    inputs: tuple[States | None, ...] = ()
    outputs: tuple[States | None, ...] | None = None

    @property
    def call(self) -> str:
        """The call without its module: see `call_text`."""
        return call_text(self.function, self.occurrence, self.forward)

    def matches(self, module: str, function: str, occurrence: int, forward: int = 0) -> bool:
        """Whether the rule applies to this call."""
        same = self.occurrence == occurrence and self.function == function and self.forward in (None, forward)
        return same and fnmatchcase(module, self.module)


class ZeroRule(Model):
    """How the ranks along the mesh axis `zero` shard one copy of the training state.

    stage: 1 shards optimizer states, 2 gradients too, 3 parameters too (unsharded for compute, one block at a time). The
        first-party strategies shard gradients at stage 1 as well, since that costs nothing.
    unit: what no border of shards cuts. A number: a block of so many elements of a parameter, in their order, as optimizers
        quantize their states in; "row": what one index of its first dim names; "tensor": all of a parameter. None: shards are
        the equal chunks of one dim.
    owners: name of a parameter -> the rank along `zero` that has all of it, whatever the unit; for optimizers that compute
        with whole matrices. The planner writes them.
    """

    stage: Literal[1, 2, 3]
    unit: ShardUnit = None
    owners: Annotated[dict[Word, Count], Frozen] = Field(default_factory=FrozenDict)


class PrecisionRule(Model):
    """In which precision a float32 model is computed; parameters and optimizer states stay float32.

    parameters: dtype of the compute copies of parameters, and of floating-point batch tensors.
    reduce: dtype in which gradients are reduced over ranks.
    """

    parameters: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce: Literal["fp32"] = "fp32"


class ExpertsRule(Model):
    """A module of experts: tokens are sent to the rank of their expert, along the axis that shards the parameters.

    module: a shell-style pattern on full module names.
    count: number of experts.
    kind: "fused" - dim 0 of the parameters is the experts, equally many rows each; "container" - one child per expert.
    assignment: the second argument of the forward: "index" - expert ids, one per slot; "mask" - the chosen experts along
        its last dim.
    attributes: paths of integer attributes that hold the number of experts; a rank sets them to its local number.
    children: of a container, the paths of its experts in order; each rank owns equally many, in order.
    inner: parameter path -> state in which ranks of another axis may hold parts of each expert, whose results are summed.
    """

    module: Word
    count: Positive
    kind: Literal["fused", "container"] = "fused"
    assignment: Literal["index", "mask"] = "index"
    attributes: tuple[Word, ...] = ()
    children: tuple[Word, ...] = ()
    inner: Annotated[dict[Word, ParameterState], Frozen] = Field(default_factory=FrozenDict)

    def matches(self, module: str) -> bool:
        """Whether the rule applies to this module."""
        return fnmatchcase(module, self.module)


class PlannedCollective(Model):
    """A collective that the plan implies, for comparison with what is executed.

    axis: a mesh axis, or several over whose product one collective runs, joined by "+" ("dp+cp").
    nbytes: bytes of the full tensor on that axis, per occurrence; count: occurrences a step.
    why: the reason, as text.
    """

    axis: AxisProduct
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    nbytes: Count
    count: Positive = 1
    phase: Literal["forward", "backward"] = "forward"
    module: Text = ""
    why: Text = ""


class ContextSharing(Model):
    """How the sequence is sharded over the axis "cp".

    attention: keys and values are gathered ("all_gather"), passed around the ranks ("ring"), or heads are sharded instead
    of the sequence inside attention ("all_to_all").
    balance: "none" gives each rank one chunk of the sequence, "zigzag" two, one from each end: equal work under a causal
    mask.
    """

    attention: Literal["all_gather", "ring", "all_to_all"] = "all_gather"
    balance: Literal["none", "zigzag"] = "none"


class RecomputeRule(Model):
    """Modules whose activations are recomputed in the backward pass instead of saved.

    pattern: a shell-style pattern on the module's full name; of nested modules that match, the outermost counts.
    policy: "full" recomputes everything; "selective" saves the results of matmuls, convolutions and attention;
        "alternate" saves those of attention and of every other matmul or convolution of a module, the first included.
    """

    pattern: Word
    policy: Literal["full", "alternate", "selective"] = "full"

    def matches(self, module: str) -> bool:
        """Whether the rule applies to this module."""
        return fnmatchcase(module, self.pattern)


class CompileRule(Model):
    """Modules whose calls run as compiled graphs (compiled regions).

    pattern: a shell-style pattern on the module's full name; of nested modules that match, the outermost counts.
    backend: "inductor" generates code; "aot_eager" runs the recorded operations one by one, to find faults.
    """

    pattern: Word
    backend: Literal["inductor", "aot_eager"] = "inductor"

    def matches(self, module: str) -> bool:
        """Whether the rule applies to this module."""
        return fnmatchcase(module, self.pattern)


class PipelineRule(Model):
    """The pipeline stages along the axis "pp", and how microbatches run through them.

    stages: per stage, shell-style patterns on module names ("model.layers.[0-3]"); a pattern includes submodules. The
        schedule assigns stages to ranks. A module that several stages call is named in each of them.
    microbatches: equal parts that the rows of a batch are split into.
    schedule: name of a registered schedule.
    shared: patterns on names of modules and parameters that every stage holds; their gradients are summed.
    outputs: what a call with gradients returns in addition to the loss: nothing ("loss"), or everything on every rank ("all").
    loss: the case that time and memory are predicted for. "microbatches": the loss is additive over microbatches, so
        backwards begin as the schedule says. "batch": the loss needs the whole batch or is computed outside of the model, so
        all forwards run first. None: unknown. The first step decides which case runs, whatever this field says.
    """

    stages: tuple[tuple[Word, ...], ...]
    microbatches: Positive = 1
    schedule: Word = "1f1b"
    shared: tuple[Word, ...] = ()
    outputs: Literal["loss", "all"] = "loss"
    loss: Literal["microbatches", "batch"] | None = None


class StageTime(Model):
    """Compute seconds of ONE microbatch on one stage of a pipeline, on one rank.

    The overhead of stages (accumulating gradients, the host) is included, except for what comes once a step. Without a
    pipeline the model is the stage and the batch the microbatch. Recomputation counts as backward.

    collectives: mesh axis -> seconds of the collectives inside of the forward, and of those inside of the backward; none of
        these are needed for weight gradients. Empty without a pipeline.
    """

    forward_seconds: Seconds
    backward_seconds: Seconds
    collectives: Annotated[dict[Axis, tuple[Seconds, Seconds]], Frozen] = Field(default_factory=FrozenDict)


class StepSplit(Model):
    """The parts of a predicted step on one rank.

    optimizer_seconds: the optimizer step.
    bubble_seconds: waiting for other ranks of the pipeline.
    exposed: mesh axis (or several, joined by "+") -> seconds of communication that add to the step.
    hidden: the same -> seconds of communication that overlap with compute.
    stages: per pipeline stage, the time of one microbatch; one entry without a pipeline.
    between_seconds: what the last stage computes once, after all forwards and before all backwards, if the loss is not
        additive over microbatches.
    between_collectives: mesh axis -> seconds of the collectives inside of that.
    """

    optimizer_seconds: Seconds = 0.0
    bubble_seconds: Seconds = 0.0
    exposed: Annotated[dict[AxisProduct, Seconds], Frozen] = Field(default_factory=FrozenDict)
    hidden: Annotated[dict[AxisProduct, Seconds], Frozen] = Field(default_factory=FrozenDict)
    stages: tuple[StageTime, ...] = ()
    between_seconds: Seconds = 0.0
    between_collectives: Annotated[dict[Axis, Seconds], Frozen] = Field(default_factory=FrozenDict)


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


class Provenance(Model):
    """Where a plan comes from.

    cost_model: name of the cost model of its predictions, None for the cluster's own figures.
    request: the keywords of `plan` that were given; batch: "rows" and "tokens" of the batch it was planned for.
    measured_seconds: of a step on real ranks, if the plan was tried; predicted ones are in `predicted`.
    notes: the planner's reasons. created: ISO 8601; created, request and batch do not count for equality.
    """

    planner: Text | None = None
    versions: Annotated[dict[Text, Text], Frozen] = Field(default_factory=FrozenDict)
    model: Text | None = None
    cluster: Text | None = None
    cost_model: Text | None = None
    request: Annotated[dict[Word, Given], Frozen] = Field(default_factory=FrozenDict)
    batch: Annotated[dict[Word, Count], Frozen] = Field(default_factory=FrozenDict)
    measured_seconds: Seconds | None = None
    created: Text | None = None
    notes: tuple[Text, ...] = ()


class PlanFields(Model):
    """The fields of a `ParallelPlan`.

    Attributes:
        degrees: mesh axis -> degree, outermost axis first; their product is world_size.
        strategies: mesh axis -> name of the strategy that works on it.
        zero: ZeRO along the axis "zero"; required if that axis has more than one rank.
        precision: None computes in the dtype of the parameters.
        parameters: the first rule that matches a parameter's name places it; without one it is replicated.
        activations: target states by call; the others are derived.
        context: how the sequence is sharded on the axis "cp"; None takes the defaults of ContextSharing.
        recompute: modules whose activations are recomputed in the backward pass; the first rule that matches counts.
        compile: modules whose calls run as compiled graphs; the first rule that matches counts.
        rng: "exact" draws the random numbers of one device; "fast" those of a stream for each shard, so that a rank draws
            its part alone.
        experts: modules whose experts are sharded along the axis "ep" and get their tokens sent; without that axis,
            each data rank runs them on its local tokens. If none is named, modules that a probe finds when the plan is
            applied.
        pipeline: stages and schedule along the axis "pp"; required if that axis has more than one rank.
    """

    version: Literal[1] = 1
    world_size: Positive
    degrees: Annotated[dict[Axis, Positive], Frozen]
    strategies: Annotated[dict[Axis, Word], Frozen] = Field(default_factory=FrozenDict)
    sequence_parallel: StrictBool = False
    zero: ZeroRule | None = None
    precision: PrecisionRule | None = None
    parameters: tuple[ParameterRule, ...] = ()
    activations: tuple[ActivationRule, ...] = ()
    context: ContextSharing | None = None
    recompute: tuple[RecomputeRule, ...] = ()
    compile: tuple[CompileRule, ...] = ()
    rng: Literal["exact", "fast"] = "exact"
    experts: tuple[ExpertsRule, ...] = ()
    pipeline: PipelineRule | None = None
    predicted: Prediction | None = None
    collectives: tuple[PlannedCollective, ...] = ()
    provenance: Provenance = Field(default_factory=Provenance)

    _listed = field_validator("compile", mode="before")(listed_rules)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, outermost first."""
        return tuple(self.degrees)

    def degree(self, axis: str) -> int:
        """The number of ranks along `axis`: 1 for an axis that the plan does not have."""
        return int(self.degrees.get(axis, 1))

    def names(self, fqn: str) -> bool:
        """Whether the plan says how this parameter is sharded: by a rule, or by an owner."""
        return self.parameter_rule(fqn) is not None or (self.zero is not None and fqn in self.zero.owners)

    def parameter_rule(self, fqn: str) -> ParameterRule | None:
        """The rule that places this parameter: the first that matches, or None."""
        return next((rule for rule in self.parameters if rule.matches(fqn)), None)

    def parameter_states(self, fqn: str) -> dict[str, State]:
        """Mesh axis -> state of this parameter, for each axis in mesh order."""
        rule = self.parameter_rule(fqn)
        placement: Mapping[str, str] = rule.placement if rule else {}
        states: dict[str, State] = {}
        for axis, degree in self.degrees.items():
            try:
                states[axis] = parse_state(placement.get(axis, "I"), degree)
            except ValueError as error:
                index = self.parameters.index(rule) if rule else 0
                where = f"parameters[{index}].placement.{axis}"
                reason = f"{fqn!r} on {count_of(degree, 'rank')}: {error}"
                raise PlanError(where, placement[axis], reason) from None
        return states

    def activation_rule(
        self, module: str, function: str, occurrence: int, forward: int = 0
    ) -> ActivationRule | None:
        """The target states of this call: the first rule that matches, or None."""
        call = module, function, occurrence, forward
        return next((rule for rule in self.activations if rule.matches(*call)), None)

    def experts_rule(self, module: str) -> ExpertsRule | None:
        """The rule of this module of experts: the first that matches, or None."""
        return next((rule for rule in self.experts if rule.matches(module)), None)
