"""The tape of one data-parallel rank of a model with cross-row interactions.

In a batch-independent model, a rank does what a tape recorded with its rows alone says.  When an operation needs rows of other
ranks, the core moves them, or gathers them and computes all of them on every rank
(`meshwright_dtensor.propagate.predict` predicts which).  The sizes on a rank then follow from a tape of all rows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright_dtensor.propagate.prediction import MeshShape, PredictedMove, PredictedRun
from meshwright_dtensor.propagate.rewrites import is_view
from meshwright_dtensor.rules.composites.base import Composite
from meshwright_dtensor.rules.localise import localise
from meshwright_dtensor.rules.node import NodeView
from meshwright_dtensor.sharding.boxes import dense_strides
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.trace.graph import Node, Value
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.names import listing
from meshwright_planner.trace.tape import Division, Saved, Tape

SHOWN = 4
"""Number of modules that a note names."""

LITTLE, FEW = 0.01, 4
"""Fraction of the bytes of all results, and number of collectives, up to which cross-row interaction is ignored."""


def is_batch_independent(
    prediction: PredictedRun, rank_tape: Tape, global_tape: Tape, grid: MeshShape
) -> bool:
    """Whether the model is batch-independent: no rows are moved, and every rank computes on its own rows only."""
    return not prediction.moved and not any(
        _computes_more(node, prediction.outs[k], rank_tape, global_tape, grid)
        for k, node in enumerate(global_tape.nodes)
    )


def is_negligible(prediction: PredictedRun, rank_tape: Tape, global_tape: Tape, grid: MeshShape) -> bool:
    """Whether the rows that are moved and computed in addition to a rank's own are too few to change the cost."""
    made = more = 0
    for k, node in enumerate(global_tape.nodes):
        if node.call is not None and not is_view(node):
            made += sum(rank_tape.values[r.i].nbytes for r in node.outs)
            if _computes_more(node, prediction.outs[k], rank_tape, global_tape, grid):
                more += sum(global_tape.values[r.i].nbytes for r in node.outs)
    moved = sum(m.nbytes for m in prediction.moved)
    return len(prediction.moved) <= FEW and more + moved <= LITTLE * made


def local_states(
    rank_tape: Tape, global_tape: Tape, index: int, axes: int
) -> tuple[tuple[States, ...], tuple[States, ...]]:
    """States of a node that every rank runs on its own rows: the dim whose size differs between the two tapes is sharded."""
    node = global_tape.nodes[index]

    def states(i: int) -> States:
        pairs = zip(rank_tape.values[i].shape, global_tape.values[i].shape)
        dim = next((d for d, (a, b) in enumerate(pairs) if a != b), None)
        return ("I" if dim is None else dim,) * axes

    return tuple(states(r.i) for r in node.ins), tuple(states(r.i) for r in node.outs)


def with_moves(rank_tape: Tape, global_tape: Tape, prediction: PredictedRun, grid: MeshShape) -> Tape:
    """The tape of one rank's rows, with the collectives for cross-row interactions."""
    notes = DataRankTape(global_tape, rank_tape, rank_tape.rows, {}, prediction, grid, {}).division()
    return replace(
        rank_tape, origin=rank_tape if rank_tape.origin is None else rank_tape.origin, division=notes
    )


