"""Simulated steps: unequal stages, messages, memory, long steps, and the costs for a search."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pipe_models import Chain
from torch import nn

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.timetable import dependencies, ordered
from meshwright_dtensor.strategy import Link, ModuleWork, PipelineQuery, SearchRequest, StrategyCost
from meshwright_pipeline import Action, Schedule, Shape, timetable
from meshwright_pipeline.planning import cost as cost_module
from meshwright_pipeline.planning.cost import MESSAGE_CALLS, STEP_CALLS
from meshwright_pipeline.planning.simulate import (
    MOST_ACTIONS,
    StageCosts,
    input_gradient_share,
    predict,
    straggler_delay,
)
from meshwright_pipeline.planning.stage_costs import StageDivision
from meshwright_pipeline.planning.survey import ModelSurvey
from meshwright_pipeline.planning.unit_costs import NO_WORK
from meshwright_pipeline.strategy import Pipeline

LINK = Link("test", 1e-6, 1e9)
NAMES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_match_the_timetable(name: str) -> None:
    schedule = schedule_named(name)
    shape = Shape(4, 4 * schedule.stages_each, 8)
    costs = StageCosts((1.0,) * shape.stages, (2.0,) * shape.stages, (1.0,) * shape.stages)
    predicted, table = predict(schedule, shape, costs), timetable(schedule, shape)
    assert predicted.seconds == table.length
    assert 1 - sum(predicted.busy) / (predicted.seconds * shape.ranks) == pytest.approx(table.bubble)
    assert predicted.held == tuple(map(float, table.alive))


def test_slowest_stage_and_messages_determine_the_time() -> None:
    schedule, shape = schedule_named("1f1b"), Shape(2, 2, 6)
    costs = StageCosts((1.0, 3.0), (2.0, 6.0), (10.0, 1.0))
    predicted = predict(schedule, shape, costs)
    assert (
        predicted.seconds == 1 + 6 * 9 + 2
        and predicted.busy == (18.0, 54.0)
        and predicted.held == (20.0, 1.0)
    )
    slower = predict(schedule, shape, replace(costs, sending=(0.5,)))
    assert (
        slower.seconds == predicted.seconds + 1.0
    )  # one forward, one backward: the other messages overlap with the slow stage


@pytest.mark.parametrize("name", NAMES)
def test_long_steps_are_extrapolated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedule_named(name)
    shape = Shape(4, 4 * schedule.stages_each, 4096 // schedule.stages_each)
    assert 2 * shape.stages * shape.microbatches > MOST_ACTIONS
    forward = tuple(1.0 + 0.3 * (stage % 3) for stage in range(shape.stages))
    costs = StageCosts(forward, tuple(2 * f for f in forward), forward, (0.1,) * (shape.stages - 1))
    drawn = predict(schedule, shape, costs)
    monkeypatch.setattr("meshwright_pipeline.planning.simulate.MOST_ACTIONS", 1 << 40)
    walked = predict(schedule, shape, costs)
    assert drawn.seconds == pytest.approx(walked.seconds, rel=1e-6)
    assert drawn.busy == pytest.approx(walked.busy) and drawn.held == pytest.approx(walked.held)


def recursion(schedule: Schedule, shape: Shape, costs: StageCosts) -> tuple[float, list[float]]:
    """Seconds of a step and compute seconds of each rank, by recursion over dependencies."""
    ranks = [list(schedule.actions(rank, shape)) for rank in range(shape.ranks)]
    split = {
        (action.stage, action.microbatch) for actions in ranks for action in actions if action.kind == "I"
    }
    halves = [b / 2 for b in costs.backward]
    lengths = {"F": costs.forward, "B": costs.backward, "I": halves, "W": halves}
    before = {
        action: (rank, [*actions[:n]][-1:])
        for rank, actions in enumerate(ranks)
        for n, action in enumerate(actions)
    }
    owner = {action: rank for rank, actions in enumerate(ranks) for action in actions}

    @functools.cache
    def end(action: Action) -> float:
        rank, earlier = before[action]
        ready = [0.0, *(end(other) for other in earlier)]
        for other in dependencies(action, shape, split):
            cut = min(action.stage, other.stage)
            ready.append(end(other) + (costs.sending[cut] if owner[other] != rank else 0.0))
        return max(ready) + lengths[action.kind][action.stage]

    busy = [sum((lengths[action.kind][action.stage] for action in actions), 0.0) for actions in ranks]
    return max(end(action) for actions in ranks for action in actions), busy


@pytest.mark.parametrize("name", NAMES)
def test_simulation_matches_the_dependency_recursion(name: str) -> None:
    schedule, dice = schedule_named(name), random.Random(name)
    for ranks in (2, 3, 4):
        shape = Shape(ranks, ranks * schedule.stages_each, ranks * dice.choice([2, 3]))
        forward, backward, sending = (
            tuple(dice.random() for _ in range(shape.stages - less)) for less in (0, 0, 1)
        )
        costs = StageCosts(forward, backward, sending=sending)
        predicted = predict(schedule, shape, costs)
        seconds, busy = recursion(schedule, shape, costs)
        assert (predicted.seconds, list(predicted.busy)) == (seconds, busy)
        assert (
            predicted.silent == recursion(schedule, shape, replace(costs, sending=(0.0,) * len(sending)))[0]
        )


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_ordered_after_their_dependencies(name: str) -> None:
    schedule = schedule_named(name)
    shape = Shape(3, 3 * schedule.stages_each, 9)
    order, done = ordered(schedule, shape), set[Action]()
    for rank, action in order.order:
        assert action in order.ranks[rank] and done.issuperset(dependencies(action, shape, order.split))
        done.add(action)
    assert len(done) == sum(map(len, order.ranks)) == len(order.order)


def request(rows: int = 8, **options: object) -> SearchRequest:
    names = ["embed", *(f"layers.{i}" for i in range(4)), "norm", "head"]
    work = [
        ModuleWork(n, 1.0, 64.0, inputs=frozenset({(i, names[i - 1], 512)} if i else ()))
        for i, n in enumerate(names)
    ]
    survey = Pipeline().survey(Chain())
    return SearchRequest(
        world_size=8,
        batch_size=rows,
        options=options,
        survey=survey,
        pipeline=PipelineQuery(work=tuple(work)),
    )


def test_choices_are_schedules_and_microbatches() -> None:
    choices = list(Pipeline().ways(request(), 2))
    assert {way["schedule"] for way in choices} >= set(NAMES)
    assert {w["microbatches"] for w in choices if w["schedule"] == "dualpipev"} == {4, 8}
    assert {way["microbatches"] for way in choices} == {2, 4, 8}
    # four ranks with two stages each need eight modules, and the model has seven
    assert "interleaved" not in {way["schedule"] for way in Pipeline().ways(request(), 4)}
    pinned = list(Pipeline().ways(request(microbatches=4, schedule="1f1b"), 2))
    assert pinned == [{"schedule": "1f1b", "microbatches": 4}]
    assert list(Pipeline().ways(request(), 1)) == [{}]
    assert Pipeline().degrees(request()) == [1, 2, 4]
    # ranks that share cores need not all be busy
    shared = replace(
        request(schedule="1f1b"),
        pipeline=replace(request(schedule="1f1b").pipeline, shared_cores=(0.5, 0.5, 0.75, 1.0)),
    )
    assert [way["microbatches"] for way in Pipeline().ways(shared, 4)] == [4, 8, 2, 1]
    assert [
        way["microbatches"]
        for way in Pipeline().ways(replace(shared, pipeline=replace(shared.pipeline, shared_cores=())), 4)
    ] == [4, 8]
    exhaustive = replace(request(schedule="1f1b"), batch_size=12, exhaustive=True)
    assert [way["microbatches"] for way in Pipeline().ways(exhaustive, 2)] == [1, 2, 3, 4, 6, 12]
    assert Pipeline().degrees(request(rows=2)) == [1, 2]


def cost(count: int, schedule: str, degree: int = 2) -> tuple[float, float]:
    query = request(microbatches=count, schedule=schedule)
    predicted = Pipeline().cost(query, degree, LINK)
    assert predicted.fields["pipeline"]["schedule"] == schedule
    assert predicted.exposed_seconds > 0
    return predicted.compute, predicted.activations


def test_cost_of_a_choice() -> None:
    """Stages of 3 and 4 modules: fill and drain, and microbatches in flight."""
    compute, kept = cost(4, "1f1b")
    # a stage also keeps the 512 bytes that it sends, in addition to 64 for each module
    first = (3 * 64 + 512) / 4 / (7 * 64)
    assert compute == pytest.approx((4 + 3 / 4) / 7) and kept == pytest.approx(2 * first)
    assert cost(8, "1f1b")[0] < compute and cost(4, "gpipe")[1] == pytest.approx(4 * first)
    assert cost(4, "interleaved")[0] < compute


@pytest.mark.parametrize(
    ("layers", "ranks", "each"), [(105, 35, 3), (96, 8, 2), (32, 4, 2), (6, 2, 3), (7, 2, 2), (126, 16, 2)]
)
def test_stages_per_rank_divide_the_layers_equally(layers: int, ranks: int, each: int) -> None:
    units = ("embed", *(f"layers.{n}" for n in range(layers)), "norm", "head")
    survey = ModelSurvey(units, {}, {})
    for name in ("interleaved", "looped-bfs"):
        assert survey.stages_each(schedule_named(name), ranks) == each
    for name in ("1f1b", "zbv"):  # these schedules have a fixed number
        assert survey.stages_each(schedule_named(name), ranks) == schedule_named(name).stages_each


def test_planned_pipeline_has_the_costed_stages() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(2, 2)
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))

    names = ["embed", *(f"layers.{i}" for i in range(6))]
    work = tuple(ModuleWork(n, 1.0, 64.0) for n in names)
    options = {"schedule": "interleaved", "microbatches": 4}
    query = SearchRequest(
        2, 4, options=options, survey=Pipeline().survey(Deep()), pipeline=PipelineQuery(work=work)
    )
    assert len(Pipeline().cost(query, 2, LINK).fields["pipeline"]["stages"]) == 6


def with_collectives(query: SearchRequest, forward: float, backward: float) -> SearchRequest:
    """Every module has these seconds of collectives, in addition."""
    both = forward + backward
    work = tuple(
        replace(
            w,
            seconds=w.seconds + both,
            forward=(w.seconds * w.forward + forward) / (w.seconds + both),
            collectives=(forward, backward),
        )
        for w in query.pipeline.work
    )  # fmt: skip
    return replace(query, pipeline=replace(query.pipeline, work=work))


@pytest.mark.parametrize("name", NAMES)
def test_collectives_are_part_of_their_passes(name: str) -> None:
    """All parts together are the simulated step, and compute is the same as without collectives."""
    query = request(schedule=name, microbatches=4)
    plain, cost = (Pipeline().cost(with_collectives(query, 0.25 * n, 0.5 * n), 2, LINK) for n in (0, 1))
    # seven modules of a second, of which a rank has four at most, and four microbatches
    assert (cost.compute - cost.idle) * 28 == pytest.approx((plain.compute - plain.idle) * 28)
    assert cost.communication == pytest.approx(cost.compute - cost.idle)
    shares = [sum(passes) for passes in zip(*cost.stage_communication, strict=True)]
    assert shares == pytest.approx([1 / 3, 2 / 3]) and cost.stages == pytest.approx(plain.stages)
    costs = [(f * s * 7, s * 7) for f, s in zip(cost.forwards, cost.stages, strict=True)]
    sent = [(f * 5.25, b * 5.25) for f, b in cost.stage_communication]
    schedule = schedule_named(name)
    simulated = predict(schedule, Shape(2, len(costs), 4), StageCosts(
        tuple(f + forward for (f, _), (forward, _) in zip(costs, sent, strict=True)),
        tuple(s - f + back for (f, s), (_, back) in zip(costs, sent, strict=True)),
        collectives=tuple(back for _, back in sent),
    ))  # fmt: skip
    assert cost.compute * 28 + cost.communication * 4 * 5.25 == pytest.approx(simulated.seconds)


def test_weight_gradients_have_no_collectives() -> None:
    def length(name: str, collectives: float) -> float:
        costs = StageCosts((1.0, 1.0), (3.0, 3.0), collectives=(collectives,) * 2)
        return predict(schedule_named(name), Shape(2, 2, 2), costs).seconds

    # the first rank gets an input gradient after F and F and I of the other, then does all of its own without a pause
    assert length("zero-bubble", 0.0) == 2 * 1.0 + 1.5 + 4 * 1.5
    assert length("zero-bubble", 1.0) == 2 * 1.0 + 2.0 + 2 * (2.0 + 1.0)
    assert length("1f1b", 0.0) == length("1f1b", 1.0)


def test_collectives_of_a_loss_on_the_whole_batch_are_between_passes() -> None:
    query = with_collectives(request(schedule="1f1b", microbatches=4), 0.25, 0.5)
    tail = replace(query.pipeline.work[-1], module="", inputs=frozenset())
    work = (*query.pipeline.work, tail)
    query = replace(query, pipeline=replace(query.pipeline, work=work))
    survey = query.survey.details  # type: ignore[union-attr]
    case = cost_module._Case(query, LINK, survey.costs(work), survey, schedule_named("1f1b"), Shape(2, 2, 4))
    model = cost_module.without_tail(case.model)
    late = replace(case, model=model, tail=cost_module.tail_of(case.model))
    cost = cost_module._strategy_cost(late, late.run(late.even(), True), {}, None)
    assert cost.full_batch_communication * 8 * 0.75 == pytest.approx(4 * 0.75)
    assert cost.full_batch_share * 8 == pytest.approx(4 * 1.0)


def test_ranks_that_share_cores_lose_less_by_waiting() -> None:
    query = request(8, schedule="1f1b", microbatches=4)
    actions = Pipeline().cost(query, 4, LINK)
    shared = Pipeline().cost(
        replace(query, pipeline=replace(query.pipeline, shared_cores=(0.5, 0.5, 0.75, 1.0))),
        4,
        LINK,
    )
    assert shared.compute < actions.compute and shared.idle < actions.idle


def test_each_rank_has_its_own_memory_peak() -> None:
    """With gpipe, no gradients exist when all microbatches are kept. A split backward leaves deferred bytes."""
    costs = StageCosts((1.0, 1.0), (2.0, 2.0), (10.0, 10.0), (), (3.0, 3.0), (5.0, 5.0), (7.0, 7.0))

    def fullest(name: str) -> list[tuple[float, float, float]]:
        predicted = predict(schedule_named(name), Shape(2, 2, 4), costs).fullest
        return [(action.kept, action.over, action.gradients) for action in predicted]

    assert fullest("gpipe") == [(40.0, 3.0, 0.0)] * 2
    assert fullest("1f1b") == [(20.0, 3.0, 7.0), (10.0, 3.0, 7.0)]
    split = predict(
        schedule_named("zero-bubble"), Shape(2, 2, 4), replace(costs, deferred_bytes=(0.0, 0.0))
    ).fullest
    assert all(
        a.total < action[0] + action[1] + action[2] for a, action in zip(split, fullest("zero-bubble"))
    )


def test_work_between_units_is_kept_on_stages_with_its_gradient() -> None:
    """A mask that all layers keep counts once on every stage. The loss belongs to the last stage."""
    query = request(microbatches=4, schedule="gpipe")
    shared = frozenset({(99, 640.0)})
    layers = [replace(w, shared=shared) if "layers" in w.module else w for w in query.pipeline.work]
    loss = ModuleWork("", 2.0, 6400.0, transient_bytes=800.0)
    plain, masked, whole = (
        Pipeline().cost(replace(query, pipeline=replace(query.pipeline, work=tuple(work))), 2, LINK)
        for work in (query.pipeline.work, layers, [*layers, loss])
    )
    sent = 4 * (7 * 64 + 640)

    def kept(cost: StrategyCost, total: float) -> float:
        return cost.activations * total

    assert kept(masked, 7 * 64 + 640) == pytest.approx(kept(plain, 7 * 64) + 640)
    assert kept(whole, 7 * 64 + 640 + 6400) > 6400 > kept(masked, sent)
    assert whole.peak is not None and whole.peak.transient_bytes >= 800.0
    # the loss loads the last stage only: modules move to the first
    assert len(whole.fields["pipeline"]["stages"][0]) > len(masked.fields["pipeline"]["stages"][0])


def test_stages_match_exhaustive_search() -> None:
    """Uneven layers and a heavy head, with every schedule that has one stage per rank."""
    seconds = [0.7, 1.0, 3.1, 0.4, 2.2, 0.3, 4.5]
    query = request(microbatches=4)
    work = tuple(replace(w, seconds=s) for w, s in zip(query.pipeline.work, seconds, strict=True))
    for degree in (2, 3, 4):
        predicted = Pipeline().cost(replace(query, pipeline=replace(query.pipeline, work=work)), degree, LINK)
        cuts = [(0, *inner, 7) for inner in itertools.combinations(range(1, 7), degree - 1)]
        best = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
        assert max(predicted.stages) * sum(seconds) == pytest.approx(best)


def test_gradient_accumulation_counts_the_bytes_of_a_rank() -> None:
    """If a tensor axis halves the gradients, accumulation takes half as long."""

    def compute(share: float) -> float:
        query = replace(
            request(microbatches=4, schedule="1f1b"),
            sizes=replace(request(microbatches=4, schedule="1f1b").sizes, gradient_bytes=int(share * 8000)),
            step=replace(request(microbatches=4, schedule="1f1b").step, byte_seconds=1e-3),
        )
        return Pipeline().cost(query, 2, LINK).compute

    half, whole = compute(0.5) - compute(0), compute(1) - compute(0)
    assert whole > 0 and half == pytest.approx(whole / 2)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_unsplit_backward_is_not_counted_as_communication(schedule: str) -> None:
    """With recomputation, backwards are not split: the bubble grows, and the message time does not."""
    query = request(microbatches=4, schedule=schedule)
    work = tuple(replace(w, inputs=frozenset()) for w in (*query.pipeline.work, *query.pipeline.work[1:-1]))
    quick = Link("test", 0.0, 1e30)
    again = Pipeline().cost(
        replace(
            query,
            pipeline=replace(query.pipeline, work=work),
            step=replace(query.step, recompute=True),
        ),
        2,
        quick,
    )
    split = Pipeline().cost(replace(query, pipeline=replace(query.pipeline, work=work)), 2, quick)
    assert again.exposed_seconds == split.exposed_seconds == 0.0
    assert again.idle > split.idle


def test_impossible_choice_is_named_in_the_error() -> None:
    with pytest.raises(PlanError, match="groups of 2"):
        cost(1, "interleaved")
    with pytest.raises(
        PlanError, match=r"microbatches is 3: the 8 rows .* cannot be split .* nearest legal: 2"
    ):
        cost(3, "1f1b")
    with pytest.raises(PlanError, match="no survey"):
        Pipeline().cost(replace(request(), survey=None), 2, LINK)


def test_long_step_is_refused_like_a_short_one() -> None:
    """The shorter steps that it is extrapolated from, with 16 and 24 microbatches, would be accepted."""
    schedule, shape = schedule_named("interleaved"), Shape(4, 8, MOST_ACTIONS + 1)
    with pytest.raises(UsageError, match="groups of 4"):
        predict(schedule, shape, StageCosts((1.0,) * 8, (2.0,) * 8, (1.0,) * 8))


class Nowhere(Schedule):
    name = "nowhere"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        return []


def test_incomplete_schedule_is_rejected() -> None:
    with pytest.raises(Exception, match="every forward needs its backward"):
        predict(Nowhere(), Shape(1, 1, 1), StageCosts((1.0,), (1.0,), (1.0,)))


def test_silent_seconds_match_a_step_without_messages() -> None:
    """Also if the step is extrapolated."""
    draw = random.Random(3)
    for name in NAMES:
        schedule = schedule_named(name)
        for ranks, microbatches in ((2, 4), (4, 8), (8, 480)):
            shape = Shape(ranks, ranks * schedule.stages_each, microbatches)
            seconds = [tuple(draw.uniform(1.0, 3.0) for _ in range(shape.stages)) for _ in range(3)]
            costs = StageCosts(seconds[0], seconds[1], sending=seconds[2][1:])
            with_messages, without = (
                predict(schedule, shape, costs),
                predict(schedule, shape, replace(costs, sending=())),
            )
            assert (
                with_messages.silent == pytest.approx(without.seconds) and with_messages.busy == without.busy
            )
            assert without.silent == without.seconds < with_messages.seconds


def test_host_cost_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step, and for each end of a message."""
    call, count = 1e-9, 4  # too little to change the order of anything

    def seconds() -> float:
        query = replace(
            request(8, schedule="gpipe", microbatches=count),
            step=replace(request(8, schedule="gpipe", microbatches=count).step, call_seconds=call),
        )
        return (
            Pipeline().cost(query, 2, LINK).compute
            * sum(part.seconds for part in query.pipeline.work)
            * count
        )

    whole = seconds()
    monkeypatch.setattr(cost_module, "STEP_CALLS", 0)
    assert whole - seconds() == pytest.approx(STEP_CALLS * call, rel=1e-3)
    whole = seconds()
    monkeypatch.setattr(cost_module, "MESSAGE_CALLS", 0)
    # every microbatch passes the slower stage, one of them the other stage: forward and backward
    assert whole - seconds() == pytest.approx((2 * count + 2) * MESSAGE_CALLS * call, rel=1e-3)


