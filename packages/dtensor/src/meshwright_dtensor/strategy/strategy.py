"""The interface of a parallelism along one mesh axis.

The planner asks a strategy which degrees are legal and what they cost. `parallelize` asks it for the placements of batch
tensors and parameters on its axis, and lets it attach its engine. This module imports no torch.
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
    """A model cut into stages, of which this rank holds some: the work left once their parameters are placed."""

    @abstractmethod
    def install(self, model: nn.Module, mesh: DeviceMesh | None, device: torch.device, plain: bool) -> None:
        """Take over the calls of `model`; the last step of `parallelize`.

        Args:
            mesh: the mesh of the other axes, on which the parameters are placed; None for ordinary parameters.
            plain: that mesh is one rank, so ordinary tensors will do.
        """


class Strategy(ABC):
    """A parallelism along one mesh axis. Subclasses are stateless: one instance may serve many models.

    Attributes:
        name: name in plans and plugin records, e.g. "tensor".
        axis: the mesh axis it owns, e.g. "tp".
        order: position of its axis in the mesh; small is outermost (data 10, tensor 40).
        placement_search: the planner searches the placements on this axis.
        gradient: "complete" - autograd delivers the complete gradient of a replicated parameter (state I); "deferred" -
            autograd delivers this rank's part (state X), and the engine of `parallelize` reduces it later.
        gathers: parameters are stored in shards on this axis and unsharded for compute by the engine.
        optional: an axis of degree 1 is left out of plans.
        divides: ranks hold different modules (`divide`); the other axes are a mesh inside of each stage.
    """

    name: ClassVar[str]
    axis: ClassVar[str]
    order: ClassVar[int] = 50
    placement_search: ClassVar[bool] = False
    gradient: ClassVar[GradientKind] = "complete"
    gathers: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    divides: ClassVar[bool] = False

    def survey(self, model: nn.Module) -> Survey | None:
        """Inspect a model, once per search. Parameters have no values then."""
        return None

    def refusal(self, request: SearchRequest, degree: int) -> str | None:
        """Why a degree that the user pinned is not among `degrees`; None for the general message."""
        return None

    @abstractmethod
    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Legal degrees of the axis for this request, ascending, 1 (off) included."""

    def batch_factor(self, degree: int) -> int:
        """The factor by which a degree divides the batch rows of the other axes."""
        return 1

    def placements(self, survey: Survey, degrees: Mapping[str, int]) -> Mapping[str, Mapping[str, str]]:
        """Parameter name of the survey -> mesh axis -> state as text, for its own axis and others that it decides."""
        return {}

    def ways(self, request: SearchRequest, degree: int) -> Iterable[Mapping[str, Any]]:
        """Further choices at a degree that are worth costing: options, by keyword of `plan`, that `cost` reads.

        What the user fixed is in `request.options` and is kept. Needs no process group.
        """
        return ({},)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """Time, memory factors and collectives of one step at `degree`, over `link`."""
        return StrategyCost()

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """The state on this axis in which batch tensor `name` of global `shape` enters the model ("I" or a dim)."""
        return "I"

    def batch_state(
        self, name: str, shape: Sequence[int], size: BatchSize, degree: int, plan: ParallelPlan | None = None
    ) -> State:
        """As `input_state`, for strategies that need the sequence or the plan. By default it calls `input_state`.

        Args:
            size: rows (as outer axes leave them) and tokens of the whole batch.
            plan: the plan that is applied, None during the search.

        Raises UsageError: the batch cannot be divided as the plan says.
        """
        return self.input_state(name, shape, size.rows, degree)

    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        """The state in which parameter `fqn` of global `shape` is stored on this axis.

        By default the first rule of `plan.parameters` whose pattern matches `fqn` decides. Without a rule it is
        replicated, with the gradient kind of the strategy.
        """
        placed = planned_state(plan, fqn, self.axis)
        if placed == "I" and self.gradient == "deferred":
            return "X"
        return placed

    def parameter_state_given(
        self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int, others: Mapping[str, State]
    ) -> State:
        """As `parameter_state`, given the states on the `others` axes; only for strategies with `gathers`."""
        return self.parameter_state(fqn, shape, plan, degree)

    def check(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Raise PlanError if `divide` cannot carry out the plan, before memory is allocated; only with `divides`."""
        return None

    def divide(self, model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> Division:
        """Remove from `model` the parameters of other stages; only for strategies with `divides`.

        Args:
            model: the whole model, of ordinary parameters.
            mesh: all axes.
        """
        raise NotImplementedError(f"strategy {self.name!r} has divides=True but no divide() method")

    def attach(self, model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Install the strategy's engine on a model whose parameters are placed on `mesh`."""
        return None


def planned_state(plan: ParallelPlan, fqn: str, axis: str) -> State:
    """The state that `plan.parameters` gives to parameter `fqn` on `axis`: first matching rule, else "I"."""
    return plan.parameter_states(fqn).get(axis, "I")


def rows_state(shape: Sequence[int], batch_size: int | None, degree: int) -> State:
    """S(0) if dim 0 is the batch and the degree divides it, else "I"."""
    rows = shape[0] if len(shape) else None
    return 0 if rows is not None and rows == batch_size and rows % degree == 0 else "I"


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
