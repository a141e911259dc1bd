"""Which estimates are evaluated exactly: what is ranked in the end.

Estimates are not exact, so some more than are asked for are, and where those that should fit do not, others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.evaluation.memory_bound import least_bytes

FEW = 64
"""Combinations of degrees up to which each is looked at, and configurations up to which more are evaluated until one fits."""

SPARE = 2
"""Configurations beyond those asked for that are evaluated exactly, since estimates are not exact."""

CLOSE = 0.02
"""Part of the best predicted step within which configurations are evaluated exactly too, as many as there are asked for."""

NEARER = 6
"""Configurations that cannot fit and are evaluated all the same, to say what comes nearest to fitting."""


def exactly(
    search: Search,
    estimates: Sequence[Candidate],
    evaluate: Callable[[Point], Candidate | None],
    wanted: int,
    each: bool,
    late: bool,
) -> list[Candidate]:
    """The best of the estimates, evaluated.

    Args:
        search: made the estimates.
        estimates: best first, at least one.
        evaluate: the exact answer for a configuration; None where a strategy refuses.
        wanted: how many are asked for.
        each: the best of every combination of degrees is evaluated, too.
        late: time is over; no more than are wanted, if some of them fit.
    """
    exact: dict[Point, Candidate | None] = {}
    if late:
        exact = {c.point: evaluate(c.point) for c in estimates[:wanted]}
        if any(c is not None and not c.excess_bytes for c in exact.values()):
            return _had(exact)
    chosen = list(_first_of_each(estimates)) if each else []
    least = estimates[0].step_seconds * (1 + CLOSE)
    close = [c for c in estimates[: 2 * (wanted + SPARE)] if not c.excess_bytes and c.step_seconds <= least]
    for candidate in (*chosen, *estimates[: wanted + SPARE], *close):
        if candidate.point not in exact:
            exact[candidate.point] = evaluate(candidate.point)
    # with placements chosen for the memory, more may fit than estimates say
    sizes, limit, nearer = search.basis.sizes, search.setting.limit, 0
    for estimate in estimates:
        found = _had(exact)
        fitting = sum(not c.excess_bytes for c in found)
        if fitting >= wanted or len(exact) >= FEW:
            break
        if estimate.point in exact:
            continue
        least = least_bytes(estimate, sizes)
        if least > limit:  # it does not fit, but may come nearer than all others
            nearest = min((c.total_bytes for c in found), default=math.inf)
            if fitting or nearer >= NEARER or least >= nearest:
                continue
            nearer += 1
        exact[estimate.point] = evaluate(estimate.point)
    return _had(exact)


def _had(exact: Mapping[Point, Candidate | None]) -> list[Candidate]:
    """Those that no strategy refuses."""
    return [candidate for candidate in exact.values() if candidate is not None]


def _first_of_each(estimates: Iterable[Candidate]) -> Iterator[Candidate]:
    seen = set[tuple[tuple[str, int], ...]]()
    for candidate in estimates:
        if candidate.point.degrees not in seen:
            seen.add(candidate.point.degrees)
            yield candidate
