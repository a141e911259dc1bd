"""Rows of factory ops (zeros, full_like, new_ones ...): any dim of the output may be sharded."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.rules.node import NodeView, Row, kept_rows, rules
from meshwright_dtensor.sharding.states import P, R


def constant(view: NodeView) -> Iterator[Row]:
    """zeros, full, ...: all elements are equal."""
    for dim in range(len(view.out_shapes[0])):
        yield (R,) * len(view.node.ins), (dim,)


def like(view: NodeView) -> Iterator[Row]:
    """zeros_like, full_like, ...: sharded like the template, or on any dim of a replicated one; a partial template gives R."""
    yield from kept_rows(view, range(len(view.out_shapes[0])))
    yield (P, *(R,) * (len(view.node.ins) - 1)), (R,)


def new(view: NodeView) -> Iterator[Row]:
    """new_zeros, new_full, ...: only dtype and device of the template matter, so it may have any state."""
    rest = (R,) * (len(view.node.ins) - 1)
    template = view.in_shapes[0]
    for state in (P, *range(len(template))):
        yield (state, *rest), (R,)
    for dim in range(len(view.out_shapes[0])):
        yield (R, *rest), (dim,)
        if dim < len(template) and template[dim] == view.out_shapes[0][dim]:
            yield (dim, *rest), (dim,)


RULES = rules(
    "factory",
    ("zeros ones full empty", constant),
    ("zeros_like ones_like full_like empty_like", like),
    ("new_zeros new_ones new_full new_empty", new),
)
"""op name -> rule; arange, scalar_tensor, eye and linspace are not here: their elements differ, so they stay replicated."""
