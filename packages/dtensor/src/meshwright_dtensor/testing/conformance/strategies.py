"""Checks of a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from meshwright_dtensor.cluster.links import CollectiveKind
from meshwright_dtensor.errors import MeshwrightError, PlanError
from meshwright_dtensor.plan.fields import ParameterRule
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plugins import Registered
from meshwright_dtensor.strategy import SearchRequest, Strategy, StrategyCost
from meshwright_dtensor.strategy.cost import Phase
from meshwright_dtensor.strategy.plan_request import KEYWORDS
from meshwright_dtensor.strategy.strategy import GradientKind
from meshwright_dtensor.testing.conformance.models import LINK, batch, model, requests
from meshwright_dtensor.testing.conformance.on_ranks import check_one_device, planned
from meshwright_dtensor.testing.conformance.report import Check, NotChecked, Tools, instance, require, told

FACTORS = ("parameters", "gradients", "optimizer", "activations", "compute")
_REFUSED = "refused"
SECONDS = ("exposed_seconds", "overlapped_seconds")


def strategy_of(plugin: Registered[Any]) -> Strategy:
    """The strategy."""
    made: Strategy = instance(plugin, Strategy, "meshwright_dtensor.strategy")
    return made


def legal_degrees(plugin: Registered[Any], strategy: Strategy) -> Iterator[tuple[SearchRequest, list[int]]]:
    """The requests, each with what the strategy surveyed, and the degrees that it answers."""
    survey = told(plugin, "survey(model)", "return a Survey, or None", lambda: strategy.survey(model()))
    for plain in requests():
        request = replace(plain, survey=survey)
        question = f"degrees(request) for world_size={request.world_size}, batch_size={request.batch_size}"
        fix = "return the legal degrees, such as divisors(request.world_size)"
        degrees = told(plugin, question, fix, lambda request: list(strategy.degrees(request)), request)
        for degree in degrees:
            require(
                isinstance(degree, int) and degree >= 1 and request.world_size % degree == 0,
                plugin,
                f"{question} has {degree!r}, which does not divide the {request.world_size} ranks",
                "return divisors of request.world_size, as meshwright_dtensor.strategy.divisors gives them",
            )
        require(
            degrees == sorted(set(degrees)) and 1 in degrees,
            plugin,
            f"{question} is {degrees}",
            "return ascending degrees without repeats, with 1 among them: 1 turns the axis off",
        )
        yield request, degrees


def check_class(plugin: Registered[Any], tools: Tools) -> None:
    """The target is a Strategy of that name and axis, with legal class attributes."""
    strategy = strategy_of(plugin)
    require(
        getattr(strategy, "axis", None) == plugin.record.axis,
        plugin,
        f"its class has axis {getattr(strategy, 'axis', None)!r}, its record {plugin.record.axis!r}",
        f"set axis = {plugin.record.axis!r} in the class",
    )
    require(
        strategy.gradient in get_args(GradientKind),
        plugin,
        f"gradient is {strategy.gradient!r}",
        'set "complete" if autograd gives a replicated parameter its whole gradient, "deferred" if it gives this rank\'s part',
    )
    require(
        isinstance(strategy.order, int),
        plugin,
        f"order is {strategy.order!r}",
        "give a whole number: small is outermost in the mesh (data 10, tensor 40)",
    )
    overridden = type(strategy).divide is not Strategy.divide
    require(
        strategy.divides == overridden,
        plugin,
        f"divides is {strategy.divides!r}, and divide() is {'' if overridden else 'not '}defined",
        "define divide() exactly if ranks hold different modules, and set divides = True then",
    )


def check_degrees(plugin: Registered[Any], tools: Tools) -> None:
    """Degrees divide the world, ascend, contain 1, and are the same for equal requests."""
    strategy = strategy_of(plugin)
    before = dict(vars(strategy))
    for request, degrees in legal_degrees(plugin, strategy):
        require(
            list(strategy.degrees(request)) == degrees,
            plugin,
            f"two calls of degrees() with world_size={request.world_size} differ",
            "make the answer depend on the request alone: ranks plan separately and have to agree",
        )
    require(
        dict(vars(strategy)) == before,
        plugin,
        "degrees() stores something in the strategy",
        "keep strategies without state: one object serves many models; Survey.details is for what was found in one",
    )


def check_costs(plugin: Registered[Any], tools: Tools) -> None:
    """Costs are finite, collectives are of a known kind, and degree 1 costs nothing."""
    strategy = strategy_of(plugin)
    for request, degrees in legal_degrees(plugin, strategy):
        for degree in degrees:
            for cost, way in _costs(plugin, strategy, request, degree):
                _check_cost(
                    plugin, cost, f"cost(request, {degree}, link){f' with {dict(way)}' if way else ''}"
                )
                require(
                    degree > 1 or not (cost.collectives or cost.exposed_seconds or cost.overlapped_seconds),
                    plugin,
                    f"cost(request, 1, link) is {cost.exposed_seconds + cost.overlapped_seconds:g} s of communication",
                    "return StrategyCost() where degree == 1: one rank communicates with nobody",
                )


def _costs(
    plugin: Registered[Any], strategy: Strategy, request: SearchRequest, degree: int
) -> Iterator[tuple[StrategyCost, Mapping[str, Any]]]:
    """The cost of each way of a degree, question twice."""
    fix = "return a StrategyCost for every degree that degrees() gives"
    question = replace(request, step=replace(request.step, degrees={strategy.axis: degree}))
    for way in told(plugin, f"ways(request, {degree})", fix, lambda: list(strategy.ways(question, degree))):
        chosen = replace(question, options={**question.options, **way})
        name = f"cost(request, {degree}, link)"
        cost, again = (told(plugin, name, fix, _asked, strategy, chosen, degree) for _ in range(2))
        if cost is _REFUSED:
            continue
        require(isinstance(cost, StrategyCost), plugin, f"{name} returned {cost!r}", fix)
        require(
            # nan is unequal to itself
            repr(cost) == repr(again),
            plugin,
            f"two calls of {name} differ",
            "make the answer depend on its arguments alone: ranks plan separately and have to agree",
        )
        yield cost, way


def _asked(strategy: Strategy, request: SearchRequest, degree: int) -> StrategyCost | str:
    """The cost; _REFUSED where the strategy raises PlanError, with which it may refuse a degree for one model."""
    try:
        return strategy.cost(request, degree, LINK)
    except PlanError:
        return _REFUSED


def _check_cost(plugin: Registered[Any], cost: StrategyCost, name: str) -> None:
    for field in (*SECONDS, *FACTORS):
        value = getattr(cost, field)
        least = "more than 0" if field in FACTORS else "0 or more"
        require(
            isinstance(value, (int, float))
            and math.isfinite(value)
            and (value > 0 or value == 0 == (field in FACTORS)),
            plugin,
            f"{name} has {field}={value!r}",
            f"give a finite number of {least} {'(a factor, 1.0 is unchanged)' if field in FACTORS else 'seconds'}",
        )
    sent = cost.communication
    require(
        sent is None or (isinstance(sent, (int, float)) and math.isfinite(sent) and sent >= 0),
        plugin,
        f"{name} has communication={sent!r}",
        "give a finite factor of 0 or more, or None for that on its compute",
    )
    for use in cost.collectives:
        wrong = [
            text
            for text, bad in (
                (f"kind={use.kind!r}", use.kind not in get_args(CollectiveKind)),
                (f"phase={use.phase!r}", use.phase not in get_args(Phase)),
                (f"nbytes={use.nbytes!r}", not use.nbytes >= 0),
                (f"count={use.count!r}", not use.count >= 0),
            )
            if bad
        ]
        require(
            not wrong,
            plugin,
            f"{name} has a collective with {', '.join(wrong)}",
            f"use the kinds {', '.join(get_args(CollectiveKind))}, the phases {', '.join(get_args(Phase))}, numbers of 0 or more",
        )


def check_states(plugin: Registered[Any], tools: Tools) -> None:
    """States are legal, divide what they shard, and follow a rule of the plan where there is one."""
    strategy, degree = strategy_of(plugin), 2
    plan = ParallelPlan(
        world_size=degree, degrees={strategy.axis: degree}, strategies={strategy.axis: plugin.name}
    )
    parameters = {name: tuple(p.shape) for name, p in model().named_parameters()} | {
        "scale": (),
        "odd": (7, 5),
    }
    for name, shape in parameters.items():
        question = f"parameter_state({name!r}, {shape}, plan, {degree})"
        fix = 'return "I" (replicated) or the number of a tensor dim; planned_state(plan, fqn, axis) is the default'
        state = told(plugin, question, fix, _stored, strategy, name, shape, plan, degree)
        replicated = "X" if strategy.gradient == "deferred" else "I"
        require(
            (isinstance(state, int) and 0 <= int(state) < len(shape)) or state == replicated,
            plugin,
            f"{question} is {state!r}",
            f"return a tensor dim of 0..{len(shape) - 1}, or {replicated!r}: replicated, "
            f"with gradient = {strategy.gradient!r}",
        )
    for name, value in batch().items():
        shape = tuple(value.shape)
        state = told(
            plugin,
            f"input_state({name!r}, {shape}, {shape[0]}, {degree})",
            'return "I" or the number of a dim',
            strategy.input_state,
            name,
            shape,
            shape[0],
            degree,
        )
        require(
            state == "I" or (isinstance(state, int) and 0 <= int(state) < len(shape)),
            plugin,
            f"input_state({name!r}, {shape}, {shape[0]}, {degree}) is {state!r}",
            f'return "I", or a dim of 0..{len(shape) - 1}',
        )


def check_rules_of_the_plan(plugin: Registered[Any], tools: Tools) -> None:
    """A rule that a person wrote into the plan decides, not the strategy."""
    strategy = strategy_of(plugin)
    if strategy.gathers or strategy.divides:
        raise NotChecked(
            f"strategy {plugin.name!r} decides by itself how parameters are stored (gathers, divides)"
        )
    axis = strategy.axis
    for name, shape, dim in (("wte.weight", (24, 16), 1), ("h.0.up.weight", (32, 16), 1)):
        rule = ParameterRule(pattern=name, placement={axis: f"S({dim})"})
        plan = ParallelPlan(
            world_size=2, degrees={axis: 2}, strategies={axis: plugin.name}, parameters=[rule]
        )
        state = strategy.parameter_state(name, shape, plan, 2)
        require(
            state == dim,
            plugin,
            f"the plan says {name}: {{{axis}: S({dim})}}, and parameter_state() is {state!r}",
            "call planned_state(plan, fqn, self.axis) first and return its state unless that is 'I'",
        )


def _stored(strategy: Strategy, name: str, shape: tuple[int, ...], plan: ParallelPlan, degree: int) -> Any:
    if strategy.gathers:
        return strategy.parameter_state_given(name, shape, plan, degree, {})
    return strategy.parameter_state(name, shape, plan, degree)


def check_on_ranks(plugin: Registered[Any], tools: Tools) -> None:
    """Degree 2 on two real ranks: losses and gradients of one device."""
    strategy = strategy_of(plugin)
    purpose = "running a strategy"
    try:
        axis = strategy.axis
        pin: dict[str, Any] = {KEYWORDS[axis]: 2} if axis in KEYWORDS else {"degrees": {axis: 2}}
        plan = planned(plugin, purpose, **pin)
        if plan.degree(axis) != 2:
            raise NotChecked(f"the planner's plan for the small model has no {axis}=2")
        plan = plan.replace(strategies={**plan.strategies, axis: plugin.name})
    except MeshwrightError as error:
        raise NotChecked(f"the small model has no plan with {strategy.axis}=2: {error}") from error
    fix = "look at parameter_state(), input_state() and gradient, and at attach() if the strategy has an engine of its own"
    check_one_device(plugin, tools, plan, purpose, fix)


CHECKS: tuple[Check, ...] = (
    check_class,
    check_degrees,
    check_costs,
    check_states,
    check_rules_of_the_plan,
    check_on_ranks,
)
