"""When nothing fits: by how much, and the smallest changes that would, each of them tried."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright_dtensor.errors import InfeasibleError, PlanError, UsageError
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED, Setting, allowing
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.evaluation.memory_bound import floor_bytes, least_bytes
from meshwright_planner.trace.batch import scaled

MOST_RANKS = 64
"""How many times the asked number of ranks is tried at most."""

SHOWN = 4
"""Configurations that are said to be closest."""

WIDTH = 90
"""Columns of a line; the command line puts "Error: " before the first, so that 100 are enough."""


def infeasible(search: Search, candidates: Sequence[Candidate]) -> InfeasibleError:
    """The error for `candidates`, none of which fits, with what was tried and would fit: a line for each."""
    setting = search.setting
    closest = sorted(candidates, key=lambda c: (c.excess_bytes, c.step_seconds))
    misses = [
        f"{c.name} needs {human_bytes(c.total_bytes)}, {human_bytes(c.excess_bytes)} too much ({_largest(c)})"
        for c in closest[:SHOWN]
    ]
    if len(closest) > SHOWN:
        misses.append(f"and {len(closest) - SHOWN} more")
    advice = [*_changes(search), *_more_memory(search, closest[0])] or ["nothing that was tried"]
    head = (
        f"no plan for {setting.world_size} rank(s) of {setting.cluster.name} fits the {human_bytes(setting.allowed)} that each "
        f"has ({human_bytes(setting.allowed - setting.limit)} kept back):"
    )
    lines = [*_wrapped(head), *_listed(misses), "Would fit:", *_listed(advice)]
    return InfeasibleError("\n".join(lines), listed=True)


def _listed(reasons: Iterable[str]) -> Iterator[str]:
    """A line for each, broken where it is too long."""
    return (line for reason in reasons for line in _wrapped(reason, "  - ", "    "))


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines that are not too long; a size and its unit stay together."""
    together = re.sub(r"(\d) (?=[KMG]iB|B\b)", "\\1\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(
        together, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _largest(candidate: Candidate) -> str:
    part = max(candidate.memory, key=lambda name: candidate.memory[name])
    return f"largest: {part} {human_bytes(candidate.memory[part])}"


def _changes(search: Search) -> list[str]:
    setting = search.setting
    found = _unpinned(search)
    factor, most = 2, setting.cluster.most_ranks or math.inf
    while factor <= MOST_RANKS and setting.world_size * factor <= most:
        ranks = setting.world_size * factor
        # a degree that grows with the cluster must not be held down by its pin
        fit = _first_fit(search.variant(world_size=ranks, pins={}, data=None))
        if fit is not None:
            found.append(f"world_size={ranks}: {fit.name} ({human_bytes(fit.total_bytes)})")
            break
        factor *= 2
    rows = setting.batch.size
    while rows > 1:
        rows //= 2
        fit = _first_fit(search.variant(batch=scaled(setting.batch, rows)))
        if fit is not None:
            found.append(f"a batch of {rows} instead of {setting.batch.size}: {fit.name}")
            break
    if setting.precision in (None, "fp32"):
        fit = _first_fit(search.variant(precision="bf16"))
        if fit is not None:
            found.append(f'precision="bf16": {fit.name} ({human_bytes(fit.total_bytes)})')
    if setting.optimizer != "sgd":
        fit = _first_fit(search.variant(optimizer="sgd"))
        if fit is not None:
            found.append(f'optimizer="sgd" (no state): {fit.name} ({human_bytes(fit.total_bytes)})')
    return found


def _unpinned(search: Search) -> list[str]:
    """Without each thing that is pinned, and where that is not enough, without all of them."""
    every = dict(_pinned(search.setting))
    found = []
    for pin, changes in every.items():
        fit = _first_fit(search.variant(**changes))
        if fit is not None:
            found.append(f"without {pin}: {fit.name} ({human_bytes(fit.total_bytes)})")
    if not found and len(every) > 1:
        free = {name: value for changes in every.values() for name, value in changes.items()}
        fit = _first_fit(search.variant(**{**free, "options": {}}))
        if fit is not None:
            found.append(f"without {', '.join(every)}: {fit.name} ({human_bytes(fit.total_bytes)})")
    return found


def _pinned(setting: Setting) -> Iterator[tuple[str, dict[str, object]]]:
    """What the user pinned, in words, and the setting without it. Degrees are one thing: their product is given."""
    if setting.pins or setting.data is not None:
        said: dict[str, object] = {**setting.pins} or {"dp": setting.data}
        yield ", ".join(f"{axis}={degree}" for axis, degree in said.items()), {"pins": {}, "data": None}
    if setting.stage:
        yield f"zero={setting.stage}", {"stage": 0}
    for name in ("recompute", "sequence_parallel"):
        value = getattr(setting, name)
        if value is not None:
            yield f"{name}={value!r}", {name: None}
    for name, value in setting.options.items():
        yield f"{name}={value!r}", {"options": {n: v for n, v in setting.options.items() if n != name}}


def _more_memory(search: Search, closest: Candidate) -> list[str]:
    """The smallest memory that is known to be enough."""
    limit = closest.total_bytes
    raised = search.variant(limit=limit)
    # a placement was found for the limit as it is; a little room lets the search find one as small
    if raised.evaluate(closest.point).excess_bytes:
        limit = math.ceil(1.02 * limit)
        if search.variant(limit=limit).evaluate(closest.point).excess_bytes:
            return []
    enough = allowing(limit)
    return [f"memory_limit={enough} ({human_bytes(enough)} per rank): {closest.name}"]


def _first_fit(search: Search) -> Candidate | None:
    """A candidate that fits, data degrees first and with as little given up as it can; None where none was found."""
    if floor_bytes(search.basis) > search.setting.limit:
        return None
    try:
        combinations = search.combinations()
    except UsageError:
        return None
    for degrees in reversed(combinations):
        if floor_bytes(search.basis, degrees) > search.setting.limit:
            continue
        for chain in _savings(search, degrees):
            try:
                fit = _first_of(search, chain)
            except (PlanError, UsageError):  # these degrees cannot be had so: a schedule or a mark refuses
                continue
            if fit is not None:
                return fit
    return None


def _first_of(search: Search, chain: Sequence[Point]) -> Candidate | None:
    """The first of these that fits; each gives up more than the one before."""
    last = search.estimate(chain[-1])
    if least_bytes(last, search.basis.sizes) > search.setting.limit:
        return None  # not even with everything given up
    for point in chain:
        if not search.estimate(point).excess_bytes or point == chain[-1]:
            candidate = search.evaluate(point)
            if not candidate.excess_bytes:
                return candidate
    return None


def _savings(search: Search, degrees: Mapping[str, int]) -> list[list[Point]]:
    """Configurations of these degrees, a list for each way, from nothing given up to all that saves memory."""
    setting = search.setting
    ways = search.ways(degrees) or [{}]
    stages = [setting.stage or (3 if degrees.get(SHARED, 1) > 1 else 0)]
    policies = [None, *search.can_recompute(degrees)] if setting.recompute is None else [setting.recompute]
    smallest: dict[tuple[tuple[str, object], ...], dict[str, object]] = {}
    for way in sorted(ways, key=lambda way: int(str(way.get("microbatches", 1)))):
        smallest[tuple((n, v) for n, v in way.items() if n != "microbatches")] = way
    chosen = [ways[0], *(way for way in smallest.values() if way != ways[0])]
    return [
        [Point.of(degrees, stage, way, policy) for policy in policies for stage in stages] for way in chosen
    ]
