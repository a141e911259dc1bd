"""What a combination of degrees costs, once the placements on its searched axis are known.

The collectives for which rows of several data ranks meet, in a step.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshwright_dtensor.propagate.prediction import PredictedMove
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
)
from meshwright_planner.cost.operations import OPTIMIZERS, optimizer_seconds, update_of
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED, Basis, Setting, placements
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.evaluation.stage_recompute import Again, Easing
from meshwright_planner.memory.module_work import inside_of
from meshwright_planner.memory.peak import Moment, at_peak
from meshwright_planner.placement.problem import Placement
from meshwright_planner.recompute.region import recomputed_blocks

SUMS = "dp"
"""The axis whose strategy costs the sum of gradients, over every axis that defers it."""


TRIES = 4
"""How often relief is asked for, each time by what the last one lacked: a strategy does not know of all that a rank holds."""


def cost(
    point: Point,
    placed: Placed,
    searched: tuple[str, ...],
    easing: Easing | None = None,
    rough: bool = False,
    beyond: float = math.inf,
) -> Candidate:
    """The candidate with the degrees of `point` (of every axis) and these placements on the axes that were `searched`.

    `easing`: what stages may run again, and for how much memory; `rough`, `beyond`: `estimate` and `cutoff_seconds`
    of PipelineQuery.

    Raises:
        PlanError: a strategy cannot have it so.
    """
    basis, times, degrees = placed.basis, point.microbatches, dict(point.degrees)
    setting, problem = basis.setting, placed.problem
    placement, tape = placed.repeated(times), problem.tape
    memory = dict(placed.memory)
    memory["activations"] *= times
    stepped = memory["gradients"]
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    uses: list[tuple[str, CollectiveUse]] = []
    shards = degrees.get(SHARED, 1)
    if setting.dtype is not None and shards == 1:  # the copies that are computed with
        memory["parameters"] += math.ceil(placed.copies)
    # communication hides behind compute only where it does not take the cores that compute needs
    hides = setting.cluster.hides_communication
    common = replace(
        basis.request(),
        options={**setting.options, **dict(point.way)},
        batch_size=max(1, math.ceil(setting.batch.size / basis.batch_factor(degrees))),
        sizes=ModelSizes(
            parameter_bytes=memory["parameters"],
            gradient_bytes=memory["gradients"],
            activation_bytes=memory["activations"],
            flops=placed.flops * times,
            layers=max((len(g) for g in problem.quotient.groups), default=1),
            attention=tuple(replace(use, count=use.count * times) for use in placed.attention),
            units=placed.summed(degrees, (SHARED,)) if shards > 1 else (),
            state_bytes=_resident(memory, shards, point.stage),
        ),
        step=StepContext(
            backward_seconds=(placement.compute_seconds - placement.forward_seconds) * hides,
            forward_seconds=placement.forward_seconds * hides,
            zero_stage=point.stage,
            degrees=dict(degrees),
            microbatches=times,
            call_seconds=0.0 if setting.cluster.hides_launch else setting.cluster.launch_s,
            byte_seconds=1 / setting.cluster.streams,
            recompute=bool(placed.recompute),
            accelerated=setting.cluster.accelerated,
        ),
        pipeline=PipelineQuery(estimate=rough, cutoff_seconds=beyond),
    )
    outer = next((a for a, s in setting.strategies.items() if s.divides and degrees[a] > 1), None)
    divided, again = StrategyCost(), placed.recompute
    if outer is not None:  # what it leaves to one rank is what all others see
        company = setting.cluster.shared_core_factors(degrees[outer])
        asked = replace(
            common,
            survey=basis.surveys.get(outer),
            pipeline=replace(
                common.pipeline,
                work=placed.work,
                shared_cores=company,
                scalar_flows=problem.quotient.once("numbers", lambda: tape.numbers),
                calls=tape.calls,
                example=(setting.batch.args, setting.batch.kwargs),
            ),
        )
        if easing is not None:
            asked = replace(
                asked,
                pipeline=replace(
                    asked.pipeline, recompute_variants=easing.again.work, bytes_to_free=easing.relief
                ),
            )
        divided = setting.strategies[outer].cost(asked, degrees[outer], basis.link(degrees, outer))
        if easing is not None and divided.recompute:
            again = easing.again.rules(divided.recompute)
        common = inside_of(common, divided, math.ceil)
        own_part = 1 / degrees[outer]
        common = replace(
            common,
            sizes=replace(
                common.sizes,
                units=placed.summed(degrees, (SHARED,), divided.held_parameters) if shards > 1 else (),
                attention=tuple(
                    replace(u, count=math.ceil(u.count * own_part)) for u in common.sizes.attention
                ),
            ),
            step=replace(common.step, stages=max(1, len(divided.stages) // degrees[outer])),
        )
    holds = divided.held_parameters
    own = {
        axis: placed.own(survey.parameters if holds is None else survey.parameters & holds)
        for axis, survey in basis.surveys.items()
        if degrees[axis] > 1
    }
    # what ranks share is summed over the replicas of each shard
    parted = replace(
        common, sizes=replace(common.sizes, gradient_bytes=math.ceil(common.sizes.gradient_bytes / shards))
    )
    fields: dict[str, Any] = {}
    said: list[str] = []
    lasting = bucket = 0.0
    waiting = 0.0  # of ranks of a pipeline, for what is communicated inside of stages beside the placement's
    summed = [
        axis
        for axis, s in setting.strategies.items()
        if s.gradient == "deferred" and not s.gathers and degrees[axis] > 1
    ]
    for name in setting.strategies:  # in the order in which they are told
        exposed["+".join(summed) if name == SUMS and summed else name] = 0.0
    # over which links ranks share, for how long in the backward pass: the sum comes behind that, and takes turns with it
    shared: tuple[Link, float] | None = None
    for name, strategy in sorted(setting.strategies.items(), key=lambda item: item[0] == SUMS):
        if degrees[name] <= 1 and not (name == SUMS and summed):
            continue
        axes, degree, link = name, degrees[name], basis.link(degrees, name)
        if name == SUMS and summed:  # one sum over all axes on which gradients are partial
            axes, degree = "+".join(summed), math.prod(degrees[axis] for axis in summed)
            link = basis.link(degrees, axes)
        request = common if strategy.gathers else parted
        if name == SUMS:
            request = replace(
                request, step=replace(request.step, backward_seconds=_hiding(request, link, shared))
            )
        if name == SUMS:  # ranks share gradients, or have them in other memory, where they are not whole
            units = placed.summed(degrees, summed) if shards == 1 and outer is None else ()
            request = replace(request, sizes=replace(request.sizes, units=units))
        survey = basis.surveys.get(name)
        mine, mine_trained = own.get(name, (0.0, 0.0))
        others = sum((1 - 1 / degrees[a]) * trained for a, (_, trained) in own.items() if a != name)
        parts = 1 if strategy.gathers else shards  # as in `parted`
        asked = replace(
            request,
            survey=survey,
            sizes=replace(
                request.sizes,
                surveyed_bytes=math.ceil(mine),
                surveyed_gradient_bytes=math.ceil(mine_trained / parts),
                gradient_bytes=max(0, request.sizes.gradient_bytes - math.ceil(others / parts)),
                module_inputs={} if survey is None else placed.entering(_held(survey.modules, holds), times),
            ),
        )
        found = divided if name == outer else strategy.cost(asked, degree, link)
        # beside a collective compute is slower: as if a part of it were not hidden
        taken = found.overlapped_seconds * setting.cluster.interference
        exposed[axes] = exposed.get(axes, 0.0) + found.exposed_seconds + taken
        if name != outer:
            waiting += _waiting(found.stall, divided, setting.cluster.interference)
        if strategy.gathers:
            shared = (link, _behind(found, link, degree))
        hidden[axes] = hidden.get(axes, 0.0) + found.overlapped_seconds - taken
        fields.update(found.fields)
        said += found.notes
        stepped = math.ceil(stepped * found.optimizer)
        lasting, bucket = max(lasting, found.persistent_gradients), max(bucket, found.bucket_bytes)
        for part in ("parameters", "gradients", "optimizer", "activations"):
            memory[part] = math.ceil(memory[part] * getattr(found, part))
        uses += ((axes, use) for use in found.collectives)
    busy = divided.compute - divided.idle
    inside = placement.communication_seconds * divided.model_share
    for axis, own_share in zip(searched, problem.shares(placed.placement)):
        exposed[axis] = exposed.get(axis, 0.0) + inside * own_share * busy
    for axis, use, seconds in rows_meet(basis, placed, times, degrees):
        exposed[axis] = exposed.get(axis, 0.0) + use.count * seconds * busy
        uses.append((axis, use))
    placed_apart = sum(trained / degrees[a] for a, (_, trained) in own.items())
    if outer is not None:  # gradients are in other memory until the step is over
        lasting = 0.0
    bucket = min(bucket, max(0.0, memory["gradients"] - placed_apart))
    if shards > 1:  # whole until all of a unit are there, but for those in buffers that stay
        bucket = max(bucket, _largest_unit(common.sizes.units) / (shards if lasting else 1))
    if divided.peak is None:
        always = lasting * memory["gradients"]
        memory = at_peak(
            memory,
            placed.moments,
            math.inf if outer is not None else bucket,
            always,
            copies=shards == 1,
            stepped=stepped,
        )
    else:
        meshed = any(degree > 1 for axis, degree in degrees.items() if axis != outer)
        torchs = 0.0 if meshed else placed.replay.more_without_mesh * divided.peak.loss_microbatches
        beside = divided.peak.transient_bytes + torchs
        memory = at_peak(
            memory, (Moment(1.0, divided.peak.gradients, beside), placed.update), stepped=stepped
        )
    return Candidate(
        degrees={a: d for a, d in degrees.items() if d > 1 or not setting.strategies[a].optional},
        stage=point.stage if shards > 1 else 0,
        searched=searched,
        problem=problem,
        placement=placement,
        compute_seconds=placement.compute_seconds * busy,
        # collectives inside of stages take cores too: where others wait they are faster, as compute is
        bubble_seconds=(placement.compute_seconds + inside) * divided.idle + waiting,
        stages=_stages(placement, divided),
        between=divided.full_batch_share,
        exposed=exposed,
        hidden=hidden,
        optimizer_seconds=_updated(setting, stepped, placed.trained(divided.held_parameters)),
        memory=memory,
        limit=setting.limit,
        allowed=setting.allowed,
        uses=uses,
        fields=fields,
        placements=placements(setting.strategies, basis.surveys, degrees),
        apart=tuple(m for a, survey in basis.surveys.items() if degrees[a] > 1 for m in survey.modules),
        notes=(*(n for a, survey in basis.surveys.items() if degrees[a] > 1 for n in survey.notes), *said),
        point=point,
        recompute=again,
    )


def _waiting(stall: Stall, divided: StrategyCost, interference: float) -> float:
    """Seconds that ranks which hold other modules wait for what a strategy communicates inside of forwards and backwards."""
    longer = stall.exposed + stall.overlapped * interference
    return longer * stall.microbatches * divided.straggler_delay[stall.microbatches > 1]


def _behind(found: StrategyCost, link: Link, degree: int) -> float:
    """Seconds of its collectives in the backward pass."""
    return sum(
        use.count * link.seconds(use.kind, use.nbytes, degree)
        for use in found.collectives
        if use.phase == "backward"
    )


def _hiding(request: SearchRequest, link: Link, shared: tuple[Link, float] | None) -> float:
    """Seconds of the backward pass that a sum of gradients over `link` may hide behind.

    `shared`: the link that what ranks share crosses, and for how long: where both end on the same level they take turns.
    """
    if request.step.stages:
        return 0.0
    if shared is None or shared[0].name != link.name:
        return request.step.backward_seconds
    return max(0.0, request.step.backward_seconds - shared[1])


def _updated(setting: Setting, nbytes: float, parameters: int) -> float:
    """Seconds of the optimizer's step over so many parameters of so many bytes."""
    if setting.cost_model is None:
        return optimizer_seconds(setting.cluster, nbytes, OPTIMIZERS[setting.optimizer], parameters)
    return setting.cost_model.operation(update_of(setting.optimizer, nbytes, parameters))


