"""What it takes to sum the gradients of parameters that several ranks of a pipeline hold (see tied.TiedSum).

Where to cut a model: stages of equal predicted time, and what they cost.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.schedule.schedule import ForwardsFirst, Schedule, Shape
from meshwright_dtensor.strategy import CollectiveUse, Link, Peak, SearchRequest, StrategyCost
from meshwright_dtensor.strategy.cost import TIED
from meshwright_pipeline.analysis.loss_preview import LossForecast
from meshwright_pipeline.planning.activation_memory import MemoryPeak
from meshwright_pipeline.planning.full_batch_loss import (
    tail_gradient_bytes,
    tail_memory,
    tail_of,
    with_tail,
    without_tail,
)
from meshwright_pipeline.planning.recompute_cuts import recompute_to_fit
from meshwright_pipeline.planning.search_space import microbatches, single_microbatch_note
from meshwright_pipeline.planning.simulate import (
    Prediction,
    StageCosts,
    input_gradient_share,
    predict,
    straggler_delay,
)
from meshwright_pipeline.planning.stage_costs import StageDivision, divide, even_cuts
from meshwright_pipeline.planning.survey import ModelSurvey, survey_of
from meshwright_pipeline.planning.unit_costs import ModelCosts, UnitWork
from meshwright_pipeline.trace.side_outputs import CannotBeCut

AGREEING_CALLS = 400
"""What it costs the host that all agree that it went well, in operations: a message that goes and one that comes."""


def tied_sums(
    held: Sequence[frozenset[str]], known: ModelSurvey, request: SearchRequest, link: Link
) -> tuple[float, tuple[CollectiveUse, ...]]:
    """Seconds behind all backwards, and messages.

    Two ranks exchange what both hold; of more the first adds up and tells the others. All agree that it went well. Where sums
    over the ranks of a stage, more than two, may differ in their order, the first tells the others again.

    `held`: by rank, first names of the parameters that it holds.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(held):
        for name in names & known.trained:
            holders[name].append(rank)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(name for name, ranks in holders.items() if len(ranks) > 1):
        groups[tuple(holders[name])].append(name)
    if not groups:
        return 0.0, ()
    count = len(held)
    unlike = request.world_size // count > 2
    waits = [0.0] * count
    uses = []
    for ranks, tied in groups.items():
        nbytes = math.ceil(known.share(frozenset(tied)) * request.sizes.gradient_bytes)
        others = len(ranks) - 1
        times = (1 if others == 1 else 2 * others) + others * unlike
        for rank in ranks:
            waits[rank] += times * link.seconds("send_recv", nbytes, count)
        uses.append(CollectiveUse("send_recv", nbytes, times, "backward", TIED))
    return max(waits) + (1 + unlike) * AGREEING_CALLS * request.step.call_seconds, tuple(uses)


ACTION_CALLS, UNIT_CALLS, WEIGHT_CALLS = 350, 50, 40
"""What the runtime costs the host, in operations: of each forward, of each unit in it, and of each parameter whose gradient a
split backward puts off (measured; thread time of actions less that of the same modules run plainly)."""

MESSAGE_CALLS, STEP_CALLS = 200, 1700
"""The same of each end of a message (looking ahead, posting, waiting), and of a step: cutting the batch, giving stand-ins to
parameters, agreeing on the loss and handing gradients over (measured; thread time of a step less that of its actions)."""

RECOMPUTE_TRIES = 3
"""How often stages are chosen anew where they hold more than was reckoned."""


