"""Recomputation under a memory limit is optimal by enumeration, and not more than necessary."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from pipe_models import Chain, chain_batch

from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Action, ForwardsFirst
from meshwright_dtensor.strategy import (
    Link,
    ModelSizes,
    ModuleWork,
    PipelineQuery,
    SearchRequest,
    StrategyCost,
)
from meshwright_pipeline import Schedule, Shape
from meshwright_pipeline.planning import cost as cost_module
from meshwright_pipeline.planning.full_batch_loss import tail_of, without_tail
from meshwright_pipeline.planning.recompute import (
    MOST_CHOICES,
    Choices,
    RunChoice,
    UnitOption,
    cheapest,
    moments,
)
from meshwright_pipeline.planning.simulate import StageCosts, predict
from meshwright_pipeline.planning.stage_costs import divide
from meshwright_pipeline.planning.survey import ModelSurvey
from meshwright_pipeline.planning.unit_costs import ModelCosts, UnitWork
from meshwright_pipeline.schedule.one_f_one_b import OneForwardOneBackward
from meshwright_pipeline.strategy import Pipeline

LINK = Link("test", 1e-6, 1e9)
NAMES = ["embed", *(f"layers.{i}" for i in range(4)), "norm", "head"]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]


def some_ways(draw: random.Random) -> list[UnitOption]:
    """First without recomputation; then slower options that keep less and may have a higher peak."""
    kept = draw.randrange(20, 90)
    ways = [UnitOption(draw.uniform(1, 3), kept, draw.randrange(30))]
    for _ in range(draw.randrange(3)):
        ways.append(
            UnitOption(
                ways[0].seconds + draw.uniform(0.1, 1), draw.randrange(5, kept), draw.randrange(30 + kept)
            )
        )
    return ways


def bytes_of(ways: Sequence[UnitOption], count: int, running: bool) -> int:
    """By definition: bytes kept, and the peak of transient bytes while the units run backward in order."""
    kept = sum(way.kept for way in ways)
    over = max(way.over - sum(later.kept for later in ways[n + 1 :]) for n, way in enumerate(ways))
    return count * kept + (max(0, over) if running else 0)


Counts = tuple[tuple[int, ...], int]
"""As in Moment: microbatches in flight on each stage, and the stage that runs backward."""


def moment_bytes(stage: int, options: Sequence[UnitOption], when: Sequence[Counts]) -> list[int]:
    return [bytes_of(options, counts[stage], running == stage) for counts, running in when]


def every_need(
    stages: Sequence[Sequence[Sequence[UnitOption]]], when: Sequence[Counts]
) -> Iterator[tuple[float, int]]:
    """(seconds, peak bytes) of every combination of options for the units of some stages."""
    for combination in itertools.product(*(itertools.product(*units) for units in stages)):
        by_stage = [moment_bytes(stage, units, when) for stage, units in enumerate(combination)]
        yield sum(o.seconds for units in combination for o in units), max(map(sum, zip(*by_stage)))


@pytest.mark.parametrize("seed", range(60))
def test_cheapest_choice_matches_enumeration(seed: int) -> None:
    """One or two stages of a rank, random units, and memory for some of the choices."""
    draw = random.Random(seed)
    kinds = [some_ways(draw) for _ in range(4)]
    rows = [[draw.randrange(4) for _ in range(draw.randint(1, 4))] for _ in range(1 + seed % 2)]
    when = [
        (tuple(draw.randint(1, 4) for _ in rows), draw.randrange(-1, len(rows))) for _ in range(1 + seed % 3)
    ]

    def memory(stage: int, choice: RunChoice) -> list[int]:
        options = [kinds[kind][place] for kind, place in zip(rows[stage], choice.options, strict=True)]
        return moment_bytes(stage, options, when)

    needs = list(every_need([[kinds[kind] for kind in row] for row in rows], when))
    for room in sorted({need for _, need in needs})[:: max(1, len(needs) // 7)]:
        best = min(seconds for seconds, need in needs if need <= room)
        choices = Choices(kinds)
        stages = [choices.of(row) for row in rows]
        assert all(len(result) < MOST_CHOICES for result in stages)
        result = cheapest(stages, memory, [room] * len(when))
        assert result is not None and sum(choice.seconds for choice in result) == pytest.approx(best)
    assert cheapest(stages, memory, [0] * len(when)) is None


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("count", [8, 12, 64])
def test_whenmatch_a_simulated_step(name: str, count: int) -> None:
    """The highest peak equals that of the schedule's actions, also for long steps."""
    schedule = schedule_named(name)
    shape = Shape(4, 4 * schedule.stages_each, count)
    draw = random.Random(count)

    def some() -> tuple[float, ...]:
        return tuple(float(draw.randrange(1, 40)) for _ in range(shape.stages))

    costs = StageCosts(some(), some(), some(), over=some(), gradients=some(), split=False)
    fullest = [peak.total for peak in predict(schedule, shape, costs).fullest]
    for rank, rank_moments in enumerate(moments(schedule, shape)):
        stages = schedule.own(rank, shape)
        most = max(
            sum(n * costs.saved[stage] for n, stage in zip(moment.kept, stages, strict=True))
            + (costs.over[stages[moment.running]] if moment.running >= 0 else 0.0)
            + sum(
                costs.gradients[stage]
                for made, stage in zip(moment.has_gradients, stages, strict=True)
                if made
            )
            for moment in rank_moments
        )
        assert most == pytest.approx(fullest[rank])


