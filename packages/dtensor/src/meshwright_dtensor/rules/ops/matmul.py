"""Rows of matrix products, from their einsum equation: a shared label is sharded in both, a contracted one gives a partial sum."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.rules.node import NodeView, Row, Rule, Slot, rules
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


def product(equation: str, summand: bool = False) -> Rule:
    """Rule of an op with two operands, after a ``summand`` where there is one (addmm, baddbmm)."""

    def rule(view: NodeView) -> Iterator[Row]:
        for left, right, bias, out in einsum_rows(equation, view.in_shapes[0] if summand else None):
            yield ((left, right) if bias is None else (bias, left, right)), (out,)

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


def scaled(view: NodeView) -> Iterator[Row]:
    """_scaled_mm(x [m, k], y [k, n], scales, bias): the rows, if scales are numbers or of rows and columns."""
    (rows, _), (_, columns), *others = view.in_shapes
    if all(shape in ((), (1,), (1, 1), (rows, 1), (1, columns), (columns,)) for shape in others):
        yield (0, R, *(0 if shape == (rows, 1) else R for shape in others)), (0,)


RULES = rules(
    "einsum",
    ("mm", product("mk,kn->mn")),
    ("bmm", product("bmk,bkn->bmn")),
    ("mv", product("mk,k->m")),
    ("dot vdot", product("k,k->")),
    ("addmm addmm_", product("mk,kn->mn", summand=True)),
    ("addbmm addbmm_", product("bmk,bkn->mn", summand=True)),
    ("addr addr_", product("m,n->mn", summand=True)),
    ("addmv", product("mk,k->m", summand=True)),
    ("baddbmm baddbmm_", product("bmk,bkn->bmn", summand=True)),
) | rules("hand", ("_grouped_mm", grouped), ("_scaled_mm _scaled_mm_v2", scaled))
"""op name -> rule."""
