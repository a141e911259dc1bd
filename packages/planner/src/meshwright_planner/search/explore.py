"""Explores the configurations: all combinations of degrees where they are few, else those that hill climbing reaches.

Each explored configuration gets an estimate (`Search.estimate`), with placements that were found for its degrees at another
number of rows. The best estimates are then evaluated exactly, and those are ranked.

Four facts keep the number of configurations small:

- Recompute only costs time, so it is tried where the memory requires it.
- The same holds for ZeRO stages that share more than gradients.
- A searched axis that is wider than the innermost links is tried only where the user pins it, where nothing else fits, or
  where the model is so small that every rank may as well compute all of it.
- The same holds for sharing a sequence that is not long.
"""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.utils.bytesize import human_seconds
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.evaluation.candidate import Candidate, estimated, rank
from meshwright_planner.evaluation.configuration import BY_STAGE, Chosen, Point, alike, is_number, middle
from meshwright_planner.evaluation.context import SHARED, ended_by
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.placement.ilp import Unsolved
from meshwright_planner.search.finalists import FEW, SPARE, Estimates, exactly
from meshwright_planner.search.hill_climb import EXACT, Legal, adjacent, narrowed, refusals, starts, untried
from meshwright_planner.search.lower_bound import floor_of

_LOG = logging.getLogger(__name__)

SLACK = 1.1
"""A configuration that does not fit is dropped where it is slower than the best by this factor. Another way may be faster."""

FEW_WAYS = 12
"""Number of ways of a strategy up to which each is tried."""

REFINED = 6
"""Combinations of degrees, best first, for which the ways of strategies are explored."""

Degrees = tuple[tuple[str, int], ...]

Way = Mapping[str, Any]
"""Options of strategies, as microbatches and schedule."""


@dataclass(frozen=True)
class Choice:
    """The candidates of a search.

    Args:
        search: evaluated them.
        ranked: candidates that were evaluated exactly, best first; there may be none that fits.
        legal: legal combinations of degrees.
        notes: how they were found, a line each.
        by_point: configuration -> its estimate, None where a strategy refuses it; None where not every combination was tried.
    """

    search: Search
    ranked: list[Candidate]
    legal: Legal
    notes: Sequence[str]
    by_point: Estimates | None = None


