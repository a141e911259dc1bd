"""Which combinations of degrees are tried unasked: those whose searched axes are not wider than the innermost links, and that share
a sequence only where it is long.


Where climbing over combinations of degrees begins, and where it goes from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.evaluation.evaluator import Search

EXACT = 16
"""Combinations up to which each is evaluated exactly."""

LONG = 16384
"""Tokens of a row from which sharing the sequence is tried along with everything else."""


def narrowed(search: Search, every: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """Without combinations whose searched axis is wider than the innermost links, where there are others."""
    setting = search.setting
    level = setting.cluster.links[0]
    inner = min(level.sizes) if level.sizes else level.size or setting.world_size
    axes = [a for a, s in setting.strategies.items() if s.placement_search and a not in setting.pins]
    kept = [d for d in every if all(d[a] <= inner for a in axes)] or list(every)
    if (setting.batch.sequence_length or 0) >= LONG or len(kept) <= EXACT:
        return kept
    late = [a for a in _of_the_sequence(search) if a not in setting.pins]
    return [d for d in kept if all(d[a] == 1 for a in late)] or kept


def _of_the_sequence(search: Search) -> list[str]:
    """Axes that share neither rows nor modules nor parameters: what they take apart is the sequence."""
    return [
        a
        for a, s in search.setting.strategies.items()
        if s.batch_factor(2) == 1 and not s.placement_search and not s.divides and a not in search.surveys
    ]


def neighbours(degrees: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The same number of ranks with one prime factor moved from one axis to another."""
    for source, degree in degrees.items():
        for prime in _primes(degree):
            for target in degrees:
                if target != source:
                    yield {**degrees, source: degree // prime, target: degrees[target] * prime}


def _primes(number: int) -> list[int]:
    """The prime factors, each once."""
    found, divisor = [], 2
    while number > 1:
        if number % divisor == 0:
            found.append(divisor)
            while number % divisor == 0:
                number //= divisor
        divisor = divisor + 1 if divisor * divisor <= number else max(number, divisor + 1)
    return found


def starts(search: Search, legal: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Where to climb from: for each degree of the searched axis, the model whole, and for the widest also in parts; for axes along
    which strategies place parameters themselves (experts), the widest of those."""
    strategies = search.setting.strategies
    searched = next(
        (a for a, s in strategies.items() if s.placement_search and len({d.get(a, 1) for d in legal}) > 1),
        None,
    )
    dividing = next((a for a, s in strategies.items() if s.divides), None)
    plain = [a for a in strategies if a not in (searched, dividing, "dp", SHARED)]
    found: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}
    for degree in sorted({d.get(searched, 1) if searched else 1 for d in legal}):
        own = [d for d in legal if not searched or d[searched] == degree]
        least = min(math.prod(d[a] for a in plain) for d in own)
        own = [d for d in own if math.prod(d[a] for a in plain) == least]
        own.sort(key=lambda d: (d.get(dividing or "", 1), d.get(SHARED, 1)))
        found[tuple(own[0].items())] = own[0]
        middle = own[len(own) // 2]
    found[tuple(middle.items())] = middle  # of the widest
    for axis, survey in search.surveys.items():  # what a strategy takes apart itself, as far apart as it goes
        if survey.parameters and any(d.get(axis, 1) > 1 for d in legal):
            widest = max(
                legal,
                key=lambda d: (
                    d.get(axis, 1),
                    -d.get(searched or "", 1),
                    -d.get(dividing or "", 1),
                    d.get(SHARED, 1),
                ),
            )
            found[tuple(widest.items())] = widest
    return list(found.values())
