"""An all-reduce of a gradient overwrites it where nobody else holds it, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.comm.redistribute import conversion_between
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool, fake_group

pytestmark = pytest.mark.host("an array that holds the memory of a tensor")
HOLDERS = ("tensor", "view", "base", "array", "storage")


class Reader(torch.autograd.Function):
    """A reader of a converted value, whose gradient is 1 on rank 0 and 2 on rank 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, made: list[Any], held: str) -> Tensor:
        """`made`: of the gradient; `held`: how it keeps it."""
        ctx.rank, ctx.made, ctx.held = rank, made, held
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """A new gradient."""
        whole = torch.full((2, *grad.shape), ctx.rank + 1.0, device=grad.device)
        new = whole[0] if ctx.held == "base" else whole[0].clone()
        if ctx.held == "array":
            # the memory of an array, whose owner torch does not count
            array = new.numpy()
            ctx.made.append(torch.from_numpy(array))
            return torch.from_numpy(array), None, None, None
        if ctx.held == "storage":
            ctx.made.append(new.untyped_storage())
            return new, None, None, None
        ctx.made.append({"tensor": new, "view": new[0], "base": whole}.get(ctx.held, new.data_ptr()))
        return new, None, None, None


def gradients(rank: int, size: int, held: str) -> tuple[Tensor, Any]:
    """The gradient after the all-reduce, and what the reader has kept of its own."""
    mesh = init_device_mesh(device_type(), (size,), mesh_dim_names=("a",))
    conversion = conversion_between(MeshContext.of(mesh), ("I",), ("X",), torch.Size([3, 4]))
    assert conversion is not None
    x = torch.zeros(3, 4, device=device_type(), requires_grad=True)
    made: list[Any] = []
    Reader.apply(conversion.apply(x), rank, made, held).sum().backward()  # type: ignore[attr-defined]
    assert x.grad is not None
    return x.grad, made[0]


def reduced(rank: int, size: int) -> None:
    for held in ("nothing", *HOLDERS):
        gradient, kept = gradients(rank, size, held)
        assert torch.equal(gradient, torch.full((3, 4), 3.0))
        if held == "storage":
            kept = torch.empty(0).set_(kept, 0, (3, 4))
        assert held == "nothing" or bool((kept == rank + 1).all())


def test_no_gradient_that_is_held_is_overwritten(rank_pool: RankPool) -> None:
    rank_pool.run(2, reduced)


def test_a_gradient_that_nobody_holds_is_reduced_in_its_memory() -> None:
    # on real ranks a thread of the backend may hold the result for a moment, so that autograd copies it
    with fake_group(2):
        gradient, address = gradients(0, 2, "nothing")
        assert gradient.data_ptr() == address
        gradient, kept = gradients(0, 2, "tensor")
        assert gradient.data_ptr() != kept.data_ptr()
