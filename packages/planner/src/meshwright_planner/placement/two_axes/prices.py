"""Costs on several searched axes: operations by the ranks of all, each collective on the link of its axis."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright_dtensor.comm.redistribute import route
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.states import State, States, forward_kind, is_shard
from meshwright_planner.cost.prices import (
    AxisCosts,
    Collective,
    backward_move,
    convertible,
    forward_move,
)
from meshwright_planner.placement.ilp import Phase


@dataclass(frozen=True)
class JointCosts(AxisCosts):
    """Costs on several searched axes; `axes` are those of each, `degree` is the number of their ranks together."""

    axes: tuple[AxisCosts, ...] = ()

    @staticmethod
    def of(axes: Sequence[AxisCosts]) -> JointCosts:
        """The costs of axes on one cluster, outermost first."""
        first = axes[0]
        degree = math.prod(a.degree for a in axes)
        return JointCosts(first.cluster, first.link, degree, first.meshed, first.model, tuple(axes))

    def collective(self, collective: Collective | None) -> float:
        """Seconds of a collective on the link of its axis."""
        if collective is None:
            return 0.0
        return self.axes[collective.axis].collective(collective)

    def share(self, state: State) -> float:
        """The fraction of a value that one rank holds."""
        return self.part(self.split((state,)))

    def split(self, states: Iterable[State]) -> Hashable:
        """Per axis, whether work on tensors in these states is divided along it."""
        all_states = list(states)
        return tuple(
            any(is_shard(s[axis] if isinstance(s, tuple) else s) for s in all_states)
            for axis in range(len(self.axes))
        )

    def sharers(self, split: Hashable) -> int:
        """Number of ranks that share work divided so."""
        assert isinstance(split, tuple)
        return math.prod(a.degree for a, divided in zip(self.axes, split, strict=True) if divided)

    def _local(self, shape: tuple[int, ...], state: State) -> tuple[int, ...]:
        """The shape that one rank has of a value."""
        if not isinstance(state, tuple):
            return tuple(shape)
        return local_shape_of(shape, self.degrees, (0,) * len(self.axes), state)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of the axes."""
        return tuple(a.degree for a in self.axes)

    def ranks(self, collective: Collective) -> int:
        """Number of ranks in a collective."""
        return self.axes[collective.axis].degree


@dataclass(frozen=True)
class Move:
    """One collective of a conversion: the states on its axis before and after, the pass it happens in."""

    source: State
    target: State
    phase: Phase
    kind: Collective
    axis: int
    shards: tuple[bool, ...]


@dataclass(frozen=True)
class Stage:
    """A conversion that the runtime does at once and caches: its target states and its collectives.

    `kept`: consumers share the result; a stage that only slices is done by each.
    """

    target: States
    moves: tuple[Move, ...]
    kept: bool


@lru_cache(maxsize=65536)
def stages(source: States, target: States) -> tuple[Stage, ...] | None:
    """The stages in which the runtime converts a value (`local_in`, `route`); None if it cannot.

    A Partial that becomes X is reduced first; all consumers share that, and the rest starts from there.
    """
    if not all(map(convertible, source, target)):
        return None
    result = []
    if any(a == "P" and b == "X" for a, b in zip(source, target, strict=True)):
        between: States = tuple(
            "I" if a == "P" and b == "X" else a for a, b in zip(source, target, strict=True)
        )
        result.append(_stage(source, between))
        source = between
    if source != target:
        result.append(_stage(source, target))
    return tuple(result)


def _stage(source: States, target: States) -> Stage:
    moves: list[Move] = []
    current = list(source)
    moved = cut = False
    for axis, a, b in route(source, target):
        others = tuple(is_shard(s) and i != axis for i, s in enumerate(current))
        forward, backward = forward_move(a, b, 1), backward_move(a, b, 1)
        if forward is not None:
            moves.append(Move(a, b, "forward", forward, axis, others))
            moved = True
        elif forward_kind(a) != forward_kind(b):
            cut = True
        if backward is not None:
            moves.append(Move(a, b, "backward", backward, axis, others))
        current[axis] = b
    return Stage(target, tuple(moves), moved or not cut)


def sized(move: Move, nbytes: int, degrees: Sequence[int]) -> Collective:
    """The collective of a move of a value of `nbytes`."""
    parts = math.prod(n for n, divided in zip(degrees, move.shards, strict=True) if divided)
    return Collective(move.kind.kind, nbytes // parts, move.axis, parts)
