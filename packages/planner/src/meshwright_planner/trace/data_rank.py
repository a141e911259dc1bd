"""The tape of one data rank, where not all of the model goes row by row.

A rank that has a part of the rows computes what the whole batch would take, divided: so says a tape that was recorded with its
rows alone.  Where an operation needs rows of other ranks, the core moves them, or gathers them and computes all of them on every
rank (`meshwright_dtensor.propagate.predict` says which).  A rank runs the program of the whole batch on its parts, so the sizes
that it has
follow from a tape of all rows.
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
"""Modules that a note names."""

LITTLE, FEW = 0.01, 4
"""The part of what a model makes, and the number of collectives, up to which rows that meet change no decision."""


def plain(found: PredictedRun, own: Tape, whole: Tape, grid: MeshShape) -> bool:
    """Whether every operation goes row by row: nothing is moved, and every rank computes on its rows alone."""
    return not found.moved and not any(
        _more(node, found.outs[k], own, whole, grid) for k, node in enumerate(whole.nodes)
    )


def little(found: PredictedRun, own: Tape, whole: Tape, grid: MeshShape) -> bool:
    """Whether what is moved and computed beside a rank's own rows makes no difference to what is costed."""
    made = more = 0
    for k, node in enumerate(whole.nodes):
        if node.call is not None and not is_view(node):
            made += sum(own.values[r.i].nbytes for r in node.outs)
            if _more(node, found.outs[k], own, whole, grid):
                more += sum(whole.values[r.i].nbytes for r in node.outs)
    moved = sum(m.nbytes for m in found.moved)
    return len(found.moved) <= FEW and more + moved <= LITTLE * made


def apart(own: Tape, whole: Tape, index: int, axes: int) -> tuple[tuple[States, ...], tuple[States, ...]]:
    """States of a node that every rank runs on its own rows, read off the sizes: the dim that is longer where there are more."""
    node = whole.nodes[index]

    def states(i: int) -> States:
        pairs = zip(own.values[i].shape, whole.values[i].shape)
        dim = next((d for d, (a, b) in enumerate(pairs) if a != b), None)
        return ("I" if dim is None else dim,) * axes

    return tuple(states(r.i) for r in node.ins), tuple(states(r.i) for r in node.outs)


def with_moves(own: Tape, whole: Tape, found: PredictedRun, grid: MeshShape) -> Tape:
    """The tape of one rank's rows, and what it moves beside."""
    notes = Dividing(whole, own, own.rows, {}, found, grid, {}).division()
    return replace(own, origin=own if own.origin is None else own.origin, division=notes)


