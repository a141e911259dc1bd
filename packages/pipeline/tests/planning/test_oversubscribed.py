"""Simulated steps on ranks that share cores: a waiting rank leaves its core to the others."""

from __future__ import annotations

import math
import random

import pytest

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_pipeline import Shape
from meshwright_pipeline.planning.simulate import (
    MOST_ACTIONS,
    StageCosts,
    TimedAction,
    predict,
    shared_core_time,
)

NAMES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]
CASES = [(name, ranks, count) for name in NAMES for ranks, count in ((2, 4), (4, 8))]


def unequal(name: str, ranks: int, count: int, seed: int = 0) -> tuple[Shape, StageCosts]:
    """Stages and messages of random lengths."""
    draw = random.Random(f"{name} {ranks} {seed}").uniform
    stages = ranks * schedule_named(name).stages_each
    forward, backward = (tuple(draw(1, n) for _ in range(stages)) for n in (2, 4))
    sending = tuple(draw(0, 0.5) for _ in range(stages - 1))
    return Shape(ranks, stages, count), StageCosts(forward, backward, sending=sending)


@pytest.mark.parametrize(("name", "ranks", "count"), CASES)
def test_one_core_per_rank_changes_nothing(name: str, ranks: int, count: int) -> None:
    shape, costs = unequal(name, ranks, count)
    alone = predict(schedule_named(name), shape, costs)
    shared = predict(schedule_named(name), shape, costs, (1.0,) * ranks)
    assert shared.seconds == pytest.approx(alone.seconds) and shared.silent == pytest.approx(alone.silent)
    assert shared.busy == pytest.approx(alone.busy)


@pytest.mark.parametrize(("name", "ranks", "count"), CASES)
def test_single_core_is_idle_only_for_messages(name: str, ranks: int, count: int) -> None:
    shape, costs = unequal(name, ranks, count)
    shared = predict(schedule_named(name), shape, costs, tuple(n / ranks for n in range(1, ranks + 1)))
    work = (sum(costs.forward) + sum(costs.backward)) * count
    assert shared.silent == pytest.approx(work / ranks) and shared.seconds > shared.silent * (1 - 1e-9)
    assert max(shared.busy) <= shared.silent * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_two_cores_are_between_one_and_four(name: str) -> None:
    shape, costs = unequal(name, 4, 8, seed=1)
    schedule = schedule_named(name)
    single_core = predict(schedule, shape, costs, (0.25, 0.5, 0.75, 1.0)).silent
    two = predict(schedule, shape, costs, (0.5, 0.5, 0.75, 1.0)).silent
    four = predict(schedule, shape, costs, (1.0,) * 4).silent
    assert single_core < two < four
    work = (sum(costs.forward) + sum(costs.backward)) * 8
    assert two > work / 4  # sometimes only one of two cores is busy


def test_two_ranks_on_one_core_by_hand() -> None:
    # an action that takes 2 seconds while both ranks compute takes 1 alone
    first = [TimedAction(1, 2.0, 0, 0.0), TimedAction(2, 2.0, 0, 0.0)]
    second = [TimedAction(3, 2.0, 1, 0.25)]
    seconds, busy = shared_core_time([first, second], (0.5, 1.0))
    # 0 to 1: first alone; to 1.25: its next one alone, half a second of it; then both for 1.5; the rest of the other alone
    assert busy == pytest.approx([1 + 0.25 + 1.5, 1.5 + 0.25]) and seconds == pytest.approx(3.0)


def test_deadlock_is_reported() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        shared_core_time([[TimedAction(1, 1.0, 2, 0.0)], [TimedAction(2, 1.0, 1, 0.0)]], (1.0, 1.0))
    assert shared_core_time([[], []], (1.0, 1.0)) == (0.0, [0.0, 0.0])


@pytest.mark.slow
@pytest.mark.parametrize("company", [(0.5, 0.5, 0.75, 1.0), (0.25, 0.5, 0.75, 1.0)])
@pytest.mark.parametrize("name", NAMES)
def test_long_steps_are_extrapolated(
    name: str, company: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedule_named(name)
    shape, costs = unequal(name, 4, 2048 // schedule.stages_each)
    assert 2 * shape.stages * shape.microbatches > MOST_ACTIONS
    drawn = predict(schedule, shape, costs, company)
    monkeypatch.setattr("meshwright_pipeline.planning.simulate.MOST_ACTIONS", 1 << 40)
    walked = predict(schedule, shape, costs, company)
    assert drawn.seconds == pytest.approx(walked.seconds, rel=0.01)
    assert drawn.silent == pytest.approx(walked.silent, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_computes_longer_than_the_step(name: str) -> None:
    """Equal stages often end at the same time."""
    schedule = schedule_named(name)
    for count in (8, 16, 600):
        stages = 4 * schedule.stages_each
        costs = StageCosts((0.1,) * stages, (0.2,) * stages)
        shared = predict(schedule, Shape(4, stages, count), costs, (0.25, 0.5, 0.75, 1.0))
        assert max(shared.busy) <= shared.silent * (1 + 1e-6)


@pytest.mark.parametrize("company", [(1.0,), (0.5, 0.5, 0.5), (0.0, 1.0)])
def test_slowdown_is_checked(company: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="each of the 2 ranks"):
        predict(schedule_named("1f1b"), Shape(2, 2, 2), StageCosts((1.0, 1.0), (2.0, 2.0)), company)


def test_infinite_times_are_rejected() -> None:
    with pytest.raises(ValueError, match="finite"):
        shared_core_time([[TimedAction(1, math.nan, 0, 0.0)]], (1.0,))
