"""The cost of one step of a configuration whose placements are known: seconds, memory, collectives.

`cost` asks the strategy of each axis in turn. The strategy that divides the model by modules comes first, because the
others plan for one stage of it. The strategy that sums gradients comes last, because it overlaps with what is left of
the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.strategy import (
    CollectiveUse,
    Link,
    ModelSizes,
    ParameterSize,
    PipelineQuery,
    SearchRequest,
    Stall,
    StepContext,
    StrategyCost,
    Survey,
)
from meshwright_planner.cost.operations import OPTIMIZERS, optimizer_seconds, update_of
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED, Basis, Setting, placements
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.evaluation.row_collectives import row_collectives
from meshwright_planner.evaluation.stage_recompute import RecomputeVariants, StageRecompute
from meshwright_planner.memory.module_work import inside_of
from meshwright_planner.memory.peak import Moment, at_peak
from meshwright_planner.placement.problem import Placement

SUMS = "dp"
"""The axis whose strategy sums gradients, over every axis on which they are partial."""

TRIES = 4
"""Tries of stage-wise recompute. A strategy does not know everything that a rank holds, so each try adds the bytes by which
the last one still exceeded the memory."""


@dataclass(frozen=True)
class _Step:
    """A configuration with its placements, and the values that every part of the cost reads."""

    point: Point
    placed: Placed
    searched: tuple[str, ...]

    @cached_property
    def degrees(self) -> dict[str, int]:
        return dict(self.point.degrees)

    @property
    def basis(self) -> Basis:
        return self.placed.basis

    @property
    def setting(self) -> Setting:
        return self.placed.basis.setting

    @cached_property
    def placement(self) -> Placement:
        """The placement, of all microbatches."""
        return self.placed.repeated(self.point.microbatches)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the training state."""
        return self.degrees.get(SHARED, 1)

    @cached_property
    def surveys(self) -> dict[str, Survey]:
        """Axis of several ranks -> what its strategy found in the model."""
        return {axis: survey for axis, survey in self.basis.surveys.items() if self.degrees[axis] > 1}

    @cached_property
    def dividing(self) -> str | None:
        """The axis whose ranks hold different modules; None where every rank runs the whole model."""
        strategies = self.setting.strategies.items()
        return next((axis for axis, s in strategies if s.divides and self.degrees[axis] > 1), None)

    @cached_property
    def partial(self) -> list[str]:
        """The axes on which gradients are partial until they are summed."""
        strategies = self.setting.strategies.items()
        return [
            a for a, s in strategies if s.gradient == "deferred" and not s.gathers and self.degrees[a] > 1
        ]

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by part before any strategy divides them."""
        memory = dict(self.placed.memory)
        memory["activations"] *= self.point.microbatches
        if self.setting.dtype is not None and self.shards == 1:
            # the copies of the parameters in the precision of the plan
            memory["parameters"] += math.ceil(self.placed.copies)
        return memory

    def costed_axes(self, axis: str) -> str:
        """The axes that the strategy of `axis` communicates over: "dp+cp" for one sum of gradients over both."""
        return "+".join(self.partial) if axis == SUMS and self.partial else axis


@dataclass(frozen=True)
class _Division:
    """The cost of dividing the model by modules, and the request to the other strategies that follows from it.

    Args:
        cost: of the strategy that divides; neutral where none does.
        request: sizes and seconds of one rank of a stage.
        recompute: modules that run again, as the placement or the strategy decided.
        held: axis -> bytes of the parameters of its survey on one rank, of all and of the trained ones.
    """

    cost: StrategyCost
    request: SearchRequest
    recompute: tuple[RecomputeRule, ...]
    held: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class _AxisCost:
    """What one strategy adds to a step, and the axes that it communicates over."""

    axis: str
    axes: str
    cost: StrategyCost


def cost(
    point: Point,
    placed: Placed,
    searched: tuple[str, ...],
    stage_recompute: StageRecompute | None = None,
    rough: bool = False,
    beyond: float = math.inf,
) -> Candidate:
    """The candidate with the degrees of `point` (of every axis) and these placements on the axes that were `searched`.

    `stage_recompute`: blocks that stages may recompute, and bytes that they must free; `rough`, `beyond`: `estimate` and
    `cutoff_seconds` of PipelineQuery.

    Raises:
        PlanError: a strategy does not support the configuration.
    """
    step = _Step(point, placed, searched)
    division = _divided(step, stage_recompute, rough, beyond)
    costs = _strategy_costs(step, division)
    exposed, hidden, uses = _communication(step, division.cost, costs)
    memory, updated = _memory_at_peak(step, division, costs)
    return _candidate(step, division, costs, exposed, hidden, uses, memory, updated)


def _common_request(step: _Step, rough: bool, beyond: float) -> SearchRequest:
    """The request that all strategies share: sizes and seconds of one rank that runs the whole model."""
    basis, setting, placed, point = step.basis, step.setting, step.placed, step.point
    placement, memory, times, cluster = step.placement, step.memory, point.microbatches, step.setting.cluster
    # communication overlaps with compute only where it does not take the cores that compute needs
    hides = cluster.hides_communication
    return replace(
        basis.request(),
        options={**setting.options, **dict(point.way)},
        batch_size=max(1, math.ceil(setting.batch.size / basis.batch_factor(step.degrees))),
        sizes=ModelSizes(
            parameter_bytes=memory["parameters"],
            gradient_bytes=memory["gradients"],
            activation_bytes=memory["activations"],
            flops=placed.flops * times,
            layers=max((len(g) for g in placed.problem.quotient.groups), default=1),
            attention=tuple(replace(use, count=use.count * times) for use in placed.attention),
            units=placed.summed(step.degrees, (SHARED,)) if step.shards > 1 else (),
            state_bytes=_state_bytes(step),
        ),
        step=StepContext(
            backward_seconds=(placement.compute_seconds - placement.forward_seconds) * hides,
            forward_seconds=placement.forward_seconds * hides,
            zero_stage=point.stage,
            degrees=dict(step.degrees),
            microbatches=times,
            call_seconds=0.0 if cluster.hides_launch else cluster.launch_s,
            byte_seconds=1 / cluster.streams,
            recompute=bool(placed.recompute),
            accelerated=cluster.accelerated,
        ),
        pipeline=PipelineQuery(estimate=rough, cutoff_seconds=beyond),
    )


def _state_bytes(step: _Step) -> int:
    """Bytes of parameters, gradients and optimizer states that a rank would hold of the whole model."""
    memory, shards = step.memory, step.shards
    parameters = memory["parameters"] / (shards if step.point.stage == 3 else 1)
    return math.ceil(parameters + memory["gradients"] + memory["optimizer"] / shards)


def _divided(step: _Step, stage_recompute: StageRecompute | None, rough: bool, beyond: float) -> _Division:
    """Ask the strategy that divides the model by modules, if there is one."""
    axis, degrees, placed, setting = step.dividing, step.degrees, step.placed, step.setting
    request, divided, recompute = _common_request(step, rough, beyond), StrategyCost(), placed.recompute
    if axis is not None:
        problem = placed.problem
        query = replace(
            request.pipeline,
            work=placed.work,
            shared_cores=setting.cluster.shared_core_factors(degrees[axis]),
            scalar_flows=problem.quotient.once("numbers", lambda: problem.tape.numbers),
            calls=problem.tape.calls,
            example=(setting.batch.args, setting.batch.kwargs),
        )
        if stage_recompute is not None:
            query = replace(
                query,
                recompute_variants=stage_recompute.variants.work,
                bytes_to_free=stage_recompute.bytes_to_free,
            )
        asking = replace(request, survey=step.basis.surveys.get(axis), pipeline=query)
        divided = setting.strategies[axis].cost(asking, degrees[axis], step.basis.link(degrees, axis))
        if stage_recompute is not None and divided.recompute:
            recompute = stage_recompute.variants.rules(divided.recompute)
        part = 1 / degrees[axis]
        request = inside_of(request, divided, math.ceil)
        units = placed.summed(degrees, (SHARED,), divided.held_parameters) if step.shards > 1 else ()
        attention = tuple(replace(use, count=math.ceil(use.count * part)) for use in request.sizes.attention)
        request = replace(
            request,
            sizes=replace(request.sizes, units=units, attention=attention),
            step=replace(request.step, stages=max(1, len(divided.stages) // degrees[axis])),
        )
    holds = divided.held_parameters
    held = {
        name: placed.survey_bytes(survey.parameters if holds is None else survey.parameters & holds)
        for name, survey in step.surveys.items()
    }
    return _Division(divided, request, recompute, held)


def _strategy_costs(step: _Step, division: _Division) -> list[_AxisCost]:
    """The cost of every strategy with several ranks, the sum of gradients last."""
    strategies, degrees = step.setting.strategies, step.degrees
    # the link over which ranks share training state, and for how long in the backward pass
    shared: tuple[Link, float] | None = None
    costs = []
    for axis, strategy in sorted(strategies.items(), key=lambda item: item[0] == SUMS):
        axes = step.costed_axes(axis)
        if degrees[axis] <= 1 and not (axis == SUMS and step.partial):
            continue
        degree, link = math.prod(degrees[name] for name in axes.split("+")), step.basis.link(degrees, axes)
        if axis == step.dividing:
            axis_cost = division.cost
        else:
            axis_cost = strategy.cost(_axis_request(step, division, axis, link, shared), degree, link)
        costs.append(_AxisCost(axis, axes, axis_cost))
        if strategy.gathers:
            shared = (link, _backward_seconds(axis_cost, link, degree))
    return costs


def _axis_request(
    step: _Step, division: _Division, axis: str, link: Link, shared: tuple[Link, float] | None
) -> SearchRequest:
    """The request to the strategy of one axis; `shared`: as for `_hiding_seconds`."""
    request, survey, holds = division.request, step.basis.surveys.get(axis), division.cost.held_parameters
    # gradients that ranks share are summed over the replicas of each shard
    parts = 1 if step.setting.strategies[axis].gathers else step.shards
    parameters, trained = division.held.get(axis, (0.0, 0.0))
    elsewhere = sum(
        (1 - 1 / step.degrees[other]) * size for other, (_, size) in division.held.items() if other != axis
    )
    gradient_bytes = math.ceil(request.sizes.gradient_bytes / parts) - math.ceil(elsewhere / parts)
    modules = [] if survey is None else _held_modules(survey.modules, holds)
    sizes = replace(
        request.sizes,
        surveyed_bytes=math.ceil(parameters),
        surveyed_gradient_bytes=math.ceil(trained / parts),
        gradient_bytes=max(0, gradient_bytes),
        module_inputs=step.placed.entering(modules, step.point.microbatches),
    )
    context = request.step
    if axis == SUMS:
        # with shared gradients, or several stages, no unit has its whole gradients in buckets of its own
        whole = step.shards == 1 and step.dividing is None
        sizes = replace(sizes, units=step.placed.summed(step.degrees, step.partial) if whole else ())
        context = replace(context, backward_seconds=_hiding_seconds(request, link, shared))
    return replace(request, survey=survey, sizes=sizes, step=context)


def _communication(
    step: _Step, divided: StrategyCost, costs: Sequence[_AxisCost]
) -> tuple[dict[str, float], dict[str, float], list[tuple[str, CollectiveUse]]]:
    """Axes -> exposed seconds, axes -> hidden seconds, and the collectives of strategies with their axes."""
    # the order of the strategies is the order in a plan
    exposed = dict.fromkeys(map(step.costed_axes, step.setting.strategies), 0.0)
    hidden: dict[str, float] = {}
    uses: list[tuple[str, CollectiveUse]] = []
    for entry in costs:
        axes, seconds = entry.axes, entry.cost
        # during a collective compute is slower, as if a part of the collective were exposed
        slowdown = seconds.overlapped_seconds * step.setting.cluster.interference
        exposed[axes] = exposed.get(axes, 0.0) + seconds.exposed_seconds + slowdown
        hidden[axes] = hidden.get(axes, 0.0) + seconds.overlapped_seconds - slowdown
        uses += ((axes, use) for use in seconds.collectives)
    busy = divided.compute - divided.idle
    inside = step.placement.communication_seconds * divided.model_share
    for axis, share in zip(step.searched, step.placed.problem.shares(step.placed.placement)):
        exposed[axis] = exposed.get(axis, 0.0) + inside * share * busy
    for axis, use, each in row_collectives(step.basis, step.placed, step.point.microbatches, step.degrees):
        exposed[axis] = exposed.get(axis, 0.0) + use.count * each * busy
        uses.append((axis, use))
    return exposed, hidden, uses


def _memory_at_peak(
    step: _Step, division: _Division, costs: Sequence[_AxisCost]
) -> tuple[dict[str, int], int]:
    """Bytes by part when the rank holds most, and bytes of the parameters that its optimizer updates."""
    memory, updated, shards, divided = dict(step.memory), step.memory["gradients"], step.shards, division.cost
    for entry in costs:
        updated = math.ceil(updated * entry.cost.optimizer)
        for part in ("parameters", "gradients", "optimizer", "activations"):
            memory[part] = math.ceil(memory[part] * getattr(entry.cost, part))
    if divided.peak is not None:
        meshed = any(degree > 1 for axis, degree in step.degrees.items() if axis != step.dividing)
        alive = 0.0 if meshed else step.placed.replay.more_without_mesh * divided.peak.loss_microbatches
        fullest = Moment(1.0, divided.peak.gradients, divided.peak.transient_bytes + alive)
        return at_peak(memory, (fullest, step.placed.update), stepped=updated), updated
    # with stages, gradients are in other memory until the step is over
    lasting = max((c.cost.persistent_gradients for c in costs), default=0.0) if step.dividing is None else 0.0
    bucket: float = max((c.cost.bucket_bytes for c in costs), default=0)
    outside = sum(trained / step.degrees[axis] for axis, (_, trained) in division.held.items())
    bucket = min(bucket, max(0.0, memory["gradients"] - outside))
    if shards > 1:
        # gradients are whole until all of a unit are there, except those in buffers that stay
        bucket = max(bucket, _largest_unit(division.request.sizes.units) / (shards if lasting else 1))
    if step.dividing is not None:
        bucket = math.inf
    always = lasting * memory["gradients"]
    moments = step.placed.moments
    return at_peak(memory, moments, bucket, always, copies=shards == 1, stepped=updated), updated


def _candidate(
    step: _Step,
    division: _Division,
    costs: Sequence[_AxisCost],
    exposed: Mapping[str, float],
    hidden: Mapping[str, float],
    uses: list[tuple[str, CollectiveUse]],
    memory: dict[str, int],
    updated: int,
) -> Candidate:
    """The candidate of these parts."""
    setting, placement, divided, degrees = step.setting, step.placement, division.cost, step.degrees
    waiting = 0.0
    fields: dict[str, Any] = {}
    for entry in costs:
        fields.update(entry.cost.fields)
        if entry.axis != step.dividing:
            waiting += _waiting_seconds(entry.cost.stall, divided, setting.cluster.interference)
    inside = placement.communication_seconds * divided.model_share
    return Candidate(
        degrees={a: d for a, d in degrees.items() if d > 1 or not setting.strategies[a].optional},
        stage=step.point.stage if step.shards > 1 else 0,
        searched=step.searched,
        problem=step.placed.problem,
        placement=placement,
        compute_seconds=placement.compute_seconds * (divided.compute - divided.idle),
        # while other ranks wait, collectives inside of stages get more cores, just as compute does
        bubble_seconds=(placement.compute_seconds + inside) * divided.idle + waiting,
        stages=_stage_shares(placement, divided),
        between=divided.full_batch_share,
        exposed=exposed,
        hidden=hidden,
        optimizer_seconds=_update_seconds(setting, updated, step.placed.trained(divided.held_parameters)),
        memory=memory,
        limit=setting.limit,
        allowed=setting.allowed,
        uses=uses,
        fields=fields,
        placements=placements(setting.strategies, step.basis.surveys, degrees),
        strategy_modules=tuple(m for survey in step.surveys.values() for m in survey.modules),
        notes=(
            *(note for survey in step.surveys.values() for note in survey.notes),
            *(note for entry in costs for note in entry.cost.notes),
        ),
        point=step.point,
        recompute=division.recompute,
    )


def with_stage_recompute(candidate: Candidate, placed: Placed, variants: RecomputeVariants) -> Candidate:
    """The candidate where each stage recomputes as much as it must to fit the memory, or the nearest to that.

    Raises:
        PlanError: a strategy does not support the configuration.
    """
    bytes_to_free = 0
    for _ in range(TRIES):
        if not candidate.excess_bytes:
            break
        bytes_to_free += candidate.excess_bytes
        request = StageRecompute(variants, bytes_to_free)
        smaller = cost(candidate.point, placed, candidate.searched, request)
        if smaller.total_bytes >= candidate.total_bytes:
            break
        candidate = smaller
    return candidate


def _waiting_seconds(stall: Stall, divided: StrategyCost, interference: float) -> float:
    """Seconds that the ranks of other stages wait for a strategy's communication inside of forwards and backwards."""
    longer = stall.exposed + stall.overlapped * interference
    return longer * stall.microbatches * divided.straggler_delay[stall.microbatches > 1]


