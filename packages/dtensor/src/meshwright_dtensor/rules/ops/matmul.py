"""Rows of matrix products, from their einsum equation: a shared label is sharded in both, a contracted one gives a partial sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from meshwright_dtensor.rules.node import NodeView, Row, RuleEntry, Slot
from meshwright_dtensor.sharding.states import P, R, State


def einsum_rows(
    equation: str, bias: tuple[int, ...] | None = None
) -> Iterator[tuple[State, State, State | None, State]]:
    """(left, right, bias, out) per label of ``"ab,bc->ac"``, and for a partial left or right operand.

    ``bias`` is the shape of a summand that broadcasts to the output; it is partial wherever the output is.
    """
    inputs, output = equation.split("->")
    left, right = inputs.split(",")

    def place(labels: str, label: str) -> State:
        return labels.index(label) if label in labels else R

    for label in dict.fromkeys(left + right):
        out: State = output.index(label) if label in output else P
        yield place(left, label), place(right, label), _summand(out, len(output), bias), out
    yield P, R, P if bias is not None else None, P
    yield R, P, P if bias is not None else None, P


def _summand(out: State, ndim: int, bias: tuple[int, ...] | None) -> State | None:
    if bias is None:
        return None
    if not isinstance(out, int):
        return P
    dim = out - ndim + len(bias)
    return R if dim < 0 or bias[dim] == 1 else dim


def product(equation: str) -> Callable[[NodeView], Iterator[Row]]:
    """Rule of an op with exactly two operands."""

    def rule(view: NodeView) -> Iterator[Row]:
        for left, right, _, out in einsum_rows(equation):
            yield (left, right), (out,)

    return rule


def product_with_bias(equation: str) -> Callable[[NodeView], Iterator[Row]]:
    """Rule of addmm and baddbmm: (summand, left, right)."""

    def rule(view: NodeView) -> Iterator[Row]:
        for left, right, summand, out in einsum_rows(equation, view.in_shapes[0]):
            assert summand is not None
            yield (summand, left, right), (out,)

    return rule


def grouped(view: NodeView) -> Iterator[Row]:
    """_grouped_mm of rows [t, k] with weights [e, k, n]: columns, contracted dim; rows belong to groups by position."""
    shapes, bound = view.in_shapes, view.bound()
    bias = bound.get("bias")
    if len(shapes[0]) != 2 or len(shapes[1]) != 3 or isinstance(bias, Slot):
        return
    rest = (R,) * (len(shapes) - 2)
    # the kernels want rows of a multiple of 16 bytes
    wanted = view.n * 16 // min(16, view.dtype(view.node.ins[0]).itemsize)
    if shapes[1][2] % wanted == 0:
        yield (R, 2, *rest), (1,)
    if shapes[1][1] % wanted == 0:
        yield (1, 1, *rest), (P,)
    yield (P, R, *rest), (P,)
    yield (R, P, *rest), (P,)


RULES: Mapping[str, RuleEntry] = {
    "aten.mm": RuleEntry(product("mk,kn->mn"), "einsum"),
    "aten.bmm": RuleEntry(product("bmk,bkn->bmn"), "einsum"),
    "aten.mv": RuleEntry(product("mk,k->m"), "einsum"),
    "aten.dot": RuleEntry(product("k,k->"), "einsum"),
    "aten.addmm": RuleEntry(product_with_bias("mk,kn->mn"), "einsum"),
    "aten.addmm_": RuleEntry(product_with_bias("mk,kn->mn"), "einsum"),
    "aten.addmv": RuleEntry(product_with_bias("mk,k->m"), "einsum"),
    "aten.baddbmm": RuleEntry(product_with_bias("bmk,bkn->bmn"), "einsum"),
    "aten.baddbmm_": RuleEntry(product_with_bias("bmk,bkn->bmn"), "einsum"),
    "aten._grouped_mm": RuleEntry(grouped, "hand"),
}
"""op name -> rule."""
