"""Hill climbing over combinations of degrees: which are tried by default, where to start, the steps, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.utils.names import listing
from meshwright_planner.evaluation.context import SHARED, Setting
from meshwright_planner.evaluation.evaluator import Search

EXACT = 16
"""Number of combinations up to which each is evaluated exactly."""

LONG = 16384
"""Tokens of a row from which sharing the sequence is tried together with everything else."""

Legal = Sequence[Mapping[str, int]]
"""Legal combinations of degrees, or some of them."""


def narrowed(search: Search, combinations: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """Combinations whose searched axes are not wider than the innermost links, and that share only long sequences.

    Where a condition would leave none, it is dropped.
    """
    setting = search.setting
    level = setting.cluster.links[0]
    inner = min(level.sizes) if level.sizes else level.size or setting.world_size
    axes = [a for a, s in setting.strategies.items() if s.placement_search and a not in setting.pins]
    kept = [d for d in combinations if all(d[a] <= inner for a in axes)] or list(combinations)
    if (setting.batch.sequence_length or 0) >= LONG or len(kept) <= EXACT:
        return kept
    # these divide neither rows nor modules nor parameters
    sequence_axes = [
        a
        for a, s in setting.strategies.items()
        if a not in setting.pins and a not in search.surveys
        if s.batch_factor(2) == 1 and not s.placement_search and not s.divides
    ]
    return [d for d in kept if all(d[a] == 1 for a in sequence_axes)] or kept


def adjacent(degrees: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The same number of ranks with one prime factor moved from one axis to another."""
    for source, degree in degrees.items():
        divisors = [n for n in range(2, degree + 1) if degree % n == 0]
        for prime in (n for n in divisors if all(n % other for other in divisors if other < n)):
            for target in degrees:
                if target != source:
                    yield {**degrees, source: degree // prime, target: degrees[target] * prime}


def starts(search: Search, legal: Legal) -> list[Mapping[str, int]]:
    """The combinations to climb from.

    - For each degree of the searched axis, the fewest stages; for its widest degree also a middle number of stages.
    - For each axis whose strategy places parameters itself (experts), its widest degree.
    """
    strategies = search.setting.strategies
    varying = {a for a in strategies if len({degrees.get(a, 1) for degrees in legal}) > 1}
    searched = next((a for a, s in strategies.items() if s.placement_search and a in varying), "")
    dividing = next((a for a, s in strategies.items() if s.divides), "")
    plain = [a for a in strategies if a not in (searched, dividing, "dp", SHARED)]
    chosen: list[Mapping[str, int]] = []
    for degree in sorted({d.get(searched, 1) for d in legal}):
        ranks = [(d, math.prod(d[a] for a in plain)) for d in legal if d.get(searched, 1) == degree]
        fewest = min(count for _, count in ranks)
        candidates = [d for d, count in ranks if count == fewest]
        candidates.sort(key=lambda d: (d.get(dividing, 1), d.get(SHARED, 1)))
        chosen.append(candidates[0])
        middle = candidates[len(candidates) // 2]
    chosen.append(middle)
    for axis, survey in search.surveys.items():
        if survey.parameters and any(d.get(axis, 1) > 1 for d in legal):
            order = ((axis, 1), (searched, -1), (dividing, -1), (SHARED, 1))
            chosen.append(max(legal, key=lambda d: [sign * d.get(name, 1) for name, sign in order]))
    return list({tuple(degrees.items()): degrees for degrees in chosen}.values())


def untried(setting: Setting, legal: Legal, default: Legal, extra: Legal, climbed: bool, ended: bool) -> str:
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
        wide, short = f"wider than {setting.cluster.links[0].name}", f"for rows of fewer than {LONG:,} tokens"
        axes.append(f"{axis} above {most}{except_for}, {wide if strategy.placement_search else short}")
    reasons = [f"not tried by default: {', '.join(axes)}"] if axes else []
    causes = {"chosen by hill climbing from several starts": climbed, "the time budget was spent": ended}
    return "; ".join([*reasons, *(cause for cause, holds in causes.items() if holds)])


def refusals(refused: Iterable[PlanError], possible: Sequence[Sequence[tuple[str, int]]]) -> Iterator[str]:
    """Why a legal degree cannot be used, a line each, where none of the `possible` combinations has it."""
    lines: dict[str, None] = {}
    for error in refused:
        kind, _, axis = error.field.partition(".")
        if kind == "degrees" and not any((axis, error.value) in degrees for degrees in possible):
            lines[f"no {axis}: {error.rule}"] = None
    yield from lines
