"""Schedules are complete, end, and hold as many activations as theory says; errors of broken ones name the action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from meshwright_dtensor.errors import UsageError
from meshwright_pipeline import Action, Schedule, Shape, timetable
from meshwright_pipeline.schedule.dualpipe_v import DualPipeV
from meshwright_pipeline.schedule.gpipe import GPipe, LoopedBFS
from meshwright_pipeline.schedule.one_f_one_b import Interleaved, OneForwardOneBackward, ZeroBubble
from meshwright_pipeline.schedule.zbv import ZBV


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 16])
def test_1f1b_matches_theory(ranks: int, count: int) -> None:
    table = timetable(OneForwardOneBackward(), Shape(ranks, ranks, count))
    assert table.alive == tuple(min(count, ranks - rank) for rank in range(ranks))
    # filling and draining: one forward and one backward for every rank but one
    assert table.length == 3 * (count + ranks - 1)
    assert table.bubble == pytest.approx((ranks - 1) / (count + ranks - 1))


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_gpipe_holds_all_microbatches(ranks: int, each: int) -> None:
    table = timetable(GPipe(), Shape(ranks, ranks * each, 6))
    assert table.alive == (6 * each,) * ranks


@pytest.mark.parametrize(("ranks", "each", "count"), [(2, 2, 2), (2, 2, 8), (4, 2, 8), (4, 3, 12), (3, 2, 6)])
def test_interleaving_shrinks_the_bubble(ranks: int, each: int, count: int) -> None:
    table = timetable(Interleaved(), Shape(ranks, ranks * each, count))
    # Narayanan et al. 2021, 2.2: the bubble is an each-th of that of 1f1b
    ideal = 3 * each * count
    assert table.length - ideal == pytest.approx(3 * (ranks - 1))
    most = (each - 1) * ranks + 2 * (ranks - 1) + 1
    assert table.alive[0] == min(most, count * each)


@pytest.mark.parametrize(("ranks", "each", "count"), [(2, 1, 4), (2, 2, 8), (4, 1, 8), (4, 2, 8), (3, 2, 6)])
def test_zero_bubble_fills_the_bubble_with_weights(ranks: int, each: int, count: int) -> None:
    table = timetable(ZeroBubble(), Shape(ranks, ranks * each, count))
    # Qi et al. 2023, table 2, ZB-H1: (p - 1)(F + I - W), where 1f1b waits (p - 1)(F + B); the memory of its first rank
    assert table.length - 3 * each * count == ranks - 1
    assert table.alive == (each * ranks,) * ranks


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 3), (2, 8), (4, 7), (4, 16), (8, 32)])
def test_zbv_holds_as_much_as_1f1b(ranks: int, count: int) -> None:
    table = timetable(ZBV(), Shape(ranks, 2 * ranks, count))
    # stages are half as large; waiting is for the first microbatch alone to come down
    assert table.length - 6 * count == ranks - 1
    assert table.alive == (min(2 * ranks, 2 * count),) * ranks


@pytest.mark.parametrize(("ranks", "count"), [(1, 2), (2, 4), (4, 8), (4, 20), (8, 16)])
def test_dualpipev_holds_one_half_more(ranks: int, count: int) -> None:
    table = timetable(DualPipeV(), Shape(ranks, 2 * ranks, count))
    assert table.length - 6 * count == ranks - 1
    assert table.alive == (min(2 * ranks + 1, 2 * count),) * ranks
    assert any(action.kind == "B" for action in table.ranks[0])


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 8), (3, 5)])
def test_looped_bfs_shrinks_the_bubble_of_gpipe(ranks: int, count: int) -> None:
    table = timetable(LoopedBFS(), Shape(ranks, 2 * ranks, count))
    assert table.alive == (2 * count,) * ranks
    if count >= ranks:
        assert table.length - 6 * count == 3 * (ranks - 1)


@pytest.mark.parametrize("schedule", [ZBV(), DualPipeV()], ids=lambda s: s.name)
def test_v_schedules_have_two_stages_per_rank(schedule: Schedule) -> None:
    with pytest.raises(UsageError, match="two stages per rank"):
        timetable(schedule, Shape(2, 2, 8))
    assert [schedule.owner(stage, Shape(3, 6, 6)) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    with pytest.raises(UsageError, match="at least 8 microbatches"):
        timetable(DualPipeV(), Shape(4, 8, 6))


def test_interleaved_needs_whole_groups() -> None:
    with pytest.raises(UsageError, match="groups of 4"):
        timetable(Interleaved(), Shape(4, 8, 6))
    with pytest.raises(UsageError, match="one stage per rank"):
        timetable(OneForwardOneBackward(), Shape(2, 4, 4))


class Broken(Schedule):
    name: ClassVar[str] = "broken"

    def __init__(self, change: str) -> None:
        self.change = change

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        actions = list(OneForwardOneBackward().actions(rank, shape))
        if rank == 1 and self.change == "forgets":
            actions.remove(Action("B", 1, 2))
        if rank == 1 and self.change == "hangs":
            actions.reverse()
        if rank == 1 and self.change == "repeats":
            actions.append(actions[0])
        if rank == 1 and self.change == "halves":
            actions[actions.index(Action("B", 1, 1))] = Action("I", 1, 1)
        if rank == 1 and self.change == "twice":
            actions.append(Action("W", 1, 1))
        if rank == 1 and self.change == "weights first":
            place = actions.index(Action("B", 1, 1))
            actions[place : place + 1] = [Action("W", 1, 1), Action("I", 1, 1)]
        if rank == 1 and self.change == "takes":
            actions.append(Action("F", 0, 0))
            actions.remove(Action("F", 1, 0))
        return actions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("forgets", "B2 of stage 1 is missing; every forward needs its backward"),
        ("hangs", "rank 1 waits at B3 of stage 1 for F3 of stage 1"),
        ("repeats", "F0 of stage 1 comes twice"),
        ("takes", "F0 of stage 0"),
        ("halves", "W1 of stage 1 is missing; every forward needs its backward"),
        ("twice", "W1 of stage 1 is a part of B1 of stage 1, which is there too"),
        ("weights first", "rank 1 waits at W1 of stage 1 for I1 of stage 1"),
    ],
)
def test_error_of_broken_schedule_names_the_action(change: str, message: str) -> None:
    with pytest.raises(UsageError, match="broken") as caught:
        timetable(Broken(change), Shape(2, 2, 4))
    assert message in str(caught.value)