def cost(request: SearchRequest, degree: int, link: Link) -> StrategyCost:
    """One step of a pipeline over `degree` ranks, cut where the slowest stage is fastest.

    Where relief is asked for, units run again stage by stage, as few as bring it.

    Raises:
        PlanError: there are not enough modules, rows cannot be shared equally, or the schedule does not fit.
    """
    known = survey_of(request)
    if known is None:
        rule = "a model is cut by what Pipeline.survey finds in it, and the request holds no survey; give it that"
        raise PlanError("degrees.pp", degree, rule)
    schedule = known.schedule(request.options.get("schedule", "1f1b"))
    shape = Shape(degree, degree * known.stages_each(schedule, degree), microbatches(request, degree))
    found = known.read(request.pipeline.work)
    tail: UnitWork | None = None
    foreseen = now = None
    case = _Case(request, link, found, known, schedule, shape)
    # the first look takes longer than all estimates together
    if request.pipeline.estimate and not known.looked:
        now = case.run(case.even(), not request.step.recompute)
    if now is None or now.step.seconds < request.pipeline.cutoff_seconds:
        foreseen = _foreseen(request, known, degree, shape)
    late = foreseen is not None and not foreseen.adds
    if late:  # what runs then, see behind
        schedule, found, tail, now = ForwardsFirst(schedule), without_tail(found), tail_of(found), None
        case = _Case(request, link, found, known, schedule, shape, tail)
    parts = case.even()
    now = now or case.run(parts, not request.step.recompute)
    policies: Mapping[str, str] = {}
    if request.pipeline.bytes_to_free and request.pipeline.recompute_variants:
        room = now.fullest.total(request)[0] - request.pipeline.bytes_to_free
        asked = room
        between = None
        if tail is not None:
            between = (
                sum(tail_memory(tail, shape.microbatches)),
                tail_gradient_bytes(tail, shape.microbatches),
            )
        for _ in range(RECOMPUTE_TRIES):  # what several units keep is only known when all is chosen
            relieved = recompute_to_fit(request, found, known, schedule, shape, parts, asked, between)
            if relieved is None:
                break
            other = case.run(relieved.parts, not relieved.policies and not request.step.recompute)
            more = other.fullest.total(request)[0] - room
            if more <= 0:
                now, policies = other, relieved.policies
                break
            asked -= more
    parts, step, fullest = now.parts, now.step, now.fullest
    whole, around = found.whole * shape.microbatches, STEP_CALLS * request.step.call_seconds
    summing, sums = case.tied(parts)
    times = list(zip(now.costs.forward, now.costs.backward, strict=True))
    return StrategyCost(
        exposed_seconds=max(0.0, step.seconds - step.silent) + summing,
        parameters=fullest.share,
        gradients=fullest.share,
        optimizer=fullest.share,
        activations=fullest.peak.kept / (found.kept * shape.microbatches),
        collectives=(*_messages(parts, schedule, shape), *sums),
        compute=(step.silent + around) / whole,
        idle=max(0.0, step.silent - max(step.busy)) / whole,
        stages=tuple((ahead + back) / found.whole for ahead, back in times),
        forwards=tuple(ahead / (ahead + back) if ahead + back else 1 / 3 for ahead, back in times),
        full_batch_share=0.0 if tail is None else tail.seconds * shape.microbatches / found.whole,
        model_share=case.operations(now),
        straggler_delay=straggler_delay(schedule, shape),
        input_gradient_share=input_gradient_share(schedule, shape) if now.costs.split else 1.0,
        held_parameters=fullest.holds,
        peak=fullest.moment(request, 1 if tail is None else shape.microbatches),
        recompute=policies,
        notes=_notes(request, shape, foreseen),
        fields={
            "pipeline": {
                "stages": parts.stages,
                "microbatches": shape.microbatches,
                "schedule": schedule.name,
                "shared": [*found.shared, *known.unnamed((*parts.stages, found.shared))],
                **({} if foreseen is None else {"loss": "batch" if late else "microbatches"}),
            }
        },
    )


def _foreseen(request: SearchRequest, known: ModelSurvey, degree: int, shape: Shape) -> LossForecast | None:
    """What there is to know of the loss; None of one microbatch, of which only that it can be cut.

    Raises:
        PlanError: the runtime cannot run the model as a pipeline.
    """
    several = shape.microbatches > 1
    single = several and shape.microbatches == request.batch_size
    try:
        found = known.foreseen(request.pipeline.example, single, request.pipeline.estimate or not several)
    except CannotBeCut as error:
        raise PlanError("degrees.pp", degree, str(error), "1") from None
    return found if several else None


def _notes(request: SearchRequest, shape: Shape, foreseen: LossForecast | None) -> tuple[str, ...]:
    """What users should know: why there is one microbatch, or why several are all held."""
    if shape.microbatches == 1:
        one = single_microbatch_note(request)
        return () if one is None else (one,)
    return () if foreseen is None or foreseen.adds else (foreseen.note(shape.microbatches),)


@dataclass(frozen=True)
class _Outcome:
    """A step with these stages, and the rank that holds most in it."""

    parts: StageDivision
    costs: StageCosts
    step: Prediction
    fullest: _Rank


@dataclass(frozen=True)
class _Case:
    """A model under a schedule. `tail`: what runs once between all forwards and all backwards, None where nothing does."""

    request: SearchRequest
    link: Link
    found: ModelCosts
    known: ModelSurvey
    schedule: Schedule
    shape: Shape
    tail: UnitWork | None = None

    def even(self) -> StageDivision:
        """Stages of equal time."""
        found, known, shape = self.found, self.known, self.shape
        return found.once(
            ("divide", shape.stages),
            lambda: divide(found, known, even_cuts(found, known, shape.ranks, shape.stages)),
        )

    def run(self, parts: StageDivision, split: bool) -> _Outcome:
        """A step with these stages; `split`: split backwards are run in halves."""
        request, schedule, shape, found = self.request, self.schedule, self.shape, self.found
        costs = _stage_costs(parts, self.link, request, shape)
        owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
        costs = replace(_with_host(costs, parts.sizes, owners, request, shape), split=split)
        company = request.pipeline.shared_cores
        step = found.once(
            (schedule.name, shape, costs, company),
            functools.partial(_predicted, schedule, shape, costs, company),
        )
        if self.tail is not None:
            step = with_tail(step, self.tail, owners[-1], shape.microbatches)
        fullest = max(_ranks(step, self.owned(parts), parts.messages), key=lambda one: one.total(request))
        return _Outcome(parts, costs, step, fullest)

    def owned(self, parts: StageDivision) -> list[_Owned]:
        """What every rank holds, with these stages."""
        return self.found.once(
            ("owned", self.schedule.name, self.shape, parts.cuts),
            lambda: _owned(self.schedule, self.shape, parts.held, self.known),
        )

    def tied(self, parts: StageDivision) -> tuple[float, tuple[CollectiveUse, ...]]:
        """What sums of gradients take that several ranks hold, with these stages."""
        held = [names for _, names, _ in self.owned(parts)]
        return tied_sums(held, self.known, self.request, self.link)

    def operations(self, outcome: _Outcome) -> float:
        """Of what the rank with most work computes, the part that is operations of the model."""
        model, every = [0.0] * self.shape.ranks, [0.0] * self.shape.ranks
        costs = outcome.costs
        for stage, load in enumerate(outcome.parts.loads):
            rank = self.schedule.owner(stage, self.shape)
            model[rank] += load.seconds
            every[rank] += costs.forward[stage] + costs.backward[stage]
        if self.tail is not None:
            last = self.schedule.owner(self.shape.stages - 1, self.shape)
            model[last] += self.tail.seconds
            every[last] += self.tail.seconds
        most = max(range(self.shape.ranks), key=every.__getitem__)
        return model[most] / every[most] if every[most] else 1.0