def eased(found: Candidate, placed: Placed, again: Again) -> Candidate:
    """`found` where each stage runs as much again as its memory asks for; the nearest to it where that is not enough.

    Raises:
        PlanError: a strategy cannot have it so.
    """
    relief = 0
    for _ in range(TRIES):
        if not found.excess_bytes:
            break
        relief += found.excess_bytes
        other = cost(found.point, placed, found.searched, Easing(again, relief))
        if other.total_bytes >= found.total_bytes:
            break
        found = other
    return found


def _largest_unit(units: Iterable[Iterable[ParameterSize]]) -> float:
    """Bytes of the gradients of the unit that has most."""
    different = {id(unit): unit for unit in units}.values()  # equal units are one object
    return max((sum(p.numel * p.itemsize[0] for p in unit if p.trainable) for unit in different), default=0.0)


def _resident(memory: Mapping[str, int], shards: int, stage: int) -> int:
    """What the whole model would have a rank hold beside activations, ranks along zero sharing what they share."""
    parameters = memory["parameters"] / (shards if stage == 3 else 1)
    return math.ceil(parameters + memory["gradients"] + memory["optimizer"] / shards)


def _stages(placement: Placement, divided: StrategyCost) -> tuple[tuple[float, float], ...]:
    """Per stage, forward and backward as parts of what the whole model computes; one where nothing is divided."""
    if not divided.stages:
        ahead = placement.forward_seconds / placement.compute_seconds if placement.compute_seconds else 0.0
        return ((ahead, 1.0 - ahead),)
    forwards = divided.forwards or (1 / 3,) * len(divided.stages)
    return tuple(
        (part * ahead, part * (1 - ahead)) for part, ahead in zip(divided.stages, forwards, strict=True)
    )


