"""The cost of a pipeline: cuts the model into stages of equal predicted time, and simulates a step of the schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.schedule.schedule import ForwardsFirst, Schedule, Shape
from meshwright_dtensor.strategy import CollectiveUse, Link, Peak, SearchRequest, StrategyCost
from meshwright_dtensor.strategy.cost import TIED
from meshwright_pipeline.analysis.loss_preview import LossForecast
from meshwright_pipeline.planning import simulate
from meshwright_pipeline.planning.activation_memory import MemoryPeak
from meshwright_pipeline.planning.full_batch_loss import tail_memory, tail_of, with_tail, without_tail
from meshwright_pipeline.planning.recompute_cuts import recompute_to_fit
from meshwright_pipeline.planning.search_space import microbatches, single_microbatch_note
from meshwright_pipeline.planning.simulate import Prediction, StageCosts
from meshwright_pipeline.planning.stage_costs import StageDivision, divide, even_cuts
from meshwright_pipeline.planning.survey import ModelSurvey, survey_of
from meshwright_pipeline.planning.unit_costs import NO_WORK, ModelCosts, UnitWork
from meshwright_pipeline.trace.side_outputs import CannotBeCut

ACTION_CALLS, UNIT_CALLS, WEIGHT_CALLS = 350, 50, 40
"""Host cost of the runtime, in operations: for each forward, for each unit in it, and for each parameter whose gradient a
split backward delays (measured: thread time of actions minus that of the same modules without a pipeline)."""

MESSAGE_CALLS, STEP_CALLS = 200, 1700
"""The same for each end of a message (prefetch, post, wait), and for each step: splitting the batch, stand-in leaves for
parameters, agreeing on the loss, passing on gradients (measured: thread time of a step minus that of its actions)."""

AGREEING_CALLS = 400
"""Host cost of the final agreement of the ranks, in operations: one message in each direction."""

RECOMPUTE_TRIES = 3
"""How often stages are chosen again if they need more memory than estimated."""


def cost(request: SearchRequest, degree: int, link: Link) -> StrategyCost:
    """One step of a pipeline over `degree` ranks, cut so that the slowest stage is fastest.

    If the request asks to free memory, units are recomputed stage by stage, as few as necessary.

    Raises PlanError: there are not enough modules, rows cannot be divided equally, or the schedule does not fit.
    """
    survey = survey_of(request)
    if survey is None:
        rule = "stages are cut from the survey of the model, and this request has no survey; pass that of Pipeline.survey"
        raise PlanError("degrees.pp", degree, rule)
    schedule = survey.schedule(request.options.get("schedule", "1f1b"))
    shape = Shape(degree, degree * survey.stages_each(schedule, degree), microbatches(request, degree))
    case = _Case(request, link, survey.costs(request.pipeline.work), survey, schedule, shape)
    forecast = outcome = None
    # the first analysis of the loss takes longer than all estimates together: slow candidates go without
    if request.pipeline.estimate and not survey.loss_checked:
        outcome = case.run(case.even(), not request.step.recompute)
    if outcome is None or outcome.step.seconds < request.pipeline.cutoff_seconds:
        forecast = _forecast(request, survey, degree, shape)
    if forecast is not None and not forecast.adds:
        # computed once, on the whole batch
        model, schedule = without_tail(case.model), ForwardsFirst(schedule)
        case, outcome = replace(case, model=model, schedule=schedule, tail=tail_of(case.model)), None
    outcome = outcome or case.run(case.even(), not request.step.recompute)
    outcome, policies = case.fitted(outcome)
    reason = survey.divided(outcome.parts.stages, case.model.shared)
    if reason is not None:
        raise PlanError("degrees.pp", degree, f"{reason}. Plan without pp, or return what is kept", "1")
    return _strategy_cost(case, outcome, policies, forecast)


def _forecast(request: SearchRequest, survey: ModelSurvey, degree: int, shape: Shape) -> LossForecast | None:
    """The forecast for the loss; None for one microbatch, for which only p2p is checked (PlanError: it cannot run)."""
    several, query = shape.microbatches > 1, request.pipeline
    mixing = survey.row_mixing(query.example)
    if mixing is not None and mixing.by_values:
        raise PlanError("degrees.pp", degree, str(mixing), "1")
    single = several and shape.microbatches == request.batch_size
    try:
        forecast = survey.loss_forecast(query.example, single, query.estimate or not several)
    except CannotBeCut as error:
        raise PlanError("degrees.pp", degree, str(error), "1") from None
    return forecast if several else None


def _strategy_cost(
    case: _Case, outcome: _Outcome, policies: Mapping[str, str], forecast: LossForecast | None
) -> StrategyCost:
    request, model, shape, schedule, tail = case.request, case.model, case.shape, case.schedule, case.tail
    parts, step, fullest = outcome.parts, outcome.step, outcome.fullest
    note = None
    if shape.microbatches == 1:
        note = single_microbatch_note(request)
    elif forecast is not None and not forecast.adds:
        note = forecast.note(shape.microbatches)
    shared = [*model.shared, *case.survey.unnamed((*parts.stages, model.shared))]
    rule: dict[str, Any] = {"stages": parts.stages, "microbatches": shape.microbatches}
    rule |= {"schedule": schedule.name, "shared": shared}
    if forecast is not None:
        rule["loss"] = "microbatches" if forecast.adds else "batch"
    whole, between, collectives = model.whole * shape.microbatches, tail or NO_WORK, model.collectives or 1.0
    loads, sent = outcome.parts.loads, case.communicating(outcome)
    seconds = zip(loads, outcome.costs.forward, outcome.costs.backward, strict=True)
    times = [(f - load.forward_collectives, b - load.backward_collectives) for load, f, b in seconds]
    inside = [(w.forward_collectives / collectives, w.backward_collectives / collectives) for w in loads]
    held = [names for _, names, _ in case.owned(parts)]
    sum_seconds, sums = tied_sums(held, case.survey, request, case.link)
    return StrategyCost(
        exposed_seconds=max(0.0, step.seconds - step.silent) + sum_seconds,
        parameters=fullest.share,
        gradients=fullest.share,
        optimizer=fullest.share,
        activations=fullest.peak.kept / (model.kept * shape.microbatches),
        collectives=(*_messages(parts, schedule, shape), *sums),
        compute=(step.silent - sent + STEP_CALLS * request.step.call_seconds) / whole,
        idle=max(0.0, step.silent - max(step.busy)) / whole,
        stages=tuple((f + b) / model.whole for f, b in times),
        forwards=tuple(f / (f + b) if f + b else 1 / 3 for f, b in times),
        full_batch_share=between.compute * shape.microbatches / model.whole,
        communication=sent / (collectives * shape.microbatches) if model.collectives else 1.0,
        stage_communication=tuple(inside) if model.collectives else (),
        full_batch_communication=(between.seconds - between.compute) * shape.microbatches / collectives,
        straggler_delay=simulate.straggler_delay(schedule, shape),
        input_gradient_share=simulate.input_gradient_share(schedule, shape) if outcome.costs.split else 1.0,
        held_parameters=fullest.holds,
        peak=fullest.moment(request, 1 if tail is None else shape.microbatches),
        recompute=policies,
        notes=() if note is None else (note,),
        fields={"pipeline": rule},
    )


@dataclass(frozen=True)
class _Outcome:
    """A simulated step with the given stages, and the rank with the highest memory peak."""

    parts: StageDivision
    costs: StageCosts
    step: Prediction
    fullest: _RankMemory


@dataclass(frozen=True)
class _Case:
    """A model under a schedule. `tail`: work that runs once between all forwards and all backwards."""

    request: SearchRequest
    link: Link
    model: ModelCosts
    survey: ModelSurvey
    schedule: Schedule
    shape: Shape
    tail: UnitWork | None = None

    def even(self) -> StageDivision:
        """Stages of equal time."""
        model, survey, shape = self.model, self.survey, self.shape
        return model.memo.once(
            ("divided", shape.stages),
            lambda: divide(model, survey, even_cuts(model, survey, shape.ranks, shape.stages)),
        )

    def run(self, parts: StageDivision, split: bool) -> _Outcome:
        """Simulate a step with these stages. `split`: split backwards run in halves."""
        request, schedule, shape = self.request, self.schedule, self.shape
        owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
        costs = self._stage_costs(parts, owners, split)
        slowdown = request.pipeline.shared_cores
        key = (schedule.name, shape, costs, slowdown)
        try:
            step = self.model.memo.once(key, lambda: simulate.predict(schedule, shape, costs, slowdown))
        except UsageError as error:
            raise PlanError("pipeline.schedule", schedule.name, str(error)) from None
        if self.tail is not None:
            step = with_tail(step, self.tail, owners[-1], shape.microbatches)
        ranks = _rank_memory(step, self.owned(parts), parts.messages)
        return _Outcome(parts, costs, step, max(ranks, key=lambda rank: rank.total(request)))

    def _stage_costs(self, parts: StageDivision, owners: Sequence[int], split: bool) -> StageCosts:
        """The costs of a microbatch on each stage, with host time and gradient accumulation (two reads and a write).

        A stage keeps its sent tensors until its backward. `owners`: the rank of each stage.
        """
        request, shape, loads, sent = self.request, self.shape, parts.loads, parts.messages
        call = request.step.call_seconds
        accumulation = 3 * request.step.byte_seconds if shape.microbatches > 1 else 0.0
        crossed = [0, *(int(a != b) for a, b in pairwise(owners)), 0]
        p2p = [call * MESSAGE_CALLS * (before + after) for before, after in pairwise(crossed)]
        gradients = [share * request.sizes.gradient_bytes for share in parts.shares]
        return StageCosts(
            forward=tuple(
                load.forward + call * (ACTION_CALLS + UNIT_CALLS * units) + messages
                for load, (units, _), messages in zip(loads, parts.sizes, p2p, strict=True)
            ),
            backward=tuple(
                load.seconds - load.forward + accumulation * nbytes + messages
                for load, nbytes, messages in zip(loads, gradients, p2p, strict=True)
            ),
            saved=tuple(load.kept + nbytes for load, nbytes in zip(loads, [*sent, 0], strict=True)),
            sending=tuple(self.link.seconds("send_recv", size, shape.ranks) for size in sent),
            over=tuple(load.over for load in loads),
            # the first stage has no input gradients: all of its backward is in the second half
            deferred_bytes=tuple(load.deferred_bytes if i else 0.0 for i, load in enumerate(loads)),
            gradients=tuple(gradients),
            halving=tuple(call * WEIGHT_CALLS * weights / 2 for _, weights in parts.sizes),
            split=split,
            first=tuple(load.first if i else load.over for i, load in enumerate(loads)),
            collectives=tuple(load.backward_collectives for load in loads),
        )

    def fitted(self, outcome: _Outcome) -> tuple[_Outcome, Mapping[str, str]]:
        """The step with units recomputed to free the requested memory, and their policies; unchanged if none can."""
        request = self.request
        if not (request.pipeline.bytes_to_free and request.pipeline.recompute_variants):
            return outcome, {}
        limit = outcome.fullest.total(request)[0] - request.pipeline.bytes_to_free
        between = None
        if self.tail is not None:
            kept, over, gradients = tail_memory(self.tail, self.shape.microbatches)
            between = kept + over, gradients
        target = limit
        # bytes that several units share are known only when all units are chosen
        for _ in range(RECOMPUTE_TRIES):
            chosen = recompute_to_fit(
                request, self.model, self.survey, self.schedule, self.shape, outcome.parts, target, between
            )
            if chosen is None:
                break
            parts, policies = chosen
            other = self.run(parts, not policies and not request.step.recompute)
            excess = other.fullest.total(request)[0] - limit
            if excess <= 0:
                return other, policies
            target -= excess
        return outcome, {}

    def owned(self, parts: StageDivision) -> list[_Owned]:
        """The parameters of every rank, with these stages."""

        def owned() -> list[_Owned]:
            empty: frozenset[str] = frozenset()
            stages = [self.schedule.own(rank, self.shape) for rank in range(self.shape.ranks)]
            names = [empty.union(*(parts.held[stage] for stage in of_rank)) for of_rank in stages]
            return [(of_rank, n, self.survey.share(n)) for of_rank, n in zip(stages, names, strict=True)]

        return self.model.memo.once(("owned", self.schedule.name, self.shape, parts.cuts), owned)

    def communicating(self, outcome: _Outcome) -> float:
        """Seconds for which the busiest rank is in collectives inside of its passes."""
        busy, costs = outcome.step.busy, outcome.costs
        busiest = max(range(self.shape.ranks), key=busy.__getitem__)
        works = [(load, costs.forward[i] + costs.backward[i]) for i, load in enumerate(outcome.parts.loads)]
        of_rank = [works[stage] for stage in self.schedule.own(busiest, self.shape)]
        if self.tail is not None and busiest == self.schedule.owner(self.shape.stages - 1, self.shape):
            of_rank.append((self.tail, self.tail.seconds))
        sent = sum(work.seconds - work.compute for work, _ in of_rank)
        # where ranks share cores, both take longer alike
        return busy[busiest] * sent / sum(seconds for _, seconds in of_rank) if sent else 0.0


@dataclass(frozen=True)
class _RankMemory:
    """The memory of one rank: names and share of its parameters, and its peak."""

    holds: frozenset[str]
    share: float
    peak: MemoryPeak

    def total(self, request: SearchRequest) -> tuple[float, float]:
        """Bytes at the peak of the step or of the optimizer, whichever is more; and the share of the parameters."""
        lasting = self.share * request.sizes.state_bytes
        return max(lasting, lasting - self.share * request.sizes.gradient_bytes + self.peak.total), self.share

    def moment(self, request: SearchRequest, at_once: int) -> Peak:
        """The peak in the form that the planner takes."""
        gradients = self.share * request.sizes.gradient_bytes
        fraction = min(1.0, self.peak.gradients / gradients) if gradients else 1.0
        return Peak(fraction, self.peak.over, at_once)


_Owned: TypeAlias = tuple[list[int], frozenset[str], float]
"""Of a rank: its stages, names of its parameters, and their share of all parameter bytes."""


def _rank_memory(step: Prediction, owned: Sequence[_Owned], messages: Sequence[int]) -> Iterator[_RankMemory]:
    sizes = [0, *messages, 0]
    for (stages, holds, share), peak in zip(owned, step.fullest, strict=True):
        # messages in flight, in addition to what stages keep: one received, one sent, and one prefetched
        passing = max(sizes[i] + sizes[i + 1] + max(sizes[i], sizes[i + 1]) for i in stages)
        yield _RankMemory(holds, share, replace(peak, over=peak.over + passing))


def _messages(parts: StageDivision, schedule: Schedule, shape: Shape) -> Iterator[CollectiveUse]:
    """The p2p messages of a step between ranks."""
    for cut, (sent, returned) in enumerate(zip(parts.messages, parts.returned, strict=True)):
        if schedule.owner(cut, shape) == schedule.owner(cut + 1, shape):
            continue
        count = shape.microbatches
        yield CollectiveUse("send_recv", sent, count, "forward", f"from stage {cut} to {cut + 1}")
        yield CollectiveUse("send_recv", returned, count, "backward", f"gradients to stage {cut}")


def tied_sums(
    held: Sequence[frozenset[str]], survey: ModelSurvey, request: SearchRequest, link: Link
) -> tuple[float, tuple[CollectiveUse, ...]]:
    """The sums of gradients of parameters that several ranks hold (see runtime.tied_grads): seconds after all backwards, and
    messages.

    Two ranks exchange their gradients. With more, the first rank sums them and sends the result back. Then all ranks
    agree on success. If more than two ranks of a stage reduce, their sums may differ in order, and the first sends its own.

    `held`: for each rank, first names of the parameters that it holds.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(held):
        for name in names & survey.trained:
            holders[name].append(rank)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(name for name, ranks in holders.items() if len(ranks) > 1):
        groups[tuple(holders[name])].append(name)
    if not groups:
        return 0.0, ()
    count = len(held)
    sends_sum = request.world_size // count > 2
    seconds = [0.0] * count
    uses = []
    for ranks, tied in groups.items():
        others = len(ranks) - 1
        nbytes = math.ceil(survey.share(frozenset(tied)) * request.sizes.gradient_bytes)
        times = (1 if others == 1 else 2 * others) + others * sends_sum
        for rank in ranks:
            seconds[rank] += times * link.seconds("send_recv", nbytes, count)
        uses.append(CollectiveUse("send_recv", nbytes, times, "backward", TIED))
    return max(seconds) + (1 + sends_sum) * AGREEING_CALLS * request.step.call_seconds, tuple(uses)
