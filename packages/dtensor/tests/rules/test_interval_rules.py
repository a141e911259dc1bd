"""Ops on values sharded in runs: right on real ranks, value and gradient, and moving nothing where nothing has to move."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_cases import partitions
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.sharding.boxes import region_of
from meshwright_dtensor.sharding.intervals import (
    IntervalShard,
    intervals_of,
    merge_intervals,
    segmented_shard,
    zigzag_shard,
)
from meshwright_dtensor.sharding.reshape import (
    _first_period,
    _flat,
    concatenated_state,
    groups,
    local_slice,
    through_view,
)
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def held(shape, state, n, rank):
    """The elements that a rank holds, in local order: a model of index lists."""
    whole = torch.arange(math.prod(shape)).view(shape)
    index = [i for a, m in intervals_of(state, shape[int(state)], n)[rank] for i in range(a, a + m)]
    return whole.index_select(int(state), torch.tensor(index, dtype=torch.long)).reshape(-1)


@st.composite
def views(draw):
    """Two shapes of equally many elements, and a shard of the first."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))

    def grouped():
        cuts = sorted(draw(st.sets(st.integers(1, len(sizes)), max_size=3)) | {0, len(sizes)})
        return tuple(math.prod(sizes[a:b]) for a, b in itertools.pairwise(cuts))

    before, after = grouped(), grouped()
    dim, n = draw(st.integers(0, len(before) - 1)), draw(st.integers(2, 3))
    state = dim if draw(st.booleans()) else draw(partitions(before[dim], n, dim))
    return before, after, state, n


@given(views())
def test_view_keeps_the_elements_of_each_rank_or_has_no_shard(case):
    before, after, state, n = case
    assume(before[state] > 1)
    there = through_view(before, after, state, n)
    if there is None:
        # then no division of any one dim holds what the ranks hold
        assume(before != after)
        for dim, size in enumerate(after):
            intervals = []
            for rank in range(n):
                mine = held(before, state, n, rank)
                whole = torch.arange(math.prod(after)).view(after).movedim(dim, 0).reshape(size, -1)
                intervals.append([i for i in range(size) if bool(torch.isin(whole[i], mine).all())])
            if sorted(i for o in intervals for i in o) != list(range(size)) or (
                size == 1 and math.prod(after) > 1
            ):
                continue
            # the sets agree, so the order must not
            order = [
                torch.arange(math.prod(after))
                .view(after)
                .index_select(dim, torch.tensor(o, dtype=torch.long))
                .reshape(-1)
                for o in intervals
            ]
            assert any(not torch.equal(a, held(before, state, n, r)) for r, a in enumerate(order))
        return
    for rank in range(n):
        assert torch.equal(held(before, state, n, rank), held(after, there, n, rank))


