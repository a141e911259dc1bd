"""Which configurations are looked at: all of them where they are few, else those that climbing from several places meets.

Every configuration that is looked at is costed by `Search.estimate`, with placements that were found for its degrees at
another number of rows.  The best of them are then evaluated exactly, and those are what is ranked.

Four facts keep the numbers small.  Recomputation only ever costs time, so it is tried where memory asks for it.  What ranks
along zero share beyond gradients is the same.  And a searched axis that is wider than the innermost links is only tried
where the user pins it, nothing else fits, or the model is so small that every rank may as well compute all of it.  The
same goes for sharing a sequence that is not long.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright_dtensor.errors import PlanError
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.configuration import BY_STAGE, Point, is_number, middle
from meshwright_planner.evaluation.context import SHARED, ended_by
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.evaluation.memory_bound import floor_bytes
from meshwright_planner.placement.ilp import Unsolved
from meshwright_planner.search.finalists import FEW, SPARE, exactly
from meshwright_planner.search.hill_climb import EXACT, LONG, narrowed, neighbours, starts
from meshwright_planner.search.left_out import left_out, refusals
from meshwright_planner.search.lower_bound import floor_of

SLACK = 1.1
"""How much slower than the best so far a configuration may be that does not fit and is not given up: other ways are faster."""

FEW_WAYS = 12
"""Ways of a strategy up to which each is tried."""

REFINED = 6
"""Combinations of degrees for which every way of a strategy is tried."""

Degrees = tuple[tuple[str, int], ...]


@dataclass
class Explored:
    """What was found.

    Args:
        ranked: candidates that were evaluated exactly, best first.
        every: combinations of degrees that are legal.
        seen: those that were looked at.
        estimates: configurations that were costed.
        complete: every combination was looked at.
        budget: seconds that ended the search before its time, None where nothing did.
        known: configuration -> its estimate, None where a strategy refuses it; None where not every combination was looked at.
        left_out: why those that were not looked at were not.
        refused: why degrees are in none of those that were.
    """

    ranked: list[Candidate]
    every: Sequence[Mapping[str, int]]
    seen: int
    estimates: int
    complete: bool
    budget: float | None = None
    known: Mapping[Point, Candidate | None] | None = None
    left_out: str = ""
    refused: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """How exact the answer is, in a line."""
        share = "all" if self.complete else f"{self.seen} of"
        how = "" if self.complete else f" ({self.left_out}: the best need not be among them)"
        return (
            f"searched {share} {len(self.every)} combinations of degrees{how}, {self.estimates} configurations in all; "
            f"placements of the best {len(self.ranked)} solved exactly" + ended_by(self.budget)
        )


@dataclass
class _Explorer:
    search: Search
    wanted: int
    found: dict[Degrees, list[Candidate]] = field(default_factory=dict)
    estimates: int = 0
    refused: list[PlanError] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    known: dict[Point, Candidate | None] = field(default_factory=dict)
    keeps: bool = True
    free: dict[tuple[object, ...], dict[int, tuple[float, float]]] = field(default_factory=dict)
    tried: dict[tuple[Degrees, Any], Candidate | None] = field(default_factory=dict)
    ended: bool = False

    @property
    def late(self) -> bool:
        """Whether the time budget is spent, and there is something to show for it."""
        over = bool(self.steps) and time.monotonic() > self.search.end
        self.ended |= over
        return over

    def look(self, degrees: Mapping[str, int]) -> Candidate | None:
        """The best estimate for these degrees in their first way; None where a strategy refuses all."""
        key = tuple(degrees.items())
        if key not in self.found:
            if self.late:
                return None
            ways = self.search.ways(degrees) or [{}]
            few = ways if len(ways) <= 3 else [middle(ways)]
            self.found[key] = [c for way in few for c in [self.relieved(degrees, way)] if c is not None]
            if not self.found[key] and len(ways) > len(few):
                self.refine(key)
        return min(self.found[key], key=estimated, default=None)

    def refine(self, key: Degrees) -> None:
        """Try other ways of strategies for these degrees: all where they are few, else one choice after the other, numbers first
        (which schedule is the fastest depends on the number of microbatches more than that does on it)."""
        ways = self.search.ways(dict(key), thorough=True)
        ways += [way for way in (dict(c.point.way) for c in self.found[key]) if way not in ways]
        if len(ways) <= FEW_WAYS:
            for way in ways:
                self._try(key, way)
            return
        for name in 2 * sorted(ways[0], key=lambda n: not is_number(ways[0][n])):
            best = min(self.found[key], key=estimated, default=None)
            now = dict(best.point.way) if best is not None else ways[0]
            others = {k: v for k, v in now.items() if k != name}
            alike = [w for w in ways if {k: v for k, v in w.items() if k != name} == others]
            if is_number(now[name]):
                self._follow(key, sorted(alike, key=lambda w: int(str(w[name]))), now)
            else:
                for way in alike:
                    self._try(key, way)
        for name in filter(lambda n: is_number(ways[0][n]), ways[0]):
            self._follow_relieved(key, ways, name)

    def _follow_relieved(self, key: Degrees, ways: Sequence[Mapping[str, Any]], name: str) -> None:
        """More of them in ways that only memory keeps from being the best: of smaller microbatches less is held."""
        seen = set[tuple[tuple[str, Any], ...]]()
        for own in sorted(self.found[key], key=estimated):
            best, now = min(self.found[key], key=estimated), dict(own.point.way)
            others = {k: v for k, v in now.items() if k != name}
            alone = self.free.get((key, own.point.way))
            if tuple(others.items()) in seen or own.point.recompute is None or own.excess_bytes or not alone:
                continue
            seen.add(tuple(others.items()))
            if min(seconds for seconds, _ in alone.values()) < best.step_seconds:
                alike = [w for w in ways if {k: v for k, v in w.items() if k != name} == others]
                self._follow(key, sorted(alike, key=lambda w: int(str(w[name]))), now, down=False)

    def _follow(
        self, key: Degrees, ways: Sequence[Mapping[str, Any]], now: Mapping[str, Any], down: bool = True
    ) -> None:
        """From one way to its neighbour, and on as long as that is better: `down`, or where that is not, up."""
        best = here = self._try(key, now)
        below, above = range(ways.index(now) - 1, -1, -1), range(ways.index(now) + 1, len(ways))
        for direction in (below, above) if down else (above,):
            for place in direction:
                found = self._try(key, ways[place])
                if found is not None and best is not None and estimated(found) >= estimated(best):
                    break
                best = found or best
            if best is not here:
                return

    def _try(self, key: Degrees, way: Mapping[str, Any]) -> Candidate | None:
        """The best estimate for a way, asked for once; None where a strategy refuses it, or there is no time."""
        chosen = key, tuple(sorted(way.items()))
        if chosen not in self.tried:
            own = next((c for c in self.found[key] if c.point.way == chosen[1]), None)
            if own is None and not self.late:
                own = self.relieved(dict(key), way)
                if own is not None:
                    self.found[key].append(own)
            self.tried[chosen] = own
        return self.tried[chosen]

    def relieved(self, degrees: Mapping[str, int], way: Mapping[str, Any]) -> Candidate | None:
        """The fastest that fits of the ways to save memory, else the one that needs least."""
        setting = self.search.setting
        shares = degrees.get(SHARED, 1) > 1
        stages = ((setting.stage,) if setting.stage else (2, 3)) if shares else (0,)
        first = self._estimate(Point.of(degrees, stages[0], way, setting.recompute))
        if first is None or not first.excess_bytes:
            return first
        if first.step_seconds >= self.bound:  # whatever saves memory takes longer still
            return first
        policies = [setting.recompute]
        if setting.recompute is None:
            policies += self.search.can_recompute(degrees)
        chain = [(stage, policy) for policy in policies for stage in stages][1:]
        if not chain:
            return first
        last = self._estimate(Point.of(degrees, chain[-1][0], way, chain[-1][1]))
        if last is None or last.excess_bytes:
            return min((c for c in (first, last) if c is not None), key=estimated)
        best = last
        for stage, policy in chain[:-1]:
            if best is not last and (stage == best.point.stage or first.step_seconds >= best.step_seconds):
                continue
            found = self._estimate(Point.of(degrees, stage, way, policy))
            if found is None or found.excess_bytes:
                continue
            best = min(best, found, key=lambda c: c.step_seconds) if best is not last else found
            # with parameters gathered once nothing later is faster; gathered twice, running more again may be
            if stage == stages[0]:
                break
        return best

    def ease(self) -> None:
        """Where all blocks of a pipeline run again, let stages choose: the fastest first, while that may be among the best."""
        setting, easable = self.search.setting, self.search.can_ease
        every: list[tuple[float, Candidate, dict[int, float]]] = []
        for candidate in filter(easable, self.ranked()):
            point = candidate.point
            # where all of it running again did not fit at stage 2, a part of it does not
            all_of_it = point.recompute == self.search.can_recompute(dict(point.degrees))[-1]
            free = point.stage == 3 and not setting.stage and not all_of_it
            least = {stage: self._free(candidate, stage) for stage in ((2, 3) if free else (point.stage,))}
            every.append((min(least.values()), candidate, least))
        for first, candidate, least in sorted(every, key=lambda entry: entry[0]):
            if self.late or first >= self._worst:
                break
            for stage in least:
                if least[stage] >= self._worst:
                    continue
                point = candidate.point.but(recompute=BY_STAGE, stage=stage)
                eased = self._estimate(point)
                if eased is not None and not eased.excess_bytes:
                    if eased.step_seconds < candidate.step_seconds:
                        self.found[point.degrees].append(eased)
                    break

    def _free(self, candidate: Candidate, stage: int) -> float:
        """Seconds that this takes at least at a stage with less run again, which leaves less for gathering to hide behind."""
        alike = self.free[candidate.point.degrees, candidate.point.way]
        if stage in alike:
            return alike[stage][0]
        step, shared = min(alike.values())
        more = candidate.exposed.get(SHARED, 0.0) - shared if stage == candidate.point.stage else 0.0
        return step + max(0.0, more)

    @property
    def _worst(self) -> float:
        """Seconds of the last of those asked for, as far as is known."""
        place = min(self.wanted, len(self.steps)) - 1
        return self.steps[place] if place >= 0 else math.inf

    def _estimate(self, point: Point) -> Candidate | None:
        try:
            self.estimates += 1
            found = self.search.estimate(point, self.bound)
        except PlanError as refused:
            self._refuse(point, refused)
            return None
        if self.keeps:
            self.known[point] = found
        if point.recompute is None:
            known = self.free.setdefault((point.degrees, point.way), {})
            known[point.stage] = found.step_seconds, found.exposed.get(SHARED, 0.0)
        if not found.excess_bytes:
            bisect.insort(self.steps, found.step_seconds)
        return found

    @property
    def bound(self) -> float:
        """Seconds beyond which nothing will be among the best, in another way neither."""
        place = self.wanted + SPARE
        return SLACK * self.steps[place] if len(self.steps) > place else math.inf

    def climb(self, start: Mapping[str, int], legal: Mapping[Degrees, Mapping[str, int]]) -> None:
        """From neighbour to better neighbour, until there is none."""
        now = self.look(start)
        here = tuple(start.items())
        better = True
        while better:
            better = False
            for other in neighbours(dict(here)):
                key = tuple(other.items())
                if key not in legal or key in self.found:
                    continue
                there = self.look(other)
                if there is not None and (now is None or estimated(there) < estimated(now)):
                    now, here, better = there, key, True
                    break

    def widen(self, every: Sequence[Mapping[str, int]], some: Sequence[Mapping[str, int]]) -> None:
        """Climb from the widest searched axis too, where a rank that computes all of it may be faster than what was found."""
        setting = self.search.setting
        axes = [axis for axis, strategy in setting.strategies.items() if strategy.placement_search]
        widest = max(every, key=lambda degrees: math.prod(degrees[axis] for axis in axes))
        fitting = [c for c in self.ranked() if not c.excess_bytes]
        if setting.figures is None or not fitting or tuple(widest.items()) in self.found:
            return
        if floor_of(self.search, setting.figures, fitting).whole() < fitting[0].step_seconds:
            most = {axis: max(degrees[axis] for degrees in some) for axis in widest if axis not in axes}
            legal = (d for d in every if all(d[axis] <= degree for axis, degree in most.items()))
            self.climb(widest, {tuple(degrees.items()): degrees for degrees in legal})

    def evaluate(self, point: Point) -> Candidate | None:
        """The exact answer; None where a strategy refuses, which an estimate of what is far from the best does not ask."""
        try:
            return self.search.evaluate(point)
        except PlanError as refused:
            self._refuse(point, refused)
            axis = refused.field.removeprefix("degrees.")
            for key in self.found:
                if (axis, refused.value) in key:
                    self.found[key] = [c for c in self.found[key] if self._can_be_had(c.point)]
            return None

    def _can_be_had(self, point: Point) -> bool:
        try:
            self.search.estimate(point)
        except PlanError as refused:
            self._refuse(point, refused)
            return False
        return True

    def _refuse(self, point: Point, refused: PlanError) -> None:
        self.refused.append(refused)
        if self.keeps and not isinstance(refused, Unsolved):  # of that nothing is known
            self.known[point] = None

    def ranked(self) -> list[Candidate]:
        """Every estimate, best first."""
        return sorted((c for found in self.found.values() for c in found), key=estimated)


def explore(search: Search, wanted: int = 1) -> Explored:
    """Look for the best configurations.

    Args:
        search: evaluates them.
        wanted: how many are asked for.

    Raises:
        UsageError: no combination of degrees is legal.
        PlanError: strategies refuse every one of them.
    """
    every = search.combinations()
    explorer = _Explorer(search, wanted)
    narrow = narrowed(search, every)
    explorer.keeps = len(narrow) == len(every) <= FEW
    found = _explored(explorer, every, narrow)
    possible = floor_bytes(search.basis) <= search.setting.limit
    if possible and all(c.excess_bytes for c in found.ranked) and found.seen < len(every):
        found = _explored(explorer, every, every)
    return found


def _explored(
    explorer: _Explorer, every: Sequence[dict[str, int]], some: Sequence[dict[str, int]]
) -> Explored:
    search, wanted = explorer.search, explorer.wanted
    legal = {tuple(degrees.items()): degrees for degrees in some}
    complete = len(legal) <= FEW
    if complete:
        for degrees in legal.values():
            explorer.look(degrees)
        complete = not explorer.ended
    else:
        for start in starts(search, list(legal.values())):
            explorer.climb(start, legal)
    if len(some) < len(every):
        explorer.widen(every, some)
    keys = list(dict.fromkeys(c.point.degrees for c in explorer.ranked()))
    # where ranks share cores, the first way looked at says little of the others, and such worlds are small
    all_of_them = complete and bool(search.setting.cluster.shared_core_factors(2))
    for key in keys if all_of_them else keys[:REFINED]:
        explorer.refine(key)
    explorer.ease()
    estimates = explorer.ranked()
    if not estimates:
        raise explorer.refused[0]
    exact = exactly(search, estimates, explorer.evaluate, wanted, len(legal) <= EXACT, explorer.ended)
    if not exact:
        raise explorer.refused[0]
    return Explored(
        sorted(exact, key=rank),
        every,
        len(explorer.found),
        explorer.estimates,
        len(explorer.found) == len(every) and not explorer.ended,
        search.setting.time_budget if explorer.ended else None,
        explorer.known if explorer.keeps and complete else None,
        left_out(
            search.setting,
            every,
            some,
            LONG,
            beyond=[dict(key) for key in explorer.found.keys() - legal.keys()],
            climbed=len(legal) > FEW,
            ended=explorer.ended,
        ),
        tuple(refusals(explorer.refused, [key for key, own in explorer.found.items() if own])),
    )


def estimated(candidate: Candidate) -> tuple[Any, ...]:
    """As `rank`, but of those that do not fit the nearest to fitting comes first."""
    return (candidate.excess_bytes, *rank(candidate)[1:])
