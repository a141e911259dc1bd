"""Rows of lookups and scattered writes: dims that no index touches can be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from meshwright_dtensor.rules import node
from meshwright_dtensor.rules.node import NodeView, Row, Slot
from meshwright_dtensor.sharding.states import P, R, State


def embedding(view: NodeView) -> Iterator[Row]:
    """embedding(weight [v, h], ids): every dim of ids; the feature dim.  A sharded vocabulary needs a mask: see the composite."""
    bound = view.bound()
    if bound["scale_grad_by_freq"] or bound["sparse"]:
        return
    ndim = len(view.in_shapes[1])
    for dim in range(ndim):
        yield (R, dim), (dim,)
    yield (1, R), (ndim,)
    yield (P, R), (P,)


def _index_plan(view: NodeView, indices: list[Any]) -> tuple[dict[int, int], list[int], int, int] | None:
    """(kept dim of self -> dim of the result, tensor slots, first dim and rank of the broadcast index), or None."""
    places = [d for d, index in enumerate(indices) if isinstance(index, Slot)]
    slots = [index.index for index in indices if isinstance(index, Slot)]
    dtypes = [view.dtype(view.node.ins[slot]) for slot in slots]
    # bool and uint8 are masks
    masks = (torch.bool, torch.uint8)
    if not places or any(dtype.is_floating_point or dtype in masks for dtype in dtypes):
        return None
    rank = max(len(view.in_shapes[s]) for s in slots)
    adjacent = places[-1] - places[0] + 1 == len(places)
    start = places[0] if adjacent else 0
    kept = [d for d in range(len(view.in_shapes[0])) if d not in places]
    landing = {d: (i if i < start else i + rank) for i, d in enumerate(kept)}
    return landing, slots, start, rank


def index(view: NodeView) -> Iterator[Row]:
    """index(self, [i, None, j]): kept dims of self; dims of the broadcast indices; linear in self."""
    plan = _index_plan(view, view.bound()["indices"])
    if plan is None:
        return
    landing, slots, start, rank = plan
    count, out = len(view.node.ins), view.out_shapes[0]
    for dim, target in landing.items():
        yield (dim, *(R,) * (count - 1)), (target,)
    for offset in range(rank):
        states: list[State] = [R] * count
        for slot in slots:
            states[slot] = node.broadcast_state(offset, out[start : start + rank], view.in_shapes[slot])
        yield tuple(states), (start + offset,)
    if view.floating(0):
        yield node.linear_row(view, 0)


def index_put(view: NodeView) -> Iterator[Row]:
    """index_put(self, indices, values): dims of self that no index touches; all dims for a mask with one value."""
    bound = view.bound()
    plan = _index_plan(view, bound["indices"])
    values = bound["values"]
    if isinstance(values, Slot):
        yield from _masked_put(view, bound["indices"], values)
    if plan is None or not isinstance(values, Slot):
        return
    landing, _, _, rank = plan
    whole = len(landing) + rank
    shapes, count = view.in_shapes, len(view.node.ins)
    for dim, target in landing.items():
        states: list[State] = [R] * count
        states[0] = dim
        index = target - whole + len(shapes[values.index])
        if index >= 0 and shapes[values.index][index] == shapes[0][dim] and shapes[0][dim] > 1:
            states[values.index] = index
        yield tuple(states), (dim,)


def _masked_put(view: NodeView, indices: list[Any], values: Slot) -> Iterator[Row]:
    """x[mask] = values, for a boolean mask over the first dims of x and one value for all its places: every dim of x."""
    given = [index for index in indices if index is not None]
    if len(given) != 1 or indices[0] is not given[0] or not isinstance(given[0], Slot):
        return
    slot, shapes = given[0].index, view.in_shapes
    if view.dtype(view.node.ins[slot]) is not torch.bool:
        return
    masked, whole = len(shapes[slot]), shapes[0]
    put = shapes[values.index]
    if len(put) > len(whole) - masked + 1 or (len(put) == len(whole) - masked + 1 and put[0] != 1):
        # another value for each place
        return
    for dim in range(len(whole)):
        states: list[State] = [R] * len(shapes)
        states[0] = dim
        if dim < masked:
            states[slot] = dim
        else:
            states[values.index] = node.broadcast_state(dim, whole, put)
        yield tuple(states), (dim,)


def index_select(view: NodeView) -> Iterator[Row]:
    """index_select(self, dim, index [m]): other dims of self; the index; linear in self."""
    if not all(view.in_shapes):
        return
    used, others = node.other_dims(view)
    yield from node.kept_rows(view, others)
    yield (R, 0), (used,)
    if view.floating(0):
        yield node.linear_row(view, 0)


def gather(view: NodeView) -> Iterator[Row]:
    """gather(self, dim, index): other dims, where index is as long as self, in both; the index along dim; linear in self."""
    data, positions = view.in_shapes
    if not data or not positions or view.bound()["sparse_grad"]:
        return
    used, _ = node.other_dims(view)
    for dim in range(len(data)):
        if dim == used:
            yield (R, dim), (dim,)
        elif data[dim] == positions[dim]:
            yield (dim, dim), (dim,)
    if view.floating(0):
        yield node.linear_row(view, 0)


def scatter(view: NodeView) -> Iterator[Row]:
    """scatter, scatter_add (self, dim, index, src): dims other than dim in which all agree."""
    shapes = view.in_shapes
    for dim in node.other_dims(view)[1] if all(shapes) else ():
        if len({shape[dim] for shape in shapes}) == 1:
            yield (dim,) * len(shapes), (dim,)


def scatter_add(view: NodeView) -> Iterator[Row]:
    """scatter_add: as scatter; jointly linear in self and src; a sharded index and src give a partial sum to a partial self."""
    yield from scatter(view)
    shapes = view.in_shapes
    if view.floating(0) and view.floating(2) and all(shapes):
        yield node.linear_row(view, 0, 2)
        used, _ = node.other_dims(view)
        if shapes[1] == shapes[2]:
            yield (P, used, used), (P,)


def index_add(view: NodeView) -> Iterator[Row]:
    """index_add(self, dim, index, source): other dims; jointly linear; a sharded index and source give a partial sum."""
    shapes = view.in_shapes
    if not shapes[0] or len(shapes[0]) != len(shapes[2]) or not shapes[1]:
        return
    used, others = node.other_dims(view)
    for dim in others:
        yield (dim, R, dim), (dim,)
    if view.floating(0) and view.floating(2):
        yield node.linear_row(view, 0, 2)
        yield (P, 0, used), (P,)


def index_fill(view: NodeView) -> Iterator[Row]:
    """index_fill, index_copy, index_reduce: dims other than the one indexed."""
    shapes, source = view.in_shapes, view.bound().get("source")
    of_source = source.index if isinstance(source, Slot) else None
    if of_source is not None and len(shapes[of_source]) != len(shapes[0]):
        return
    for dim in node.other_dims(view)[1]:
        yield tuple(dim if i in (0, of_source) else R for i in range(len(shapes))), (dim,)


def one_hot(view: NodeView) -> Iterator[Row]:
    """one_hot(ids, classes): every dim, if the number of classes is given."""
    if view.bound()["num_classes"] > 0:
        yield from node.kept_rows(view, range(len(view.in_shapes[0])))


def positions(view: NodeView) -> Iterator[Row]:
    """take(self, index), searchsorted(sorted, values) of one sorted row: every dim of what is looked up."""
    is_take = node.base_name(view.node.name) == "aten.take"
    if len(view.node.ins) == 2 and (is_take or len(view.in_shapes[0]) == 1):
        for dim in range(len(view.in_shapes[1])):
            yield (R, dim), (dim,)


def first_only(view: NodeView) -> Iterator[Row]:
    """bucketize, isin: elementwise in the first input, with a table that is whole on every rank."""
    bound = view.bound()
    first = bound.get("elements", bound.get("self"))
    if isinstance(first, Slot) and first.index == 0:
        yield from node.kept_rows(view, range(len(view.in_shapes[0])))


RULES = node.rules(
    "hand",
    ("embedding", embedding),
    ("index _unsafe_index", index),
    ("index_put index_put_ _unsafe_index_put", index_put),
    ("index_select", index_select),
    ("gather", gather),
    ("scatter scatter_ scatter_reduce scatter_reduce_", scatter),
    ("scatter_add scatter_add_", scatter_add),
    ("index_add index_add_", index_add),
    ("index_fill index_fill_ index_copy index_copy_ index_reduce index_reduce_", index_fill),
    ("one_hot", one_hot),
    ("bucketize isin", first_only),
    ("take searchsorted", positions),
)
"""op name -> rule."""
