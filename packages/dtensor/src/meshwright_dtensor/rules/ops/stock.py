"""Rows that stock DTensor lists for an op that has no rule here.  They are suggestions: each is checked before use."""

from __future__ import annotations

import itertools
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from meshwright_dtensor._torch.core import TensorSketch, offline_mesh, pytree, stock_probe, stock_rows
from meshwright_dtensor.rules.node import NodeView, Row
from meshwright_dtensor.sharding.states import P, R, State
from meshwright_dtensor.trace.graph import Ref, is_ref

_PROBES = 64
"""Combinations of input placements tried per op."""


def suggestions(view: NodeView) -> list[Row]:
    """Rows from DTensor's single-dim strategies, else from probing its strategy function."""
    op, count = view.node.op, len(view.node.ins) + len(view.node.outs)

    def sketch(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        shape = view.shape(x)
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return TensorSketch(shape, tuple(reversed(strides)), view.dtype(x))

    args, kwargs = pytree.tree_map(sketch, (view.node.args, view.node.kwargs), is_leaf=is_ref)
    try:
        found = stock_rows(op, args, kwargs, count)
        if found is None:
            found = _probe(view, args, kwargs)
    except Exception:  # a suggestion that DTensor cannot make is none: the op stays replicated
        return []
    rows = []
    for entries in found:
        states = [_state(x) for x in entries]
        if len(states) == count and None not in states:
            cut = len(view.node.outs)
            known: tuple[State, ...] = tuple(s for s in states if s is not None)
            rows.append((known[cut:], known[:cut]))
    return rows


def _probe(view: NodeView, args: Any, kwargs: Any) -> list[tuple[Any, ...]]:
    mesh = offline_mesh(view.n)
    options: list[list[Any]] = []
    for index, shape in enumerate(view.in_shapes):
        own: list[Any] = [Replicate(), *(Shard(d) for d, size in enumerate(shape) if size >= view.n)]
        options.append(own + [Partial()] if view.floating(index) else own)
    rows: dict[tuple[Any, ...], None] = {}
    for placements in itertools.islice(itertools.product(*options), _PROBES):
        try:
            found = stock_probe(view.node.op, args, kwargs, mesh, list(placements))
        except Exception:  # this combination is not supported
            continue
        if found is None:
            return []
        rows.update(dict.fromkeys(found))
    return list(rows)


def _state(placement: Any) -> State | None:
    if type(placement) is int:
        return placement
    if type(placement) is Shard:
        return placement.dim
    if isinstance(placement, Replicate):
        return R
    if type(placement) is Partial and placement.reduce_op == "sum":
        return P
    return None
