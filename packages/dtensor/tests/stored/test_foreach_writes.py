"""Writes that are easily lost: to lists of tensors, to sums that are still partial, through views that others must notice."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright_dtensor import as_mesh_parameter, distribute
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool

VALUE = torch.arange(16.0).view(4, 4)
LISTS = {
    "zero": lambda x: torch._foreach_zero_([x[0], x[:, 1]]),
    "number": lambda x: torch._foreach_mul_([x[2], x.T[0]], 3.0),
    "numbers": lambda x: torch._foreach_add_([x[0], x[3]], [1.0, 2.0]),
    "plain": lambda x: torch._foreach_add_([x[1], x], [torch.ones(4), torch.ones(4, 4)], alpha=2),
    "one for all": lambda x: torch._foreach_mul_([x[0], x[1]], torch.tensor(2.0, device=HOST)),
    "views": lambda x: torch._foreach_copy_([x[0], x[1]], [x[2], x[3]]),
    "read only": lambda x: torch._foreach_copy_([x], [x.T * 2]),
    "addcdiv": lambda x: torch._foreach_addcdiv_([x[0], x[1]], [x[2], x[3]], [x[3], x[2]], [1.0, 2.0]),
    "addcmul": lambda x: torch._foreach_addcmul_([x[0]], [x[2]], [x[3]], value=0.5),
    "scalars": lambda x: torch._foreach_addcmul_(
        [x[0], x[1]], [x[2]] * 2, [x[3]] * 2, torch.tensor([1.0, 2], device=HOST)
    ),
    "lerp": lambda x: torch._foreach_lerp_([x[0]], [x[1]], 0.25),
    "maximum": lambda x: torch._foreach_maximum_([x[0], x[1]], [x[2], x[0]]),
}


def places(mesh):
    """The same value in every kind of tensor that can be written to without autograd."""
    for state in ("I", 0, 1):
        stored = distribute_tensor(VALUE, mesh, [Shard(state) if isinstance(state, int) else Replicate()])
        yield f"value {state}", mesh_value(stored)
        copy = distribute_tensor(VALUE, mesh, stored.placements)
        yield f"parameter {state}", as_mesh_parameter(copy, (state,), requires_grad=False)
    yield "activation I", distribute(VALUE.clone(), mesh, ["I"])


def listed(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    wrong = []
    for name, write in LISTS.items():
        for place, x in places(mesh):
            plain = VALUE.clone()
            write(plain)
            try:
                write(x)
            except Exception as error:
                wrong.append((name, place, f"{type(error).__name__}: {error}"))
                continue
            if not torch.equal(x.full_tensor(), plain):
                wrong.append((name, place))
    # activations: a part is never taken for the whole value
    for state in ("I", 0, 1, "P"):
        x, plain = distribute(VALUE.clone(), mesh, [state]), VALUE.clone()
        for tensor, other in ((x, distribute(VALUE.clone(), mesh, [1])), (plain, VALUE)):
            torch._foreach_add_([tensor, tensor], 1.0)
            torch._foreach_mul_([tensor], [other])
        if not torch.equal(x.full_tensor(), plain):
            wrong.append(("activation", state))
    x, plain = distribute(VALUE.clone(), mesh, [0]), VALUE.clone()
    torch._foreach_zero_([x[0]])
    torch._foreach_zero_([plain[0]])
    if not torch.equal(x.full_tensor(), plain):
        wrong.append(("gathered view", 0))
    return wrong


def test_foreach_functions_write_to_views(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, listed):
        assert wrong == []


def counted(rank, world):
    """What autograd would raise on one device: a parameter written to between a forward and its backward pass."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    silent = []
    writes = {
        "column": lambda p: p[:, 1].zero_(),
        "transposed": lambda p: p.T.add_(1),
        "row": lambda p: p[0].zero_(),
        "list": lambda p: torch._foreach_zero_([p[:, 1]]),
    }
    for name, write in writes.items():
        for state in ("I", 0, 1):
            placement = Shard(state) if isinstance(state, int) else Replicate()
            p = as_mesh_parameter(distribute_tensor(VALUE, mesh, [placement]), (state,))
            x = distribute(torch.ones(4, 4), mesh, ["I"]).requires_grad_()
            loss = (x @ p).square().sum()
            with torch.no_grad():
                write(p)
            try:
                loss.backward()
                silent.append((name, state))
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
    return silent


def test_writes_through_views_are_counted(rank_pool: RankPool) -> None:
    for silent in rank_pool.run(2, counted):
        assert silent == []


def partial_norms(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    gradient = mesh_value(distribute_tensor(VALUE, mesh, [Shard(0)]))
    norms = torch._foreach_norm([gradient])
    assert norms[0].mul_(2) is norms[0]
    assert torch.allclose(norms[0].full_tensor(), VALUE.norm() * 2)
    return True


def test_write_to_partial_norm_stays(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, partial_norms))


def moved_on(rank, world):
    """A view keeps the index with which it was taken."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    wrong = []
    for place, x in places(mesh):
        plain = VALUE.clone()
        for tensor in (plain, x):
            at = torch.tensor(0)
            row, rows = tensor[at], tensor[at : at + 2]
            at += 2
            row.zero_()
            rows[:, 1].fill_(5)
        if not torch.equal(x.full_tensor(), plain):
            wrong.append(place)
    return wrong


def test_view_keeps_index_that_changes_later(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, moved_on):
        assert wrong == []


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def given_to_functions(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    p = as_mesh_parameter(distribute_tensor(VALUE, mesh, [Shard(0)]), (0,), requires_grad=False)
    row = p[1]
    p.mul_(2)
    assert torch.equal(Same.apply(row).full_tensor(), VALUE[1] * 2)
    x = distribute(VALUE.clone(), mesh, [0])
    row = x[1]
    x.mul_(2)
    with pytest.raises(UnsupportedError, match="take the view again"):
        Same.apply(row)
    return True


def test_autograd_functions_get_present_views(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, given_to_functions))


def changed_shapes(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    for place, x in places(mesh):
        if place.startswith("activation"):
            continue
        for change in (lambda x: x.t_(), lambda x: x[:].t_(), lambda x: x.data.transpose_(0, 1)):
            with torch.no_grad(), pytest.raises(UnsupportedError, match="would change the shape"):
                change(x)
        assert torch.equal(x.full_tensor(), VALUE)
    leaf = distribute(VALUE, mesh, [0]).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf.t_()
    return True


def test_in_place_reshape_of_stored_tensor_is_rejected(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, changed_shapes))


def whole_on_every_rank(rank, world):
    """A view without a rule in stock DTensor shares the memory of a replicated tensor, too."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x = mesh_value(distribute_tensor(VALUE, mesh, [Replicate()]))
    diagonal = x.as_strided((4,), (5,))
    assert diagonal.to_local().untyped_storage().data_ptr() == x.to_local().untyped_storage().data_ptr()
    diagonal.zero_()
    assert torch.equal(x.full_tensor(), VALUE - torch.diag(VALUE.diagonal()))
    return True


def test_views_share_memory_with_their_base(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, whole_on_every_rank))


def test_fused_step_rejects_views(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, fused))


def fused(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x = mesh_value(distribute_tensor(VALUE, mesh, [Shard(0)]))
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    with pytest.raises(UnsupportedError, match="one view after the other"):
        torch._fused_sgd_([x[0]], [torch.ones(4)], [], **options, **flags)
    return True
