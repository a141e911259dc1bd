"""A planner: all ranks share the rows of the batch, or nothing fits."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.plan import ParallelPlan, Provenance
from meshwright_dtensor.strategy import Planner, PlanRequest

COPIES = 4
"""Parameters, gradients, and the two averages of AdamW."""


class DataPlanner(Planner):
    """Data parallelism on the axis of the strategy next to it."""

    name: ClassVar[str] = "acme-data"

    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        """One plan. Activations are not counted."""
        ranks = request.world_size or 1
        other = {axis: degree for axis, degree in request.pins.items() if axis != "acme" and degree > 1}
        if other or request.pins.get("acme", ranks) != ranks:
            raise UsageError(
                f"planner 'acme-data' puts all {ranks} ranks on the axis acme; leave {dict(request.pins)} out"
            )
        needed = COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
        limit = request.memory_limit
        if isinstance(limit, int) and needed > limit:
            raise InfeasibleError(f"each rank needs {needed} bytes and has {limit}; use another planner")
        degrees = {"acme": ranks} if ranks > 1 else {}
        return [
            ParallelPlan(
                world_size=ranks,
                degrees=degrees,
                strategies=dict.fromkeys(degrees, "acme-rows"),
                provenance=Provenance(planner=self.name),
            )
        ]