@given(st.data())
def test_split_and_cat_of_interval_shards(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    n = data.draw(st.integers(2, 3))
    states = [data.draw(partitions(size, n)) for size in sizes]
    whole = concatenated_state(states, sizes, 0, n)
    start = 0
    for state, size in zip(states, sizes, strict=True):
        for rank in range(n):
            intervals = intervals_of(whole, sum(sizes), n)[rank]
            part = local_slice(intervals, start, start + size)
            if part is not None:
                assert part[0] == intervals_of(state, size, n)[rank]
        start += size


def fused_attention(x, w):
    """q|k|v of unequal parts, split, into heads."""
    q, k, v = F.linear(x, w).split([8, 4, 4], -1)
    q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(*x.shape[:2], -1)


def fused_by_slices(x, w):
    y = F.linear(x, w)
    return y[..., :8] * torch.sigmoid(y[..., 8:])


def interleaved(x, w):
    """NeoX: heads of q, k, v each."""
    y = F.linear(x, w).view(*x.shape[:2], 4, 6)
    q, k, v = y.transpose(1, 2).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


W = (16, 8)
FUSED = ("I", segmented_shard(0, (8, 4, 4), 2))
HALVES = ("I", segmented_shard(0, (8, 8), 2))
ZIGZAG = zigzag_shard(1, 8, 2)
# name -> (function, shapes, states, collectives forward and backward)
CASES = {
    "fused attention": (fused_attention, ((1, 4, 8), W), FUSED, 0, 1),
    "gate and up by slices": (fused_by_slices, ((1, 4, 8), W), HALVES, 0, 1),
    "gate and up by chunk": (lambda x, w: torch.mul(*F.linear(x, w).chunk(2, -1)), ((1, 4, 8), W), HALVES, 0, 1),
    "conv1d": (
        lambda x, w, b: torch.addmm(b, x.view(-1, 8), w).view(1, 4, 16).split(8, 2)[1].relu(),
        ((1, 4, 8), (8, 16), (16,)),
        ("I", segmented_shard(1, (8, 8), 2), segmented_shard(0, (8, 8), 2)),
        0,
        1,
    ),
    "interleaved heads": (interleaved, ((1, 4, 8), (24, 8)), ("I", 0), 0, 1),
    "flatten sharded sequence": (lambda x: x.flatten(0, 1).tanh(), ((3, 8, 4),), (1,), 0, 0),
    "flatten and back": (lambda x: x.view(-1, 4).exp().view(3, 8, 4), ((3, 8, 4),), (ZIGZAG,), 0, 0),
    "rows of a flat loss": (
        lambda x: F.cross_entropy(x.view(-1, 5), torch.arange(24).view(3, 8).flatten() % 5, reduction="none"),
        ((3, 8, 5),),
        (ZIGZAG,),
        0,
        0,
    ),
    "mean loss": (lambda x: F.cross_entropy(x.view(-1, 5), torch.arange(24) % 5), ((3, 8, 5),), (ZIGZAG,), 1, 0),
    "cat of shards": (lambda x, y: torch.cat([x, y], 1).sin(), ((3, 8), (3, 4)), (1, 1), 0, 0),
    "shift": (lambda x: x[:, :-1] * 2, ((3, 8),), (ZIGZAG,), 0, 0),
    "norm and linear": (
        lambda x, w: F.linear(F.layer_norm(x, (8,)).softmax(-1), w), ((2, 8, 8), W), (ZIGZAG, "I"), None, None),
    "sum over runs": (lambda x: x.sum(1), ((3, 8),), (ZIGZAG,), 1, 0),
    "mean over runs": (lambda x: x.mean((0, 1)), ((3, 8, 2),), (ZIGZAG,), 1, 0),
    "matmul contracts runs": (lambda x, w: F.linear(x, w), ((3, 16), (5, 16)), (segmented_shard(1, (8, 4, 4), 2),) * 2, 1, 0),
    "batch norm of channels": (
        lambda x: F.batch_norm(x, None, None, training=True), ((4, 8, 3),), (ZIGZAG,), 0, 0),
    "transpose": (lambda x: x.transpose(1, 2).permute(2, 0, 1).unsqueeze(0).squeeze(0) + 1, ((3, 8, 4),), (ZIGZAG,), 0, 0),
    "against a plain shard": (lambda x, y: x * y, ((3, 8), (3, 8)), (ZIGZAG, 1), None, None),
    "along the runs": (lambda x: x.cumsum(1), ((3, 8),), (ZIGZAG,), None, None),
    "index": (lambda x: x[:, torch.tensor([1, 0]), :2].cos(), ((8, 3, 4),), (ZIGZAG.on(0),), 0, 0),
    "in place through a view": (lambda x: (y := x.clone(), y.view(-1, 4)[:, 0].mul_(2), y)[2], ((3, 8, 4),), (ZIGZAG,), 0, 0),
}  # fmt: skip


def run_cases(rank, world, names):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    results = {}
    for name in names:
        function, shapes, states, _, _ = CASES[name]
        torch.manual_seed(0)
        whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        given = [
            distribute(t.detach(), mesh, [s]).requires_grad_() for t, s in zip(whole, states, strict=True)
        ]
        expected = function(*whole)
        seed = torch.randn_like(expected)
        (expected * seed).sum().backward()
        with communication() as log:
            out = function(*given)
            local = out.redistribute(["I" if s == "P" else s for s in out.global_layout.states])
            forward = [(e.kind, e.function) for e in log.events]
            (local * distribute(seed, mesh, local.global_layout.states)).sum().backward()
            back = [(e.kind, e.why) for e in log.events if e.phase == "backward"]
        torch.testing.assert_close(
            out.full_tensor(), expected.detach(), msg=lambda m, name=name: f"{name}: {m}"
        )
        for t, w in zip(given, whole, strict=True):
            assert w.grad is not None
            torch.testing.assert_close(
                t.grad.full_tensor(), w.grad, msg=lambda m, name=name: f"{name}, gradient: {m}"
            )
        results[name] = (forward, back, repr(out.global_layout))
    return results


@pytest.mark.slow
def test_interval_rules_on_real_ranks(rank_pool: RankPool):
    results = rank_pool.run(2, run_cases, list(CASES))[0]
    for name, (_, _, _, forward, back) in CASES.items():
        if forward is not None:
            assert (len(results[name][0]), len(results[name][1])) == (forward, back), (name, results[name])


@pytest.mark.slow
def test_plain_shards_of_a_fused_projection_move_data(rank_pool: RankPool):
    """The negative control: without runs the same model has to gather."""
    (results, _) = rank_pool.run(2, plain_fused)
    assert results > 0


def plain_fused(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x, w = distribute(torch.randn(2, 8, 8), mesh, ["I"]), distribute(torch.randn(*W), mesh, [0])
    with communication() as log:
        fused_attention(x, w)
    return len(log.events)


def two_axes(rank, world):
    """Batch on one axis, sequence in runs on the other: flattened together and back, nothing moves."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    value = torch.randn(4, 8, 3, requires_grad=True)
    x = distribute(value.detach(), mesh, [0, ZIGZAG]).requires_grad_()
    with communication() as log:
        y = x.view(-1, 3).relu()
        z = y.view(4, 8, 3)
    assert (
        not log.events
        and isinstance(y.global_layout.states[1], IntervalShard)
        and z.global_layout.states == (0, ZIGZAG)
    )
    assert torch.equal(y.full_tensor(), value.view(-1, 3).relu())
    sizes = region_of((32, 3), (2, 2), (0, 0), y.global_layout.states)
    assert sum(n for _, n in sizes[0]) == 8
    (z * z).sum().backward()
    (value.relu() ** 2).sum().backward()
    assert torch.allclose(x.grad.full_tensor(), value.grad)
    return True


@pytest.mark.slow
def test_interval_rules_on_two_axes(rank_pool: RankPool):
    assert all(rank_pool.run(4, two_axes))


@given(
    st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), partitions(size, 2))),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_intervals_that_do_not_touch_need_no_merging(sized, outer, inner, grain):
    """Carried as they are, or merged one by one: the same pattern, and the same units of it."""
    size, state = sized
    for intervals in intervals_of(state, size, 2):
        flat = _flat(intervals, outer, size, inner)
        assert flat == merge_intervals(
            [
                ((o * size + start) * inner, length * inner)
                for o in range(outer)
                for start, length in intervals
            ]
        )
        period = size * outer * inner // grain
        results = _first_period(flat, period, grain)
        assert results is None or results == merge_intervals(results)


@pytest.mark.parametrize("n", [2, 3])
def test_too_many_intervals_are_rejected(n):
    assert through_view((10_000, 6), (60_000,), 1, n) is None
    assert isinstance(through_view((10, 6), (60,), 1, n), IntervalShard)


def test_views_in_another_dtype_have_no_groups():
    assert list(groups((4, 8), (4, 32))) == list(groups((4, 0), (0, 2))) == []
    assert through_view((4, 8), (4, 32), 1, 2) is None


def test_groups_of_a_view_are_the_dims_that_it_joins_or_splits():
    assert list(groups((4, 6, 96), (24, 3, 32))) == [(range(2), range(1)), (range(2, 3), range(1, 3))]
