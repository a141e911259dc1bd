"""The tape of one data rank, where not all of the model goes row by row.

A rank that has a part of the rows computes what the whole batch would take, divided: so says a tape that was recorded with its
rows alone.  Where an operation needs rows of other ranks, the core moves them, or gathers them and computes all of them on every
rank (`meshwright_dtensor.following` says which).  Here the sizes that one rank has then are put together from two tapes, of all
rows and of a rank's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshwright_dtensor._names import listing
from meshwright_dtensor.boxes import dense_strides
from meshwright_dtensor.following import Followed, Grid, Moved
from meshwright_dtensor.rules.base import NodeView
from meshwright_dtensor.rules.composite import Composite
from meshwright_dtensor.sizes import human_bytes
from meshwright_dtensor.states import States
from meshwright_dtensor.trace import Node, Value
from meshwright_planner.profile.tape import Division, Saved, Tape

SHOWN = 4
"""Modules that a note names."""


def plain(found: Followed, own: Tape, whole: Tape, grid: Grid) -> bool:
    """Whether every operation goes row by row: nothing is moved, and every rank computes on its rows alone."""
    return not found.moved and not any(
        _more(node, found.outs[k], own, whole, grid) for k, node in enumerate(whole.nodes)
    )


def apart(own: Tape, whole: Tape, index: int, axes: int) -> tuple[tuple[States, ...], tuple[States, ...]]:
    """States of a node that every rank runs on its own rows, read off the sizes: the dim that is longer where there are more."""
    node = whole.nodes[index]

    def states(i: int) -> States:
        pairs = zip(own.values[i].shape, whole.values[i].shape)
        dim = next((d for d, (a, b) in enumerate(pairs) if a != b), None)
        return ("I" if dim is None else dim,) * axes

    return tuple(states(r.i) for r in node.ins), tuple(states(r.i) for r in node.outs)


def divided(own: Tape, whole: Tape, found: Followed, grid: Grid, composites: Mapping[str, Composite]) -> Tape:
    """The tape of one rank.

    Args:
        own: recorded with the rows of one rank; whole: with those of all.
        found: what the core does with `whole`.
        grid: the axes that divide rows.
        composites: by the names of their nodes.
    """
    made: dict[int, States] = {}
    for node, outs in zip(whole.nodes, found.outs, strict=True):
        made.update((ref.i, states) for ref, states in zip(node.outs, outs, strict=True))
    values = [
        _value(own.values[i], value, grid.local(value.shape, made[i])) if i in made else own.values[i]
        for i, value in enumerate(whole.values)
    ]
    nodes = [
        _node(k, own, whole, found, grid, values, composites)
        if _changed(k, own, found, grid, values, whole)
        else own.nodes[k]
        for k in range(len(whole.nodes))
    ]
    saved = [_saved(a, b, own, whole, values, found, grid) for a, b in zip(own.saved, whole.saved)]
    return replace(
        own, values=values, nodes=nodes, saved=saved, origin=None, division=_division(own, whole, found, grid)
    )


def _more(node: Node, outs: tuple[States, ...], own: Tape, whole: Tape, grid: Grid) -> bool:
    """Whether a rank makes more of a result of `node` than its own rows ask for."""
    return any(
        math.prod(grid.local(whole.values[r.i].shape, states)) > math.prod(own.values[r.i].shape)
        for r, states in zip(node.outs, outs, strict=True)
    )


def _value(own: Value, whole: Value, shape: tuple[int, ...]) -> Value:
    if shape == own.shape:
        return own
    if shape == whole.shape:
        return whole
    order = sorted(range(len(shape)), key=lambda d: -whole.stride[d]) if whole.stride else range(len(shape))
    return replace(whole, shape=shape, stride=dense_strides(shape, list(order)))


def _changed(k: int, own: Tape, found: Followed, grid: Grid, values: list[Value], whole: Tape) -> bool:
    """Whether a node is another than a rank's rows alone would make it."""
    node = own.nodes[k]
    if any(values[r.i].shape != own.values[r.i].shape for r in (*node.ins, *node.outs)):
        return True
    pairs = zip(node.ins, found.ins[k], strict=True)
    return any(grid.local(whole.values[r.i].shape, s) != own.values[r.i].shape for r, s in pairs)


def _node(
    k: int,
    own: Tape,
    whole: Tape,
    found: Followed,
    grid: Grid,
    values: list[Value],
    composites: Mapping[str, Composite],
) -> Node:
    node = whole.nodes[k]
    # arguments speak of sizes: those of the tape of which the results are as large
    like = own if all(values[r.i].shape == own.values[r.i].shape for r in node.outs) else whole
    flops = node.flops
    if node.op is None and node.name in composites:
        flops = float(composites[node.name].flops(NodeView.of(node, whole.values, 1)))
    part = 1.0
    for axis, size in enumerate(grid.sizes):
        if any(isinstance(s[axis], int) for s in (*found.ins[k], *found.outs[k])):
            part /= size
    chosen = like.nodes[k]
    return replace(chosen, flops=flops * part)


def _saved(
    own: Saved, whole: Saved, few: Tape, more: Tape, values: list[Value], found: Followed, grid: Grid
) -> Saved:
    """What is kept: of the size in which the node that keeps it reads it."""
    node = more.nodes[own.by]
    split = any(isinstance(s, int) for states in (*found.ins[own.by], *found.outs[own.by]) for s in states)
    if own.value is None or own.root is None:
        return own if split else own._replace(nbytes=whole.nbytes)
    states = next(
        (
            s
            for r, s in zip((*node.ins, *node.outs), (*found.ins[own.by], *found.outs[own.by]))
            if r.i == own.value
        ),
        None,
    )
    if states is None:
        shape = values[own.value].shape
    else:
        shape = grid.local(more.values[own.value].shape, states)
    for kept, tape in ((own, few), (whole, more)):
        if shape == tape.values[own.value].shape:
            return own._replace(nbytes=kept.nbytes)
    return own._replace(nbytes=math.prod(shape) * more.values[own.value].dtype.itemsize)


def _division(own: Tape, whole: Tape, found: Followed, grid: Grid) -> Division:
    moved = Counter(m for m in found.moved if m.nbytes)
    alone = [
        node
        for k, node in enumerate(whole.nodes)
        if node.call is not None
        and not any(isinstance(s, int) for states in (*found.ins[k], *found.outs[k]) for s in states)
        and _more(node, found.outs[k], own, whole, grid)
    ]
    return Division(tuple(moved.items()), _notes(alone, found, whole, moved, "+".join(grid.axes)))


def _notes(
    alone: list[Node], found: Followed, whole: Tape, moved: Counter[Moved], axes: str
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
        if m.phase == "forward" and m.kind == "all_gather":
            causes[name] = None
        moves[name] = moves.get(name, 0) + m.nbytes * count
    notes = []
    if alone:
        modules = list(dict.fromkeys(node.module or "the model itself" for node in alone))
        because = f": {listing(list(causes), SHOWN)} needs rows that other ranks have" if causes else ""
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
