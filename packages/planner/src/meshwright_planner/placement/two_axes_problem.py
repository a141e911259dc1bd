"""The placement problem of one tape on two axes."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright_dtensor.comm.redistribute import route
from meshwright_dtensor.sharding.states import State, States, forward_kind, is_shard
from meshwright_planner.cost.prices import JointCosts, along, backward_move, convertible, forward_move
from meshwright_planner.placement.ilp import ConversionStep, Move, Placement, Route
from meshwright_planner.placement.legal_rows import Option
from meshwright_planner.placement.pinned import pinned
from meshwright_planner.placement.problem import NOTICEABLE, PlacementProblem
from meshwright_planner.placement.two_axes_rows import JointLegality, Pins, inside


class JointProblem(PlacementProblem):
    """As PlacementProblem, with one state per axis.

    Attributes:
        fixed: number of an axis and a placement: on that axis all states are those of the placement.
    """

    whole: State = ("I", "I")  # type: ignore[assignment]
    # one program of two axes takes about 20 at most on an idle machine
    patience = 600.0
    legality: JointLegality
    costs: JointCosts

    def __init__(self, legality: JointLegality, pins: Pins | None = None) -> None:
        """`pins`: states of parameters on each axis, None: free."""
        super().__init__(legality)
        self.pinned_states = _held(legality, pins or {})
        self.fixed: tuple[int, Placement | None] | None = None
        self._storable: dict[tuple[int, bool], list[State]] = {}
        self._readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for value, node, position in self.quotient.edges:
            self._readers[value].append((node, position))

    # ---- what is legal
    def storable(self, value: int, divided: bool) -> list[State]:
        """The pairs in which a parameter may be stored; `divided`: sharded over the most ranks that can use it."""
        key = (value, divided)
        if key not in self._storable:
            states = [s for s in self.legality.parameter_states(value) if self._allowed(value, s)]
            if divided:
                ranks = {s: self.costs.sharers(self.costs.split((s,))) for s in self.usable(value, states)}
                states = [s for s in states if ranks.get(s) == max(ranks.values())] if ranks else states
            self._storable[key] = states
        return self._storable[key]

    def _allowed(self, value: int, state: State) -> bool:
        pinned_pair = self.pinned_states.get(value, (None, None))
        degree = self.legality.axes[1].costs.degree
        first = along(state)[0]
        wanted = (pinned_pair[0], None if pinned_pair[1] is None else inside(pinned_pair[1], first, degree))
        if any(w is not None and w != s for w, s in zip(wanted, along(state), strict=True)):
            return False
        if self.fixed is None:
            return True
        axis, placement = self.fixed
        there = "I" if placement is None else along(placement.stored[value])[axis]
        return along(state)[axis] == there

    def usable(self, value: int, states: Sequence[State]) -> list[State]:
        """The states in which every reader can use a parameter without moving a shard of it."""
        readers = self._readers.get(value, [])
        wanted = [{option.ins[position] for option in self.options[node]} for node, position in readers]

        def is_used(stored: State, some: set[State]) -> bool:
            return any(stored == state or self.may_move(value, stored, state) for state in some)

        return [s for s in states if all(is_used(s, some) for some in wanted)]

    def weights(self, alone: bool = False) -> frozenset[int]:
        """See PlacementProblem.weights: parameters that can be used as shards on at least one axis."""
        quotient, values, nodes = self.quotient, self.tape.values, self.tape.nodes
        calls = Counter((n.call, n.call_inputs) for n in map(nodes.__getitem__, quotient.nodes))
        sizes: dict[int, int] = {}
        usable = set()
        for value, readers in self._readers.items():
            if not self.is_parameter(value) or len(values[value].shape) < 2 or value in self.pinned_states:
                continue
            if not self.legality.parameter_choices(value):
                continue
            sizes[value] = values[value].nbytes * quotient.value_count[value]
            if alone and any(calls[nodes[n].call, nodes[n].call_inputs] > 1 for n, _ in readers):
                continue
            if any(any(map(is_shard, along(s))) for s in self.usable(value, self.storable(value, False))):
                usable.add(value)
        total = sum(sizes.values())
        return frozenset(v for v in usable if sizes[v] >= NOTICEABLE * total)

    def may_move(self, value: int, source: State, target: State) -> bool:
        """Whether a value may be converted from one pair to another: shards of a weight never move."""
        if not self.is_parameter(value):
            return True
        pinned_pair = self.pinned_states.get(value, (None, None))
        cut = [int(s) if isinstance(s, int) else None for s in along(source)]
        for axis, (a, b) in enumerate(zip(along(source), along(target), strict=True)):
            if a == b or pinned_pair[axis] is not None:
                continue
            # a dim with an inner shard cannot get an outer shard without moving the inner one
            if is_shard(a) or (isinstance(b, int) and axis == 0 and int(b) == cut[1]):
                return False
        return True

    # ---- costs
    def _steps(self, nbytes: int, grad: bool, parameter: bool, source: State, target: State) -> Route:
        way = _stages(along(source), along(target), self.costs.degrees)
        if way is None:
            return None
        steps: list[ConversionStep] = []
        here = along(source)
        for stage in way:
            moves = tuple(
                move._replace(collective=move.collective.resized(nbytes))
                for move in stage.moves
                if move.phase == "forward" or grad
            )
            if moves:
                # a weight is converted at each of its uses
                key = (source, here, stage.target) if stage.kept and not parameter else None
                seconds = sum(self.costs.collective(move.collective) for move in moves)
                steps.append(ConversionStep(moves, seconds, key))
            here = stage.target
        return tuple(steps)

    # ---- others like it
    def pinning(self, pins: Pins) -> JointProblem:  # type: ignore[override]
        """See PlacementProblem.pinning; `pins` as the problem is made with."""
        other = copy.copy(self)
        other.pinned_states, other._storable = _held(self.legality, pins), {}
        return other

    def with_fixed(self, axis: int, placement: Placement | None) -> JointProblem:
        """The same with the states of one axis fixed to those of a placement; None: replicated."""
        other = copy.copy(self)
        other.fixed, other._storable = (axis, placement), {}

        def on_axis(option: Option) -> States:
            return tuple(along(s)[axis] for s in (*option.ins, *option.outs))

        def is_kept(k: int, option: Option) -> bool:
            states = on_axis(option)
            there = ("I",) * len(states) if placement is None else on_axis(placement.options[k])
            return states == there

        other.options = {k: [o for o in some if is_kept(k, o)] for k, some in self.options.items()}
        return other


def _held(legality: JointLegality, pins: Pins) -> dict[int, tuple[State | None, ...]]:
    """Value -> the states on each axis in which the user or a strategy stores it."""
    by_axis = [
        pinned(on_axis, {name: s for name, some in pins.items() if (s := some[axis]) is not None})
        for axis, on_axis in enumerate(legality.axes)
    ]
    return {value: tuple(held.get(value) for held in by_axis) for value in {**by_axis[0], **by_axis[1]}}


@dataclass(frozen=True)
class _Stage:
    """A conversion that the runtime does at once and caches: its target states and its collectives, per byte.

    `kept`: consumers share the result; a stage that only slices is done by each.
    """

    target: States
    moves: tuple[Move, ...]
    kept: bool


@lru_cache(maxsize=65536)
def _stages(source: States, target: States, degrees: tuple[int, ...]) -> tuple[_Stage, ...] | None:
    """The stages in which the runtime converts a value (`local_in`, `route`); None if it cannot.

    A Partial that becomes X is reduced first; all consumers share that, and the rest starts from there.
    """
    if not all(map(convertible, source, target)):
        return None
    reduced = tuple("I" if a == "P" and b == "X" else a for a, b in zip(source, target, strict=True))
    return tuple(_stage(a, b, degrees) for a, b in ((source, reduced), (reduced, target)) if a != b)


def _stage(source: States, target: States, degrees: tuple[int, ...]) -> _Stage:
    moves: list[Move] = []
    current = list(source)
    moved = cut = False
    for axis, a, b in route(source, target):
        # the other axes divide the tensor into this many parts
        parts = math.prod(d for i, (d, s) in enumerate(zip(degrees, current)) if is_shard(s) and i != axis)
        forward, backward = forward_move(a, b, 1), backward_move(a, b, 1)
        if forward is not None:
            moves.append(Move(a, b, "forward", replace(forward, axis=axis, parts=parts)))
            moved = True
        elif forward_kind(a) != forward_kind(b):
            cut = True
        if backward is not None:
            moves.append(Move(a, b, "backward", replace(backward, axis=axis, parts=parts)))
        current[axis] = b
    return _Stage(target, tuple(moves), moved or not cut)
