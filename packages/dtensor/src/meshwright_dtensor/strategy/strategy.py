"""The interface of a parallelism: what a strategy tells the planner, and what it does to a model.

A strategy owns one mesh axis. The planner asks it which degrees are legal and what they cost; `parallelize` asks it
how batch tensors and parameters lie on its axis and lets it attach its engine. This module needs no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwright_dtensor.cluster.links import CollectiveKind as CollectiveKind
from meshwright_dtensor.cluster.links import Link as Link
from meshwright_dtensor.strategy.cost import CollectiveUse as CollectiveUse
from meshwright_dtensor.strategy.cost import Peak as Peak
from meshwright_dtensor.strategy.cost import Phase as Phase
from meshwright_dtensor.strategy.cost import Stall as Stall
from meshwright_dtensor.strategy.cost import StrategyCost as StrategyCost

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright_dtensor.model.batch_size import BatchSize
    from meshwright_dtensor.plan.plan import ParallelPlan
    from meshwright_dtensor.sharding.states import State

GradientKind = Literal["complete", "deferred"]


@dataclass(frozen=True)
class AttentionUse:
    """`count` equal attention calls of one forward pass, as ONE rank sees them.

    Args:
        query_bytes, key_value_bytes, output_bytes: sizes of its tensors; keys and values together.
        heads, key_heads: how many of each (1 where there is no such dim).
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
    """One parameter, as the axes that do not gather leave it to one rank.

    Args:
        shape: of the local part, whole on the axes that gather.
        taken: dims that an axis has cut.
        itemsize: bytes of an element as it is stored, and of one as it is computed with.
        trainable: it gets a gradient.
    """

    shape: tuple[int, ...]
    taken: tuple[int, ...]
    itemsize: tuple[int, int]
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModuleWork:
    """Consecutive operations of one module, forward and backward, on one rank.

    Args:
        module: its full name.
        seconds: predicted.
        saved_bytes: what autograd keeps of them alone, on one rank.
        parameters: names of the parameters that they read, the first name of tied ones.
        entering: (number of a value, module that made it, bytes on one rank) of the tensors that were made before, whatever
            they hold; not those that come from outside of the model.
        shared: (number of a tensor, bytes) of what autograd keeps of them and of other modules too, once.
        beside: the most bytes that are alive at once while they run, beside what is kept (backward gradients of values, and
            of the parameter that gets one).
        waiting: bytes of the gradients that lie between the two halves of a backward pass: of what parameters were used for.
        forward: the part of the seconds that is the forward pass.
        leaving: (number of a value, numbers of those entering that it is made of, whether it gets a gradient) of the tensors
            that are made here and enter elsewhere.
    """

    module: str
    seconds: float = 0.0
    saved_bytes: float = 0.0
    parameters: frozenset[str] = frozenset()
    entering: frozenset[tuple[int, str, int]] = frozenset()
    shared: frozenset[tuple[int, float]] = frozenset()
    beside: float = 0.0
    waiting: float = 0.0
    forward: float = 1 / 3
    leaving: tuple[tuple[int, frozenset[int], bool], ...] = ()


@dataclass(frozen=True)
class Survey:
    """What a strategy found in a model before the search.

    Args:
        parameters: names of the parameters that it shards on its own axis.
        modules: names of the modules whose inputs it wants to know of (SearchRequest.entering).
        notes: what users should know; they stand in the plan.
        details: for the strategy itself.
    """

    parameters: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    details: Any = None


