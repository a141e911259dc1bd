"""The notes on what a search did not try, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.utils.names import listing
from meshwright_planner.evaluation.context import Setting
from meshwright_planner.search.hill_climb import LONG


def left_out(
    setting: Setting,
    legal: Sequence[Mapping[str, int]],
    default: Sequence[Mapping[str, int]],
    extra: Sequence[Mapping[str, int]],
    climbed: bool,
    ended: bool,
) -> str:
    """Why not every legal combination of degrees was tried; `default`: those that a search tries by default.

    `extra`: those tried in addition; `climbed`: hill climbing chose among the default ones; `ended`: the time budget was spent.
    """
    axes = []
    for axis, strategy in setting.strategies.items():
        most = max(degrees[axis] for degrees in default)
        if most == max(degrees[axis] for degrees in legal):
            continue
        tried = sorted({degrees[axis] for degrees in extra if degrees[axis] > most})
        except_for = f" except {listing([*map(str, tried)], len(tried))}" if tried else ""
        reason = (
            f"wider than {setting.cluster.links[0].name}"
            if strategy.placement_search
            else f"for rows of fewer than {LONG:,} tokens"
        )
        axes.append(f"{axis} above {most}{except_for}, {reason}")
    reasons = [f"not tried by default: {', '.join(axes)}"] if axes else []
    if climbed:
        reasons.append("chosen by hill climbing from several starts")
    if ended:
        reasons.append("the time budget was spent")
    return "; ".join(reasons)


def refusals(refused: Iterable[PlanError], possible: Sequence[Sequence[tuple[str, int]]]) -> Iterator[str]:
    """Why a legal degree cannot be used, a line each, where none of the `possible` combinations has it."""
    lines: dict[str, None] = {}
    for error in refused:
        kind, _, axis = error.field.partition(".")
        if kind == "degrees" and not any((axis, error.value) in degrees for degrees in possible):
            lines[f"no {axis}: {error.rule}"] = None
    yield from lines
