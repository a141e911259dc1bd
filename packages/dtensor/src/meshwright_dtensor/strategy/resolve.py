"""The strategies of a plan, and the states that they give to parameters. Needs no model."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, StrategySpec
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy.strategy import Strategy
from meshwright_dtensor.utils.names import listing


def resolve_strategies(plan: ParallelPlan, host: PluginHost, world_size: int) -> tuple[Strategy, ...]:
    """The strategy of each mesh axis, in mesh order; checks that the plan is valid and fits the run.

    Raises PlanError if the plan is invalid or names a strategy of another axis, PluginError if one is not installed.
    """
    installed = host.strategies()
    plan.validate_for(world_size, sorted({r.record.axis for r in installed.values()}))
    strategies: list[Strategy] = []
    for axis in plan.degrees:
        owners = [name for name, registered in installed.items() if registered.record.axis == axis]
        name = plan.strategies.get(axis)
        if name is None:
            if len(owners) != 1:
                rule = f"{len(owners)} strategies work on this axis: say which"
                raise PlanError(f"strategies.{axis}", None, rule, listing(owners))
            name = owners[0]
        registered = host.get(StrategySpec, name)
        if registered.record.axis != axis:
            rule = f"strategy {name!r} works on axis {registered.record.axis!r}"
            raise PlanError(f"strategies.{axis}", name, rule, listing(owners))
        strategies.append(registered.load()())
    return tuple(strategies)


def parameter_states(
    fqn: str, shape: tuple[int, ...], plan: ParallelPlan, strategies: Sequence[Strategy]
) -> tuple[State, ...]:
    """State per mesh axis, in mesh order, in which parameter `fqn` of global `shape` is stored."""
    states: dict[str, State] = {}
    # strategies that gather are last, since their states depend on the others
    for strategy in sorted(strategies, key=lambda strategy: strategy.gathers):
        axis, degree = strategy.axis, plan.degree(strategy.axis)
        if degree == 1:
            states[axis] = "I"
        elif strategy.gathers:
            states[axis] = strategy.parameter_state_given(fqn, shape, plan, degree, dict(states))
        else:
            states[axis] = strategy.parameter_state(fqn, shape, plan, degree)
    return tuple(states[axis] for axis in plan.degrees)
