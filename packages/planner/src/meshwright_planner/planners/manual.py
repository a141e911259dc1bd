"""The manual planner: the user gives the degrees, and placements are searched as by the default planner."""

from __future__ import annotations

import math
from typing import ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.strategy import PlanRequest, Strategy
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.planners.eager import EagerPlanner
from meshwright_planner.search.explore import Choice
from meshwright_planner.search.optimality import Proof


class ManualPlanner(EagerPlanner):
    """Pins every degree. Axes that the request does not name get 1, but the data axis gets all remaining ranks."""

    name: ClassVar[str] = "manual"

    def proven(self, choice: Choice) -> tuple[list[Candidate], Proof]:
        """The candidates without a bound, because other degrees are not compared."""
        words = "not searched: all degrees were given, and no others compared"
        return super().proven(choice)[0], Proof(None, words)

    def pins(self, request: PlanRequest, strategies: dict[str, Strategy], world_size: int) -> dict[str, int]:
        """A degree for every axis. Raises UsageError where the degrees do not multiply to the world size."""
        given = {axis: degree for axis, degree in request.pins.items() if axis in strategies}
        degrees = {axis: given.get(axis, 1) for axis in strategies}
        filled = "zero" if request.zero and request.zero_degree is None else "dp"
        if filled in strategies and filled not in given:
            others = math.prod(d for axis, d in degrees.items() if axis != filled)
            if world_size % others == 0:
                degrees[filled] = world_size // others
        product = math.prod(degrees.values())
        if product != world_size:
            shown = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())
            raise UsageError(
                f"planner='manual': {shown} is {product} ranks, but world_size is {world_size}; "
                f"give degrees whose product is {world_size}"
            )
        return degrees
