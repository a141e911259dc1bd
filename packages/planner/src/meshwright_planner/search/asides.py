"""What a search did not look at, and why, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright_dtensor.errors import PlanError
from meshwright_planner.search.setting import Setting


def left_out(
    setting: Setting,
    every: Sequence[Mapping[str, int]],
    some: Sequence[Mapping[str, int]],
    long: int,
    *,
    climbed: bool,
    ended: bool,
) -> str:
    """Why not every combination of degrees was looked at.

    Args:
        setting: what the search is about.
        every, some: legal combinations, and those that the search was to look at.
        long: tokens of a row from which sharing the sequence is tried unasked.
        climbed: of those it looked at what climbing met.
        ended: the time was over before.
    """
    said = [*_axes(setting, every, some, long)]
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
    setting: Setting, every: Sequence[Mapping[str, int]], some: Sequence[Mapping[str, int]], long: int
) -> Iterator[str]:
    """Axes whose larger degrees were left aside, and why."""
    for axis, strategy in setting.strategies.items():
        most = max(degrees[axis] for degrees in some)
        if most == max(degrees[axis] for degrees in every):
            continue
        if strategy.placement_search:
            yield f"{axis} above {most}, wider than {setting.cluster.links[0].name}"
        else:
            yield f"{axis} above {most}, for rows of fewer than {long:,} tokens"