@dataclass(frozen=True)
class SearchRequest:
    """What a strategy may know of the model when it says which degrees are legal and what they cost.

    The sizes are those of ONE rank as the other axes leave them (the planner divides before it asks), for one step.

    Args:
        world_size: number of ranks in the whole mesh.
        batch_size: rows of the global batch (size of dim 0 of its tensors).
        sequence_length: size of the sequence dim, or None where the batch has none.
        parameter_bytes: bytes of parameters.
        gradient_bytes: bytes of gradients (parameters that require one).
        activation_bytes: bytes that autograd keeps for the backward pass.
        flops: floating-point operations of products and attention, forward and backward, with what runs again.
        layers: number of repeated blocks (1 when nothing repeats).
        backward_seconds: predicted seconds of the backward pass, which communication may hide behind.
        attention: the attention calls.
        pins: degrees that the user pinned, by axis.
        options: keywords of `plan` that a strategy may know by name, those that were given.
        forward_seconds: the same of the forward pass.
        stage: what ranks that share training state share (see plan.ZeroRule), 0 where it is not decided.
        units: parameters by unit (see units.parameter_units), the one outside of blocks last. For the strategy that sums
            gradients, those whose gradients it sums whole, as all axes leave them to one rank.
        survey: what the strategy that is asked found in the model.
        own_bytes, own_gradient_bytes: those of the parameters that its survey names, which the others include.
        entering: module of the survey -> (shape, bytes) of every floating-point tensor that goes into it.
        degrees: of every axis, where they are decided.
        work: what modules do in one microbatch, in the order of execution; for strategies that divide a model by modules. What the
            model returns enters the last of it, that of the model itself ("").
        microbatches: how often a step runs the model, forward and backward, before gradients are handed over.
        resident_bytes: bytes of parameters, gradients and optimizer states that a rank would hold of the whole model; for
            strategies that divide one, to tell which rank holds most.
        call_seconds: what one operation costs the host and compute does not hide; 0 where the host runs ahead of the device.
        recompute: modules run again in the backward pass, which is not split into halves then.
        byte_seconds: what moving one byte between memory and cores takes.
        accelerated: ranks compute on accelerators, not on the cores of the host.
        company: for the strategy that divides the model, how many times as long a rank computes while only 1, 2, ..., all ranks of
            the axis do, against what is said here: ranks that wait leave the cores that they share to the others. () where ranks
            have a device of their own, and for other strategies.
        again: for the same strategy, policy of plan.RecomputeRule -> `work` where all that can run again does, one for one.
        relief: bytes that the fullest rank must hold less than if nothing ran again; the strategy chooses among `again` what does.
        numbers: for the same strategy, (module that made it, module that takes it) of tensors without dims made of inputs.
        calls: for the same strategy, (module that calls, module that is called) in one forward; None where that is not known.
        example: for the same strategy, positional and keyword arguments of the batch that is planned for; its tensors need
            have no values. None where it is not known.
        rough: the answer is an estimate, one of many: where it takes a trial of the model, what is known of a similar one will do.
        beyond: of such an estimate, seconds of a step from which it is out of the question; it may then say less than it takes.
        thorough: where a strategy says which degrees and ways there are, all that are legal, not only those worth a try unasked.
        stages: parts of the model that one rank holds, 0 where it holds all of it.  Gradients of parts are handed over together,
            when all ranks have gone back: no backward pass is left to hide their sums behind.
    """

    world_size: int
    batch_size: int
    sequence_length: int | None = None
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    flops: float = 0.0
    layers: int = 1
    backward_seconds: float = 0.0
    attention: tuple[AttentionUse, ...] = ()
    pins: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    forward_seconds: float = 0.0
    stage: int = 0
    units: tuple[tuple[ParameterSize, ...], ...] = ()
    survey: Survey | None = None
    own_bytes: int = 0
    own_gradient_bytes: int = 0
    entering: Mapping[str, tuple[tuple[tuple[int, ...], int], ...]] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    work: tuple[ModuleWork, ...] = ()
    microbatches: int = 1
    resident_bytes: int = 0
    call_seconds: float = 0.0
    byte_seconds: float = 0.0
    recompute: bool = False
    accelerated: bool = True
    company: tuple[float, ...] = ()
    again: Mapping[str, tuple[ModuleWork, ...]] = field(default_factory=dict)
    relief: int = 0
    numbers: frozenset[tuple[str, str]] = frozenset()
    calls: frozenset[tuple[str, str]] | None = None
    example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = field(default=None, repr=False, compare=False)
    rough: bool = False
    beyond: float = math.inf
    thorough: bool = False
    stages: int = 0


class Division(ABC):
    """A model of which this rank holds some modules only: what is left to do once their parameters are placed."""

    @abstractmethod
    def install(self, model: nn.Module, mesh: DeviceMesh | None, device: torch.device, plain: bool) -> None:
        """Take over the calls of `model`, last of all.

        Args:
            mesh: of the other axes, on which the parameters lie; None where they are ordinary ones.
            plain: that mesh is one rank, and nothing is lost by computing with ordinary tensors.
        """


