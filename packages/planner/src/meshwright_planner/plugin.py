"""What this distribution registers: planners and clusters."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import ClusterSpec, PlannerSpec, hookimpl


@hookimpl
def meshwright_planners() -> Iterator[PlannerSpec]:
    """The planners of this package."""
    yield PlannerSpec(
        name="eager",
        target="meshwright_planner.planners.eager:EagerPlanner",
        summary="one eager run, every combination of degrees, placements by integer programming",
    )
    yield PlannerSpec(
        name="manual",
        target="meshwright_planner.planners.manual:ManualPlanner",
        summary="degrees as given (what is left goes to dp), placements by integer programming",
    )
    yield PlannerSpec(
        name="alpa",
        target="meshwright_planner.planners.alpa:AlpaPlanner",
        summary="Alpa's search (OSDI 2022): integer programs inside of operators, dynamic programming between them",
    )
    yield PlannerSpec(
        name="mcmc",
        target="meshwright_planner.planners.mcmc:McmcPlanner",
        summary="FlexFlow's search (MLSys 2019): a Markov chain over configurations, seeded",
    )


@hookimpl
def meshwright_clusters() -> Iterator[ClusterSpec]:
    """The clusters of this package, a file each."""
    from meshwright_planner.machines.known import PROFILES

    for attribute, (name, summary) in PROFILES.items():
        yield ClusterSpec(name=name, target=f"meshwright_planner.machines.known:{attribute}", summary=summary)
