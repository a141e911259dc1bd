"""Which combinations of degrees are tried unasked: those whose searched axes are not wider than the innermost links, and that share
a sequence only where it is long.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright_planner.search.evaluator import Search

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
