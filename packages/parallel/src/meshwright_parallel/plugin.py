"""Plugin registration of this distribution. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright_dtensor.plugins import PlacementSpec, StrategySpec, hookimpl

meshwright_hook_api = "1.0"

_AXES = {
    "data": "dp",
    "zero": "zero",
    "context": "cp",
    "tensor": "tp",
    "tensor-outer": "tp_outer",
    "expert": "ep",
}
_SUMMARIES = {
    "data": "ranks share the rows of the batch; gradients are summed in buckets during the backward pass",
    "zero": "ranks share the rows of the batch, and one copy of optimizer states, gradients and parameters",
    "context": "ranks share the tokens of each row; attention gathers keys, passes them around, or spreads heads",
    "tensor": "ranks share weights and the work inside a layer; the planner's search finds the placements",
    "tensor-outer": "a second tensor axis outside of tp, over the slower link; both are placed together, where it is pinned",
    "expert": "ranks share the experts, and tokens travel to theirs; the rest of the model sees a data axis",
}


@hookimpl
def meshwright_strategies() -> Iterable[StrategySpec]:
    """The strategies of this package, one file for each kind."""
    for name, summary in _SUMMARIES.items():
        target = f"meshwright_parallel.strategies.{name.partition('-')[0]}:{name.title().replace('-', '')}"
        yield StrategySpec(name=name, axis=_AXES[name], target=target, summary=summary)


@hookimpl
def meshwright_placements() -> Iterable[PlacementSpec]:
    """Placements by intervals: of fused parameters, zig-zag sequences and experts of one owner; of rows, blocks, whole tensors."""
    yield PlacementSpec(
        name="run",
        target="meshwright_dtensor.mesh.run_shard:RunShard",
        summary="each rank owns an ordered list of intervals of a dim: parts of a fused q|k|v, a zig-zag sequence, one owner",
    )
    yield PlacementSpec(
        name="ragged",
        target="meshwright_dtensor.mesh.ragged_shard:RaggedShard",
        summary="each rank owns consecutive elements of a dim, cut at the borders of rows, blocks or whole tensors",
    )