@dataclass
class _Explorer:
    """Estimates of configurations, by combination of degrees.

    Args:
        explored: combination of degrees -> estimates of its configurations.
        estimates: how many were made.
        seconds: step times of estimates that fit, ascending.
        by_point: configuration -> its estimate, None where a strategy refuses it; filled where `keeps`.
        keeps: all combinations are tried, so that estimates are worth keeping for the proof.
        without_recompute: (degrees, way) -> ZeRO stage -> seconds of the step without recompute, and of its sharing.
        tried: (degrees, way) -> its best estimate, None where there is none.
        among: what is searched, in words.
    """

    search: Search
    wanted: int
    explored: dict[Degrees, list[Candidate]] = field(default_factory=dict)
    estimates: int = 0
    refused: list[PlanError] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    by_point: Estimates = field(default_factory=dict)
    keeps: bool = True
    without_recompute: dict[tuple[object, ...], dict[int, tuple[float, float]]] = field(default_factory=dict)
    tried: dict[tuple[Degrees, Any], Candidate | None] = field(default_factory=dict)
    ended: bool = False
    among: str = ""

    @property
    def late(self) -> bool:
        """Whether the time budget is spent and a configuration that fits is known."""
        over = bool(self.seconds) and time.monotonic() > self.search.end
        self.ended |= over
        return over

    def try_degrees(self, degrees: Mapping[str, int]) -> Candidate | None:
        """The best estimate for these degrees in their first ways; None where a strategy refuses all."""
        key = tuple(degrees.items())
        if key not in self.explored:
            if self.late:
                return None
            ways = self.search.ways(degrees) or [{}]
            few = ways if len(ways) <= 3 else [middle(ways)]
            estimates = (self.best_that_fits(degrees, way) for way in few)
            self.explored[key] = [estimate for estimate in estimates if estimate is not None]
            if not self.explored[key] and len(ways) > len(few):
                self.refine(key)
        return min(self.explored[key], key=estimated, default=None)

    def refine(self, key: Degrees) -> None:
        """Try other ways of strategies for these degrees: all where they are few, else one option after the other.

        Numbers come first: the best schedule depends on the number of microbatches more than the other way round.
        """
        ways = self.search.ways(dict(key), thorough=True)
        ways += [way for way in (dict(c.point.way) for c in self.explored[key]) if way not in ways]
        if len(ways) <= FEW_WAYS:
            for way in ways:
                self._try(key, way)
            return
        for option in 2 * sorted(ways[0], key=lambda n: not is_number(ways[0][n])):
            best = min(self.explored[key], key=estimated, default=None)
            now: Way = dict(best.point.way) if best is not None else ways[0]
            same = alike(ways, now, option)
            if is_number(now[option]):
                self._follow(key, same, now)
            else:
                for other in same:
                    self._try(key, other)
        for option in filter(lambda n: is_number(ways[0][n]), ways[0]):
            self._follow_recomputed(key, ways, option)

    def _follow_recomputed(self, key: Degrees, ways: Sequence[Way], option: str) -> None:
        """Try more microbatches where only recompute keeps a way from being the best: smaller ones keep less."""
        seen = set[tuple[tuple[str, Any], ...]]()
        for candidate in sorted(self.explored[key], key=estimated):
            best, now = min(self.explored[key], key=estimated), dict(candidate.point.way)
            others = tuple((name, value) for name, value in now.items() if name != option)
            free = self.without_recompute.get((key, candidate.point.way))
            if others in seen or candidate.point.recompute is None or candidate.excess_bytes or not free:
                continue
            seen.add(others)
            if min(seconds for seconds, _ in free.values()) < best.step_seconds:
                self._follow(key, alike(ways, now, option), now, down=False)

    def _follow(self, key: Degrees, ways: Sequence[Way], now: Way, down: bool = True) -> None:
        """Move from one way to the next as long as that is better: `down` first, and up where that is not better."""
        best = here = self._try(key, now)
        below, above = range(ways.index(now) - 1, -1, -1), range(ways.index(now) + 1, len(ways))
        for direction in (below, above) if down else (above,):
            for place in direction:
                other = self._try(key, ways[place])
                if other is not None and best is not None and estimated(other) >= estimated(best):
                    break
                best = other or best
            if best is not here:
                return

    def _try(self, key: Degrees, way: Way) -> Candidate | None:
        """The best estimate for a way, made once; None where a strategy refuses it or the time budget is spent."""
        chosen = key, tuple(sorted(way.items()))
        if chosen not in self.tried:
            estimate = next((c for c in self.explored[key] if c.point.way == chosen[1]), None)
            if estimate is None and not self.late:
                estimate = self.best_that_fits(dict(key), way)
                if estimate is not None:
                    self.explored[key].append(estimate)
            self.tried[chosen] = estimate
        return self.tried[chosen]

    def best_that_fits(self, degrees: Mapping[str, int], way: Way) -> Candidate | None:
        """The fastest estimate that fits, over ZeRO stages and recompute policies; else the one that needs least."""
        setting = self.search.setting
        stages = setting.zero_stages(degrees)
        fastest = self._estimate(Point.of(degrees, stages[0], way, setting.recompute))
        # everything that saves memory takes longer still
        if fastest is None or not fastest.excess_bytes or fastest.step_seconds >= self.bound:
            return fastest
        policies: list[str | Chosen | None] = [setting.recompute]
        if setting.recompute is None:
            policies += self.search.can_recompute(degrees)
        savings = [(stage, policy) for policy in policies for stage in stages][1:]
        if not savings:
            return fastest
        smallest = self._estimate(Point.of(degrees, savings[-1][0], way, savings[-1][1]))
        if smallest is None:
            return fastest
        if smallest.excess_bytes:
            return min(fastest, smallest, key=estimated)
        best = None
        for stage, policy in savings[:-1]:
            if best is not None and (stage == best.point.stage or fastest.step_seconds >= best.step_seconds):
                continue
            estimate = self._estimate(Point.of(degrees, stage, way, policy))
            if estimate is None or estimate.excess_bytes:
                continue
            best = min(best or estimate, estimate, key=lambda c: c.step_seconds)
            # at the first stage parameters are gathered once, so no later saving is faster;
            # at stage 3 they are gathered twice, and recomputing more at a lower stage may be faster
            if stage == stages[0]:
                break
        return best or smallest

    def choose_by_stage(self) -> None:
        """Let each stage choose its recompute where all blocks of a pipeline are recomputed, the most promising first."""
        setting, search = self.search.setting, self.search
        possible: list[tuple[float, Candidate, dict[int, float]]] = []
        for candidate in filter(search.has_stage_choice, self.ranked()):
            point = candidate.point
            # where recomputing everything did not fit at stage 2, recomputing a part does not fit
            everything = point.recompute == search.can_recompute(dict(point.degrees))[-1]
            both = point.stage == 3 and not setting.stage and not everything
            least = {stage: self._least(candidate, stage) for stage in ((2, 3) if both else (point.stage,))}
            possible.append((min(least.values()), candidate, least))
        for first, candidate, least in sorted(possible, key=lambda entry: entry[0]):
            if self.late or first >= self._worst:
                break
            for stage in least:
                if least[stage] >= self._worst:
                    continue
                point = candidate.point.but(recompute=BY_STAGE, stage=stage)
                by_stage = self._estimate(point)
                if by_stage is not None and not by_stage.excess_bytes:
                    if by_stage.step_seconds < candidate.step_seconds:
                        self.explored[point.degrees].append(by_stage)
                    break

    def _least(self, candidate: Candidate, stage: int) -> float:
        """The least seconds at a ZeRO stage with less recompute, so that less of the gathering overlaps with compute."""
        free = self.without_recompute[candidate.point.degrees, candidate.point.way]
        if stage in free:
            return free[stage][0]
        step, shared = min(free.values())
        more = candidate.exposed.get(SHARED, 0.0) - shared if stage == candidate.point.stage else 0.0
        return step + max(0.0, more)

    @property
    def _worst(self) -> float:
        """Step seconds of the last of the wanted candidates, as estimated so far."""
        place = min(self.wanted, len(self.seconds)) - 1
        return self.seconds[place] if place >= 0 else math.inf

    def _estimate(self, point: Point) -> Candidate | None:
        best = f", best {human_seconds(self.seconds[0])} a step" if self.seconds else ""
        _LOG.info("%s of %s tried%s", count_of(self.estimates, "configuration"), self.among, best)
        try:
            self.estimates += 1
            estimate = self.search.estimate(point, self.bound)
        except PlanError as error:
            self._refuse(point, error)
            return None
        if self.keeps:
            self.by_point[point] = estimate
        if point.recompute is None:
            free = self.without_recompute.setdefault((point.degrees, point.way), {})
            free[point.stage] = estimate.step_seconds, estimate.exposed.get(SHARED, 0.0)
        if not estimate.excess_bytes:
            bisect.insort(self.seconds, estimate.step_seconds)
        return estimate

    @property
    def bound(self) -> float:
        """Seconds of a step from which a configuration will not be among the best, whatever its way."""
        place = self.wanted + SPARE
        return SLACK * self.seconds[place] if len(self.seconds) > place else math.inf

    def climb(self, start: Mapping[str, int], legal: Mapping[Degrees, Mapping[str, int]]) -> None:
        """Move to the first better combination next to this one, until there is none."""
        now = self.try_degrees(start)
        here = tuple(start.items())
        better = True
        while better:
            better = False
            for other in adjacent(dict(here)):
                key = tuple(other.items())
                if key not in legal or key in self.explored:
                    continue
                there = self.try_degrees(other)
                if there is not None and (now is None or estimated(there) < estimated(now)):
                    now, here, better = there, key, True
                    break

    def widen(self, legal: Legal, default: Legal) -> None:
        """Climb from the widest searched axis too, where a rank that computes the whole model may be faster than the best."""
        setting = self.search.setting
        axes = [axis for axis, strategy in setting.strategies.items() if strategy.placement_search]
        widest = max(legal, key=lambda degrees: math.prod(degrees[axis] for axis in axes))
        fitting = [c for c in self.ranked() if not c.excess_bytes]
        if setting.figures is None or not fitting or tuple(widest.items()) in self.explored:
            return
        if floor_of(self.search, setting.figures, fitting).whole() < fitting[0].step_seconds:
            most = {axis: max(degrees[axis] for degrees in default) for axis in widest if axis not in axes}
            allowed = (d for d in legal if all(d[axis] <= degree for axis, degree in most.items()))
            self.climb(widest, {tuple(degrees.items()): degrees for degrees in allowed})

    def evaluate(self, point: Point) -> Candidate | None:
        """The exact candidate; None where a strategy refuses. An estimate far from the best does not ask every strategy."""
        try:
            return self.search.evaluate(point)
        except PlanError as error:
            self._refuse(point, error)
            axis = error.field.removeprefix("degrees.")
            for key in self.explored:
                if (axis, error.value) in key:
                    self.explored[key] = [c for c in self.explored[key] if self._is_possible(c.point)]
            return None

    def _is_possible(self, point: Point) -> bool:
        try:
            self.search.estimate(point)
        except PlanError as error:
            self._refuse(point, error)
            return False
        return True

    def _refuse(self, point: Point, error: PlanError) -> None:
        self.refused.append(error)
        # an unsolved placement is no refusal: nothing is known about the configuration
        if self.keeps and not isinstance(error, Unsolved):
            self.by_point[point] = None

    def ranked(self) -> list[Candidate]:
        """Every estimate, best first."""
        return sorted((c for estimates in self.explored.values() for c in estimates), key=estimated)


