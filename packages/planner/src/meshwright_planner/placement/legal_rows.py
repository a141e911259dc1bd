"""The legal strategies of a tape's representative nodes on one axis, with their costs.

Only the data axis shards the rows of the batch.  A searched axis could shard them too (with sharded and gathered weights that
is ZeRO-3), so all states that follow from a sharded batch are left out: they are propagated through the rules.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.rules.node import NodeView, Strategy, refine
from meshwright_dtensor.sharding.boxes import local_shape_of, shardable
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State, States, is_shard
from meshwright_dtensor.trace.graph import Ref
from meshwright_planner.cost.backward import BackwardTraffic, BackwardTraffics
from meshwright_planner.cost.operations import FORWARD
from meshwright_planner.cost.prices import AxisCosts, Collective, Work, along, work_of
from meshwright_planner.placement.interval_domains import Domains
from meshwright_planner.trace.flops import by_name, forward_flops
from meshwright_planner.trace.quotient import Quotient, carried
from meshwright_planner.trace.tape import Tape

UNEVEN_FACTOR = 1000
"""A dim that does not divide is sharded only when the imbalance is below one part in this many."""

BatchDims = dict[int, set[int]]
"""Value -> its batch dims."""


@dataclass(frozen=True)
class Option:
    """One legal strategy of one node.

    Args:
        ins, outs: states of the node's tensor inputs and outputs.
        seconds: compute of one occurrence on one rank, forward and backward, without conversions.
        collectives: those that the operation performs by itself.
        inner_seconds: their time.
        forward: the fraction of the seconds that is the forward pass.
    """

    ins: States
    outs: States
    seconds: float
    collectives: tuple[Collective, ...] = ()
    inner_seconds: float = 0.0
    forward: float = FORWARD


def balanced(size: int, degree: int) -> bool:
    """Whether sharding a dim of `size` over `degree` ranks leaves them practically equal work."""
    return size % degree == 0 or size > UNEVEN_FACTOR * degree


class Legality:
    """The legal options of each node, for one tape on one axis. `axes`: the same on each axis, where there are several."""

    axes: tuple[Legality, ...] = ()

    def __init__(
        self,
        tape: Tape,
        quotient: Quotient,
        rules: RuleBook,
        costs: AxisCosts,
        pins: Mapping[str, State] | None = None,
        sequence: bool | None = None,
        uneven: bool = False,
    ) -> None:
        """`pins`: states of parameters that the user sets.  `sequence`: False leaves out the states in which the axis shards
        the sequence; True requires them for values between blocks.  `uneven`: the sequence is sharded where it does not divide.
        """
        self.tape, self.quotient, self.rules, self.costs = tape, quotient, rules, costs
        self._batch = batch_dims(tape, quotient.nodes, rules, costs.degree)
        runs = ((name, s) for name, s in (pins or {}).items() if isinstance(s, IntervalShard))
        pinned = {quotient.value(tape.parameters[name]): s for name, s in runs if name in tape.parameters}
        self._sequence = sequence_dims(tape, quotient, rules, costs.degree)
        self._wants, self._uneven = sequence, uneven
        self._carried = set(carried(tape, quotient)) if sequence and costs.degree > 1 else set()
        self._domains = Domains(tape, quotient, rules, costs.degree, pinned)
        self._composites = by_name(rules.composites)
        self._works: dict[int, Work] = {}

    def options(self, index: int) -> list[Option]:
        """The legal options of node `index`, fully replicated first."""
        tape, node = self.tape, self.tape.nodes[index]
        view = NodeView.of(node, tape.values, self.costs.degree)
        # values that depend on no input or parameter are computed on every rank, outside the runtime
        rows = refine(view, self._domains.rows(index), lambda ref: tape.grad[ref.i])
        if node.call is None or not node.ins or self.costs.degree == 1 or index in tape.writes:
            rows = rows[:1]
        result: dict[tuple[States, States], Option] = {}
        for row in rows:
            if not self._allowed(node.ins, row.ins) or not self._allowed(node.outs, row.outs):
                continue
            if (row.ins, row.outs) not in result and self._keeps_sequence(node.outs, row.outs):
                result[row.ins, row.outs] = self.option(index, row.ins, row.outs)
        return list(result.values())

    def on(self, tape: Tape) -> Self:
        """The same for a tape that differs in sizes and saved tensors only."""
        other = copy.copy(self)
        other.tape, other._works = tape, {}
        return other

    def across(self, costs: AxisCosts) -> Self:
        """The same for ranks joined by another link."""
        other = copy.copy(self)
        other.costs = costs
        return other

    def flops(self, index: int) -> float:
        """FLOPs of the forward pass of a node."""
        return forward_flops(self.tape.nodes[index], self.tape.values, self._composites)

    def backward(self, index: int) -> BackwardTraffic:
        """Bytes that the backward pass of a node reads and writes."""
        traffics = self.quotient.once_for(self.tape, "backward", BackwardTraffics)
        return traffics.of(self.tape, index)

    def option(self, index: int, ins: States, outs: States) -> Option:
        """The option of a node with these states."""
        node, values = self.tape.nodes[index], self.tape.values
        if index not in self._works:
            work_inputs = self.flops(index), self.backward(index), self.tape.again[index]
            self._works[index] = work_of(node, values, self.tape.flows[index], *work_inputs)
        seconds, forward = self.costs.timed(self._works[index], node, values, ins, outs)
        inners = tuple(self._inside_call(index, ins, outs)) if node.op is None else ()
        inner_seconds = sum(map(self.costs.collective, inners), 0.0) * (1 + self.tape.again[index])
        return Option(ins, outs, seconds, inners, inner_seconds, forward)

    def _inside_call(self, index: int, ins: States, outs: States) -> Iterator[Collective]:
        """The collectives of a composite, per axis, on the shards of the other axes."""
        node, values, degrees = self.tape.nodes[index], self.tape.values, self.costs.degrees
        composite = self._composites.get(node.name)
        if composite is None:
            return
        refs, states = (*node.ins, *node.outs), [along(s) for s in (*ins, *outs)]
        for axis, degree in enumerate(degrees):
            axis_states = [s[axis] for s in states]
            if not any(map(is_shard, axis_states)):
                continue
            held = zip(refs, states, strict=True)
            shapes = {ref: _seen(values[ref.i].shape, degrees, state, axis) for ref, state in held}
            view = NodeView.with_shapes(node, shapes, {ref: values[ref.i].dtype for ref in refs}, degree)
            row = Strategy(tuple(axis_states[: len(ins)]), tuple(axis_states[len(ins) :]), "hand")
            nbytes = int(composite.extra_comm_bytes(view, row))
            if nbytes:
                yield Collective("all_reduce", nbytes, axis)

    def parameter_states(self, value: int) -> list[State]:
        """The states in which a parameter may be stored."""
        shape = self.tape.values[value].shape
        plain = (d for d, size in enumerate(shape) if size and balanced(size, self.costs.degree))
        return ["I", *plain, *self._domains.of(self.quotient.value(value))]

    def parameter_choices(self, value: int) -> int:
        """Number of sharded states in which a parameter can be stored; 0 for other values."""
        name = self.tape.values[value].name or ""
        return len(self.parameter_states(value)) - 1 if name.startswith("param:") else 0

    def _allowed(self, refs: Sequence[Ref], states: States) -> bool:
        values = self.tape.values
        shards = ((ref.i, state) for ref, state in zip(refs, states) if isinstance(state, int))
        return all(self.divides(i, s, values[i].shape[s]) and not self.leaves_whole(i, s) for i, s in shards)

    def divides(self, value: int, dim: int, size: int) -> bool:
        """Whether the axis may shard a dim of a value, of which its ranks hold `size` together."""
        degree = self.costs.degree
        if balanced(size, degree):
            return True
        return self._uneven and self.splits_sequence(value, dim) and shardable(size, degree)

    def leaves_whole(self, value: int, dim: int) -> bool:
        """Whether the axis must not shard a dim: the rows of the batch, or the sequence with `sequence=False`."""
        rows = dim in self._batch.get(value, ())
        return rows or (self._wants is False and self.splits_sequence(value, dim))

    def splits_sequence(self, value: int, state: State) -> bool:
        """Whether a value in `state` is sharded along the sequence."""
        return isinstance(state, int) and state in self._sequence.get(self.quotient.value(value), ())

    def sequence_lengths(self) -> list[int]:
        """Tokens of the values between blocks; none where these hold no sequence."""
        between = carried(self.tape, self.quotient)
        return sorted({self.tape.values[v].shape[d] for v in between for d in self._sequence.get(v, ())})

    def _keeps_sequence(self, refs: Sequence[Ref], states: States) -> bool:
        """Whether values between blocks are sharded along the sequence, if that is required."""
        return not self._carried or all(
            self.quotient.value(r.i) not in self._carried or self.splits_sequence(r.i, s)
            for r, s in zip(refs, states, strict=True)
        )


def _seen(shape: tuple[int, ...], degrees: Sequence[int], states: States, axis: int) -> tuple[int, ...]:
    """The shape of the tensor that the ranks along one axis hold together."""
    if not any(is_shard(state) for number, state in enumerate(states) if number != axis):
        return shape
    left = list(local_shape_of(shape, degrees, (0,) * len(degrees), states))
    state = states[axis]
    if isinstance(state, int):
        left[state] = min(left[state] * degrees[axis], shape[state])
    return tuple(left)


def batch_dims(tape: Tape, nodes: Iterable[int], rules: RuleBook, degree: int) -> BatchDims:
    """The batch dims of the values of representative `nodes` (in order); a batch that does not divide has none."""
    if tape.rows < 2 or tape.rows % degree:
        return {}
    seeds = [i for i in _inputs(tape) if tape.values[i].shape[:1] == (tape.rows,)]
    return _pushed(tape, nodes, rules, degree, dict.fromkeys(seeds, 0), lambda value: value)


def sequence_dims(tape: Tape, quotient: Quotient, rules: RuleBook, degree: int) -> BatchDims:
    """The dims that follow from sharding dim 1 of the inputs over `degree` ranks, by representative value.

    Inputs may hold no sequence, but pictures, of which the model makes one: then from sharding dim 1 of the values between
    blocks, if no operation shards a parameter along with it, as it does for features.
    """
    values, nodes = tape.values, quotient.nodes
    shapes = {i: values[i].shape for i in _inputs(tape)}
    # that of pictures, of four dims, is their channels
    seeds = [i for i, s in shapes.items() if len(s) not in (0, 1, 4) and s[0] == tape.rows and s[1] > 1]
    dims = _pushed(tape, nodes, rules, degree, dict.fromkeys(seeds, 1), quotient.value)
    between = {v for v in carried(tape, quotient) if v not in dims and len(values[v].shape) == 3}
    # and the values that the first of the repeated blocks reads there
    readers = {(node, place) for value, node, place in quotient.edges if value in between}
    between |= {value for value, node, place in quotient.edges if (node, place) in readers}
    tokens = [v for v in between if values[v].shape[0] == tape.rows and values[v].shape[1] > 1]
    made = _pushed(tape, nodes, rules, degree, dict.fromkeys(tokens, 1), quotient.value)
    return dims if _shards_parameters(tape, quotient, rules, degree, made) else made | dims


def _shards_parameters(tape: Tape, quotient: Quotient, rules: RuleBook, degree: int, dims: BatchDims) -> bool:
    """Whether an operation shards a parameter where its other inputs are sharded on these dims."""
    parameters = set(map(quotient.value, tape.parameters.values()))
    for index in quotient.nodes:
        node = tape.nodes[index]
        ins = [quotient.value(ref.i) for ref in node.ins]
        if parameters.isdisjoint(ins) or not any(v in dims for v in ins):
            continue
        for row in rules.strategies(NodeView.of(node, tape.values, degree)):
            sharded = {v for v, s in zip(ins, row.ins, strict=True) if is_shard(s)}
            along = any(s in dims.get(v, ()) for v, s in zip(ins, row.ins, strict=True))
            if along and not parameters.isdisjoint(sharded):
                return True
    return False


def _inputs(tape: Tape) -> list[int]:
    return [i for i, value in enumerate(tape.values) if (value.name or "").startswith("input:")]


def _pushed(
    tape: Tape,
    nodes: Iterable[int],
    rules: RuleBook,
    degree: int,
    seeds: dict[int, int],
    canon: Callable[[int], int],
) -> BatchDims:
    dims: BatchDims = defaultdict(set)
    for index, dim in seeds.items():
        dims[canon(index)].add(dim)
    for index in nodes:
        node = tape.nodes[index]
        dims_in = [dims.get(canon(ref.i), set()) for ref in node.ins]
        if not any(dims_in):
            continue
        for row in rules.strategies(NodeView.of(node, tape.values, degree)):
            shards = [(s, k) for s, k in zip(row.ins, dims_in) if is_shard(s)]
            if any(k for _, k in shards) and all(not k or s in k for s, k in shards):
                for ref, state in zip(node.outs, row.outs):
                    if isinstance(state, int):
                        dims[canon(ref.i)].add(state)
    return dims
