"""What a search did not look at, and why, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.utils.names import listing
from meshwright_planner.evaluation.context import Setting


def left_out(
    setting: Setting,
    every: Sequence[Mapping[str, int]],
    some: Sequence[Mapping[str, int]],
    long: int,
    *,
    beyond: Sequence[Mapping[str, int]] = (),
    climbed: bool,
    ended: bool,
) -> str:
    """Why not every combination of degrees was looked at.

    Args:
        setting: what the search is about.
        every, some: legal combinations, and those that the search was to look at.
        long: tokens of a row from which sharing the sequence is tried unasked.
        beyond: those that it looked at all the same.
        climbed: of those it looked at what climbing met.
        ended: the time was over before.
    """
    said = [*_axes(setting, every, some, long, beyond)]
    if said:
        said = [f"left aside: {', '.join(said)}"]
    if climbed:
        said.append("met by climbing from several places")
    if ended:
        said.append("the time was over")
    return "; ".join(said)


def refusals(refused: Iterable[PlanError], possible: Sequence[Sequence[tuple[str, int]]]) -> Iterator[str]:
    """Why a degree that is legal cannot be had, a line each, where none of the `possible` configurations has it."""
    said: dict[str, None] = {}
    for error in refused:
        kind, _, axis = error.field.partition(".")
        if kind == "degrees" and not any((axis, error.value) in degrees for degrees in possible):
            said[f"no {axis}: {error.rule}"] = None
    yield from said


def _axes(
    setting: Setting,
    every: Sequence[Mapping[str, int]],
    some: Sequence[Mapping[str, int]],
    long: int,
    beyond: Sequence[Mapping[str, int]],
) -> Iterator[str]:
    """Axes whose larger degrees were left aside, and why."""
    for axis, strategy in setting.strategies.items():
        most = max(degrees[axis] for degrees in some)
        if most == max(degrees[axis] for degrees in every):
            continue
        seen = sorted({degrees[axis] for degrees in beyond if degrees[axis] > most})
        above = f"{axis} above {most}" + (f" but for {listing([*map(str, seen)], len(seen))}" if seen else "")
        if strategy.placement_search:
            yield f"{above}, wider than {setting.cluster.links[0].name}"
        else:
            yield f"{above}, for rows of fewer than {long:,} tokens"
