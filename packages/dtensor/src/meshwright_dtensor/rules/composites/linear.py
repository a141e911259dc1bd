"""torch.nn.functional.linear as one node: its aten form depends on rank and strides, its rules do not."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F

from meshwright_dtensor.rules.composites.base import Bound, Composite, LocalContext, LocalFunction, from_call
from meshwright_dtensor.rules.node import NodeView, Row, Strategy, finish, numel
from meshwright_dtensor.rules.ops.matmul import einsum_rows


class Linear(Composite):
    """x [..., k], weight [n, k], bias [n] or none -> [..., n]."""

    name: ClassVar[str] = "linear"
    functions: ClassVar[tuple[Any, ...]] = (F.linear,)

    @from_call
    def normalise(self, input: Any, weight: Any, bias: Any = None) -> Bound | None:
        """(x, weight, bias)."""
        return ((input, weight, bias), {}) if weight.dim() == 2 and input.dim() >= 1 else None

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Leading dims, output features, input features (partial), partial operands."""
        labels = "".join(chr(ord("A") + i) for i in range(len(view.in_shapes[0]) - 1))
        bias = view.in_shapes[2] if len(view.node.ins) == 3 else None
        rows: list[Row] = [
            ((x, weight) if summand is None else (x, weight, summand), (out,))
            for x, weight, summand, out in einsum_rows(f"{labels}k,nk->{labels}n", bias)
        ]
        return finish(view, rows, "einsum")

    def plain(self, ctx: LocalContext) -> bool:
        """Always: no row needs more than F.linear."""
        return True

    def local(self, ctx: LocalContext) -> LocalFunction:
        """F.linear."""
        return lambda tensors: F.linear(*tensors)

    def flops(self, view: NodeView) -> float:
        """2 m n k."""
        return 2.0 * numel(view.in_shapes[0]) * view.in_shapes[1][0]