class OnlyLong(OneForwardOneBackward):
    """Refuses fewer than twelve microbatches."""

    def refusal(self, shape: Shape) -> str | None:
        """See Schedule."""
        return None if shape.microbatches >= 12 else "too few"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        assert self.refusal(shape) is None, "called for a refused shape"
        return super().actions(rank, shape)


def test_whenskip_shapes_that_the_schedule_refuses() -> None:
    shape = Shape(2, 2, 12)
    assert moments(OnlyLong(), shape) == moments(OneForwardOneBackward(), shape)


def case(seed: int, schedule: str, degree: int = 2) -> tuple[SearchRequest, cost_module._Case]:
    """Random layers with two recompute policies."""
    draw = random.Random(seed)
    work = [
        ModuleWork(
            name,
            draw.uniform(1, 3),
            draw.randrange(60, 200),
            inputs=frozenset({(i, NAMES[i - 1], 40)} if i else ()),
            transient_bytes=draw.randrange(50),
        )
        for i, name in enumerate(NAMES)
    ]

    def again(part: float, more: float) -> tuple[ModuleWork, ...]:
        return tuple(
            replace(
                w,
                seconds=w.seconds * (1 + more),
                saved_bytes=round(w.saved_bytes * part),
                transient_bytes=w.transient_bytes + 30,
            )
            if "layers" in w.module
            else w
            for w in work
        )

    request = SearchRequest(
        world_size=degree,
        batch_size=8,
        options={"microbatches": 8, "schedule": schedule},
        survey=Pipeline().survey(Chain()),
        pipeline=PipelineQuery(
            work=tuple(work), recompute_variants={"selective": again(0.6, 0.05), "full": again(0.2, 0.3)}
        ),
        sizes=ModelSizes(state_bytes=1600, gradient_bytes=400),
    )
    assert request.survey is not None
    survey: ModelSurvey = request.survey.details
    plan = survey.schedule(schedule)
    shape = Shape(degree, degree * plan.stages_each, 8)
    return request, cost_module._Case(request, LINK, survey.costs(request.pipeline.work), survey, plan, shape)


def every_choice(request: SearchRequest, model: ModelCosts, survey: ModelSurvey) -> Iterator[ModelCosts]:
    """The model with each combination of recompute options."""
    ways: list[list[UnitWork]] = [[run] for run in model.runs]
    for work in request.pipeline.recompute_variants.values():
        for place, run in enumerate(survey.costs(work).runs):
            if run.kept < model.runs[place].kept:
                ways[place].append(run)
    for runs in itertools.product(*ways):
        yield replace(model, runs=list(runs))


def slowest(cost: StrategyCost, model: ModelCosts) -> float:
    return max(cost.stages) * model.whole


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(4))
def test_cuts_and_recomputation_are_optimal(schedule: str, seed: int) -> None:
    """Every cut with every choice: none that frees as much memory has a faster slowest stage."""
    request, how = case(seed, schedule)
    free = Pipeline().cost(request, 2, LINK)
    even = divide(how.model, how.survey, cost_module.even_cuts(how.model, how.survey, 2, 2))
    most = how.run(even, True).fullest.total(request)[0]
    outcomes = []
    for runs in every_choice(request, how.model, how.survey):
        for cut in range(1, len(NAMES)):
            outcome = how.run(divide(runs, how.survey, [cut]), runs.runs == how.model.runs)
            outcomes.append(
                (max(load.seconds for load in outcome.parts.loads), outcome.fullest.total(request)[0])
            )
    least = min(need for _, need in outcomes)
    for part in (0.1, 0.4, 0.7, 1.0):
        to_free = int(part * (most - least))
        result = Pipeline().cost(
            replace(request, pipeline=replace(request.pipeline, bytes_to_free=to_free)), 2, LINK
        )
        best = min(seconds for seconds, need in outcomes if need <= most - to_free)
        assert slowest(result, how.model) == pytest.approx(best)
        assert slowest(result, how.model) >= slowest(free, how.model)
        assert set(result.recompute) <= {name for name in NAMES if "layers" in name}
    # more than can be freed: as if nothing was requested
    assert (
        Pipeline().cost(
            replace(request, pipeline=replace(request.pipeline, bytes_to_free=int(most))), 2, LINK
        )
        == free
    )


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_recompute_of_two_stages_of_a_rank_is_optimal(schedule: str) -> None:
    request, how = case(1, schedule)
    cuts = cost_module.even_cuts(how.model, how.survey, 2, 4)
    most = how.run(divide(how.model, how.survey, cuts), True).fullest.total(request)[0]
    outcomes = [
        how.run(divide(runs, how.survey, cuts), False)
        for runs in every_choice(request, how.model, how.survey)
    ]
    for to_free in (100, 300, 500):
        result = Pipeline().cost(
            replace(request, pipeline=replace(request.pipeline, bytes_to_free=to_free)), 2, LINK
        )
        fitting = [o for o in outcomes if o.fullest.total(request)[0] <= most - to_free]
        best = min(max(map(sum, _by_rank(how.schedule, how.shape, o))) for o in fitting)
        seconds = [part * how.model.whole for part in result.stages]
        mine = [sum(seconds[s] for s in how.schedule.own(rank, how.shape)) for rank in range(2)]
        assert max(mine) == pytest.approx(best) and result.recompute