class Strategy(ABC):
    """A parallelism along one mesh axis. Subclasses are stateless: one instance may serve many models.

    Class attributes:
        name: name in plans and plugin records, e.g. "tensor".
        axis: the mesh axis it owns, e.g. "tp".
        order: position of its axis in the mesh; small is outermost (data 10, tensor 40).
        placement_search: the planner's search decides the placements on this axis.
        locates: calls of every module are named in the communication log, not only those that the plan speaks of.
        gradient: "complete" - a replicated parameter's gradient is complete when autograd delivers it (state I);
            "deferred" - autograd delivers each rank's part (state X) and the one engine of `parallelize` sums later.
        gathers: parameters that are stored in shards on this axis are computed with whole: the engine gathers them.
        optional: an axis of degree 1 is left out of plans.
        divides: ranks hold different modules (`divide`); the other axes are a mesh of their own, inside of what a rank holds.
    """

    name: ClassVar[str]
    axis: ClassVar[str]
    order: ClassVar[int] = 50
    placement_search: ClassVar[bool] = False
    locates: ClassVar[bool] = False
    gradient: ClassVar[GradientKind] = "complete"
    gathers: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    divides: ClassVar[bool] = False

    def survey(self, model: nn.Module) -> Survey | None:
        """What the strategy looks for in a model, once per search; values of parameters are not there to be read."""
        return None

    def refusal(self, request: SearchRequest, degree: int) -> str | None:
        """Why a degree that the user pinned is not among `degrees`; None where the general answer will do."""
        return None

    @abstractmethod
    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Legal degrees of the axis for this request, ascending, 1 (off) included."""

    def batch_factor(self, degree: int) -> int:
        """By how much a degree divides the local batch that the other axes see."""
        return 1

    def placements(self, survey: Survey, degrees: Mapping[str, int]) -> Mapping[str, Mapping[str, str]]:
        """Parameter name of the survey -> mesh axis -> state as text: on its own axis, and on others where it must say so."""
        return {}

    def ways(self, request: SearchRequest, degree: int) -> Iterable[Mapping[str, Any]]:
        """Choices beside the degree that are worth costing: options, by keyword of `plan`, that `cost` knows.

        What the user fixed is in `request.options` and is kept. Cheap: needs no process group, and of `request` only
        sizes, options and survey.
        """
        return ({},)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """Time, memory factors and collectives of one step at `degree`, over `link`; sizes as in SearchRequest."""
        return StrategyCost()

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """The state on this axis in which batch tensor `name` of global `shape` enters the model ("I" or a dim)."""
        return "I"

    def batch_state(
        self, name: str, shape: Sequence[int], size: BatchSize, degree: int, plan: ParallelPlan | None = None
    ) -> State:
        """As `input_state`, for strategies that look at more than rows: at the sequence, or at what the plan says.

        This is what is called; by default it asks `input_state`.

        Args:
            size: rows (as axes further out leave them) and tokens of the whole batch.
            plan: the plan that is applied, None while one is searched for.

        Raises:
            UsageError: the batch cannot be divided as the plan says.
        """
        return self.input_state(name, shape, size.rows, degree)

    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        """The state in which parameter `fqn` of global `shape` is stored on this axis.

        By default the first rule of `plan.parameters` whose pattern matches `fqn` decides; what no rule places is
        replicated, with the gradient kind of the strategy.
        """
        placed = planned_state(plan, fqn, self.axis)
        if placed == "I" and self.gradient == "deferred":
            return "X"
        return placed

    def state_beside(
        self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int, others: Mapping[str, State]
    ) -> State:
        """As `parameter_state`, knowing the states on the `others` axes; asked of strategies that gather."""
        return self.parameter_state(fqn, shape, plan, degree)

    def check(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Refuse a plan that `divide` could not carry out, before any memory is taken; asked of strategies that divide.

        Raises:
            PlanError: what does not fit.
        """
        return None

    def divide(self, model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> Division:
        """Take out of `model` what this rank does not hold; asked of strategies that divide.

        Args:
            model: the whole model, of ordinary parameters.
            mesh: all axes.
        """
        raise NotImplementedError(f"strategy {self.name!r} says that it divides models, and has no divide()")

    def attach(self, model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Install the strategy's engine on a model whose parameters are already placed on `mesh`."""
        return None


def planned_state(plan: ParallelPlan, fqn: str, axis: str) -> State:
    """The state that `plan.parameters` gives to parameter `fqn` on `axis`: first matching rule, else "I"."""
    return plan.parameter_states(fqn).get(axis, "I")


def rows_state(shape: Sequence[int], batch_size: int | None, degree: int) -> State:
    """How the rows of a batch are shared: S(0) where dim 0 is the batch and the degree divides it, else "I"."""
    rows = shape[0] if len(shape) else None
    return 0 if rows is not None and rows == batch_size and rows % degree == 0 else "I"


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
