"""Rows of elementwise ops: every dim of the output, with broadcast inputs replicated; partial sums where the op is linear."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright_dtensor.rules import node
from meshwright_dtensor.rules.node import NodeView, Row, Slot
from meshwright_dtensor.sharding.states import P

_BOTH = node.aten_ops("add sub add_ sub_")
_EITHER = node.aten_ops("mul mul_")
_FIRST = node.aten_ops("div div_ true_divide")
_ALONE = node.aten_ops("neg neg_ clone positive _conj conj_physical real")


def elementwise(view: NodeView) -> Iterator[Row]:
    """Elementwise and not linear: a broadcast input is sharded where its dim is that of the output."""
    out = view.out_shapes[0]
    for dim in range(len(out)):
        states = tuple(node.broadcast_state(dim, out, shape) for shape in view.in_shapes)
        yield states, (dim,) * len(view.node.outs)


def pointwise(view: NodeView) -> Iterator[Row]:
    """Any op that computes an output element from the input elements at the same index."""
    if all(shape == view.out_shapes[0] for shape in view.out_shapes):
        yield from elementwise(view)
        yield from _partial(view)


def _partial(view: NodeView) -> Iterator[Row]:
    name, count = node.base_name(view.node.name), len(view.node.ins)
    if len(view.node.outs) != 1 or not all(view.floating(i) for i in range(min(count, 1))):
        return
    bound = view.bound()
    if name in _ALONE and count == 1:
        yield node.linear_row(view, 0)
    elif name in _BOTH and count == 2 and isinstance(bound["other"], Slot) and not _narrows(view, 0, 1):
        yield node.linear_row(view, 0, 1)
    elif name in _EITHER:
        yield from (node.linear_row(view, i) for i in range(count) if not _narrows(view, i))
    elif name in _FIRST and bound.get("rounding_mode") is None and isinstance(bound["self"], Slot):
        if not _narrows(view, 0):
            yield node.linear_row(view, 0)


def _narrows(view: NodeView, *partial: int) -> bool:
    """Whether a partial operand is rounded on its way to the output, or is no floating-point number."""
    out = view.dtype(view.node.outs[0])
    return any(not view.floating(i) or view.dtype(view.node.ins[i]).itemsize > out.itemsize for i in partial)


def to_copy(view: NodeView) -> Iterator[Row]:
    """_to_copy: every dim; partial sums pass unless they would be rounded before they are summed."""
    yield from elementwise(view)
    source, target = view.dtype(view.node.ins[0]), view.dtype(view.node.outs[0])
    if source.is_floating_point and target.is_floating_point and _holds(target, source):
        yield node.linear_row(view, 0)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether ``wide`` represents every value of ``narrow`` exactly."""
    # torch promotes no float8
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return wide is narrow or (a.max >= b.max and a.eps <= b.eps and a.tiny * a.eps <= b.tiny * b.eps)


def where(view: NodeView) -> Iterator[Row]:
    """where(condition, a, b): elementwise, and jointly linear in a and b; where(condition) alone is nonzero, no rows."""
    if view.node.name == "aten.where.default":
        return
    yield from elementwise(view)
    if len(view.node.ins) == 3 and view.floating(1) and view.floating(2) and not _narrows(view, 1, 2):
        yield node.linear_row(view, 1, 2)


def masked_fill(view: NodeView) -> Iterator[Row]:
    """masked_fill: elementwise, and linear when it fills with 0."""
    yield from elementwise(view)
    value = view.bound()["value"]
    if not isinstance(value, Slot) and value == 0 and view.floating(0):
        yield node.linear_row(view, 0)


def reinterpret(view: NodeView) -> Iterator[Row]:
    """view(dtype): bits of another type; the last dim may change its size and is then not sharded."""
    before, after = view.in_shapes[0], view.out_shapes[0]
    return node.kept_rows(view, (dim for dim in range(len(before)) if before[dim] == after[dim]))


def zero(view: NodeView) -> Iterator[Row]:
    """zero_: any state, since the partial sum of zeros is zero."""
    yield from elementwise(view)
    if view.floating(0):
        yield (P,), (P,)


def copy(view: NodeView) -> Iterator[Row]:
    """copy_(self, src): src broadcasts to self."""
    yield from elementwise(view)
    target, source = (view.dtype(ref) for ref in view.node.ins)
    if view.floating(0) and view.floating(1) and _holds(target, source):
        yield node.linear_row(view, 0, 1)


RULES = node.rules(
    "pointwise",
    ("_to_copy", to_copy),
    ("where", where),
    ("masked_fill masked_fill_", masked_fill),
    ("fill fill_ max.other min.other complex polar rsub floor_divide floor_divide_", elementwise),
    ("hardswish hardswish_ log_sigmoid_forward _prelu_kernel", elementwise),
    ("_conj", pointwise),
    ("zero zero_", zero),
    ("view.dtype", reinterpret),
    ("copy copy_", copy),
)
"""op name -> rule."""
