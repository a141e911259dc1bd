"""Rows of ops that make values from sizes: any dim may come out sharded, whatever the tensor they are modelled on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright_dtensor.rules.node import NodeView, Row, RuleEntry
from meshwright_dtensor.sharding.states import R


def constant(view: NodeView) -> Iterator[Row]:
    """zeros, full, ...: every element alike, so every shard is known."""
    for dim in range(len(view.out_shapes[0])):
        yield (R,) * len(view.node.ins), (dim,)


def like(view: NodeView) -> Iterator[Row]:
    """zeros_like, full_like, ...: the shard of the model, or a shard of a replicated one; a partial model gives a whole value."""
    rest = (R,) * (len(view.node.ins) - 1)
    for dim in range(len(view.out_shapes[0])):
        yield (dim, *rest), (dim,)
    yield ("P", *rest), (R,)


def new(view: NodeView) -> Iterator[Row]:
    """new_zeros, new_full, ...: only dtype and device of the model matter, so it may lie in any state."""
    rest = (R,) * (len(view.node.ins) - 1)
    model = view.in_shapes[0]
    for state in ("P", *range(len(model))):
        yield (state, *rest), (R,)
    for dim in range(len(view.out_shapes[0])):
        yield (R, *rest), (dim,)
        if dim < len(model) and model[dim] == view.out_shapes[0][dim]:
            yield (dim, *rest), (dim,)


RULES: Mapping[str, RuleEntry] = {
    "aten." + name: RuleEntry(rule, "factory")
    for names, rule in (
        ("zeros ones full empty", constant),
        ("zeros_like ones_like full_like empty_like", like),
        ("new_zeros new_ones new_full new_empty", new),
    )
    for name in names.split()
}
"""op name -> rule; arange, scalar_tensor, eye and linspace are not here: their elements differ, so they stay whole."""