@pytest.mark.parametrize("heavy", [100, 900])
def test_recompute_accounts_for_the_tail(heavy: int) -> None:
    """A model without a loss: the work after its units counts for the memory of the last rank only."""
    request, how = case(0, "1f1b")
    tail_work = ModuleWork("", 0.5, heavy, inputs=frozenset({(7, "head", 40)}), transient_bytes=50)
    request = replace(
        request,
        pipeline=replace(
            request.pipeline,
            work=(*request.pipeline.work, tail_work),
            recompute_variants={
                name: (*work, tail_work) for name, work in request.pipeline.recompute_variants.items()
            },
            example=((), {"ids": chain_batch()["ids"]}),
        ),
    )
    whole = how.survey.costs(request.pipeline.work)
    tail = tail_of(whole)
    how = replace(how, model=without_tail(whole), schedule=ForwardsFirst(how.schedule), tail=tail)
    even = divide(how.model, how.survey, cost_module.even_cuts(how.model, how.survey, 2, 2))
    most = how.run(even, True).fullest.total(request)[0]
    outcomes = []
    for runs in every_choice(request, how.model, how.survey):
        for cut in range(1, len(NAMES)):
            outcome = how.run(divide(runs, how.survey, [cut]), False)
            outcomes.append(
                (max(load.seconds for load in outcome.parts.loads), outcome.fullest.total(request)[0])
            )
    least = min(need for _, need in outcomes)
    for part in (0.02, 0.1, 0.4, 0.7, 1.0):
        to_free = int(part * (most - least))
        result = Pipeline().cost(
            replace(request, pipeline=replace(request.pipeline, bytes_to_free=to_free)), 2, LINK
        )
        assert result.full_batch_share * whole.whole == pytest.approx(tail.seconds * how.shape.microbatches)
        assert max(result.stages) * whole.whole == pytest.approx(
            min(seconds for seconds, need in outcomes if need <= most - to_free)
        )


def _by_rank(schedule: Schedule, shape: Shape, outcome: cost_module._Outcome) -> list[list[float]]:
    return [
        [outcome.parts.loads[s].seconds for s in schedule.own(rank, shape)] for rank in range(shape.ranks)
    ]


def test_first_stages_recompute_more_under_1f1b() -> None:
    """Four equal layers and more: the last stage holds one microbatch and recomputes nothing."""
    request, _ = case(0, "1f1b")
    equal = [ModuleWork(name, 1.0, 100.0) for name in NAMES]
    layers = [replace(w, seconds=1.3, saved_bytes=10.0) if "layers" in w.module else w for w in equal]
    limited = replace(
        request,
        pipeline=replace(request.pipeline, work=tuple(equal), recompute_variants={"full": tuple(layers)}),
        sizes=replace(request.sizes, state_bytes=0, gradient_bytes=0),
    )
    result = Pipeline().cost(replace(limited, pipeline=replace(limited.pipeline, bytes_to_free=150)), 2, LINK)
    assert dict(result.recompute) == {"layers.0": "full"}
    assert dict(Pipeline().cost(limited, 2, LINK).recompute) == {}


def test_modules_called_twice_do_not_recompute() -> None:
    request, _ = case(0, "1f1b")
    twice = (*request.pipeline.work, replace(request.pipeline.work[1], seconds=0.1))
    again = {
        name: (*work, replace(work[1], seconds=0.2))
        for name, work in request.pipeline.recompute_variants.items()
    }
    limited = replace(
        request, pipeline=replace(request.pipeline, work=twice, recompute_variants=again, bytes_to_free=100)
    )
    assert "layers.0" not in Pipeline().cost(limited, 2, LINK).recompute
