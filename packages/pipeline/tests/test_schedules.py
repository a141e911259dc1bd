"""Schedules are complete, end, and hold as much as theory says; broken ones are refused by name of the action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from meshwright_dtensor.errors import UsageError
from meshwright_pipeline import Action, Schedule, Shape, timetable
from meshwright_pipeline.schedules.gpipe import GPipe
from meshwright_pipeline.schedules.interleaved import Interleaved
from meshwright_pipeline.schedules.one_f_one_b import OneForwardOneBackward


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 16])
def test_1f1b_holds_and_waits_as_theory_says(ranks: int, count: int) -> None:
    table = timetable(OneForwardOneBackward(), Shape(ranks, ranks, count))
    assert table.alive == tuple(min(count, ranks - rank) for rank in range(ranks))
    # filling and draining: one forward and one backward for every rank but one
    assert table.length == 3 * (count + ranks - 1)
    assert table.bubble == pytest.approx((ranks - 1) / (count + ranks - 1))


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_gpipe_holds_everything(ranks: int, each: int) -> None:
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


def test_it_takes_whole_groups() -> None:
    with pytest.raises(UsageError, match="groups of 4"):
        timetable(Interleaved(), Shape(4, 8, 6))
    with pytest.raises(UsageError, match="one stage a rank"):
        timetable(OneForwardOneBackward(), Shape(2, 4, 4))


class Broken(Schedule):
    name: ClassVar[str] = "broken"

    def __init__(self, change: str) -> None:
        self.change = change

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        found = list(OneForwardOneBackward().actions(rank, shape))
        if rank == 1 and self.change == "forgets":
            found.remove(Action("B", 1, 2))
        if rank == 1 and self.change == "hangs":
            found.reverse()
        if rank == 1 and self.change == "repeats":
            found.append(found[0])
        if rank == 1 and self.change == "takes":
            found.append(Action("F", 0, 0))
            found.remove(Action("F", 1, 0))
        return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("forgets", "B2 of stage 1 is missing; every forward needs its backward"),
        ("hangs", "rank 1 waits at B3 of stage 1 for F3 of stage 1"),
        ("repeats", "F0 of stage 1 comes twice"),
        ("takes", "F0 of stage 0"),
    ],
)
def test_a_broken_schedule_is_named(change: str, message: str) -> None:
    with pytest.raises(UsageError, match="broken") as caught:
        timetable(Broken(change), Shape(2, 2, 4))
    assert message in str(caught.value)