@pytest.mark.parametrize(
    ("owners", "ends"), [((0, 1, 0, 1), (1, 2, 2, 1)), ((0, 1, 1, 0), (1, 1, 1, 1)), ((0, 0), (0, 0))]
)
def test_adjacent_stages_on_one_rank_send_nothing(owners: tuple[int, ...], ends: tuple[int, ...]) -> None:
    stages = len(owners)
    sizes, messages = [(0, 0)] * stages, [0] * (stages - 1)
    free = StageDivision((), [], [NO_WORK] * stages, [], [0.0] * stages, sizes, messages, messages)
    query = replace(request(), step=replace(request().step, call_seconds=1.0))
    case = cost_module._Case(query, LINK, *[None] * 3, Shape(2, stages, 4))
    predicted = case._stage_costs(free, owners, True)
    assert predicted.backward == tuple(MESSAGE_CALLS * n for n in ends)


@pytest.mark.parametrize(("name", "each"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbv", 2)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_delay_by_a_longer_microbatch(name: str, each: int, ranks: int, microbatches: int) -> None:
    """A first forward that is a second longer delays each following stage. If all passes are longer, the bubble grows too."""
    first, of_all = straggler_delay(schedule_named(name), Shape(ranks, each * ranks, microbatches))
    assert first == pytest.approx(ranks - 1)
    if each == 1:  # m + p - 1 forwards and backwards instead of m
        assert of_all == pytest.approx((ranks - 1) / microbatches)


def test_delay_with_a_single_microbatch() -> None:
    for name, each in (("1f1b", 1), ("zbv", 2)):
        assert straggler_delay(schedule_named(name), Shape(4, 4 * each, 1)) == pytest.approx((3.0, 3.0))


def test_input_gradient_share_of_a_backward() -> None:
    assert input_gradient_share(schedule_named("1f1b"), Shape(4, 4, 8)) == 1.0
    assert input_gradient_share(schedule_named("zero-bubble"), Shape(4, 8, 8)) == 0.5
    assert 0.5 < input_gradient_share(schedule_named("dualpipev"), Shape(4, 8, 16)) < 1.0
