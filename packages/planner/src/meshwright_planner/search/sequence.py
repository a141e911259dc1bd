"""Sequence parallelism that is asked for: which degrees can do it, and what to say where none can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from meshwright_planner.placing.legal import balanced

if TYPE_CHECKING:
    from meshwright_planner.search.setting import Setting


def divides(setting: Setting, degree: int, lengths: Iterable[int]) -> bool:
    """Whether a searched axis of this degree can split sequences of these lengths (a rank's), if that is asked for."""
    if not setting.sequence_parallel or setting.world_size == 1:
        return True
    return degree > 1 and all(balanced(length, degree) for length in lengths)


def needs(setting: Setting) -> str:
    """What to add to an error of placements when it is asked for; else nothing."""
    if not setting.sequence_parallel:
        return ""
    return "; sequence_parallel=True needs placements that split the sequence between blocks: leave it out to do without them"


def refusal(setting: Setting, legal: Iterable[Mapping[str, int]]) -> str:
    """What to say where it is asked for, and is all that forbids these combinations of degrees."""
    searched = [axis for axis, strategy in setting.strategies.items() if strategy.placement_search]
    needs = "sequence_parallel=True needs a tensor axis of a degree above 1"
    if all(degrees[axis] == 1 for degrees in legal for axis in searched):
        given = {a: d for a, d in setting.pins.items() if a in searched} or dict(setting.pins)
        asked = ", ".join(f"{axis}={degree}" for axis, degree in given.items())
        return f"{needs}, and {asked or 'nothing that is legal'} leaves it none: change that, or leave sequence_parallel out"
    pinned = ", ".join(f"{axis}={setting.pins[axis]}" for axis in searched if axis in setting.pins)
    beside = f"; {pinned} does not" if pinned else ""
    return (
        f"{needs} that divides the sequence ({setting.batch.sequence_length} tokens) on each rank{beside}: pad the batch, change "
        "the degrees, or leave sequence_parallel out"
    )
