"""The optimality gap: a lower bound on the step of every configuration that was not evaluated exactly.

The claim is about configurations (degrees, ZeRO stage, schedule and microbatches, recompute), each with the placements that
the integer program finds for it. A configuration is settled if it was evaluated, if its estimate is exact (without a searched
axis there is nothing to place), or if it cannot fit. All others take at least the bound of `search/lower_bound.py`.
A configuration that turns out to be faster during the proof is evaluated and ranked with the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.utils.bytesize import human_seconds
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.configuration import BY_STAGE, Chosen, Point
from meshwright_planner.evaluation.degrees import named, unasked
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.placement.ilp import GAP
from meshwright_planner.search.finalists import Estimates
from meshwright_planner.search.hill_climb import Legal
from meshwright_planner.search.lower_bound import floor_of

MORE = 96
"""Configurations without a searched axis that are costed only for the proof."""

MOST = 4_000
"""Number of configurations up to which each is considered; with more, all that were not evaluated share one bound."""


@dataclass(frozen=True)
class Proof:
    """A lower bound for all configurations that were not evaluated exactly.

    Args:
        least: the least seconds of their steps; infinite where there are none, None where no bound is known.
        words: the argument, in a line.
        settled: configurations that were not evaluated, with their exact estimates; None where a strategy refuses.
    """

    least: float | None
    words: str
    settled: Estimates = field(default_factory=dict, repr=False, compare=False)

    def gap(self, seconds: float) -> float | None:
        """The part of `seconds` by which another configuration may be faster."""
        if self.least is None:
            return None
        return round(max(0.0, 1.0 - self.least / seconds), 6) if seconds else 0.0


def settle(
    search: Search, exact: Sequence[Candidate], legal: Legal, by_point: Estimates | None
) -> tuple[list[Candidate], Proof]:
    """The evaluated candidates and those that the proof finds to be faster, best first; and the proof (see `prove`)."""
    ranked = sorted(exact, key=rank)
    while True:
        proof = prove(search, ranked, legal, by_point)
        best = _fastest(ranked)
        better = sorted((c for c in _exact(proof.settled) if c.step_seconds < best), key=rank)[:MORE]
        if not better:
            return ranked, proof
        by_point = {**(by_point or {}), **proof.settled}
        for point in (c.point for c in better):
            try:
                ranked.append(search.evaluate(point))
            except PlanError:
                # an estimate does not ask a strategy everything that the exact answer does
                by_point[point] = None
        ranked.sort(key=rank)


def prove(
    search: Search, exact: Sequence[Candidate], legal: Legal, by_point: Estimates | None = None
) -> Proof:
    """The proof for a finished search.

    Args:
        exact: candidates that were evaluated exactly, at least one.
        by_point: the estimates; None where not all combinations of degrees were tried, so that configurations are not
            considered one by one.
    """
    setting = search.setting
    least, why = _unsolved(exact)
    cluster = setting.figures
    floor = None if cluster is None else floor_of(search, cluster, exact)
    best = _fastest(exact)
    stage_counts = {_stages(search, tuple(d.items())) for d in legal}
    floors = {n: floor.seconds(n) if floor is not None else 0.0 for n in stage_counts}
    left = _open(search, exact, by_point, legal)
    settled: Estimates = {}
    if left is not None:
        estimates = dict(by_point or {})

        def is_slow(point: Point) -> bool:
            return floors[_stages(search, point.degrees)] >= best

        _cost(search, [p for p in left if p.recompute == setting.recompute], is_slow, estimates)
        left = [p for p in _needed(left, estimates) if not _is_settled(search, p, estimates)]
        left = _cost(search, left, is_slow, estimates)
        # the estimates of settled configurations are exact
        evaluated = {c.point for c in exact}
        settled = {p: estimate for p, estimate in estimates.items() if p not in evaluated}
        least = min([least, *(c.step_seconds for c in _exact(settled))])
        stage_counts = {_stages(search, point.degrees) for point in left}
    if floor is None and stage_counts:
        assert setting.cost_model is not None
        words = f"not proven: there is no lower bound for the cost model {setting.cost_model.name!r}{why}"
        return Proof(None, words, settled)
    least = min(least, min((floors[n] for n in stage_counts), default=math.inf))
    if left is not None:
        pins = unasked(search.basis)
        why += f"; degrees that are tried only when pinned are not covered ({named(pins)})" if pins else ""
    if least >= best:
        words = f"exact: no other configuration can be faster, with placements solved to {100 * GAP:g}%{why}"
        return Proof(least, words, settled)
    words = (
        f"bounded: {len(exact)} configurations evaluated exactly; all others take at least {human_seconds(least)}, the time of "
        f"products with weights, of issuing operations and of the optimizer, divided over all ranks{why}"
    )
    return Proof(least, words, settled)


def _exact(settled: Estimates) -> Iterator[Candidate]:
    """The candidates that fit and whose estimates are exact, because no placements are searched."""
    return (c for c in settled.values() if c is not None and not c.searched and not c.excess_bytes)


def _fastest(candidates: Iterable[Candidate]) -> float:
    return min((c.step_seconds for c in candidates if not c.excess_bytes), default=math.inf)


def _unsolved(exact: Sequence[Candidate]) -> tuple[float, str]:
    """The least seconds of evaluated candidates with better placements, and the remark on unsolved programs."""
    least, count = math.inf, 0
    for candidate in exact:
        placement = candidate.placement
        if placement.bound is None or placement.objective <= 0:
            continue
        gap = 1.0 - placement.bound / placement.objective
        if gap > GAP:
            count += 1
            least = min(least, candidate.step_seconds * max(0.0, 1.0 - gap))
    return least, f"; {count} placement programs were not solved to optimality" if count else ""


def _stages(search: Search, degrees: tuple[tuple[str, int], ...]) -> int:
    """The number of ranks that hold different modules."""
    strategies = search.setting.strategies
    return math.prod(degree for axis, degree in degrees if strategies[axis].divides)


def _points(search: Search, legal: Legal) -> Iterator[Point]:
    """Every configuration of these combinations."""
    setting = search.setting
    for degrees in legal:
        policies: list[str | Chosen | None] = [setting.recompute]
        if setting.recompute is None:
            policies += search.can_recompute(degrees)
            if len(policies) > 1 and _stages(search, tuple(degrees.items())) > 1:
                policies.append(BY_STAGE)
        for way in search.ways(degrees, thorough=True) or [{}]:
            for stage in setting.zero_stages(degrees):
                for policy in policies:
                    yield Point.of(degrees, stage, way, policy)


def _open(
    search: Search, exact: Sequence[Candidate], estimates: Estimates | None, legal: Legal
) -> list[Point] | None:
    """Configurations that are not settled; None where there are too many to consider each, or no estimates."""
    if estimates is None:
        return None
    evaluated, unsettled = {c.point for c in exact}, []
    for number, point in enumerate(_points(search, legal)):
        if number >= MOST:
            return None
        if point not in evaluated and not _is_settled(search, point, estimates):
            unsettled.append(point)
    return unsettled


def _needed(left: Sequence[Point], estimates: Estimates) -> list[Point]:
    """Without those that recompute although the same configuration fits without: recompute only takes longer."""
    kept = []
    for point in left:
        free = estimates.get(point.but(recompute=None)) if point.recompute is not None else None
        if free is None or free.searched or free.excess_bytes:
            kept.append(point)
    return kept


def _is_settled(search: Search, point: Point, estimates: Estimates) -> bool:
    """Whether a configuration is refused, has an exact estimate because nothing is placed, or cannot fit."""
    if point not in estimates:
        return False
    estimate = estimates[point]
    if estimate is None or not estimate.searched:
        return True
    return bool(estimate.excess_bytes) and estimate.least_bytes(search.basis.sizes) > search.setting.limit


def _cost(
    search: Search, left: Sequence[Point], is_slow: Callable[[Point], bool], estimates: Estimates
) -> list[Point]:
    """Estimate configurations that are not `is_slow` and need no placements, if they are few; returns the unsettled."""
    placed = {axis for axis, s in search.setting.strategies.items() if s.placement_search}
    plain = [point for point in left if point not in estimates and not is_slow(point)]
    plain = [point for point in plain if all(n == 1 or axis not in placed for axis, n in point.degrees)]
    for point in plain if len(plain) <= MORE else ():
        if time.monotonic() > search.end:
            break
        try:
            estimates[point] = search.estimate(point)
        except PlanError:
            estimates[point] = None
    return [point for point in left if not _is_settled(search, point, estimates)]
