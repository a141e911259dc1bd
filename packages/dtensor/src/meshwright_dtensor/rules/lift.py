"""Rows for interval shards, derived from the rows for plain dims.

A row whose sharded dims all have the same elements (one size) holds for any division of them over ranks: it is *lifted* to
the interval shards of the inputs. Ops that move elements of a sharded dim (views, split, slice, cat) have a function each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from meshwright_dtensor.rules import node
from meshwright_dtensor.rules.node import NodeView, Row, Strategy
from meshwright_dtensor.sharding.intervals import IntervalShard, interval_shard, intervals_of
from meshwright_dtensor.sharding.reshape import concatenated_state, local_slice, through_view
from meshwright_dtensor.sharding.states import R, State, States

Known: TypeAlias = Sequence[Iterable[State]]
"""The possible states of each tensor."""

_PROVEN = frozenset({"hand", "einsum", "view", "pointwise", "factory", "random"})
"""Sources whose rows hold for any division of elements; rows of other sources were only checked on chunks."""

_UNBALANCED = 8
"""A slice may leave local sizes that differ by 1 / _UNBALANCED."""


def extended(
    view: NodeView,
    rows: Sequence[Strategy],
    ins: Known,
    outs: Known = (),
    permutes: Callable[[Strategy], bool] = lambda row: True,
) -> list[Strategy]:
    """The rows for inputs and outputs in these states that are not in ``rows`` (over R, P and plain dims).

    Args:
        ins: the possible states of each input.
        outs: the wanted states of each output.
        permutes: whether a row holds for elements in any order.
    """
    present = {(row.ins, row.outs) for row in rows}
    added: dict[tuple[States, States], Strategy] = {}
    shards = [s for states in (*ins, *outs) for s in states if isinstance(s, IntervalShard)]
    for row in rows if shards else ():
        if row.source in _PROVEN and permutes(row):
            for shard in dict.fromkeys(shards):
                lifted = _lifted(view, row, shard)
                if lifted is not None:
                    added.setdefault(lifted, Strategy(*lifted, row.source, row.complete))
    special = SPECIAL.get(node.base_name(view.node.name)) if view.node.op is not None else None
    if special is not None and not node.mutation_ties(view):
        sources, targets = (
            [[s for s in states if isinstance(s, int)] for states in tensors] for tensors in (ins, outs)
        )
        for moved in special(view, sources, targets or [[] for _ in view.node.outs]):
            added.setdefault(moved, Strategy(*moved, "view"))
    return [strategy for row, strategy in added.items() if row not in present]


def _lifted(view: NodeView, row: Strategy, shard: IntervalShard) -> Row | None:
    """``row`` with each shard replaced by the same intervals, if all of them are dims of that size."""
    shapes = (*view.in_shapes, *view.out_shapes)
    states = (*row.ins, *row.outs)
    sharded = [(s, shape) for s, shape in zip(states, shapes, strict=True) if isinstance(s, int)]
    if not sharded or len(shard.intervals) != view.n or any(shape[s] != shard.total for s, shape in sharded):
        return None
    if not any(int(s) == int(shard) for s, _ in sharded):
        return None
    changed = tuple(shard.on(s) if isinstance(s, int) else s for s in states)
    return changed[: len(row.ins)], changed[len(row.ins) :]


def _reshape(view: NodeView, ins: list[list[int]], outs: list[list[int]]) -> Iterator[Row]:
    before, after = view.in_shapes[0], view.out_shapes[0]
    for state in ins[0]:
        there = through_view(before, after, state, view.n)
        if there is not None:
            yield (state,), (there,)
    for state in outs[0]:
        here = through_view(after, before, state, view.n)
        if here is not None:
            yield (here,), (state,)


def _cut(view: NodeView, state: int, dim: int, bounds: Sequence[tuple[int, int]]) -> list[int] | None:
    """States of the parts ``bounds`` of a dim in ``state``; None if a rank's part is empty or not contiguous."""
    ranks = intervals_of(state, view.in_shapes[0][dim], view.n)
    results = []
    for start, stop in bounds:
        parts = [local_slice(intervals, start, stop) for intervals in ranks]
        if any(p is None for p in parts):
            return None
        lengths = [p[2] for p in parts if p is not None]
        if min(lengths) == 0 or max(lengths) - min(lengths) > max(1, max(lengths) // _UNBALANCED):
            return None
        results.append(interval_shard(dim, [p[0] for p in parts if p is not None]))
    return results


def _slice(view: NodeView, ins: list[list[int]], outs: list[list[int]]) -> Iterator[Row]:
    bounds = slice_bounds(view)
    if bounds is None:
        return
    dim, start, stop = bounds
    for state in ins[0]:
        cut = _cut(view, state, dim, [(start, stop)]) if int(state) == dim else None
        if cut is not None:
            yield (state,), (cut[0],)


def slice_bounds(view: NodeView) -> tuple[int, int, int] | None:
    """(dim, start, stop) of a slice with step 1 that is not the whole dim, else None."""
    bound, shape = view.bound(), view.in_shapes[0]
    if not shape or bound.get("step", 1) != 1:
        return None
    dim = bound["dim"] % len(shape)
    start, stop, _ = slice(bound["start"], bound["end"]).indices(shape[dim])
    return None if (start, stop) == (0, shape[dim]) or stop <= start else (dim, start, stop)


def _split(view: NodeView, ins: list[list[int]], outs: list[list[int]]) -> Iterator[Row]:
    shape, n = view.in_shapes[0], view.n
    dim = view.bound()["dim"] % len(shape)
    sizes = [out[dim] for out in view.out_shapes]
    ends = [0, *itertools.accumulate(sizes)]
    for state in ins[0]:
        if int(state) != dim:
            continue
        cut = _cut(view, state, dim, list(itertools.pairwise(ends)))
        if cut is not None and concatenated_state(cut, sizes, dim, n) == state:
            yield (state,), tuple(cut)
    along = [[s for s in states if int(s) == dim] for states in outs]
    if any(along) and all(size % n == 0 for size in sizes):
        # of the key and value of cross-attention, each part is known in intervals and the query in chunks
        shards = [[dim, *(s for s in states if isinstance(s, IntervalShard))] for states in along]
        for place in range(max(map(len, shards))):
            parts = tuple(states[min(place, len(states) - 1)] for states in shards)
            yield (concatenated_state(parts, sizes, dim, n),), parts


def _cat(view: NodeView, ins: list[list[int]], outs: list[list[int]]) -> Iterator[Row]:
    ndim, n = len(view.out_shapes[0]), view.n
    dim = view.bound()["dim"] % max(ndim, 1)
    real = [i for i, shape in enumerate(view.in_shapes) if not (shape == (0,) and ndim != 1)]
    sizes = [view.in_shapes[i][dim] for i in real]
    if any(size % n or not size for size in sizes):
        return

    def row(states: Sequence[int]) -> Row:
        given: dict[int, State] = dict(zip(real, states, strict=True))
        joined = concatenated_state(states, sizes, dim, n)
        return tuple(given.get(i, R) for i in range(len(view.in_shapes))), (joined,)

    along = [[s for s in ins[i] if int(s) == dim] for i in real]
    if all(along):
        yield row([states[0] for states in along])
    if any(along) or any(int(s) == dim for s in outs[0]):
        yield row([dim] * len(real))


SPECIAL: Mapping[str, Callable[[NodeView, list[list[int]], list[list[int]]], Iterator[Row]]] = {
    **dict.fromkeys(node.RESHAPES, _reshape),
    **dict.fromkeys(node.SLICES, _slice),
    **dict.fromkeys(node.SPLITS, _split),
    **dict.fromkeys(("aten.cat", "aten.concatenate"), _cat),
}
"""op name -> (view, shards of the inputs, wanted shards of the outputs) -> rows."""
