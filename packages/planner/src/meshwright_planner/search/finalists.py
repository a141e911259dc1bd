"""The finalists: estimates that are evaluated exactly and ranked.

Estimates are not exact. So a few more than requested are evaluated, and where those that should fit do not, others are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.evaluator import Search

FEW = 64
"""Combinations of degrees up to which each is tried, and exact evaluations up to which the search for one that fits goes on."""

SPARE = 2
"""Configurations that are evaluated exactly in addition to those requested."""

CLOSE = 0.02
"""Part of the best predicted step within which further configurations are evaluated exactly."""

Estimates = dict[Point, Candidate | None]
"""Configuration -> its candidate; None where a strategy refuses it."""

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
        estimates: best first, at least one.
        evaluate: the exact answer for a configuration; None where a strategy refuses.
        each: also evaluate the best of every combination of degrees.
        late: the time budget is spent. No more than `wanted` are evaluated, if one of them fits.
    """
    exact: Estimates = {}
    if late:
        exact = {c.point: evaluate(c.point) for c in estimates[:wanted]}
        if any(not c.excess_bytes for c in _possible(exact)):
            return _possible(exact)
    for candidate in _promising(estimates, wanted, each):
        if candidate.point not in exact:
            exact[candidate.point] = evaluate(candidate.point)
    # placements chosen for the memory may fit where estimates do not
    closest = 0
    for estimate in estimates:
        evaluated = _possible(exact)
        fitting = sum(not c.excess_bytes for c in evaluated)
        if fitting >= wanted or len(exact) >= FEW:
            break
        if estimate.point in exact:
            continue
        least = estimate.least_bytes(search.basis.sizes)
        if least > search.setting.limit:
            # it cannot fit, but it may come closer than all others
            smallest = min((c.total_bytes for c in evaluated), default=math.inf)
            if fitting or closest >= CLOSEST or least >= smallest:
                continue
            closest += 1
        exact[estimate.point] = evaluate(estimate.point)
    return _possible(exact)


def _promising(estimates: Sequence[Candidate], wanted: int, each: bool) -> Iterator[Candidate]:
    """The first estimates, and those that fit and are about as fast as the best; `each`: see `exactly`."""
    first: dict[object, Candidate] = {}
    for candidate in estimates if each else ():
        first.setdefault(candidate.point.degrees, candidate)
    yield from first.values()
    yield from estimates[: wanted + SPARE]
    bound = estimates[0].step_seconds * (1 + CLOSE)
    leading = estimates[: 2 * (wanted + SPARE)]
    yield from (c for c in leading if not c.excess_bytes and c.step_seconds <= bound)


def _possible(exact: Estimates) -> list[Candidate]:
    """The candidates that no strategy refuses."""
    return [candidate for candidate in exact.values() if candidate is not None]
