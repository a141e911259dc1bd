"""The results of a compiled region of which one has to be part of the loss.

A compiled backward pass takes zeros for the gradient of a result that the loss does not use, and then gives zeros to
parameters that have no gradient on one device, which an optimizer with weight decay or momentum would change. Where a
result needs every parameter, nothing is wrong as long as the loss uses that result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from meshwright_dtensor.errors import UnsupportedError

Tensor = torch.Tensor


def main_results(joint: fx.GraphModule, inputs: int) -> frozenset[int]:
    """The numbers, among the differentiable results, of those on which every gradient depends.

    Args:
        joint: the graph of forward and backward pass, as AOTAutograd records it.
        inputs: how many it has, whose gradients are its last outputs.
    """
    reached: dict[fx.Node, frozenset[int]] = {}
    tangents = 0
    for node in joint.graph.nodes:
        if node.op == "placeholder" and node.name.startswith("tangents"):
            reached[node] = frozenset([tangents])
            tangents += 1
        elif node.op == "output":
            gradients = [g for g in fx.node.map_arg(node.args[0], lambda n: n)[-inputs:] if g is not None]
            return frozenset(range(tangents)).intersection(*(reached[g] for g in gradients))
        else:
            reached[node] = frozenset().union(*(reached[n] for n in node.all_input_nodes))
    return frozenset()


class MainResults(torch.autograd.Function):
    """Identity of results; its backward raises where none of the main ones has a gradient."""

    @staticmethod
    def forward(ctx: Any, name: str, main: frozenset[int], *results: Tensor) -> Any:
        """`main`: the numbers of the results of which one has to be used."""
        ctx.set_materialize_grads(False)
        ctx.name, ctx.main = name, main
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients themselves."""
        if all(gradients[number] is None for number in ctx.main):
            raise UnsupportedError(
                f"the loss uses a result of a compiled {ctx.name}, and none on which all of its parameters depend: "
                "parameters without a gradient would get zeros; leave this module out of compile="
            )
        return (None, None, *gradients)


def once_differentiable(name: str, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of a compiled region, of a module of class `name`, which raise where they are differentiated."""
    return OnceOnly.apply(name, *gradients)  # type: ignore[no-any-return]


class OnceOnly(torch.autograd.Function):
    """Identity of the gradients of a compiled region, which has no derivative of them: its backward raises."""

    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Tensor | None) -> Any:
        """`name`: of the class of the region's module."""
        ctx.name = name
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            f"a derivative of gradients (create_graph=True) passes through a compiled {ctx.name}, whose graph has a forward "
            "and a backward pass and no third one: leave this module out of compile=, and it runs as it is"
        )