@dataclass
class Dividing:
    """What one rank does of a run that was recorded with the rows of all.

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

    whole: Tape
    own: Tape | None
    rows: int
    start: Mapping[int, States]
    found: PredictedRun
    grid: MeshShape
    composites: Mapping[str, Composite]

    def tape(self) -> Tape:
        """The tape of one rank."""
        whole = self.whole
        lies = dict(self.start)
        for node, outs in zip(whole.nodes, self.found.outs, strict=True):
            lies.update((ref.i, states) for ref, states in zip(node.outs, outs, strict=True))
        shapes = [
            self.grid.local(v.shape, lies[i]) if i in lies else v.shape for i, v in enumerate(whole.values)
        ]
        values = [self._value(i, shape) for i, shape in enumerate(shapes)]
        return replace(
            whole,
            values=values,
            nodes=[self._node(k, values) for k in range(len(whole.nodes))],
            saved=self._kept(whole.saved, None if self.own is None else self.own.saved, values),
            dropped=self._kept(whole.dropped, None if self.own is None else self.own.dropped, values),
            rows=self.rows,
            origin=None,
            division=self.division(),
        )

    def _value(self, index: int, shape: tuple[int, ...]) -> Value:
        whole = self.whole.values[index]
        for known in (whole,) if self.own is None else (self.own.values[index], whole):
            if shape == known.shape:
                return known
        dims = range(len(shape))
        order = sorted(dims, key=lambda d: -whole.stride[d]) if whole.stride else dims
        return replace(whole, shape=shape, stride=dense_strides(shape, list(order)))

    def _read(self, k: int) -> list[tuple[int, ...]]:
        """The shapes in which a node reads its inputs: they may be brought there first."""
        values = self.whole.values
        pairs = zip(self.whole.nodes[k].ins, self.found.ins[k], strict=True)
        return [self.grid.local(values[r.i].shape, s) for r, s in pairs]

    def _part(self, k: int) -> float:
        """The part of the work of a node that one rank does."""
        states = (*self.found.ins[k], *self.found.outs[k])
        shared = (
            n for axis, n in enumerate(self.grid.sizes) if any(isinstance(s[axis], int) for s in states)
        )
        return 1 / math.prod(shared)

    def _node(self, k: int, values: list[Value]) -> Node:
        node, read = self.whole.nodes[k], self._read(k)
        if self.own is not None:
            like = self.own.nodes[k]
            alone = (self.own.values[r.i].shape for r in (*like.ins, *like.outs))
            if (
                list(alone)
                == [*read, *(values[r.i].shape for r in like.outs)]
                == [values[r.i].shape for r in (*like.ins, *like.outs)]
            ):
                return like
        flops = node.flops
        if node.op is None:
            flops = float(self.composites[node.name].flops(NodeView.of(node, self.whole.values, 1)))
            return replace(node, flops=flops * self._part(k))
        view = NodeView.of(node, self.whole.values, 1)
        op, args, kwargs = localise(view, [values[r.i].shape for r in node.outs], read)
        if op is not node.op:  # another operation that does the same with a part
            args, kwargs = node.args, node.kwargs
        return replace(node, args=args, kwargs=kwargs, flops=flops * self._part(k))

    def _kept(self, items: Sequence[Saved], own: Sequence[Saved] | None, values: list[Value]) -> list[Saved]:
        """What is kept: each of the size in which the node that keeps it reads it."""
        alone = itertools.repeat(None) if own is None else own
        return [self._saved(item, like, values) for item, like in zip(items, alone)]

    def _saved(self, item: Saved, own: Saved | None, values: list[Value]) -> Saved:
        part = self._part(item.by)
        if item.value is None or item.root is None:
            if part < 1 and own is not None:
                return item._replace(nbytes=own.nbytes)
            return item._replace(nbytes=round(item.nbytes * part))
        node, found = self.whole.nodes[item.by], self.found
        pairs = zip((*node.ins, *node.outs), (*found.ins[item.by], *found.outs[item.by]))
        states = next((s for r, s in pairs if r.i == item.value), None)
        seen = self.whole.values[item.value]
        shape = values[item.value].shape if states is None else self.grid.local(seen.shape, states)
        if shape == seen.shape:
            return item
        if own is not None and self.own is not None and shape == self.own.values[item.value].shape:
            return item._replace(nbytes=own.nbytes)
        return item._replace(nbytes=math.prod(shape) * seen.dtype.itemsize)

    def division(self) -> Division:
        """What it does beside computing on its own rows."""
        moved = Counter(m for m in self.found.moved if m.nbytes)
        flows = self._from_rows() if self.own is None else set()
        alone = [
            node
            for k, node in enumerate(self.whole.nodes)
            if node.call is not None
            and not any(isinstance(s, int) for s in itertools.chain(*self.found.ins[k], *self.found.outs[k]))
            and (
                any(r.i in flows for r in node.outs)
                if self.own is None
                else _more(node, self.found.outs[k], self.own, self.whole, self.grid)
            )
        ]
        return Division(
            tuple(moved.items()), _notes(alone, self.found, self.whole, moved, "+".join(self.grid.axes))
        )

    def _from_rows(self) -> set[int]:
        """The values, numbers aside, that are made of inputs whose rows are divided."""
        flows = {i for i, states in self.start.items() if any(isinstance(s, int) for s in states)}
        for node in self.whole.nodes:
            if any(r.i in flows for r in node.ins):
                flows.update(r.i for r in node.outs)
        return {i for i in flows if math.prod(self.whole.values[i].shape) > 1}


def _more(node: Node, outs: tuple[States, ...], own: Tape, whole: Tape, grid: MeshShape) -> bool:
    """Whether a rank computes more of a result of `node` than its own rows ask for."""
    return not is_view(node) and any(
        math.prod(grid.local(whole.values[r.i].shape, states)) > math.prod(own.values[r.i].shape)
        for r, states in zip(node.outs, outs, strict=True)
    )


def _notes(
    alone: list[Node], found: PredictedRun, whole: Tape, moved: Counter[PredictedMove], axes: str
) -> tuple[str, ...]:
    """What users should know of it."""
    causes: dict[str, None] = {}
    for k in found.gathered:
        node = whole.nodes[k]
        assert node.call is not None
        causes[_called(node.call.function, node.module)] = None
    moves: dict[str, int] = {}
    for m, count in moved.items():
        name = _called(m.function, m.module)
        if m.phase == "forward" and m.why.endswith("->R"):
            causes[name] = None
        moves[name] = moves.get(name, 0) + m.nbytes * count
    notes = []
    if alone:
        modules = list(dict.fromkeys(node.module or "the model itself" for node in alone))
        because = f": {listing(list(causes), SHOWN)} needs what other ranks have" if causes else ""
        notes.append(
            f"data parallelism does not help in {listing(modules, SHOWN)}, which every rank of {axes} computes for all of the "
            f"batch{because}"
        )
    if moves:
        notes.append(
            f"rows meet across {axes} in {listing(list(moves), SHOWN)}: {human_bytes(sum(moves.values()))} moved in a forward "
            "and backward pass"
        )
    return tuple(notes)


def _called(function: str, module: str) -> str:
    return f"{function} ({module})" if module else function
