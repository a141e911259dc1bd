"""Plugin registration of this distribution. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright_dtensor.plugins import PlacementSpec, StrategySpec, hookimpl


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
        name="zero",
        axis="zero",
        target="meshwright_parallel.strategies.zero:Zero",
        summary="ranks share the rows of the batch, and one copy of optimizer states, gradients and parameters",
    )
    yield StrategySpec(
        name="context",
        axis="cp",
        target="meshwright_parallel.strategies.context:Context",
        summary="ranks share the tokens of each row; attention gathers keys, passes them around, or spreads heads",
    )
    yield StrategySpec(
        name="tensor",
        axis="tp",
        target="meshwright_parallel.strategies.tensor:Tensor",
        summary="ranks share weights and the work inside a layer; the planner's search finds the placements",
    )
    yield StrategySpec(
        name="tensor-outer",
        axis="tp_outer",
        target="meshwright_parallel.strategies.tensor:TensorOuter",
        summary="a second tensor axis outside of tp, over the slower link; both are placed together, where it is pinned",
    )
    yield StrategySpec(
        name="expert",
        axis="ep",
        target="meshwright_parallel.strategies.expert:Expert",
        summary="ranks share the experts, and tokens travel to theirs; the rest of the model sees a data axis",
    )


@hookimpl
def meshwright_placements() -> Iterable[PlacementSpec]:
    """The placement of fused parameters, zig-zag sequences and experts of one owner."""
    yield PlacementSpec(
        name="run",
        target="meshwright_dtensor.mesh.run_shard:RunShard",
        summary="each rank owns an ordered list of intervals of a dim: parts of a fused q|k|v, a zig-zag sequence, one owner",
    )
