"""The tape of one data-parallel rank of a model with cross-row interactions.

In a batch-independent model, a rank does what a tape recorded with its rows alone says.  When an operation needs rows of other
ranks, the core moves them, or gathers them and computes all of them on every rank
(`meshwright_dtensor.propagate.predict` predicts which).  The sizes on a rank then follow from a tape of all rows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright_dtensor.propagate.choose import MeshShape, is_view
from meshwright_dtensor.propagate.predict import PredictedMove, PredictedRun
from meshwright_dtensor.rules.composites.base import Composite
from meshwright_dtensor.rules.localise import localise
from meshwright_dtensor.rules.node import NodeView
from meshwright_dtensor.sharding.boxes import dense_strides
from meshwright_dtensor.sharding.states import I, States
from meshwright_dtensor.trace.function_kinds import is_in_place
from meshwright_dtensor.trace.graph import Node, Value
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.names import listing
from meshwright_planner.trace.tape import Division, Saved, Tape

NodeStates = tuple[tuple[States, ...], tuple[States, ...]]
"""States of the inputs and of the results of a node."""

SHOWN = 4
"""Number of modules that a note names."""

LITTLE, FEW = 0.01, 4
"""Fraction of the bytes of all results, and number of collectives, up to which cross-row interaction is ignored."""


def local_states(rank_tape: Tape, global_tape: Tape, index: int, axes: int) -> NodeStates:
    """States of a node that every rank runs on its own rows: the dim whose size differs between the two tapes is sharded."""
    node = global_tape.nodes[index]

    def states(i: int) -> States:
        pairs = zip(rank_tape.values[i].shape, global_tape.values[i].shape)
        dim = next((d for d, (a, b) in enumerate(pairs) if a != b), None)
        return ("I" if dim is None else dim,) * axes

    return tuple(states(r.i) for r in node.ins), tuple(states(r.i) for r in node.outs)


@dataclass
class DataRank:
    """One data rank of a run, as the core is predicted to execute it.

    Args:
        global_tape: recorded with the rows of all ranks.
        rank_tape: recorded with the rows of one rank.
        same: both tapes are of the same operations, so that `rank_tape` has the exact sizes inside operations.
        initial: value -> states of inputs and parameters.
        prediction: of the core for `global_tape`.
        grid: the axes that shard rows.
        composites: by the names of their nodes.
    """

    global_tape: Tape
    rank_tape: Tape
    same: bool
    initial: Mapping[int, States]
    prediction: PredictedRun
    grid: MeshShape
    composites: Mapping[str, Composite]

    def is_batch_independent(self) -> bool:
        """Whether no rows are moved, and every rank computes on its own rows only."""
        nodes = range(len(self.global_tape.nodes))
        return not self.prediction.moved and not any(map(self._computes_more, nodes))

    def is_negligible(self) -> bool:
        """Whether the rows that are moved and computed in addition to a rank's own are too few to change the cost."""
        made = more = 0
        for k, node in enumerate(self.global_tape.nodes):
            if node.call is not None and not is_view(node):
                made += sum(self.rank_tape.values[r.i].nbytes for r in node.outs)
                if self._computes_more(k):
                    more += sum(self.global_tape.values[r.i].nbytes for r in node.outs)
        moved = self.prediction.moved
        return len(moved) <= FEW and more + sum(m.nbytes for m in moved) <= LITTLE * made

    def lost_write(self) -> Node | None:
        """The first view of moved rows that is written through: the core refuses it at run time."""
        states_of = dict(self.initial)
        for k, node in enumerate(self.global_tape.nodes):
            # the core converts the result of an in-place call back
            in_place = node.call is not None and is_in_place(node.call.function)
            if k in self.global_tape.through and not in_place:
                stored = states_of.get(node.ins[0].i, (I,) * self.grid.ndim)
                if any(isinstance(state, int) for state in stored) and stored != self.prediction.ins[k][0]:
                    return node
            outs = zip(node.outs, self.prediction.outs[k], strict=True)
            states_of.update((ref.i, states) for ref, states in outs)
        return None

    def with_moves(self) -> Tape:
        """The tape of the rank's rows, with the collectives for cross-row interactions."""
        tape = self.rank_tape
        return replace(tape, origin=tape.origin or tape, division=self.division())

    def tape(self) -> Tape:
        """The tape of the rank, derived from the global tape."""
        tape, rank_tape = self.global_tape, self.rank_tape
        states_of = dict(self.initial)
        for node, outs in zip(tape.nodes, self.prediction.outs, strict=True):
            states_of.update((ref.i, states) for ref, states in zip(node.outs, outs, strict=True))
        values = [
            self._value(i, self.grid.local(v.shape, states_of[i]) if i in states_of else v.shape)
            for i, v in enumerate(tape.values)
        ]
        return replace(
            tape,
            values=values,
            nodes=[self._node(k, values) for k in range(len(tape.nodes))],
            saved=self._kept(tape.saved, rank_tape.saved, values),
            dropped=self._kept(tape.dropped, rank_tape.dropped, values),
            rows=rank_tape.rows,
            origin=None,
            division=self.division(),
        )

    def _value(self, index: int, shape: tuple[int, ...]) -> Value:
        value = self.global_tape.values[index]
        for candidate in (self.rank_tape.values[index], value) if self.same else (value,):
            if shape == candidate.shape:
                return candidate
        dims = range(len(shape))
        order = sorted(dims, key=lambda d: -value.stride[d]) if value.stride else dims
        return replace(value, shape=shape, stride=dense_strides(shape, tuple(order)))

    def _computes_more(self, k: int) -> bool:
        """Whether the rank computes more of a result of a node than its own rows need."""
        node, whole, rank_values = self.global_tape.nodes[k], self.global_tape.values, self.rank_tape.values
        return not is_view(node) and any(
            math.prod(self.grid.local(whole[r.i].shape, states)) > math.prod(rank_values[r.i].shape)
            for r, states in zip(node.outs, self.prediction.outs[k], strict=True)
        )

    def _part(self, k: int) -> float:
        """The fraction of the work of a node that one rank does."""
        states = (*self.prediction.ins[k], *self.prediction.outs[k])
        sizes = enumerate(self.grid.sizes)
        return 1 / math.prod(n for axis, n in sizes if any(isinstance(s[axis], int) for s in states))

    def _node(self, k: int, values: list[Value]) -> Node:
        node, whole = self.global_tape.nodes[k], self.global_tape.values
        # the shapes in which it reads its inputs, after conversions
        pairs = zip(node.ins, self.prediction.ins[k], strict=True)
        read = [self.grid.local(whole[r.i].shape, states) for r, states in pairs]
        if self.same:
            rank_node = self.rank_tape.nodes[k]
            refs = (*rank_node.ins, *rank_node.outs)
            shapes = [values[r.i].shape for r in refs]
            needed = [*read, *(values[r.i].shape for r in rank_node.outs)]
            if [self.rank_tape.values[r.i].shape for r in refs] == needed == shapes:
                return rank_node
        view = NodeView.of(node, whole, 1)
        if node.op is None:
            flops = float(self.composites[node.name].flops(view))
            return replace(node, flops=flops * self._part(k))
        op, args, kwargs = localise(view, [values[r.i].shape for r in node.outs], read)
        # an equivalent operation on the local part
        if op is not node.op:
            args, kwargs = node.args, node.kwargs
        return replace(node, args=args, kwargs=kwargs, flops=node.flops * self._part(k))

    def _kept(self, items: Sequence[Saved], rank_items: Sequence[Saved], values: list[Value]) -> list[Saved]:
        """Saved tensors with the sizes in which the nodes that save them read them."""
        of_rank = rank_items if self.same else itertools.repeat(None)
        return [self._saved(*both, values) for both in zip(items, of_rank)]

    def _saved(self, item: Saved, rank_item: Saved | None, values: list[Value]) -> Saved:
        part = self._part(item.by)
        if item.value is None or item.root is None:
            if part < 1 and rank_item is not None:
                return item._replace(nbytes=rank_item.nbytes)
            return item._replace(nbytes=round(item.nbytes * part))
        node, prediction = self.global_tape.nodes[item.by], self.prediction
        pairs = zip((*node.ins, *node.outs), (*prediction.ins[item.by], *prediction.outs[item.by]))
        states = next((s for r, s in pairs if r.i == item.value), None)
        seen = self.global_tape.values[item.value]
        shape = values[item.value].shape if states is None else self.grid.local(seen.shape, states)
        if shape == seen.shape:
            return item
        if rank_item is not None and shape == self.rank_tape.values[item.value].shape:
            return item._replace(nbytes=rank_item.nbytes)
        return item._replace(nbytes=math.prod(shape) * seen.dtype.itemsize)

    def division(self) -> Division:
        """The collectives for cross-row interactions, and notes."""
        nodes, prediction = self.global_tape.nodes, self.prediction
        moved = Counter(m for m in prediction.moved if m.nbytes)
        # values that depend on inputs whose rows are sharded
        flows = {i for i, states in self.initial.items() if any(isinstance(s, int) for s in states)}
        for node in nodes:
            if any(r.i in flows for r in node.ins):
                flows.update(r.i for r in node.outs)
        from_rows = {i for i in flows if math.prod(self.global_tape.values[i].shape) > 1}
        replicated = [
            node
            for k, node in enumerate(nodes)
            if node.call is not None
            and not any(isinstance(s, int) for s in itertools.chain(*prediction.ins[k], *prediction.outs[k]))
            and (self._computes_more(k) if self.same else any(r.i in from_rows for r in node.outs))
        ]
        return Division(tuple(moved.items()), tuple(self._notes(replicated, moved)))

    def _notes(self, replicated: list[Node], moved: Counter[PredictedMove]) -> Iterator[str]:
        """Notes for users."""
        causes: dict[str, None] = {}
        for k in self.prediction.gathered:
            node = self.global_tape.nodes[k]
            assert node.call is not None
            causes[_called(node.call.function, node.module)] = None
        moves = Counter[str]()
        for m, count in moved.items():
            name = _called(m.function, m.module)
            if m.phase == "forward" and m.why.endswith("->R"):
                causes[name] = None
            moves[name] += m.nbytes * count
        axes = "+".join(self.grid.axes)
        if replicated:
            modules = list(dict.fromkeys(node.module or "the model itself" for node in replicated))
            because = f": {listing(list(causes), SHOWN)} needs rows of other ranks" if causes else ""
            yield (
                f"data parallelism does not help in {listing(modules, SHOWN)}, which every rank of {axes} computes for the whole "
                f"batch{because}"
            )
        if moves:
            yield (
                f"rows interact across {axes} in {listing(list(moves), SHOWN)}: {human_bytes(moves.total())} moved in a forward "
                "and backward pass"
            )


def _called(function: str, module: str) -> str:
    return f"{function} ({module})" if module else function
