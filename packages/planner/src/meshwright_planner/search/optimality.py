"""How far the best may be from the best there is: a bound on everything that was not evaluated exactly.

What is claimed is about configurations (degrees, what ranks share, schedule and microbatches, recomputation), each with the
placements that the integer program finds for it.  A configuration is settled where it was evaluated, where its estimate is exact
(without a searched axis there is nothing to place), or where it cannot fit.  All others take at least
what `search/lower_bound.py` says.
What turns out to be faster while a proof is looked for is evaluated, and ranked with the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright_dtensor.errors import PlanError
from meshwright_planner.evaluation.candidate import Candidate, human_seconds, rank
from meshwright_planner.evaluation.configuration import BY_STAGE, Chosen, Point
from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.evaluation.degrees import named, unasked
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.evaluation.memory_bound import least_bytes
from meshwright_planner.placement.ilp import GAP
from meshwright_planner.search.lower_bound import floor_of

MORE = 96
"""Configurations without a searched axis that are costed for the sake of the proof alone."""

MOST = 4_000
"""Configurations up to which they are told apart; where there are more, all that were not evaluated share one bound."""


@dataclass(frozen=True)
class Proof:
    """What is known of everything that was not evaluated exactly.

    Args:
        least: seconds that it takes at least; infinite where there is nothing, None where nothing is known.
        words: how that is known, in a line.
        settled: configurations that were not evaluated, with their exact estimates; None for one that cannot be had.
    """

    least: float | None
    words: str
    settled: Mapping[Point, Candidate | None] = field(default_factory=dict, repr=False, compare=False)

    def gap(self, seconds: float) -> float | None:
        """By what part of `seconds` something that was not evaluated may be faster."""
        if self.least is None:
            return None
        return round(max(0.0, 1.0 - self.least / seconds), 6) if seconds else 0.0


def settle(
    search: Search,
    exact: Sequence[Candidate],
    every: Sequence[Mapping[str, int]],
    known: Mapping[Point, Candidate | None] | None = None,
) -> tuple[list[Candidate], Proof]:
    """What was evaluated, best first, along with what the proof finds to be faster than all of it; and the proof.

    Arguments are those of `prove`.
    """
    ranked = sorted(exact, key=rank)
    while True:
        proof = prove(search, ranked, every, known)
        best = _fastest(ranked)
        better = sorted((c for c in _exact(proof.settled) if c.step_seconds < best), key=rank)[:MORE]
        if not better:
            return ranked, proof
        known = {**(known or {}), **proof.settled}
        for point in (c.point for c in better):
            try:
                ranked.append(search.evaluate(point))
            except PlanError:  # an estimate does not ask all that the exact answer does
                known[point] = None
        ranked.sort(key=rank)


def prove(
    search: Search,
    exact: Sequence[Candidate],
    every: Sequence[Mapping[str, int]],
    known: Mapping[Point, Candidate | None] | None = None,
) -> Proof:
    """The proof for a search.

    Args:
        search: was done.
        exact: candidates that were evaluated exactly, at least one.
        every: legal combinations of degrees.
        known: configuration -> its estimate, None where a strategy refuses it; None where not all combinations of degrees
            were looked at, so that configurations are not worth telling apart.
    """
    setting = search.setting
    least, why = _unsolved(exact)
    cluster = setting.figures
    floor = None if cluster is None else floor_of(search, cluster, exact)
    best = _fastest(exact)
    widths = {_stages(search, tuple(d.items())) for d in every}
    floors = {n: floor.seconds(n) if floor is not None else 0.0 for n in widths}
    left = None if known is None else _open(search, exact, known, every)
    settled: dict[Point, Candidate | None] = {}
    if known is not None and left is not None:
        estimates = dict(known)
        as_asked = [point for point in left if point.recompute == setting.recompute]
        _cost(search, as_asked, floors, best, estimates)
        left = _open_still(search, _needed(left, estimates), estimates)
        _cost(search, left, floors, best, estimates)
        left = _open_still(search, left, estimates)
        # what is settled and was not evaluated takes what its estimate says
        evaluated = {c.point for c in exact}
        settled = {p: found for p, found in estimates.items() if p not in evaluated}
        least = min([least, *(c.step_seconds for c in _exact(settled))])
        widths = {_stages(search, point.degrees) for point in left}
    if floor is None and widths:
        assert setting.cost_model is not None
        return Proof(
            None, f"not proven: no bound is known of the cost model {setting.cost_model.name!r}{why}", settled
        )
    bound = min((floors[n] for n in widths), default=math.inf)
    if left is not None:
        pins = unasked(search.basis)
        why += f"; nothing is said of degrees that only a pin opens ({named(pins)})" if pins else ""
    if min(bound, least) >= best:
        return Proof(
            min(bound, least),
            f"exact: no configuration that was not evaluated can be faster, placements solved to {100 * GAP:g}%{why}",
            settled,
        )
    return Proof(
        min(bound, least),
        f"bounded: {len(exact)} configurations evaluated exactly; all others take at least {human_seconds(min(bound, least))}: "
        f"products with weights, calls and the update, divided over all ranks, and nothing else{why}",
        settled,
    )


def _exact(settled: Mapping[Point, Candidate | None]) -> Iterator[Candidate]:
    """Those that fit and whose estimates are exact: nothing is placed in them."""
    return (c for c in settled.values() if c is not None and not c.searched and not c.excess_bytes)


def _fastest(candidates: Iterable[Candidate]) -> float:
    return min((c.step_seconds for c in candidates if not c.excess_bytes), default=math.inf)


def _unsolved(exact: Sequence[Candidate]) -> tuple[float, str]:
    """Seconds that evaluated candidates might yet take with other placements, and what to say of it."""
    least, count = math.inf, 0
    for candidate in exact:
        placement = candidate.placement
        if placement.bound is None or placement.objective <= 0:
            continue
        gap = 1.0 - placement.bound / placement.objective
        if gap > GAP:
            count += 1
            least = min(least, candidate.step_seconds * max(0.0, 1.0 - gap))
    return least, f"; {count} placement programs not solved to the end" if count else ""


def _stages(search: Search, degrees: tuple[tuple[str, int], ...]) -> int:
    """Ranks that share the modules of the model."""
    strategies = search.setting.strategies
    return math.prod(degree for axis, degree in degrees if strategies[axis].divides)


def _points(search: Search, every: Sequence[Mapping[str, int]]) -> Iterator[Point]:
    """Every configuration of these combinations."""
    setting = search.setting
    for degrees in every:
        shares = degrees.get(SHARED, 1) > 1
        stages = ((setting.stage,) if setting.stage else (2, 3)) if shares else (0,)
        policies: list[str | Chosen | None] = [setting.recompute]
        if setting.recompute is None:
            policies += search.can_recompute(degrees)
            if len(policies) > 1 and _stages(search, tuple(degrees.items())) > 1:
                policies.append(BY_STAGE)
        for way in search.ways(degrees, thorough=True) or [{}]:
            for stage in stages:
                for policy in policies:
                    yield Point.of(degrees, stage, way, policy)


def _open(
    search: Search,
    exact: Sequence[Candidate],
    known: Mapping[Point, Candidate | None],
    every: Sequence[Mapping[str, int]],
) -> list[Point] | None:
    """Configurations that are not settled; None where they are too many to tell apart."""
    evaluated, found = {c.point for c in exact}, []
    for number, point in enumerate(_points(search, every)):
        if number >= MOST:
            return None
        if point not in evaluated and not (point in known and _is_settled(search, known[point])):
            found.append(point)
    return found


def _needed(left: Sequence[Point], known: Mapping[Point, Candidate | None]) -> list[Point]:
    """Without those that run something again where all fits as it is: they take what that takes, and more."""
    kept = []
    for point in left:
        free = known.get(point.but(recompute=None)) if point.recompute is not None else None
        if free is None or free.searched or free.excess_bytes:
            kept.append(point)
    return kept


def _is_settled(search: Search, estimate: Candidate | None) -> bool:
    if estimate is None or not estimate.searched:  # refused, or exact as it is
        return True
    return bool(estimate.excess_bytes) and least_bytes(estimate, search.basis.sizes) > search.setting.limit


def _cost(
    search: Search,
    left: Sequence[Point],
    floors: Mapping[int, float],
    best: float,
    known: dict[Point, Candidate | None],
) -> None:
    """Cost those of these configurations that might be faster than the best and need no program, where they are few."""
    placed = {axis for axis, s in search.setting.strategies.items() if s.placement_search}
    plain = [
        point
        for point in left
        if point not in known
        and floors[_stages(search, point.degrees)] < best
        and all(degree == 1 or axis not in placed for axis, degree in point.degrees)
    ]
    if len(plain) > MORE:
        return
    for point in plain:
        if time.monotonic() > search.end:
            break
        try:
            known[point] = search.estimate(point)
        except PlanError:
            known[point] = None


def _open_still(
    search: Search, left: Sequence[Point], known: Mapping[Point, Candidate | None]
) -> list[Point]:
    return [p for p in left if p not in known or not _is_settled(search, known[p])]
