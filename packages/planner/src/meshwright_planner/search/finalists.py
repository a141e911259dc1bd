"""The finalists: estimates that are evaluated exactly and ranked.

Estimates are not exact. So a few more than requested are evaluated, and where those that should fit do not, others are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.evaluation.memory_bound import least_bytes

FEW = 64
"""Combinations of degrees up to which each is tried, and exact evaluations up to which the search for one that fits goes on."""

SPARE = 2
"""Configurations that are evaluated exactly in addition to those requested."""

CLOSE = 0.02
"""Part of the best predicted step within which further configurations are evaluated exactly."""

CLOSEST = 6
"""Configurations that cannot fit and are evaluated all the same, to report the one that comes closest."""


def exactly(
    search: Search,
    estimates: Sequence[Candidate],
    evaluate: Callable[[Point], Candidate | None],
    wanted: int,
    each: bool,
    late: bool,
) -> list[Candidate]:
    """The best of the estimates, evaluated exactly.

    Args:
        search: made the estimates.
        estimates: best first, at least one.
        evaluate: the exact answer for a configuration; None where a strategy refuses.
        wanted: the number of plans requested.
        each: also evaluate the best of every combination of degrees.
        late: the time budget is spent. No more than `wanted` are evaluated, if one of them fits.
    """
    exact: dict[Point, Candidate | None] = {}
    if late:
        exact = {c.point: evaluate(c.point) for c in estimates[:wanted]}
        if any(not c.excess_bytes for c in _possible(exact)):
            return _possible(exact)
    for candidate in (*(_first_of_each(estimates) if each else ()), *_leading(estimates, wanted)):
        if candidate.point not in exact:
            exact[candidate.point] = evaluate(candidate.point)
    _until_enough_fit(search, estimates, evaluate, wanted, exact)
    return _possible(exact)


def _leading(estimates: Sequence[Candidate], wanted: int) -> Iterator[Candidate]:
    """The first estimates, and those that fit and are about as fast as the best."""
    yield from estimates[: wanted + SPARE]
    close = estimates[0].step_seconds * (1 + CLOSE)
    for candidate in estimates[: 2 * (wanted + SPARE)]:
        if not candidate.excess_bytes and candidate.step_seconds <= close:
            yield candidate


def _until_enough_fit(
    search: Search,
    estimates: Iterable[Candidate],
    evaluate: Callable[[Point], Candidate | None],
    wanted: int,
    exact: dict[Point, Candidate | None],
) -> None:
    """Add to `exact` until as many fit as are wanted. Placements chosen for the memory may fit where estimates do not."""
    sizes, limit, closest = search.basis.sizes, search.setting.limit, 0
    for estimate in estimates:
        evaluated = _possible(exact)
        fitting = sum(not c.excess_bytes for c in evaluated)
        if fitting >= wanted or len(exact) >= FEW:
            break
        if estimate.point in exact:
            continue
        least = least_bytes(estimate, sizes)
        if least > limit:
            # it cannot fit, but it may come closer than all others
            smallest = min((c.total_bytes for c in evaluated), default=math.inf)
            if fitting or closest >= CLOSEST or least >= smallest:
                continue
            closest += 1
        exact[estimate.point] = evaluate(estimate.point)


def _possible(exact: Mapping[Point, Candidate | None]) -> list[Candidate]:
    """The candidates that no strategy refuses."""
    return [candidate for candidate in exact.values() if candidate is not None]


def _first_of_each(estimates: Iterable[Candidate]) -> Iterator[Candidate]:
    """The best estimate of each combination of degrees."""
    seen = set[tuple[tuple[str, int], ...]]()
    for candidate in estimates:
        if candidate.point.degrees not in seen:
            seen.add(candidate.point.degrees)
            yield candidate
