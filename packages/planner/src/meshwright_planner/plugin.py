"""The plugin of this distribution: planners, cost models and clusters."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import ClusterSpec, CostModelSpec, PlannerSpec, hookimpl


@hookimpl
def meshwright_planners() -> Iterator[PlannerSpec]:
    """The planners of this package."""
    yield PlannerSpec(
        name="eager",
        target="meshwright_planner.planners.eager:EagerPlanner",
        summary="one eager run, all combinations of degrees, placements by integer programming",
    )
    yield PlannerSpec(
        name="manual",
        target="meshwright_planner.planners.manual:ManualPlanner",
        summary="degrees as given (remaining ranks go to dp), placements by integer programming",
    )
    yield PlannerSpec(
        name="alpa",
        target="meshwright_planner.planners.alpa:AlpaPlanner",
        summary="Alpa's search (OSDI 2022): integer programs inside operators, dynamic programming between them",
    )
    yield PlannerSpec(
        name="mcmc",
        target="meshwright_planner.planners.mcmc:McmcPlanner",
        summary="FlexFlow's search (MLSys 2019): a seeded Markov chain over configurations",
    )


@hookimpl
def meshwright_cost_models() -> Iterator[CostModelSpec]:
    """The cost models of this package."""
    yield CostModelSpec(
        name="roofline",
        target="meshwright_planner.cost.cost_models:Roofline",
        summary="datasheet peaks with the cluster's efficiencies; ignores measurements",
    )
    yield CostModelSpec(
        name="measured",
        target="meshwright_planner.cost.cost_models:Measured",
        summary="the curves of `meshwright calibrate`; refuses a cluster without them",
    )


@hookimpl
def meshwright_clusters() -> Iterator[ClusterSpec]:
    """The clusters of this package, one file each."""
    from meshwright_planner.clusters.registry import PROFILES

    for attribute, (name, summary) in PROFILES.items():
        yield ClusterSpec(
            name=name, target=f"meshwright_planner.clusters.registry:{attribute}", summary=summary
        )