@dataclass
class DataRankTape:
    """Derives the tape of one rank from a tape of all rows.

    Args:
        whole: the recorded run.
        own: the same recorded with the rows of one rank, where it does the same operations then; it says exactly what is kept
            inside of an operation.
        rows: those of one rank.
        start: value -> its states, of inputs and parameters.
        found: what the core does with `whole`.
        grid: the axes that divide rows.
        composites: by the names of their nodes.
    """

    global_tape: Tape
    rank_tape: Tape | None
    rows: int
    initial: Mapping[int, States]
    prediction: PredictedRun
    grid: MeshShape
    composites: Mapping[str, Composite]

    def tape(self) -> Tape:
        """The tape of one rank."""
        global_tape = self.global_tape
        states_of = dict(self.initial)
        for node, outs in zip(global_tape.nodes, self.prediction.outs, strict=True):
            states_of.update((ref.i, states) for ref, states in zip(node.outs, outs, strict=True))
        shapes = [
            self.grid.local(v.shape, states_of[i]) if i in states_of else v.shape
            for i, v in enumerate(global_tape.values)
        ]
        values = [self._value(i, shape) for i, shape in enumerate(shapes)]
        return replace(
            global_tape,
            values=values,
            nodes=[self._node(k, values) for k in range(len(global_tape.nodes))],
            saved=self._kept(
                global_tape.saved, None if self.rank_tape is None else self.rank_tape.saved, values
            ),
            dropped=self._kept(
                global_tape.dropped, None if self.rank_tape is None else self.rank_tape.dropped, values
            ),
            rows=self.rows,
            origin=None,
            division=self.division(),
        )

    def _value(self, index: int, shape: tuple[int, ...]) -> Value:
        global_tape = self.global_tape.values[index]
        for same in (global_tape,) if self.rank_tape is None else (self.rank_tape.values[index], global_tape):
            if shape == same.shape:
                return same
        dims = range(len(shape))
        order = sorted(dims, key=lambda d: -global_tape.stride[d]) if global_tape.stride else dims
        return replace(global_tape, shape=shape, stride=dense_strides(shape, list(order)))

    def _read(self, k: int) -> list[tuple[int, ...]]:
        """The shapes in which a node reads its inputs, after conversions."""
        values = self.global_tape.values
        pairs = zip(self.global_tape.nodes[k].ins, self.prediction.ins[k], strict=True)
        return [self.grid.local(values[r.i].shape, s) for r, s in pairs]

    def _part(self, k: int) -> float:
        """The fraction of the work of a node that one rank does."""
        states = (*self.prediction.ins[k], *self.prediction.outs[k])
        shared = (
            n for axis, n in enumerate(self.grid.sizes) if any(isinstance(s[axis], int) for s in states)
        )
        return 1 / math.prod(shared)

    def _node(self, k: int, values: list[Value]) -> Node:
        node, read = self.global_tape.nodes[k], self._read(k)
        if self.rank_tape is not None:
            rank_node = self.rank_tape.nodes[k]
            rank_shapes = (self.rank_tape.values[r.i].shape for r in (*rank_node.ins, *rank_node.outs))
            if (
                list(rank_shapes)
                == [*read, *(values[r.i].shape for r in rank_node.outs)]
                == [values[r.i].shape for r in (*rank_node.ins, *rank_node.outs)]
            ):
                return rank_node
        flops = node.flops
        if node.op is None:
            flops = float(self.composites[node.name].flops(NodeView.of(node, self.global_tape.values, 1)))
            return replace(node, flops=flops * self._part(k))
        view = NodeView.of(node, self.global_tape.values, 1)
        op, args, kwargs = localise(view, [values[r.i].shape for r in node.outs], read)
        if op is not node.op:  # an equivalent operation on the local part
            args, kwargs = node.args, node.kwargs
        return replace(node, args=args, kwargs=kwargs, flops=flops * self._part(k))

    def _kept(
        self, items: Sequence[Saved], rank_items: Sequence[Saved] | None, values: list[Value]
    ) -> list[Saved]:
        """Saved tensors with the sizes in which the nodes that save them read them."""
        rank_saved = itertools.repeat(None) if rank_items is None else rank_items
        return [self._saved(item, like, values) for item, like in zip(items, rank_saved)]

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
        if (
            rank_item is not None
            and self.rank_tape is not None
            and shape == self.rank_tape.values[item.value].shape
        ):
            return item._replace(nbytes=rank_item.nbytes)
        return item._replace(nbytes=math.prod(shape) * seen.dtype.itemsize)

    def division(self) -> Division:
        """The collectives for cross-row interactions, and notes."""
        moved = Counter(m for m in self.prediction.moved if m.nbytes)
        flows = self._from_rows() if self.rank_tape is None else set()
        replicated = [
            node
            for k, node in enumerate(self.global_tape.nodes)
            if node.call is not None
            and not any(
                isinstance(s, int) for s in itertools.chain(*self.prediction.ins[k], *self.prediction.outs[k])
            )
            and (
                any(r.i in flows for r in node.outs)
                if self.rank_tape is None
                else _computes_more(
                    node, self.prediction.outs[k], self.rank_tape, self.global_tape, self.grid
                )
            )
        ]
        return Division(
            tuple(moved.items()),
            _notes(replicated, self.prediction, self.global_tape, moved, "+".join(self.grid.axes)),
        )

    def _from_rows(self) -> set[int]:
        """The values of more than one element that depend on inputs whose rows are sharded."""
        flows = {i for i, states in self.initial.items() if any(isinstance(s, int) for s in states)}
        for node in self.global_tape.nodes:
            if any(r.i in flows for r in node.ins):
                flows.update(r.i for r in node.outs)
        return {i for i in flows if math.prod(self.global_tape.values[i].shape) > 1}


def _computes_more(
    node: Node, outs: tuple[States, ...], rank_tape: Tape, global_tape: Tape, grid: MeshShape
) -> bool:
    """Whether a rank computes more of a result of `node` than its own rows need."""
    return not is_view(node) and any(
        math.prod(grid.local(global_tape.values[r.i].shape, states)) > math.prod(rank_tape.values[r.i].shape)
        for r, states in zip(node.outs, outs, strict=True)
    )


def _notes(
    replicated: list[Node],
    prediction: PredictedRun,
    global_tape: Tape,
    moved: Counter[PredictedMove],
    axes: str,
) -> tuple[str, ...]:
    """Notes for users."""
    causes: dict[str, None] = {}
    for k in prediction.gathered:
        node = global_tape.nodes[k]
        assert node.call is not None
        causes[_called(node.call.function, node.module)] = None
    moves: dict[str, int] = {}
    for m, count in moved.items():
        name = _called(m.function, m.module)
        if m.phase == "forward" and m.why.endswith("->R"):
            causes[name] = None
        moves[name] = moves.get(name, 0) + m.nbytes * count
    notes = []
    if replicated:
        modules = list(dict.fromkeys(node.module or "the model itself" for node in replicated))
        because = f": {listing(list(causes), SHOWN)} needs rows of other ranks" if causes else ""
        notes.append(
            f"data parallelism does not help in {listing(modules, SHOWN)}, which every rank of {axes} computes for the whole "
            f"batch{because}"
        )
    if moves:
        notes.append(
            f"rows interact across {axes} in {listing(list(moves), SHOWN)}: {human_bytes(sum(moves.values()))} moved in a forward "
            "and backward pass"
        )
    return tuple(notes)


def _called(function: str, module: str) -> str:
    return f"{function} ({module})" if module else function
