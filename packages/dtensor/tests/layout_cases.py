"""Layouts and conversions that several tests share: legal states, partitions of a dim, and one checked conversion."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.sharding.boxes import read_region, shardable
from meshwright_dtensor.sharding.intervals import interval_shard
from meshwright_dtensor.sharding.states import gradient_kind, is_shard
from meshwright_dtensor.tensor.global_tensor import local_in, wrap
from meshwright_dtensor.testing.on_device import device_type

STATES = ("I", "X", "P", 0, 1, 2)


def legal(shape, states, sizes):
    left = list(shape)
    for s, n in zip(states, sizes, strict=True):
        if is_shard(s):
            if s >= len(shape) or not shardable(left[s], n):
                return False
            left[s] = -(-left[s] // n)
    return True


def convertible(a, b):
    return a == b or not (is_shard(a) and b == "P")


def parts(value, mesh, states):
    """Any local tensors that make up ``value`` in ``states``; partial sums are random."""
    context = MeshContext.of(mesh)
    layout = layout_of(context, states, value.shape, value.dtype)
    local = read_region(value, layout.region).clone()
    for axis, state in enumerate(states):
        if state != "P":
            continue
        n, rank = context.sizes[axis], context.coords[axis]
        if n == 1:
            continue
        shares = torch.randn((n - 1, *local.shape), dtype=value.dtype)
        # ranks that differ on other axes hold different parts of the same shares: draw per box
        local = shares[rank] if rank < n - 1 else local - shares.sum(0)
    return local, layout


def one(mesh, shape, source, target):
    context = MeshContext.of(mesh)
    torch.manual_seed(1)
    value = torch.randn(shape, dtype=torch.float64)
    seed = torch.randn(shape, dtype=torch.float64)
    torch.manual_seed(2)
    local, layout = parts(value, mesh, source)
    local.requires_grad_()
    x = wrap(local, layout)
    out = local_in(x, target)
    there = layout_of(context, target, value.shape, value.dtype)
    assert tuple(out.shape) == tuple(there.local_shape)
    torch.testing.assert_close(local_in(wrap(out.detach(), there), context.replicated), value)
    # the incoming gradient has the gradient kind of the target, the outgoing one that of the source
    torch.manual_seed(3)
    kinds = tuple("I" if gradient_kind(s) == "R" else gradient_kind(s) for s in there.states)
    arriving, _ = parts(seed, mesh, kinds)
    if out.requires_grad:
        out.backward(arriving)
    back = tuple("I" if gradient_kind(s) == "R" else gradient_kind(s) for s in layout.states)
    actual = wrap(local.grad, layout_of(context, back, value.shape, value.dtype))
    torch.testing.assert_close(local_in(actual, context.replicated), seed)


def run_many(rank, world, sizes, cases):
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    for shape, source, target in cases:
        try:
            one(mesh, shape, source, target)
        except Exception as e:
            raise AssertionError(f"{shape} {source} -> {target}: {e}") from e
    return True


@st.composite
def partitions(draw, total=None, n=None, dim=0):
    """Any ownership of a dim: every element on one rank, in any order of intervals."""
    total = draw(st.integers(1, 12)) if total is None else total
    n = draw(st.integers(1, 4)) if n is None else n
    order = draw(st.permutations(range(total)))
    owner = [draw(st.integers(0, n - 1)) for _ in range(total)]
    return interval_shard(dim, [[(i, 1) for i in order if owner[i] == rank] for rank in range(n)])
