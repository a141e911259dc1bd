"""The cost of one step of a configuration whose placements are known: seconds, memory, collectives.

`cost` asks the strategy of each axis in turn. The strategy that divides the model by modules comes first, because the
others plan for one stage of it. The strategy that sums gradients comes last, because it overlaps with what is left of
the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright_dtensor.strategy import CollectiveUse, Link, StrategyCost
from meshwright_dtensor.strategy.request import ModelSizes, PipelineQuery, SearchRequest, StepContext
from meshwright_planner.cost.operations import optimizer_seconds, update_of
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED, placements
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.evaluation.stage_recompute import RecomputeVariants
from meshwright_planner.memory.peak import Moment, at_peak
from meshwright_planner.placement.problem import Placement

SUMS = "dp"
"""The axis whose strategy sums gradients, over every axis on which they are partial."""

TRIES = 4
"""Tries of stage-wise recompute. A strategy does not know everything that a rank holds, so each try adds the bytes by which
the last one still exceeded the memory."""


class _AxisCost(NamedTuple):
    """What one strategy adds to a step, and the axes that it communicates over."""

    axis: str
    axes: str
    cost: StrategyCost


class _Step:
    """A configuration with its placements, and the values that every part of the cost reads.

    Attributes:
        placement: of all microbatches.
        shards: ranks that share one copy of the training state.
        surveys: axis of several ranks -> what its strategy found in the model.
        dividing: the axis whose ranks hold different modules; None where every rank runs the whole model.
        partial: the axes on which gradients are partial until they are summed.
        memory: bytes by part before any strategy divides them.
        divided: the cost of the strategy that divides the model by modules; neutral where none does.
        request: sizes and seconds of one rank of a stage, for all other strategies.
        recompute: modules that run again, as the placement or the strategy decided.
        held: axis -> bytes of the parameters of its survey on one rank, of all and of the trained ones.
    """

    def __init__(self, point: Point, placed: Placed, rough: bool, beyond: float) -> None:
        """`rough`, `beyond`: see `cost`."""
        self.point, self.placed = point, placed
        self.basis, self.setting = placed.basis, placed.basis.setting
        degrees = self.degrees = dict(point.degrees)
        self.placement = placed.repeated(point.microbatches)
        self.shards = degrees.get(SHARED, 1)
        self.surveys = {axis: survey for axis, survey in self.basis.surveys.items() if degrees[axis] > 1}
        parallel = [(axis, s) for axis, s in self.setting.strategies.items() if degrees[axis] > 1]
        self.dividing = next((axis for axis, s in parallel if s.divides), None)
        self.partial = [axis for axis, s in parallel if s.gradient == "deferred" and not s.gathers]
        self.memory = dict(placed.memory)
        self.memory["activations"] *= point.microbatches
        if self.setting.dtype is not None and self.shards == 1:
            # the copies of the parameters in the precision of the plan
            self.memory["parameters"] += math.ceil(placed.copies)
        self.divided, self.recompute = StrategyCost(), placed.recompute
        self.request = self._whole_model(rough, beyond)
        self.held: dict[str, tuple[float, float]] = {}

    def costed_axes(self, axis: str) -> str:
        """The axes that the strategy of `axis` communicates over: "dp+cp" for one sum of gradients over both."""
        return "+".join(self.partial) if axis == SUMS and self.partial else axis

    def _whole_model(self, rough: bool, beyond: float) -> SearchRequest:
        """The request that all strategies share: sizes and seconds of one rank that runs the whole model."""
        setting, placed, point, placement = self.setting, self.placed, self.point, self.placement
        memory, shards, cluster, times = self.memory, self.shards, setting.cluster, point.microbatches
        # communication overlaps with compute only where it does not take the cores that compute needs
        hides = cluster.hides_communication
        # what a rank would hold of the whole model
        state = memory["parameters"] / (shards if point.stage == 3 else 1)
        state = state + memory["gradients"] + memory["optimizer"] / shards
        return SearchRequest(
            world_size=setting.world_size,
            batch_size=max(1, math.ceil(setting.batch.size / self.basis.batch_factor(self.degrees))),
            sequence_length=setting.batch.sequence_length,
            pins=setting.pins,
            options={**setting.options, **dict(point.way)},
            sizes=ModelSizes(
                parameter_bytes=memory["parameters"],
                gradient_bytes=memory["gradients"],
                activation_bytes=memory["activations"],
                flops=placed.flops * times,
                layers=max((len(g) for g in placed.problem.quotient.groups), default=1),
                attention=tuple(replace(use, count=use.count * times) for use in placed.attention),
                units=placed.summed(self.degrees, (SHARED,)) if shards > 1 else (),
                state_bytes=math.ceil(state),
            ),
            step=StepContext(
                backward_seconds=(placement.compute_seconds - placement.forward_seconds) * hides,
                forward_seconds=placement.forward_seconds * hides,
                zero_stage=point.stage,
                degrees=self.degrees,
                microbatches=times,
                call_seconds=0.0 if cluster.hides_launch else cluster.launch_s,
                byte_seconds=1 / cluster.streams,
                recompute=bool(placed.recompute),
                accelerated=cluster.accelerated,
                interference=cluster.interference,
            ),
            pipeline=PipelineQuery(estimate=rough, cutoff_seconds=beyond),
        )

    def divide(self, variants: RecomputeVariants | None, bytes_to_free: int) -> None:
        """Ask the strategy that divides the model by modules, if there is one."""
        axis, placed, setting = self.dividing, self.placed, self.setting
        if axis is not None:
            problem, degree = placed.problem, self.degrees[axis]
            query = replace(
                self.request.pipeline,
                work=placed.work,
                recompute_variants={} if variants is None else variants.work,
                bytes_to_free=bytes_to_free,
                shared_cores=setting.cluster.shared_core_factors(degree),
                scalar_flows=problem.quotient.memo.once("numbers", lambda: problem.tape.numbers),
                calls=problem.tape.calls,
                example=(setting.batch.args, setting.batch.kwargs),
            )
            asking = replace(self.request, survey=self.basis.surveys.get(axis), pipeline=query)
            self.divided = setting.strategies[axis].cost(asking, degree, self.basis.link(self.degrees, axis))
            if variants is not None and self.divided.recompute:
                self.recompute = variants.rules(self.divided.recompute)
            self.request = self._of_one_stage(degree)
        holds = self.divided.held_parameters
        for name, survey in self.surveys.items():
            names = survey.parameters if holds is None else survey.parameters & holds
            self.held[name] = placed.survey_bytes(names)

    def _of_one_stage(self, degree: int) -> SearchRequest:
        """The request to the other strategies where one rank of `degree` holds a part of the modules."""
        request, divided = self.request, self.divided
        sizes, context, busy = request.sizes, request.step, divided.compute - divided.idle
        shared = self.shards > 1
        return replace(
            request,
            sizes=replace(
                sizes,
                parameter_bytes=math.ceil(sizes.parameter_bytes * divided.parameters),
                gradient_bytes=math.ceil(sizes.gradient_bytes * divided.gradients),
                activation_bytes=math.ceil(sizes.activation_bytes * divided.activations),
                flops=sizes.flops * busy,
                units=self.placed.summed(self.degrees, (SHARED,), divided.held_parameters) if shared else (),
                attention=tuple(replace(u, count=math.ceil(u.count * (1 / degree))) for u in sizes.attention),
            ),
            step=replace(
                context,
                forward_seconds=context.forward_seconds * busy,
                backward_seconds=context.backward_seconds * busy * divided.input_gradient_share,
                stages=max(1, len(divided.stages) // degree),
            ),
        )

    def strategy_costs(self) -> list[_AxisCost]:
        """The cost of every strategy with several ranks, the sum of gradients last."""
        strategies, degrees = self.setting.strategies, self.degrees
        # the link over which ranks share training state, and for how long in the backward pass
        shared: tuple[Link, float] | None = None
        costs = []
        for axis, strategy in sorted(strategies.items(), key=lambda item: item[0] == SUMS):
            axes = self.costed_axes(axis)
            if degrees[axis] <= 1 and not (axis == SUMS and self.partial):
                continue
            degree = math.prod(degrees[name] for name in axes.split("+"))
            link = self.basis.link(degrees, axes)
            if axis == self.dividing:
                axis_cost = self.divided
            else:
                axis_cost = strategy.cost(self._axis_request(axis, link, shared), degree, link)
            costs.append(_AxisCost(axis, axes, axis_cost))
            if strategy.gathers:
                backward = (use for use in axis_cost.collectives if use.phase == "backward")
                shared = link, sum(use.count * link.seconds(use.kind, use.nbytes, degree) for use in backward)
        return costs

    def _axis_request(self, axis: str, link: Link, shared: tuple[Link, float] | None) -> SearchRequest:
        """The request to the strategy of one axis; `shared`: as in `strategy_costs`."""
        request, survey, holds = self.request, self.basis.surveys.get(axis), self.divided.held_parameters
        # gradients that ranks share are summed over the replicas of each shard
        parts = 1 if self.setting.strategies[axis].gathers else self.shards
        parameters, trained = self.held.get(axis, (0.0, 0.0))
        others = ((1 - 1 / self.degrees[a]) * size for a, (_, size) in self.held.items() if a != axis)
        elsewhere = sum(others)
        gradient_bytes = math.ceil(request.sizes.gradient_bytes / parts) - math.ceil(elsewhere / parts)
        modules: Sequence[str] = () if survey is None else survey.modules
        if holds is not None:
            modules = [module for module in modules if module in _modules_of(holds)]
        units, context = request.sizes.units, request.step
        if axis == SUMS:
            # with shared gradients, or several stages, no unit has its whole gradients in buckets of its own
            whole = self.shards == 1 and self.dividing is None
            units = self.placed.summed(self.degrees, self.partial) if whole else ()
            hiding = 0.0 if context.stages else context.backward_seconds
            if shared is not None and shared[0].name == link.name:
                # over the same link both take turns
                hiding = max(0.0, hiding - shared[1])
            context = replace(context, backward_seconds=hiding)
        sizes = replace(
            request.sizes,
            surveyed_bytes=math.ceil(parameters),
            surveyed_gradient_bytes=math.ceil(trained / parts),
            gradient_bytes=max(0, gradient_bytes),
            module_inputs=self.placed.entering(modules, self.point.microbatches),
            units=units,
        )
        return replace(request, survey=survey, sizes=sizes, step=context)

    def communication(
        self, searched: tuple[str, ...], costs: Sequence[_AxisCost]
    ) -> tuple[dict[str, float], dict[str, float], list[tuple[str, CollectiveUse]]]:
        """Axes -> exposed seconds, axes -> hidden seconds, and the collectives of strategies with their axes."""
        # the order of the strategies is the order in a plan
        exposed = dict.fromkeys(map(self.costed_axes, self.setting.strategies), 0.0)
        hidden: dict[str, float] = {}
        uses: list[tuple[str, CollectiveUse]] = []
        for entry in costs:
            axes, seconds = entry.axes, entry.cost
            # during a collective compute is slower, as if a part of the collective were exposed, unless it waits afterwards
            slower = seconds.overlapped_seconds * self.setting.cluster.interference
            slowdown = max(0.0, slower - seconds.slack_seconds)
            exposed[axes] = exposed.get(axes, 0.0) + seconds.exposed_seconds + slowdown
            hidden[axes] = hidden.get(axes, 0.0) + seconds.overlapped_seconds - slowdown
            uses += ((axes, use) for use in seconds.collectives)
        busy = self.divided.compute - self.divided.idle
        sent = self.divided.communication
        times = self.point.microbatches * (busy if sent is None else sent)
        for axis, inside in self.inside(searched).items():
            exposed[axis] = exposed.get(axis, 0.0) + inside * times
        for axis, use, each in self.placed.row_collectives(self.point.microbatches, self.degrees):
            exposed[axis] = exposed.get(axis, 0.0) + use.count * each * busy
            uses.append((axis, use))
        return exposed, hidden, uses

    def inside(self, searched: tuple[str, ...]) -> dict[str, float]:
        """Searched axis -> seconds of the collectives of its placements in one microbatch, of the whole model."""
        seconds = self.placed.placement.communication_seconds
        return {axis: seconds * share for axis, share in zip(searched, self.placed.shares)}

    def memory_at_peak(self, costs: Sequence[_AxisCost]) -> tuple[dict[str, int], int]:
        """Bytes by part when the rank holds most, and bytes of the parameters that its optimizer updates."""
        memory, updated = dict(self.memory), self.memory["gradients"]
        shards, peak = self.shards, self.divided.peak
        for entry in costs:
            updated = math.ceil(updated * entry.cost.optimizer)
            for part in ("parameters", "gradients", "optimizer", "activations"):
                memory[part] = math.ceil(memory[part] * getattr(entry.cost, part))
        if peak is not None:
            meshed = any(degree > 1 for axis, degree in self.degrees.items() if axis != self.dividing)
            alive = 0.0 if meshed else self.placed.replay.more_without_mesh * peak.loss_microbatches
            fullest = Moment(1.0, peak.gradients, peak.transient_bytes + alive)
            return at_peak(memory, (fullest, self.placed.update), stepped=updated), updated
        # with stages, gradients are in other memory until the step is over
        lasting, bucket = 0.0, math.inf
        if self.dividing is None:
            lasting = max((c.cost.persistent_gradients for c in costs), default=0.0)
            outside = sum(trained / self.degrees[axis] for axis, (_, trained) in self.held.items())
            most = max((c.cost.bucket_bytes for c in costs), default=0)
            bucket = min(most, max(0.0, memory["gradients"] - outside))
            if shards > 1:
                # gradients are whole until all of a unit are there, except those in buffers that stay;
                # equal units are one object, so that each kind is summed once
                units = {id(unit): unit for unit in self.request.sizes.units}.values()
                sizes = (sum(p.numel * p.itemsize[0] for p in unit if p.trainable) for unit in units)
                bucket = max(bucket, max(sizes, default=0.0) / (shards if lasting else 1))
        always, moments = lasting * memory["gradients"], self.placed.moments
        return at_peak(memory, moments, bucket, always, copies=shards == 1, stepped=updated), updated


def cost(
    point: Point,
    placed: Placed,
    searched: tuple[str, ...],
    variants: RecomputeVariants | None = None,
    bytes_to_free: int = 0,
    rough: bool = False,
    beyond: float = math.inf,
) -> Candidate:
    """The candidate with the degrees of `point` (of every axis) and these placements on the axes that were `searched`.

    `variants`, `bytes_to_free`: blocks that stages may recompute, and bytes that their fullest rank must free; `rough`,
    `beyond`: `estimate` and `cutoff_seconds` of PipelineQuery. Raises PlanError: a strategy does not support the configuration.
    """
    step = _Step(point, placed, rough, beyond)
    step.divide(variants, bytes_to_free)
    costs = step.strategy_costs()
    exposed, hidden, uses = step.communication(searched, costs)
    memory, updated = step.memory_at_peak(costs)
    setting, placement, divided, degrees = step.setting, step.placement, step.divided, step.degrees
    waiting = 0.0
    fields: dict[str, Any] = {}
    for entry in costs:
        fields.update(entry.cost.fields)
        if entry.axis != step.dividing:
            # the ranks of other stages wait for communication inside of forwards and backwards
            stall = entry.cost.stall
            longer = stall.exposed + stall.overlapped * setting.cluster.interference
            waiting += longer * stall.microbatches * divided.straggler_delay[stall.microbatches > 1]
    trained = placed.trained(divided.held_parameters)
    if setting.cost_model is None:
        update = optimizer_seconds(setting.cluster, updated, setting.states, trained)
    else:
        update = setting.cost_model.operation(update_of(setting.optimizer, setting.states, updated, trained))
    return Candidate(
        degrees={a: d for a, d in degrees.items() if d > 1 or not setting.strategies[a].optional},
        stage=point.stage if step.shards > 1 else 0,
        searched=searched,
        problem=placed.problem,
        placement=placement,
        compute_seconds=placement.compute_seconds * (divided.compute - divided.idle),
        bubble_seconds=placement.compute_seconds * divided.idle + waiting,
        stages=_stage_shares(placement, divided),
        between=divided.full_batch_share,
        inside=step.inside(searched),
        stage_communication=divided.stage_communication,
        between_communication=divided.full_batch_communication,
        exposed=exposed,
        hidden=hidden,
        optimizer_seconds=update,
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
        point=point,
        recompute=step.recompute,
    )


def with_stage_recompute(candidate: Candidate, placed: Placed, variants: RecomputeVariants) -> Candidate:
    """The candidate where each stage recomputes as much as it must to fit the memory, or the nearest. Raises as `cost`."""
    bytes_to_free = 0
    for _ in range(TRIES):
        if not candidate.excess_bytes:
            break
        bytes_to_free += candidate.excess_bytes
        smaller = cost(candidate.point, placed, candidate.searched, variants, bytes_to_free)
        if smaller.total_bytes >= candidate.total_bytes:
            break
        candidate = smaller
    return candidate


def _stage_shares(placement: Placement, divided: StrategyCost) -> tuple[tuple[float, float], ...]:
    """Per stage, forward and backward as parts of the compute of the whole model; one stage where nothing is divided."""
    if not divided.stages:
        total = placement.compute_seconds
        forward = placement.forward_seconds / total if total else 0.0
        return ((forward, 1.0 - forward),)
    forwards = divided.forwards or (1 / 3,) * len(divided.stages)
    parts = zip(divided.stages, forwards, strict=True)
    return tuple((part * forward, part * (1 - forward)) for part, forward in parts)


@functools.lru_cache(maxsize=256)
def _modules_of(names: frozenset[str]) -> frozenset[str]:
    """All modules that contain a parameter of these names."""
    return frozenset(name[:end] for name in names for end, sign in enumerate(name) if sign == ".")