def _held(modules: Iterable[str], holds: frozenset[str] | None) -> list[str]:
    """Those that have a parameter which the rank holds."""
    return list(modules) if holds is None else [module for module in modules if module in _above(holds)]


@functools.lru_cache(maxsize=256)
def _above(names: frozenset[str]) -> frozenset[str]:
    """The modules that hold something of these names."""
    return frozenset(name[:end] for name in names for end, sign in enumerate(name) if sign == ".")


def rows_meet(
    basis: Basis, placed: Placed, times: int, degrees: Mapping[str, int]
) -> Iterator[tuple[str, CollectiveUse, float]]:
    """(axis, collectives, seconds of one of them), of `times` microbatches; what runs again is sent again."""
    problem, tape = placed.problem, placed.problem.tape
    if tape.division is None:
        return
    again = tuple(f"{name}." for name in recomputed_blocks(tape, placed.recompute))
    states = {
        problem.quotient.value(ref.i): state
        for k, option in placed.placement.options.items()
        for ref, state in zip(tape.nodes[k].outs, option.outs)
    }
    counted: Counter[PredictedMove] = Counter()
    for moved, count in tape.division.moved:
        twice = moved.phase == "forward" and bool(again) and f"{moved.module}.".startswith(again)
        share = 1.0
        if moved.value is not None:  # what a searched axis has divided is moved by each of its ranks in part
            share = problem.costs.share(states.get(problem.quotient.value(moved.value), "I"))
        part = replace(moved, nbytes=round(moved.nbytes * share), value=None)
        counted[part] += count * times * (1 + twice)
    for m, count in counted.items():
        link = basis.link(degrees, m.axis)
        why = (
            m.why if m.why.startswith("inside ") else f"{m.why} for {m.function}: rows of several ranks meet"
        )
        use = CollectiveUse(m.kind, m.nbytes, count, m.phase, why, m.module)
        yield m.axis, use, link.seconds(m.kind, m.nbytes, degrees[m.axis])
