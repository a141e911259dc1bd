"""Without tags, no two messages between two ranks may be taken for each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Shape
from meshwright_dtensor.schedule.timetable import Timetable, timetable
from meshwright_pipeline.runtime.p2p.channels import channels_of, check_order

SHAPES = {
    "gpipe": Shape(2, 2, 4),
    "looped-bfs": Shape(2, 4, 4),
    "1f1b": Shape(4, 4, 8),
    "interleaved": Shape(2, 6, 4),
    "zero-bubble": Shape(3, 3, 6),
    "zbv": Shape(2, 4, 6),
    "dualpipev": Shape(4, 8, 8),
}
GROUPS = {
    "gpipe": 2,
    "looped-bfs": 6,
    "1f1b": 2,
    "interleaved": 10,
    "zero-bubble": 2,
    "zbv": 4,
    "dualpipev": 4,
}


def table_of(name: str) -> Timetable:
    return timetable(schedule_named(name), SHAPES[name])


@pytest.mark.parametrize("name", SHAPES)
def test_channels_between_two_ranks_are_apart(name: str) -> None:
    table = table_of(name)
    check_order(table)
    channels = channels_of(table)
    taken: set[Any] = set()
    for (cut, _), number in channels.items():
        place = (frozenset((table.owner(cut), table.owner(cut + 1))), number)
        assert place not in taken
        taken.add(place)
    assert max(channels.values()) + 1 == GROUPS[name]


def test_microbatches_that_are_taken_in_another_order_are_refused() -> None:
    table = table_of("gpipe")
    first, second = table.ranks
    other = sorted(second, key=lambda action: (action.kind != "F", -action.microbatch))
    with pytest.raises(PlanError, match="NCCL cannot tell apart"):
        check_order(replace(table, ranks=(first, tuple(other))))
