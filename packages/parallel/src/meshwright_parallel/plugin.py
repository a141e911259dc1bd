"""What this distribution registers with the plugin host. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright_dtensor.plugins import StrategySpec, hookimpl


@hookimpl
def meshwright_strategies() -> Iterable[StrategySpec]:
    """The strategies of this package."""
    yield StrategySpec(
        name="data",
        axis="dp",
        target="meshwright_parallel.strategies.data:Data",
        summary="ranks share the rows of the batch; gradients are summed in buckets during the backward pass",
    )
    yield StrategySpec(
        name="tensor",
        axis="tp",
        target="meshwright_parallel.strategies.tensor:Tensor",
        summary="ranks share weights and the work inside a layer; the planner's search finds the placements",
    )