def explore(search: Search, wanted: int = 1) -> Choice:
    """Search for the best configurations.

    Args:
        wanted: the number of plans requested.

    Raises:
        UsageError: no combination of degrees is legal.
        PlanError: strategies refuse every one of them.
    """
    legal = search.combinations()
    explorer = _Explorer(search, wanted, among=count_of(len(legal), "combination") + " of degrees")
    narrow = narrowed(search, legal)
    explorer.keeps = len(narrow) == len(legal) <= FEW
    choice = _explored(explorer, legal, narrow)
    possible = search.basis.floor_bytes() <= search.setting.limit
    if possible and all(c.excess_bytes for c in choice.ranked) and len(explorer.explored) < len(legal):
        choice = _explored(explorer, legal, legal)
    return choice


def _explored(explorer: _Explorer, legal: Legal, default: Legal) -> Choice:
    search, wanted = explorer.search, explorer.wanted
    by_key = {tuple(degrees.items()): degrees for degrees in default}
    complete = len(by_key) <= FEW
    if complete:
        for degrees in by_key.values():
            explorer.try_degrees(degrees)
        complete = not explorer.ended
    else:
        for start in starts(search, list(by_key.values())):
            explorer.climb(start, by_key)
    if len(default) < len(legal):
        explorer.widen(legal, default)
    keys = list(dict.fromkeys(c.point.degrees for c in explorer.ranked()))
    # where ranks share cores, the first way says little about the others, and there are few combinations
    refine_all = complete and bool(search.setting.cluster.shared_core_factors(2))
    for key in keys if refine_all else keys[:REFINED]:
        explorer.refine(key)
    explorer.choose_by_stage()
    estimates = explorer.ranked()
    if not estimates:
        raise explorer.refused[0]
    _LOG.info("solving the placements of the best exactly")
    exact = exactly(search, estimates, explorer.evaluate, wanted, len(by_key) <= EXACT, explorer.ended)
    if not exact:
        raise explorer.refused[0]
    possible = [key for key, candidates in explorer.explored.items() if candidates]
    share, reasons = f"all {len(legal)}", ""
    if len(explorer.explored) < len(legal) or explorer.ended:
        share = f"{len(explorer.explored)} of {len(legal)}"
        extra = [dict(key) for key in explorer.explored.keys() - by_key.keys()]
        why = untried(search.setting, legal, default, extra, len(by_key) > FEW, explorer.ended)
        reasons = f" ({why}: the best may be among the others)"
    note = (
        f"searched {share} combinations of degrees{reasons}, {explorer.estimates} configurations in all; placements of the best "
        f"{len(exact)} solved exactly" + ended_by(search.setting.time_budget if explorer.ended else None)
    )
    notes = (note, *refusals(explorer.refused, possible))
    by_point = explorer.by_point if explorer.keeps and complete else None
    return Choice(search, sorted(exact, key=rank), legal, notes, by_point)
