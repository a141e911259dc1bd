"""The error when nothing fits: by how much, and the smallest changes that do fit, each of them tried."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshwright_dtensor.errors import InfeasibleError, PlanError, UsageError
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED, Setting, allowing
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.trace.batch import scaled

MOST_RANKS = 64
"""The largest multiple of the requested ranks that is tried."""

SHOWN = 4
"""The number of closest configurations that the error lists."""

WIDTH = 90
"""Columns of a line. With "Error: " in front on the command line, 100 columns are enough."""


def infeasible(search: Search, candidates: Sequence[Candidate]) -> InfeasibleError:
    """The error for `candidates`, none of which fits, with a line for each change that would fit."""
    setting = search.setting
    closest = sorted(candidates, key=lambda c: (c.excess_bytes, c.step_seconds))
    misses = []
    for c in closest[:SHOWN]:
        part = max(c.memory, key=lambda name: c.memory[name])
        excess = f"{human_bytes(c.excess_bytes)} too much (largest: {part} {human_bytes(c.memory[part])})"
        misses.append(f"{c.name} needs {human_bytes(c.total_bytes)}, {excess}")
    if len(closest) > SHOWN:
        misses.append(f"and {len(closest) - SHOWN} more")
    if not closest:
        misses.append("each of the plans that were tried was refused")
    advice = [*_changes(search, closest[0])] if closest else []
    advice = advice or ["none of the changes that were tried"]
    ranks = count_of(setting.world_size, "rank")
    head = (
        f"no plan for {ranks} of {setting.cluster.name} fits the {human_bytes(setting.allowed)} of each "
        f"rank ({human_bytes(setting.allowed - setting.limit)} of it are kept back):"
    )
    lines = [*_wrapped(head), *_listed(misses), "Would fit:", *_listed(advice)]
    return InfeasibleError("\n".join(lines), listed=True)


def _listed(reasons: Iterable[str]) -> Iterator[str]:
    """List items, wrapped where they are too long."""
    return (line for reason in reasons for line in _wrapped(reason, "  - ", "    "))


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most WIDTH columns; a size and its unit stay together."""
    text = re.sub(r"(\d) (?=[KMG]iB|B\b)", "\\1\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _changes(search: Search, closest: Candidate) -> Iterator[str]:
    """Changes of the request that fit, a line each."""
    setting, pins = search.setting, dict(_pinned(search.setting))
    alone = [line for pin, changes in pins.items() for line in _tried(search, f"without {pin}", **changes)]
    yield from alone
    if not alone and len(pins) > 1:
        free = {name: value for changes in pins.values() for name, value in changes.items()}
        yield from _tried(search, f"without {', '.join(pins)}", **{**free, "options": {}})
    sizes = (setting.world_size * 2**n for n in range(1, MOST_RANKS.bit_length()))
    possible = (size for size in sizes if size <= (setting.cluster.most_ranks or math.inf))
    # a pinned degree must not keep the plan from using more ranks
    more = (_tried(search, f"world_size={n}", world_size=n, pins={}, data=None) for n in possible)
    yield from next(filter(None, more), [])
    rows = setting.batch.size
    while rows > 1:
        rows //= 2
        fit = _first_fit(search.variant(batch=scaled(setting.batch, rows)))
        if fit is not None:
            yield f"a batch of {rows} instead of {setting.batch.size}: {fit.name}"
            break
    if setting.precision in (None, "fp32"):
        yield from _tried(search, 'precision="bf16"', precision="bf16")
    if setting.optimizer != "sgd":
        yield from _tried(search, 'optimizer="sgd" (no state)', optimizer="sgd")
    # the closest placement was found for another limit, for which a pipeline may be cut elsewhere
    for room in (1, 1.02, 1.1, 1.25, 1.5, 2, 3, 5):
        limit = math.ceil(room * closest.total_bytes)
        if not search.variant(limit=limit).evaluate(closest.point).excess_bytes:
            enough = allowing(limit)
            yield f"memory_limit={enough} ({human_bytes(enough)} per rank): {closest.name}"
            break


def _tried(search: Search, what: str, **changes: Any) -> list[str]:
    """The line for a change of the request; empty where nothing fits with it."""
    fit = _first_fit(search.variant(**changes))
    return [] if fit is None else [f"{what}: {fit.name} ({human_bytes(fit.total_bytes)})"]


def _pinned(setting: Setting) -> Iterator[tuple[str, dict[str, object]]]:
    """Each pin in words, and the changes of the setting without it. All degrees are one pin, because their product is fixed."""
    if setting.pins or setting.data is not None:
        degrees: dict[str, object] = {**setting.pins} or {"dp": setting.data}
        yield ", ".join(f"{axis}={degree}" for axis, degree in degrees.items()), {"pins": {}, "data": None}
    if setting.stage:
        yield f"zero={setting.stage}", {"stage": 0}
    for name in ("recompute", "sequence_parallel"):
        value = getattr(setting, name)
        if value is not None:
            yield f"{name}={value!r}", {name: None}
    for name, value in setting.options.items():
        yield f"{name}={value!r}", {"options": {n: v for n, v in setting.options.items() if n != name}}


def _first_fit(search: Search) -> Candidate | None:
    """A candidate that fits, with much data parallelism and few memory savings first; None where there is none."""
    if search.basis.floor_bytes() > search.setting.limit:
        return None
    combinations: list[dict[str, int]] = []
    with suppress(UsageError):
        combinations = search.combinations()
    for degrees in reversed(combinations):
        if search.basis.floor_bytes(degrees) > search.setting.limit:
            continue
        for chain in _savings(search, degrees):
            # a schedule or a mark_sharding may refuse these degrees
            with suppress(PlanError, UsageError):
                if (fit := _first_of(search, chain)) is not None:
                    return fit
    return None


def _first_of(search: Search, chain: Sequence[Point]) -> Candidate | None:
    """The first of these configurations that fits; each saves more memory than the one before."""
    if search.estimate(chain[-1]).least_bytes(search.basis.sizes) > search.setting.limit:
        return None
    for point in chain:
        if not search.estimate(point).excess_bytes or point == chain[-1]:
            candidate = search.evaluate(point)
            if not candidate.excess_bytes:
                return candidate
    return None


def _savings(search: Search, degrees: Mapping[str, int]) -> list[list[Point]]:
    """Configurations of these degrees, a list for each way, from no memory savings to all of them."""
    setting = search.setting
    ways = search.ways(degrees) or [{}]
    stage = setting.stage or (3 if degrees.get(SHARED, 1) > 1 else 0)
    policies = [None, *search.can_recompute(degrees)] if setting.recompute is None else [setting.recompute]
    smallest: dict[tuple[tuple[str, object], ...], dict[str, object]] = {}
    for way in sorted(ways, key=lambda way: int(str(way.get("microbatches", 1)))):
        smallest[tuple((n, v) for n, v in way.items() if n != "microbatches")] = way
    chosen = [ways[0], *(way for way in smallest.values() if way != ways[0])]
    return [[Point.of(degrees, stage, way, policy) for policy in policies] for way in chosen]
