"""Ways that strategies offer (Strategy.ways), as choices by name: which are numbers, which stands in the middle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_number(choice: object) -> bool:
    """Whether a choice is one of numbers that say how much: yes and no are none."""
    return isinstance(choice, int) and not isinstance(choice, bool)


def middle(ways: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the first choices of all else, the one in the middle."""
    name = list(ways[0])[-1]
    numbers = next((n for n in ways[0] if is_number(ways[0][n])), name)
    own = [w for w in ways if all(w[n] == ways[0][n] for n in ways[0] if n != numbers)]
    if is_number(ways[0][numbers]):
        own.sort(key=lambda way: int(way[numbers]))
    return own[len(own) // 2]
