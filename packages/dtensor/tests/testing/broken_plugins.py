"""Plugins that break one rule each, and what they were made from, for the tests of the conformance suite."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.rules import NodeView, Row
from meshwright_dtensor.schedule import Action, Schedule, Shape
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import (
    CollectiveUse,
    GradientKind,
    Link,
    Planner,
    PlanRequest,
    SearchRequest,
    Strategy,
    StrategyCost,
    divisors,
    planned_state,
    rows_state,
)


class GoodStrategy(Strategy):
    """Ranks share rows."""

    name: ClassVar[str] = "acme"
    axis: ClassVar[str] = "acme"
    gradient: ClassVar[GradientKind] = "deferred"

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return divisors(request.world_size)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        if degree == 1:
            return StrategyCost()
        return StrategyCost(exposed_seconds=1e-3, collectives=(CollectiveUse("all_reduce", 8),))

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        return rows_state(shape, batch_size, degree)


class NoStrategy:
    """No subclass."""


class WithoutDegrees(Strategy):
    """An abstract method is missing."""

    name: ClassVar[str] = "acme"
    axis: ClassVar[str] = "acme"


class OtherName(GoodStrategy):
    name: ClassVar[str] = "emca"


class OtherAxis(GoodStrategy):
    axis: ClassVar[str] = "emca"


class UnknownGradient(GoodStrategy):
    gradient: ClassVar[Any] = "partial"


class ThreeRanks(GoodStrategy):
    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return [1, 3]


class AlwaysOn(GoodStrategy):
    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return [request.world_size]


class RaisingDegrees(GoodStrategy):
    def degrees(self, request: SearchRequest) -> Iterable[int]:
        raise KeyError("sequence")


class CostOfOne(GoodStrategy):
    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        return StrategyCost(exposed_seconds=1.0)


class NotFinite(GoodStrategy):
    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        return StrategyCost(exposed_seconds=float("nan"))


class RandomCost(GoodStrategy):
    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        return StrategyCost(exposed_seconds=random.random() if degree > 1 else 0.0)


class UnknownCollective(GoodStrategy):
    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        uses = (CollectiveUse("broadcast", 8),) if degree > 1 else ()  # type: ignore[arg-type]
        return StrategyCost(collectives=uses)


class NoSuchDim(GoodStrategy):
    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        return 2


class CompleteGradient(GoodStrategy):
    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        return planned_state(plan, fqn, self.axis)


class IgnoresThePlan(GoodStrategy):
    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        return "X"


class GoodSchedule(Schedule):
    """One microbatch after the other."""

    name: ClassVar[str] = "acme"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        stages = self.own(rank, shape)
        return [
            action
            for m in range(shape.microbatches)
            for action in (
                *(Action("F", s, m) for s in stages),
                *(Action("B", s, m) for s in reversed(stages)),
            )
        ]


class WithoutBackward(GoodSchedule):
    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        return [action for action in super().actions(rank, shape) if action.kind == "F"]


class BackwardFirst(GoodSchedule):
    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        return super().actions(rank, shape)[::-1]


class RefusesAll(GoodSchedule):
    def refusal(self, shape: Shape) -> str | None:
        return "no"


class RefusesSilently(GoodSchedule):
    def refusal(self, shape: Shape) -> Any:
        return False


class FirstRankOnly(GoodSchedule):
    def owner(self, stage: int, shape: Shape) -> int:
        return 0


class NoStages(GoodSchedule):
    stages_each: ClassVar[int] = 0


class GoodPlanner(Planner):
    """All ranks on one axis."""

    name: ClassVar[str] = "acme"

    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        if isinstance(request.memory_limit, int) and request.memory_limit < 10_000:
            raise InfeasibleError(f"each rank needs 10,000 bytes and has {request.memory_limit}")
        return [self.one(request.world_size or 1)]

    def one(self, ranks: int) -> ParallelPlan:
        return ParallelPlan(world_size=ranks, degrees={"acme": ranks}, strategies={"acme": "acme"})


class FourRanks(GoodPlanner):
    def one(self, ranks: int) -> ParallelPlan:
        return super().one(4)


class UnknownAxis(GoodPlanner):
    def one(self, ranks: int) -> ParallelPlan:
        return ParallelPlan(world_size=ranks, degrees={"elsewhere": ranks})


class TooMany(GoodPlanner):
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        return super().plan(model, batch, request) * 5


class NoList(GoodPlanner):
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> Any:
        return super().plan(model, batch, request)[0]


class ChangesTheModel(GoodPlanner):
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        model.eval()
        return super().plan(model, batch, request)


class IgnoresMemory(GoodPlanner):
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        return [self.one(request.world_size or 1)]


class RaisesMemoryError(GoodPlanner):
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        if request.memory_limit:
            raise MemoryError("does not fit")
        return super().plan(model, batch, request)


def rows_of_both(view: NodeView) -> Iterator[Row]:
    """Both inputs and the output sharded on one dim."""
    for dim in range(len(view.in_shapes[0])):
        yield (dim, dim), (dim,)


def partial_product(view: NodeView) -> Iterator[Row]:
    """Wrong: the product of sums is no sum of products."""
    yield ("P", "P"), ("P",)


def one_state(view: NodeView) -> Iterator[Any]:
    """Wrong: the op has two inputs."""
    yield (0,), (0,)


def unknown_state(view: NodeView) -> Iterator[Any]:
    """Wrong: no such state."""
    yield ("S", "S"), ("S",)


def no_rows(view: NodeView) -> Iterator[Row]:
    """Useless."""
    return iter(())


GOOD_RULES = {"aten.mul": rows_of_both}
WRONG_VALUES = {"aten.mul": partial_product}
WRONG_COUNT = {"aten.mul": one_state}
WRONG_STATE = {"aten.mul": unknown_state}
NO_ROWS = {"aten.mul": no_rows}
NO_SUCH_OP = {"aten.mull": rows_of_both}
NOT_CALLED = {"aten.sub": rows_of_both}
NO_MAPPING = 3


def examples() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Products."""
    yield torch.mul, (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))


def no_calls() -> list[Any]:
    """Wrong: tensors alone."""
    return [torch.zeros(2)]
