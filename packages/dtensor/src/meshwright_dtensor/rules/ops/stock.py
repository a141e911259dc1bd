"""Rows of stock DTensor for ops without a rule here. They are suggestions: each row is checked before use."""

from __future__ import annotations

import itertools
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from meshwright_dtensor._torch.core import TensorSketch, offline_mesh, pytree, stock_probe, stock_rows
from meshwright_dtensor.rules.node import NodeView, Row
from meshwright_dtensor.sharding.boxes import dense_strides
from meshwright_dtensor.sharding.states import P, R, State
from meshwright_dtensor.trace.graph import Ref, is_ref

_PROBES = 64
"""Combinations of input placements tried per op."""


def suggested_rows(view: NodeView) -> list[Row]:
    """Rows from DTensor's single-dim strategies, else from probing its strategy function."""
    op, count = view.node.op, len(view.node.ins) + len(view.node.outs)

    def sketch(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        shape = view.shape(x)
        return TensorSketch(shape, dense_strides(shape, tuple(range(len(shape)))), view.dtype(x))

    args, kwargs = pytree.tree_map(sketch, (view.node.args, view.node.kwargs), is_leaf=is_ref)
    try:
        listed = stock_rows(op, args, kwargs, count)
        if listed is None:
            listed = _probe(view, args, kwargs)
    except Exception:
        # DTensor has no suggestion: the op stays replicated
        return []
    rows = []
    for entries in listed:
        states = tuple(state for state in map(_state, entries) if state is not None)
        if len(states) == len(entries) == count:
            cut = len(view.node.outs)
            rows.append((states[cut:], states[:cut]))
    return rows


def _probe(view: NodeView, args: Any, kwargs: Any) -> list[tuple[Any, ...]]:
    mesh = offline_mesh(view.n)
    options: list[list[Any]] = []
    for index, shape in enumerate(view.in_shapes):
        placements: list[Any] = [Replicate(), *(Shard(d) for d, size in enumerate(shape) if size >= view.n)]
        options.append([*placements, Partial()] if view.floating(index) else placements)
    rows: dict[tuple[Any, ...], None] = {}
    for combination in itertools.islice(itertools.product(*options), _PROBES):
        try:
            probed = stock_probe(view.node.op, args, kwargs, mesh, list(combination))
        except Exception:
            # this combination is not supported
            continue
        if probed is None:
            return []
        rows.update(dict.fromkeys(probed))
    return list(rows)


def _state(placement: Any) -> State | None:
    if type(placement) is int:
        return placement
    if type(placement) is Shard:
        return placement.dim
    if isinstance(placement, Replicate):
        return R
    return P if type(placement) is Partial and placement.reduce_op == "sum" else None
