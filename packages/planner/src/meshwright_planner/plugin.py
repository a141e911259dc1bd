"""What this distribution registers: two planners and three clusters."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import ClusterSpec, PlannerSpec, hookimpl


@hookimpl
def meshwright_planners() -> Iterator[PlannerSpec]:
    """The planners of this package."""
    yield PlannerSpec(
        name="eager",
        target="meshwright_planner.eager:EagerPlanner",
        summary="one eager run, every combination of degrees, placements by integer programming",
    )
    yield PlannerSpec(
        name="manual",
        target="meshwright_planner.manual:ManualPlanner",
        summary="degrees as given (what is left goes to dp), placements by integer programming",
    )


@hookimpl
def meshwright_clusters() -> Iterator[ClusterSpec]:
    """The clusters of this package."""
    yield ClusterSpec(
        name="laptop-cpu",
        target="meshwright_planner.clusters:LAPTOP_CPU",
        summary="processes on one machine, gloo over loopback",
    )
    yield ClusterSpec(
        name="dgx-a100",
        target="meshwright_planner.clusters:DGX_A100",
        summary="8 x A100 80 GB per node, NVLink, 8 x 200 Gb/s InfiniBand",
    )
    yield ClusterSpec(
        name="dgx-h100",
        target="meshwright_planner.clusters:DGX_H100",
        summary="8 x H100 80 GB per node, NVLink, 8 x 400 Gb/s InfiniBand",
    )
