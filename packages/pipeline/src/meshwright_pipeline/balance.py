"""Where to cut a model: stages of equal predicted time, and what they cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.strategy import (
    CollectiveUse,
    Link,
    Peak,
    SearchRequest,
    StrategyCost,
)
from meshwright_pipeline.actions import Schedule, Shape
from meshwright_pipeline.choosing import microbatches
from meshwright_pipeline.dividing import balanced
from meshwright_pipeline.predicting import Fullest, Prediction, StageCosts, predict
from meshwright_pipeline.reading import Read, Run
from meshwright_pipeline.surveying import Surveyed

ACTION_CALLS, UNIT_CALLS, WEIGHT_CALLS = 350, 50, 40
"""What the runtime costs the host, in operations: of each forward, of each unit in it, and of each parameter whose gradient a
split backward puts off (measured; thread time of actions less that of the same modules run plainly)."""

MESSAGE_CALLS, STEP_CALLS = 200, 1700
"""The same of each end of a message (looking ahead, posting, waiting), and of a step: cutting the batch, giving stand-ins to
parameters, agreeing on the loss and handing gradients over (measured; thread time of a step less that of its actions)."""


def cost(request: SearchRequest, degree: int, link: Link) -> StrategyCost:
    """One step of a pipeline over `degree` ranks, cut where the slowest stage is fastest.

    Raises:
        PlanError: there are not enough modules, rows cannot be shared equally, or the schedule does not fit.
    """
    if request.survey is None:
        rule = "a model is cut by what Pipeline.survey finds in it, and the request holds no survey; give it that"
        raise PlanError("degrees.pp", degree, rule)
    known: Surveyed = request.survey.details
    schedule = known.schedule(request.options.get("schedule", "1f1b"))
    shape = Shape(degree, degree * schedule.stages_each, microbatches(request, degree))
    found = known.read(request.work)
    parts = found.once(("divided", shape.stages), lambda: _divided(found, known, schedule, shape))
    costs = _stage_costs(parts, link, request, shape)
    owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
    costs = _with_host(costs, parts.sizes, owners, request, shape)
    company = request.company
    step = found.once(
        (schedule.name, shape, costs, company),
        functools.partial(_predicted, schedule, shape, costs, company),
    )
    owned = found.once(("owned", schedule.name, shape), lambda: _owned(schedule, shape, parts.held, known))
    fullest = max(_ranks(step, owned, parts.messages), key=lambda one: one.total(request))
    whole, around = found.whole * shape.microbatches, STEP_CALLS * request.call_seconds
    return StrategyCost(
        exposed_seconds=max(0.0, step.seconds - step.silent),
        parameters=fullest.share,
        gradients=fullest.share,
        optimizer=fullest.share,
        activations=fullest.peak.kept / (found.kept * shape.microbatches),
        collectives=tuple(_messages(parts.messages, shape.microbatches)),
        compute=(step.silent + around) / whole,
        idle=max(0.0, step.silent - max(step.busy)) / whole,
        stages=tuple(one.seconds / found.whole for one in parts.loads),
        forwards=tuple(one.forward / one.seconds if one.seconds else 1 / 3 for one in parts.loads),
        holds=fullest.holds,
        peak=fullest.moment(request),
        fields={
            "pipeline": {
                "stages": parts.stages,
                "microbatches": shape.microbatches,
                "schedule": schedule.name,
                "shared": found.shared,
            }
        },
    )


@dataclass(frozen=True)
class _Divided:
    """Stages: their units, their work on a microbatch, the names of the parameters that each holds and their part of all;
    sizes as for `_with_host`; and bytes of the messages between them.
    """

    stages: list[list[str]]
    loads: list[Run]
    held: list[frozenset[str]]
    shares: list[float]
    sizes: list[tuple[int, int]]
    messages: list[int]


def _divided(found: Read, known: Surveyed, schedule: Schedule, shape: Shape) -> _Divided:
    """Cut where the slowest stage is fastest."""
    shared, runs, blocks = found.shared, found.runs, found.blocks
    here = len({run.unit for block in blocks for run in block} & known.holding)
    if here < shape.stages:
        text = (
            f"{shape.stages} stages need as many modules that can be given to one, and the model has {here}"
        )
        raise PlanError("degrees.pp", shape.ranks, text, str(max(1, here // schedule.stages_each)))
    seconds = [sum(run.seconds for run in block) for block in blocks]
    seconds[-1] += found.tail.seconds
    cuts = [sum(map(len, blocks[:place])) for place in balanced(seconds, shape.stages)]
    ends = list(zip([0, *cuts], [*cuts, len(runs)], strict=True))
    stages = _stages([[run.unit for run in runs[a:b]] for a, b in ends], known, shared)
    held = [_held(stage, known, shared) for stage in stages]
    total = sum(known.sizes.values()) or 1
    shares = [sum(known.sizes[name] for name in names) / total for names in held]
    return _Divided(
        stages,
        [found.load(a, b) for a, b in ends],
        held,
        shares,
        [(len(stage), len(names)) for stage, names in zip(stages, held, strict=True)],
        [found.crossing[place] for place in cuts],
    )


@dataclass(frozen=True)
class _Rank:
    """What one rank holds: names and part of the parameters, and the moment at which it holds most."""

    holds: frozenset[str]
    share: float
    peak: Fullest

    def total(self, request: SearchRequest) -> tuple[float, float]:
        """Bytes at its peak, or when the optimizer steps, whichever is more."""
        lasting = self.share * request.resident_bytes
        return max(lasting, lasting - self.share * request.gradient_bytes + self.peak.total), self.share

    def moment(self, request: SearchRequest) -> Peak:
        """As the planner takes it."""
        own = self.share * request.gradient_bytes
        return Peak(min(1.0, self.peak.gradients / own) if own else 1.0, self.peak.over)


_Owned: TypeAlias = tuple[list[int], frozenset[str], float]
"""Of a rank: its stages, names of the parameters that it holds, and their part of all."""


def _owned(schedule: Schedule, shape: Shape, held: Sequence[frozenset[str]], known: Surveyed) -> list[_Owned]:
    stages: list[list[int]] = [[] for _ in range(shape.ranks)]
    for stage in range(shape.stages):
        stages[schedule.owner(stage, shape)].append(stage)
    nothing: frozenset[str] = frozenset()
    total = sum(known.sizes.values()) or 1
    holds = [nothing.union(*(held[stage] for stage in own)) for own in stages]
    return [
        (own, names, sum(known.sizes[name] for name in names) / total)
        for own, names in zip(stages, holds, strict=True)
    ]


def _ranks(step: Prediction, owned: Sequence[_Owned], messages: Sequence[int]) -> Iterator[_Rank]:
    sizes = [0, *messages, 0]
    for (own, holds, share), peak in zip(owned, step.fullest, strict=True):
        # messages that a rank has beside what its stages keep: one that comes, one that goes, and one ahead
        passing = max(sizes[i] + sizes[i + 1] + max(sizes[i], sizes[i + 1]) for i in own)
        yield _Rank(holds, share, replace(peak, over=peak.over + passing))


def _stage_costs(parts: _Divided, link: Link, request: SearchRequest, shape: Shape) -> StageCosts:
    """What a microbatch costs on each stage. What a stage sends it keeps until that has gone backward."""
    loads, sent = parts.loads, parts.messages
    return StageCosts(
        tuple(one.forward for one in loads),
        tuple(one.seconds - one.forward for one in loads),
        tuple(one.kept + out for one, out in zip(loads, [*sent, 0], strict=True)),
        tuple(link.seconds("send_recv", size, shape.ranks) for size in sent),
        tuple(one.over for one in loads),
        # the first stage has no inputs: all of its backward is left to the second half
        tuple(one.waiting if i else 0.0 for i, one in enumerate(loads)),
        tuple(share * request.gradient_bytes for share in parts.shares),
    )


def _with_host(
    costs: StageCosts,
    held: Sequence[tuple[int, int]],
    owners: Sequence[int],
    request: SearchRequest,
    shape: Shape,
) -> StageCosts:
    """The same with what the host does; `held`: units and parameters of each stage, `owners`: the rank of each.

    Gradients of a microbatch are added to those before, a rank's part of them: two reads and a write.
    """
    call = request.call_seconds
    added = 3 * request.byte_seconds if shape.microbatches > 1 else 0.0
    crossed = [0, *(int(a != b) for a, b in pairwise(owners)), 0]
    mail = [call * MESSAGE_CALLS * (before + behind) for before, behind in pairwise(crossed)]
    return replace(
        costs,
        forward=tuple(
            s + call * (ACTION_CALLS + UNIT_CALLS * units) + post
            for s, (units, _), post in zip(costs.forward, held, mail, strict=True)
        ),
        backward=tuple(
            s + added * nbytes + post
            for s, nbytes, post in zip(costs.backward, costs.gradients, mail, strict=True)
        ),
        split=not request.recompute,
        halving=tuple(call * WEIGHT_CALLS * weights / 2 for _, weights in held),
    )


def _predicted(schedule: Schedule, shape: Shape, costs: StageCosts, company: tuple[float, ...]) -> Prediction:
    try:
        return predict(schedule, shape, costs, company)
    except UsageError as error:
        raise PlanError("pipeline.schedule", schedule.name, str(error)) from None


def _stages(parts: Sequence[Sequence[str]], known: Surveyed, shared: Sequence[str]) -> list[list[str]]:
    """The units of each stage in the order of registration, with those that did nothing beside the one before them.

    What has no parameters and did nothing (a dropout of 0) is left to every stage: it may be called anywhere.
    """
    holding = known.holding
    stages: list[list[str]] = [list(dict.fromkeys(part)) for part in parts]
    placed = {unit: index for index, stage in reversed(list(enumerate(stages))) for unit in stage}
    current = 0
    for unit in known.units:
        if unit in placed:
            current = placed[unit]
        elif unit not in shared and unit in holding:
            stages[current].append(unit)
    place = {unit: index for index, unit in enumerate(known.units)}
    return [sorted(stage, key=place.__getitem__) for stage in stages]


def _held(stage: Sequence[str], known: Surveyed, shared: Sequence[str]) -> frozenset[str]:
    """First names of the parameters that a stage holds."""
    nothing: frozenset[str] = frozenset()
    return nothing.union(*(known.inside.get(unit, nothing) for unit in {*stage, *shared, ""}))


def _messages(sizes: Sequence[int], count: int) -> Iterator[CollectiveUse]:
    """What crosses the cuts in a step: what units behind one take from units before it, in every microbatch."""
    for index, nbytes in enumerate(sizes):
        yield CollectiveUse("send_recv", nbytes, count, "forward", f"from stage {index} to {index + 1}")
        yield CollectiveUse("send_recv", nbytes, count, "backward", f"gradients to stage {index}")
