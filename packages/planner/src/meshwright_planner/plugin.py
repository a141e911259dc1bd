"""The plugin of this distribution: planners, cost models and clusters."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import ClusterSpec, CostModelSpec, PlannerSpec, hookimpl

meshwright_hook_api = "1.0"

_PLANNERS = {
    "eager": "one eager run, all combinations of degrees, placements by integer programming",
    "manual": "degrees as given (remaining ranks go to dp), placements by integer programming",
    "alpa": "Alpa's search (OSDI 2022): integer programs inside operators, dynamic programming between them",
    "mcmc": "FlexFlow's search (MLSys 2019): a seeded Markov chain over configurations",
}
_COST_MODELS = {
    "roofline": "datasheet peaks with the cluster's efficiencies; ignores measurements",
    "measured": "the curves of `meshwright calibrate`; refuses a cluster without them",
}


@hookimpl
def meshwright_planners() -> Iterator[PlannerSpec]:
    """The planners of this package, one file each."""
    for name, summary in _PLANNERS.items():
        target = f"meshwright_planner.planners.{name}:{name.title()}Planner"
        yield PlannerSpec(name=name, target=target, summary=summary)


@hookimpl
def meshwright_cost_models() -> Iterator[CostModelSpec]:
    """The cost models of this package."""
    for name, summary in _COST_MODELS.items():
        target = f"meshwright_planner.cost.cost_models:{name.title()}"
        yield CostModelSpec(name=name, target=target, summary=summary)


@hookimpl
def meshwright_clusters() -> Iterator[ClusterSpec]:
    """The clusters of this package, one file each."""
    from meshwright_planner.clusters.registry import PROFILES

    for attribute, (name, summary) in PROFILES.items():
        target = f"meshwright_planner.clusters.registry:{attribute}"
        yield ClusterSpec(name=name, target=target, summary=summary)
