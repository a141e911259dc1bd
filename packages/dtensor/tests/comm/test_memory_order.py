"""Conversions of tensors whose dims are in another order in memory: values, gradients and their memory order."""

from __future__ import annotations

import itertools

import pytest
import torch
from layout_cases import convertible, legal, parts
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.comm.redistribute import convert
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of
from meshwright_dtensor.sharding.states import gradient_kind
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool

SHAPE = (4, 8, 4, 12)
ORDERS = ((0, 2, 3, 1), (0, 2, 1, 3), (3, 1, 2, 0))
STATES = ("I", "X", "P", 0, 1, 2, 3)


def in_order(t, order):
    return t.new_empty_strided(t.shape, dense_strides(tuple(t.shape), order)).copy_(t)


def convert_in(mesh, shape, source, target, order):
    """One conversion and its gradient. `order`: of the dims in memory, on this rank."""
    context = MeshContext.of(mesh)
    torch.manual_seed(1)
    value, seed = torch.randn(2, *shape, dtype=torch.float64)
    torch.manual_seed(2)
    local, layout = parts(value, mesh, source)
    local = in_order(local, order).requires_grad_()
    out = convert(local, layout, target)
    there = layout_of(context, target, value.shape, value.dtype)
    torch.testing.assert_close(convert(out.detach(), there, context.replicated), value)
    torch.manual_seed(3)
    kinds = tuple("I" if gradient_kind(s) == "R" else gradient_kind(s) for s in there.states)
    arriving, _ = parts(seed, mesh, kinds)
    out.backward(in_order(arriving, order))
    back = tuple("I" if gradient_kind(s) == "R" else gradient_kind(s) for s in layout.states)
    actual = layout_of(context, back, value.shape, value.dtype)
    torch.testing.assert_close(convert(local.grad, actual, context.replicated), seed)
    return dim_order_of(out), dim_order_of(local.grad)


def all_between(rank, world, sizes, shape):
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    fitting = [s for s in itertools.product(STATES, repeat=len(sizes)) if legal(shape, s, sizes)]
    pairs = [
        (a, b)
        for a, b in itertools.product(fitting, fitting)
        if a != b and all(map(convertible, a, b)) and a.count("P") < 2
    ]
    for (a, b), order in itertools.product(pairs[:: 1 if len(sizes) == 1 else 17], ORDERS):
        forward, _ = convert_in(mesh, shape, a, b, order)
        if 1 not in shape:
            assert forward == order, (a, b, order, forward)
    return len(pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "shape"), [((2,), SHAPE), ((3,), (3, 7, 6, 3)), ((2, 2), SHAPE)])
def test_conversions_keep_the_memory_order(
    rank_pool: RankPool, sizes: tuple[int, ...], shape: tuple[int, ...]
):
    ranks = 1
    for size in sizes:
        ranks *= size
    assert min(rank_pool.run(ranks, all_between, sizes, shape)) > 20


def gradient_of_gathered(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    return convert_in(mesh, SHAPE, (3,), ("X",), ORDERS[0])[1]


def test_gradients_keep_the_memory_order(rank_pool: RankPool):
    assert rank_pool.run(2, gradient_of_gathered) == [ORDERS[0]] * 2


def other_order_on_each_rank(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    orders = (ORDERS[0], (0, 1, 2, 3))
    for source, target in ((1, "I"), ("P", "I"), ("P", 2), (1, 3), (2, "X"), ("I", 1)):
        for order in (orders[rank], orders[1 - rank]):
            convert_in(mesh, SHAPE, (source,), (target,), order)
    return True


def test_ranks_with_other_memory_orders_exchange_the_right_values(rank_pool: RankPool):
    assert all(rank_pool.run(2, other_order_on_each_rank))


def partial_of_expanded(rank, world):
    """A Partial of an expanded value has the same strides on the rank that keeps it and on those with zeros."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    context = MeshContext.of(mesh)
    value = torch.arange(8.0).view(1, 8, 1, 1).expand(SHAPE)
    layout = layout_of(context, ("I",), value.shape, value.dtype)
    out = convert(value, layout, ("P",))
    summed = convert(out, layout_of(context, ("P",), value.shape, value.dtype), ("I",))
    torch.testing.assert_close(summed, value, rtol=0, atol=0)
    return out.stride()


def test_a_partial_of_an_expanded_value_is_its_value_once(rank_pool: RankPool):
    first, second = rank_pool.run(2, partial_of_expanded)
    assert first == second == (0, 1, 0, 0)