def _backward_seconds(strategy_cost: StrategyCost, link: Link, degree: int) -> float:
    """Seconds of a strategy's collectives in the backward pass."""
    return sum(
        use.count * link.seconds(use.kind, use.nbytes, degree)
        for use in strategy_cost.collectives
        if use.phase == "backward"
    )


def _hiding_seconds(request: SearchRequest, link: Link, shared: tuple[Link, float] | None) -> float:
    """Seconds of the backward pass that a sum of gradients over `link` may overlap with.

    `shared`: the link over which ranks share training state, and for how long. Over the same link both take turns.
    """
    if request.step.stages:
        return 0.0
    if shared is None or shared[0].name != link.name:
        return request.step.backward_seconds
    return max(0.0, request.step.backward_seconds - shared[1])


def _update_seconds(setting: Setting, nbytes: float, parameters: int) -> float:
    """Seconds of the optimizer's step over this many parameters of this many bytes."""
    if setting.cost_model is None:
        return optimizer_seconds(setting.cluster, nbytes, OPTIMIZERS[setting.optimizer], parameters)
    return setting.cost_model.operation(update_of(setting.optimizer, nbytes, parameters))


def _largest_unit(units: Iterable[Iterable[ParameterSize]]) -> float:
    """Bytes of the gradients of the unit that has most."""
    # equal units are one object, so that each kind is summed once
    different = {id(unit): unit for unit in units}.values()
    return max((sum(p.numel * p.itemsize[0] for p in unit if p.trainable) for unit in different), default=0.0)


def _stage_shares(placement: Placement, divided: StrategyCost) -> tuple[tuple[float, float], ...]:
    """Per stage, forward and backward as parts of the compute of the whole model; one stage where nothing is divided."""
    if not divided.stages:
        total = placement.compute_seconds
        forward = placement.forward_seconds / total if total else 0.0
        return ((forward, 1.0 - forward),)
    forwards = divided.forwards or (1 / 3,) * len(divided.stages)
    return tuple(
        (share * forward, share * (1 - forward))
        for share, forward in zip(divided.stages, forwards, strict=True)
    )


def _held_modules(modules: Iterable[str], holds: frozenset[str] | None) -> list[str]:
    """The modules that have a parameter which the rank holds."""
    return list(modules) if holds is None else [module for module in modules if module in _modules_of(holds)]


@functools.lru_cache(maxsize=256)
def _modules_of(names: frozenset[str]) -> frozenset[str]:
    """All modules that contain a parameter of these names."""
    return frozenset(name[:end] for name in names for end, sign in enumerate(name) if sign == ".")
