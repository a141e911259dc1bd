"""The interface of a parallelism: what a strategy tells the planner, and what it does to a model.

A strategy owns one mesh axis. The planner asks it which degrees are legal and what they cost; `parallelize` asks it
how batch tensors and parameters lie on its axis and lets it attach its engine. This module needs no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwright_dtensor.cluster.links import Link
from meshwright_dtensor.strategy.cost import StrategyCost
from meshwright_dtensor.strategy.request import SearchRequest, Survey

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright_dtensor.model.batch_size import BatchSize
    from meshwright_dtensor.plan.plan import ParallelPlan
    from meshwright_dtensor.sharding.states import State

GradientKind = Literal["complete", "deferred"]


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
        """Time, memory factors and collectives of one step at `degree`, over `link`; sizes as `PipelineQuery.bytes_to_free`."""
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