@dataclass(frozen=True)
class _Rank:
    """What one rank holds: names and part of the parameters, and the moment at which it holds most."""

    holds: frozenset[str]
    share: float
    peak: MemoryPeak

    def total(self, request: SearchRequest) -> tuple[float, float]:
        """Bytes at its peak, or when the optimizer steps, whichever is more."""
        lasting = self.share * request.sizes.state_bytes
        return max(lasting, lasting - self.share * request.sizes.gradient_bytes + self.peak.total), self.share

    def moment(self, request: SearchRequest, at_once: int) -> Peak:
        """As the planner takes it."""
        own = self.share * request.sizes.gradient_bytes
        return Peak(min(1.0, self.peak.gradients / own) if own else 1.0, self.peak.over, at_once)


_Owned: TypeAlias = tuple[list[int], frozenset[str], float]
"""Of a rank: its stages, names of the parameters that it holds, and their part of all."""


def _owned(
    schedule: Schedule, shape: Shape, held: Sequence[frozenset[str]], known: ModelSurvey
) -> list[_Owned]:
    stages: list[list[int]] = [[] for _ in range(shape.ranks)]
    for stage in range(shape.stages):
        stages[schedule.owner(stage, shape)].append(stage)
    nothing: frozenset[str] = frozenset()
    holds = [nothing.union(*(held[stage] for stage in own)) for own in stages]
    return [(own, names, known.share(names)) for own, names in zip(stages, holds, strict=True)]


def _ranks(step: Prediction, owned: Sequence[_Owned], messages: Sequence[int]) -> Iterator[_Rank]:
    sizes = [0, *messages, 0]
    for (own, holds, share), peak in zip(owned, step.fullest, strict=True):
        # messages that a rank has beside what its stages keep: one that comes, one that goes, and one ahead
        passing = max(sizes[i] + sizes[i + 1] + max(sizes[i], sizes[i + 1]) for i in own)
        yield _Rank(holds, share, replace(peak, over=peak.over + passing))


def _stage_costs(parts: StageDivision, link: Link, request: SearchRequest, shape: Shape) -> StageCosts:
    """What a microbatch costs on each stage. What a stage sends it keeps until that has gone backward."""
    loads, sent = parts.loads, parts.messages
    return StageCosts(
        tuple(one.forward for one in loads),
        tuple(one.seconds - one.forward for one in loads),
        tuple(one.kept + out for one, out in zip(loads, [*sent, 0], strict=True)),
        tuple(link.seconds("send_recv", size, shape.ranks) for size in sent),
        tuple(one.over for one in loads),
        # the first stage has no inputs: all of its backward is left to the second half
        tuple(one.deferred_bytes if i else 0.0 for i, one in enumerate(loads)),
        tuple(share * request.sizes.gradient_bytes for share in parts.shares),
        first=tuple(one.first if i else one.over for i, one in enumerate(loads)),
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
    call = request.step.call_seconds
    added = 3 * request.step.byte_seconds if shape.microbatches > 1 else 0.0
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
        halving=tuple(call * WEIGHT_CALLS * weights / 2 for _, weights in held),
    )


def _predicted(schedule: Schedule, shape: Shape, costs: StageCosts, company: tuple[float, ...]) -> Prediction:
    try:
        return predict(schedule, shape, costs, company)
    except UsageError as error:
        raise PlanError("pipeline.schedule", schedule.name, str(error)) from None


def _messages(parts: StageDivision, schedule: Schedule, shape: Shape) -> Iterator[CollectiveUse]:
    """What goes from rank to rank in a step: what is behind a cut takes results of units before it, in every microbatch."""
    for cut, (sent, returned) in enumerate(zip(parts.messages, parts.returned, strict=True)):
        if schedule.owner(cut, shape) == schedule.owner(cut + 1, shape):
            continue
        count = shape.microbatches
        yield CollectiveUse("send_recv", sent, count, "forward", f"from stage {cut} to {cut + 1}")
        yield CollectiveUse("send_recv", returned, count, "backward", f"gradients to stage {cut}")
