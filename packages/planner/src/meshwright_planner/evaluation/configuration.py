"""A configuration: one point of the search space, before placements are decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final


class Chosen(Enum):
    """Stands in place of a recompute policy. It is no text, so that no request can name it."""

    BY_STAGE = "by stage"


BY_STAGE: Final = Chosen.BY_STAGE
"""Each stage of a pipeline chooses the blocks that it recomputes."""


@dataclass(frozen=True)
class Point:
    """Everything that is decided before placements are.

    Args:
        degrees: mesh axis -> degree, of every axis, in the order of the mesh.
        stage: ZeRO stage, 0 where ranks share no training state.
        way: options that strategies offer (Strategy.ways): schedule and microbatches of a pipeline.
        recompute: a policy of plan.RecomputeRule for every repeated block, a pattern of module names, or None; BY_STAGE where
            stages choose.
    """

    degrees: tuple[tuple[str, int], ...] = ()
    stage: int = 0
    way: tuple[tuple[str, Any], ...] = ()
    recompute: str | Chosen | None = None

    @classmethod
    def of(
        cls, degrees: Mapping[str, int], stage: int, way: Mapping[str, Any], recompute: str | Chosen | None
    ) -> Point:
        """A configuration from mappings."""
        return cls(tuple(degrees.items()), stage, tuple(sorted(way.items())), recompute)

    def degree(self, axis: str) -> int:
        """Ranks along `axis`."""
        return dict(self.degrees).get(axis, 1)

    @property
    def microbatches(self) -> int:
        """Equal parts of the local batch, computed one after the other."""
        return int(dict(self.way).get("microbatches", 1))

    def but(self, **changes: Any) -> Point:
        """The same configuration with some fields changed; `way` and `degrees` as mappings."""
        if "way" in changes:
            changes["way"] = tuple(sorted(changes["way"].items()))
        if "degrees" in changes:
            changes["degrees"] = tuple(changes["degrees"].items())
        return replace(self, **changes)


def is_number(choice: object) -> bool:
    """Whether an option is a number; True and False are not."""
    return isinstance(choice, int) and not isinstance(choice, bool)


def middle(ways: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The middle value of the numeric option, with the first value of every other option."""
    name = list(ways[0])[-1]
    numbers = next((n for n in ways[0] if is_number(ways[0][n])), name)
    same = [w for w in ways if all(w[n] == ways[0][n] for n in ways[0] if n != numbers)]
    if is_number(ways[0][numbers]):
        same.sort(key=lambda way: int(way[numbers]))
    return same[len(same) // 2]


def alike(ways: Sequence[Mapping[str, Any]], now: Mapping[str, Any], option: str) -> list[Mapping[str, Any]]:
    """The options that differ from `now` at most in this one; ascending where it is a number."""
    same = [way for way in ways if {**way, option: None} == {**now, option: None}]
    return sorted(same, key=lambda way: int(way[option])) if is_number(now[option]) else same
