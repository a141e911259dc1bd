"""Legality on two searched axes: pairs of rows; the inner one is legal for the local shapes of the outer one.

States are tuples with one State per axis, outermost first.  The runtime derives a call in the same way, one axis after
the other (dtensor's `choose.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from meshwright_dtensor.rules.node import NodeView, Strategy, refine
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.intervals import IntervalShard, segmented_shard
from meshwright_dtensor.sharding.states import State, States
from meshwright_dtensor.trace.graph import Ref
from meshwright_planner.cost.prices import AxisCosts, JointCosts, along
from meshwright_planner.placement.legal_rows import Legality, Option, balanced
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
                if second is not None and self._nests(shape, left, first, second):
                    states.append(pairs((first,), (second,))[0])
        return list(dict.fromkeys(states))

    def splits_sequence(self, value: int, state: State) -> bool:
        """Whether a value in `state` is sharded along the sequence on either axis."""
        return any(axis.splits_sequence(value, s) for axis, s in zip(self.axes, along(state), strict=False))

    def on(self, tape: Tape) -> Self:
        """The same for a tape that differs in sizes and saved tensors only."""
        other = super().on(tape)
        other.axes = (self.axes[0].on(tape), self.axes[1].on(tape))
        return other

    def across(self, costs: AxisCosts) -> Self:
        """The same for ranks joined by other links."""
        assert isinstance(costs, JointCosts)
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
        return not whole and self._nests(self.tape.values[ref.i].shape, left, first, second)

    def _nests(self, shape: tuple[int, ...], left: tuple[int, ...], first: State, second: State) -> bool:
        """Whether the inner axis can shard the local shape of the outer one; a dim that both shard must divide evenly."""
        if not isinstance(second, int):
            return True
        dim, (outer, inner) = int(second), self.costs.degrees
        if isinstance(first, int) and int(first) == dim and shape[dim] % (outer * inner):
            return False
        if isinstance(second, IntervalShard):
            return second.total == left[dim] and second.even
        return left[dim] > 0 and balanced(left[dim], inner)

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


Pins = Mapping[str, Sequence[State | None]]
"""Parameter name -> state on each axis, None: free."""
