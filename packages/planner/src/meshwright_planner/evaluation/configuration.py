"""One configuration among those that are searched.

Ways that strategies offer (Strategy.ways), as choices by name: which are numbers, which stands in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final


class Chosen(Enum):
    """Stands for a policy where something else chooses: no text, so that nobody asks for it by accident."""

    BY_STAGE = "by stage"


BY_STAGE: Final = Chosen.BY_STAGE
"""Stages of a pipeline choose what runs again."""


@dataclass(frozen=True)
class Point:
    """Everything that is decided before placements are.

    Args:
        degrees: mesh axis -> degree, of every axis, as sorted as the mesh.
        stage: what ranks along zero share, 0 where they share nothing.
        way: what a strategy lets one choose (Strategy.ways): schedule and microbatches of a pipeline.
        recompute: a policy of plan.RecomputeRule for every repeated block, a pattern of module names, or None; BY_STAGE where
            stages choose.
    """

    degrees: tuple[tuple[str, int], ...] = ()
    stage: int = 0
    way: tuple[tuple[str, Any], ...] = ()
    recompute: str | Chosen | None = None

    @classmethod
    def of(
        cls,
        degrees: Mapping[str, int],
        stage: int = 0,
        way: Mapping[str, Any] | None = None,
        recompute: str | Chosen | None = None,
    ) -> Point:
        """From mappings."""
        return cls(tuple(degrees.items()), stage, tuple(sorted((way or {}).items())), recompute)

    def degree(self, axis: str) -> int:
        """Ranks along `axis`."""
        return dict(self.degrees).get(axis, 1)

    @property
    def microbatches(self) -> int:
        """Equal parts of the local batch that are computed one after the other."""
        return int(dict(self.way).get("microbatches", 1))

    def but(self, **changes: Any) -> Point:
        """The same with some things changed; `way` and `degrees` as mappings."""
        if "way" in changes:
            changes["way"] = tuple(sorted(changes["way"].items()))
        if "degrees" in changes:
            changes["degrees"] = tuple(changes["degrees"].items())
        return replace(self, **changes)


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
