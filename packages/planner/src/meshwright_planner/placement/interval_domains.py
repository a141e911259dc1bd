"""The interval shards that values of a tape may have on one axis, from the splits in the model.

A fused projection (q|k|v, gate|up) is computed at once and then split or sliced.  Shards of plain chunks straddle the
parts; sharded part by part, every part is a plain shard.  So the parts of each split seed an interval shard, which is propagated
back and forth through the rules (views, products, biases) until it reaches the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.rules.lift import Known, slice_bounds
from meshwright_dtensor.rules.node import NodeView, Strategy, base_name
from meshwright_dtensor.sharding.intervals import IntervalShard, segmented_shard
from meshwright_dtensor.sharding.reshape import groups, through_view
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.trace.graph import Ref
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.tape import Tape

_ROUNDS = 8
_FEW = 1024
"""Most intervals on one rank for which a flattened dim gets a state."""
_VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape"})
_SPLITS = "aten.split aten.split_with_sizes aten.unsafe_split aten.unsafe_split_with_sizes".split()


class Domains:
    """The runs of every representative value, and with them the rows of every representative node."""

    def __init__(
        self, tape: Tape, quotient: Quotient, rules: RuleBook, degree: int, pins: Mapping[int, IntervalShard]
    ) -> None:
        """`pins`: representative parameter value -> runs in which the user stores it."""
        self.tape, self.quotient, self.rules, self.degree = tape, quotient, rules, degree
        self.runs: dict[int, dict[IntervalShard, None]] = defaultdict(dict)
        self._sources: dict[tuple[int, int], list[int]] = defaultdict(list)
        # rows of a node for the runs that its inputs and outputs had: asked for round after round
        self._found: dict[int, tuple[tuple[Known, Known], list[Strategy]]] = {}
        for value, node, position in quotient.edges:
            self._sources[node, position].append(value)
        for value, state in pins.items():
            self.runs[value][state] = None
        if degree > 1:
            self._seed()
            self._spread()

    def rows(self, index: int) -> list[Strategy]:
        """The raw rows of representative node `index`, those over runs last."""
        ins, outs = self.around(index)
        if index not in self._found or self._found[index][0] != (ins, outs):
            view = NodeView.of(self.tape.nodes[index], self.tape.values, self.degree)
            rows = self.rules.strategies(view)
            if any(ins) or any(outs):
                rows = self.rules.lifted(view, rows, ins, outs)
            self._found[index] = ((ins, outs), rows)
        return list(self._found[index][1])

    def around(self, index: int) -> tuple[list[list[State]], list[list[State]]]:
        """The runs of each input and of each output of representative node `index`."""
        node = self.tape.nodes[index]
        sources = (self._sources[index, j] for j in range(len(node.ins)))
        ins = [list[State](dict.fromkeys(s for v in some for s in self.of(v))) for some in sources]
        return ins, [list[State](self.of(self.quotient.value(r.i))) for r in node.outs]

    def of(self, value: int) -> list[IntervalShard]:
        """The runs of a representative value."""
        return list(self.runs.get(value, ()))

    def _seed(self) -> None:
        cuts: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for index in self.quotient.nodes:
            node = self.tape.nodes[index]
            name = base_name(node.name)
            if node.op is None or name not in (*_SPLITS, "aten.slice"):
                continue
            view = NodeView.of(node, self.tape.values, self.degree)
            if name == "aten.slice":
                bounds = slice_bounds(view)
                if bounds is not None:
                    cuts[node.ins[0].i, bounds[0]].add(bounds[1:])
                continue
            dim = view.bound()["dim"] % len(view.in_shapes[0])
            self._parts(node.ins[0].i, dim, [shape[dim] for shape in view.out_shapes])
        self._reshaped()
        for (value, dim), parts in cuts.items():
            starts, stops = zip(*sorted(parts))
            if (*starts, self.tape.values[value].shape[dim]) == (0, *stops):
                self._parts(value, dim, [stop - start for start, stop in zip(starts, stops)])

    def _reshaped(self) -> None:
        """The runs that views leave where they join dims (heads with the batch: BLOOM) or split one (q|k|v: ViT)."""
        for index in self.quotient.nodes:
            node = self.tape.nodes[index]
            if node.op is None or base_name(node.name) not in _VIEWS or node.call is None:
                continue
            source, result = node.ins[0], node.outs[0]
            before, after = (self.tape.values[r.i].shape for r in (source, result))
            for joined, split in groups(before, after):
                for dim in joined if len(joined) > 1 else ():
                    # features flattened with rows are one interval a row
                    if dim < len(before) - 1 or len(split) > 1:
                        self._moved(result, dim, before, after)
                for dim in split if len(joined) == 1 else ():
                    # the outermost dim that can be divided: heads, not their features. As many parts as ranks are no heads
                    state = self._moved(source, dim, after, before)
                    if isinstance(state, IntervalShard) or (state is not None and after[dim] > self.degree):
                        break

    def _moved(self, ref: Ref, dim: int, before: tuple[int, ...], after: tuple[int, ...]) -> State | None:
        """The state of a value of shape `after` that is the shard `dim` of `before`; if it is runs, they are its seed."""
        if before[dim] % self.degree or before[dim] == 1:
            return None
        state = through_view(before, after, dim, self.degree)
        if isinstance(state, IntervalShard) and len(state.intervals[0]) <= _FEW:
            self._add(ref.i, state)
        return state

    def _parts(self, value: int, dim: int, sizes: Sequence[int]) -> None:
        if all(size and size % self.degree == 0 for size in sizes):
            self._add(value, segmented_shard(dim, sizes, self.degree))

    def _add(self, value: int, state: State) -> bool:
        shards = self.runs[self.quotient.value(value)]
        if not isinstance(state, IntervalShard) or not state.even or state in shards:
            return False
        shards[state] = None
        return True

    def _spread(self) -> None:
        """Carry the runs along until nothing new is found, backwards first: towards the parameters."""
        nodes = list(self.quotient.nodes)
        for turn in range(_ROUNDS):
            changed = False
            for index in reversed(nodes) if turn % 2 == 0 else nodes:
                if not any(map(any, self.around(index))):
                    continue
                refs = (*self.tape.nodes[index].ins, *self.tape.nodes[index].outs)
                for row in self.rows(index):
                    for ref, state in zip(refs, (*row.ins, *row.outs), strict=True):
                        changed |= self._add(ref.i, state)
            if not changed and turn:
                return
