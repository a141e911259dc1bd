"""What an exception inside of a trace leaves in torch's state of the thread is undone; forward mode is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright_dtensor._torch.modes import has_tangent
from meshwright_dtensor.api import as_mesh_parameter, distribute, from_local
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import FORMS, share_attention
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def keys_after_a_failed_trace(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("a",))
    before = str(torch._C._dispatch_tls_local_exclude_set())
    with contextlib.suppress(RuntimeError), forward_ad.dual_level():
        # torch's own meta function raises, with most dispatch keys excluded
        torch.quantile(distribute(torch.randn(4, 6), mesh, [0]), torch.tensor([0.3]), dim=1)
    assert str(torch._C._dispatch_tls_local_exclude_set()) == before
    x = torch.ones(8, requires_grad=True)
    total = (distribute(x, mesh, [0]) + 3).sum()
    total.backward()
    assert total.item() == 32
    assert x.grad is not None and x.grad.tolist() == [1.0] * 8


def test_a_failed_trace_leaves_no_dispatch_keys(rank_pool: RankPool) -> None:
    rank_pool.run(2, keys_after_a_failed_trace)


def tangents(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("a",))
    for requires_grad in (False, True):
        weight = as_mesh_parameter(
            distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)]), (1,), requires_grad
        )
        with forward_ad.dual_level():
            whole = forward_ad.make_dual(torch.randn(2, 4), torch.ones(2, 4))
            part = forward_ad.make_dual(torch.randn(2, 2), torch.ones(2, 2))
            refused = [
                lambda x=whole: distribute(x, mesh, [0]),
                lambda x=whole: from_local(x, mesh, ["P"], (2, 4)).full_tensor(),
                lambda x=part: from_local(x, mesh, [1], (2, 4)).full_tensor(),
                lambda x=part: F.linear(from_local(x, mesh, [1], (2, 4)), weight).full_tensor(),  # noqa: B023
                lambda x=whole: F.linear(x, weight),  # noqa: B023
            ]
            for compute in refused:
                with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
                    compute()
            # as on one device where nothing is converted
            kept = (from_local(whole, mesh, ["I"], (2, 4)) * 3).full_tensor()
            tangent = forward_ad.unpack_dual(kept).tangent
            assert tangent is not None and tangent.tolist() == [[3.0] * 4] * 2
    for form in FORMS:
        share_attention(mesh, "a", form)
        with forward_ad.dual_level():
            local = forward_ad.make_dual(torch.randn(1, 2, 4, 4), torch.ones(1, 2, 4, 4))
            x = from_local(local, mesh, [2], (1, 2, 4 * world, 4))
            with pytest.raises((UnsupportedError, NotImplementedError), match=r"forward-mode|forward mode"):
                F.scaled_dot_product_attention(x, x, x)


def test_tangents_are_not_lost_in_a_conversion(rank_pool: RankPool) -> None:
    rank_pool.run(2, tangents)


# torch's own, where it loads the formulas of forward mode
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_tangents_under_nested_transforms_are_seen() -> None:
    seen: list[bool] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(has_tangent(x))
        return x * 2

    x = torch.randn(3, 2)
    torch.func.jvp(torch.vmap(double), (x,), (x,))
    torch.vmap(lambda row: torch.func.jvp(double, (row,), (row,))[1])(x)
    with forward_ad.dual_level():
        torch.vmap(double)(forward_ad.make_dual(x, x))
        torch.vmap(double)(x)
    torch.vmap(double)(x)
    assert seen == [True, True, True, False, False]
