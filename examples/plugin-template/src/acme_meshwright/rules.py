"""A sharding rule for a custom op: silu(x) * y in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from meshwright_dtensor.rules import NodeView, Row, Rule


@torch.library.custom_op("acme::swiglu", mutates_args=())
def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y, of two tensors of one shape."""
    return F.silu(x) * y


@swiglu.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = ctx.saved_tensors
    gate = torch.sigmoid(x)
    return grad * y * gate * (1 + x * (1 - gate)), grad * F.silu(x)


swiglu.register_autograd(_backward, setup_context=_setup)


def same_dims(view: NodeView) -> Iterator[Row]:
    """Both inputs and the output sharded on one dim, any."""
    for dim in range(len(view.in_shapes[0])):
        yield (dim, dim), (dim,)


RULES: Mapping[str, Rule] = {"acme.swiglu": same_dims}


def examples() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Calls on which the conformance suite tries each row."""
    yield swiglu, (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
    yield swiglu, (torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64))
