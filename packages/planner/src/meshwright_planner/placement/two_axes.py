"""Placements on two searched axes: pairs of rows, where the inner one is legal for the local shapes of the outer one.

States are tuples with one State per axis, outermost first.  The runtime derives a call in the same way, one axis after
the other (dtensor's `choose.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from meshwright_dtensor.comm.redistribute import route
from meshwright_dtensor.rules.node import NodeView, Strategy, refine
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.intervals import IntervalShard, segmented_shard
from meshwright_dtensor.sharding.states import State, States, forward_kind, is_shard
from meshwright_dtensor.trace.graph import Ref
from meshwright_planner.cost.prices import JointCosts, along, backward_move, convertible, forward_move
from meshwright_planner.placement.ilp import ConversionStep, Move, Placement, Route
from meshwright_planner.placement.legal_rows import Legality, Option
from meshwright_planner.placement.problem import PlacementProblem
from meshwright_planner.trace.quotient import carried
from meshwright_planner.trace.tape import Tape


class JointLegality(Legality):
    """Options by node on two axes, from what is legal on each.

    Args:
        axes: legality on the outer and on the inner axis, of one tape.
        sequence: True requires values between blocks to be sharded along the sequence on one of the axes.
    """

    def __init__(self, axes: Sequence[Legality], sequence: bool | None = None) -> None:
        outer, inner = axes
        self.axes = (outer, inner)
        self.tape, self.quotient, self.rules = outer.tape, outer.quotient, outer.rules
        self.costs = JointCosts.of([outer.costs, inner.costs])
        self._composites, self._works = outer._composites, {}
        self._carried = set(carried(self.tape, self.quotient)) if sequence else set()

    def options(self, index: int) -> list[Option]:
        """The legal pairs of node `index`, fully replicated first."""
        outer, node = self.axes[0], self.tape.nodes[index]
        options: dict[tuple[States, States], Option] = {}
        for first in outer.options(index):
            for second in self._inside(index, first):
                ins, outs = pairs(first.ins, second.ins), pairs(first.outs, second.outs)
                if (ins, outs) not in options and self._keeps_sequence(node.outs, outs):
                    options[ins, outs] = self.option(index, ins, outs)
        return list(options.values())

    def parameter_states(self, value: int) -> list[State]:
        """The pairs in which a parameter may be stored, whole first."""
        outer, inner = self.axes
        shape = self.tape.values[value].shape
        states: list[State] = []
        for first in outer.parameter_states(value):
            left = self._left(shape, first)
            for state in inner.parameter_states(value):
                second = inside(state, first, inner.costs.degree)
                if second is not None and self._nests(value, left, first, second):
                    states.append(pairs((first,), (second,))[0])
        return list(dict.fromkeys(states))

    def splits_sequence(self, value: int, state: State) -> bool:
        """Whether a value in `state` is sharded along the sequence on either axis."""
        return any(axis.splits_sequence(value, s) for axis, s in zip(self.axes, along(state), strict=False))

    def sequence_lengths(self) -> list[int]:
        """Tokens of the values between blocks; none where these hold no sequence."""
        return self.axes[1].sequence_lengths()

    def on(self, tape: Tape) -> Self:
        """The same for a tape that differs in sizes and saved tensors only."""
        other = super().on(tape)
        other.axes = (self.axes[0].on(tape), self.axes[1].on(tape))
        return other

    def across(self, costs: JointCosts) -> Self:  # type: ignore[override]
        """The same for ranks joined by other links."""
        other = super().across(costs)
        other.axes = (self.axes[0].across(costs.axes[0]), self.axes[1].across(costs.axes[1]))
        return other

    # ---- the inner axis
    def _inside(self, index: int, first: Option) -> Iterator[Strategy]:
        """The rows of the inner axis for the local shapes of a row of the outer one."""
        inner, node, values = self.axes[1], self.tape.nodes[index], self.tape.values
        degree = inner.costs.degree
        refs, outer = (*node.ins, *node.outs), (*first.ins, *first.outs)
        shapes = {ref: self._left(values[ref.i].shape, state) for ref, state in zip(refs, outer, strict=True)}
        view = NodeView.with_shapes(node, shapes, {ref: values[ref.i].dtype for ref in refs}, degree)
        rows = self.rules.strategies(view)
        ins, outs = (
            [
                [inner_run for run in runs if (inner_run := inside(run, state, degree)) is not None]
                for runs, state in zip(shards, some, strict=True)
            ]
            for shards, some in zip(inner._domains.around(index), (first.ins, first.outs), strict=True)
        )
        if any(ins) or any(outs):
            rows = self.rules.lifted(view, rows, ins, outs)
        rows = refine(view, rows, lambda ref: self.tape.grad[ref.i])
        if node.call is None or not node.ins or index in self.tape.writes:
            rows = rows[:1]
        for row in rows:
            states = zip(refs, outer, (*row.ins, *row.outs), strict=True)
            if all(self._fits(ref, shapes[ref], a, b) for ref, a, b in states):
                yield row

    def _fits(self, ref: Ref, left: tuple[int, ...], first: State, second: State) -> bool:
        plain = isinstance(second, int) and not isinstance(second, IntervalShard)
        whole = plain and self.axes[1].leaves_whole(ref.i, int(second))
        return not whole and self._nests(ref.i, left, first, second)

    def _nests(self, value: int, left: tuple[int, ...], first: State, second: State) -> bool:
        """Whether the inner axis can shard the local shape of the outer one; a dim that both shard must divide evenly."""
        if not isinstance(second, int):
            return True
        dim, degrees = int(second), self.costs.degrees
        shape = self.tape.values[value].shape
        if isinstance(first, int) and int(first) == dim and shape[dim] % math.prod(degrees):
            return False
        if isinstance(second, IntervalShard):
            return second.total == left[dim] and second.even
        return left[dim] > 0 and self.axes[1].divides(value, dim, left[dim])

    def _left(self, shape: tuple[int, ...], first: State) -> tuple[int, ...]:
        return local_shape_of(shape, (self.axes[0].costs.degree,), (0,), (first,))


def pairs(first: States, second: States) -> States:
    """One tuple per tensor of the states on both axes."""
    return tuple(zip(first, second, strict=True))  # type: ignore[arg-type]


def inside(state: State, outer: State, degree: int) -> State | None:
    """The state of `degree` ranks on a shard of `outer`, from a state of the whole value; None if there is none.

    The parts of a fused dim are shorter within a shard of the outer axis.
    """
    if not isinstance(state, IntervalShard) or not isinstance(outer, int) or int(outer) != int(state):
        return state
    parts = state.parts
    if parts is None or not isinstance(outer, IntervalShard) or outer.parts != parts:
        return None
    n = len(outer.intervals)
    if any(size % (n * degree) for size in parts):
        return None
    return segmented_shard(int(state), [size // n for size in parts], degree)


class JointProblem(PlacementProblem):
    """As PlacementProblem, with one state per axis; `fixed`: an axis, and the placement whose states it has there."""

    whole: State = ("I", "I")  # type: ignore[assignment]
    # one program of two axes takes about 20 at most on an idle machine
    patience = 600.0
    legality: JointLegality
    costs: JointCosts
    fixed: tuple[int, Placement | None] | None = None

    def _allowed(self, value: int, state: State) -> bool:
        pinned_pair = self.pins.get(value, (None, None))
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

    def _steps(
        self, inner: int, nbytes: int, grad: bool, parameter: bool, source: State, target: State
    ) -> Route:
        way = _stages(along(source), along(target), self.costs.degrees)
        if way is None:
            return None
        steps: list[ConversionStep] = []
        here = along(source)
        for stage in way:
            needed = (move for move in stage.moves if grad or move.phase == "forward")
            moves = tuple(move._replace(collective=move.collective.resized(nbytes, inner)) for move in needed)
            if moves:
                # a weight is converted at each of its uses
                key = (source, here, stage.target) if stage.kept and not parameter else None
                seconds = sum(self.costs.collective(move.collective) for move in moves)
                steps.append(ConversionStep(moves, seconds, key))
            here = stage.target
        return tuple(steps)

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
