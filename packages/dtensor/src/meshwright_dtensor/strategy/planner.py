"""The interface of a planner. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright_dtensor.strategy.plan_request import PlanRequest

if TYPE_CHECKING:
    from torch import nn

    from meshwright_dtensor.plan.plan import ParallelPlan


class Planner(ABC):
    """Finds plans. Registered by a PlannerSpec; `name` is that of the record."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        """At most `request.top_k` plans for `model`, best first. The model is left as it was.

        Raises:
            InfeasibleError: no candidate fits, with by how much, and what would.
            UsageError: the request or the batch is at fault.
        """
