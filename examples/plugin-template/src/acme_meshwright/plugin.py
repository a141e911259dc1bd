"""What this distribution registers. It imports no torch: the targets are imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import (
    BackendSpec,
    OpRuleSpec,
    PlannerSpec,
    ScheduleSpec,
    StrategySpec,
    hookimpl,
)

meshwright_hook_api = "1.0"


@hookimpl
def meshwright_strategies() -> Iterator[StrategySpec]:
    """A strategy owns a mesh axis."""
    yield StrategySpec(
        name="acme-rows",
        axis="acme",
        target="acme_meshwright.strategy:Rows",
        summary="ranks share the rows of the batch; gradients are summed after the backward pass",
    )


@hookimpl
def meshwright_schedules() -> Iterator[ScheduleSpec]:
    """A schedule orders the forwards and backwards of a pipeline."""
    yield ScheduleSpec(
        name="acme-pairs",
        target="acme_meshwright.schedule:Pairs",
        summary="two microbatches at a time go through all stages and back",
    )


@hookimpl
def meshwright_planners() -> Iterator[PlannerSpec]:
    """A planner chooses a plan."""
    yield PlannerSpec(
        name="acme-data",
        target="acme_meshwright.planner:DataPlanner",
        summary="all ranks on the data axis, if the model fits on each of them",
    )


@hookimpl
def meshwright_checkpoint_backends() -> Iterator[BackendSpec]:
    """A backend keeps checkpoints somewhere."""
    yield BackendSpec(
        name="acme-journal",
        target="acme_meshwright.backend:JournalStorage",
        summary="directories, and a line in journal.txt next to them for each checkpoint that appears or goes",
    )


@hookimpl
def meshwright_op_rules() -> Iterator[OpRuleSpec]:
    """A rule says which dims of the tensors of an op can be sharded."""
    yield OpRuleSpec(
        name="acme-swiglu",
        target="acme_meshwright.rules:RULES",
        examples="acme_meshwright.rules:examples",
        summary="silu(x) * y as one custom op: every dim can be sharded",
    )
