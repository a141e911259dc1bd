"""Runs: the state itself, regions, and conversions of values and gradients between runs and everything else."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import partitions, run_many

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.run_shard import RunShard
from meshwright_dtensor.sharding.boxes import (
    chunk_box,
    read_region,
    region_boxes,
    region_of,
    region_shape,
    write_region,
)
from meshwright_dtensor.sharding.intervals import (
    IntervalShard,
    interval_shard,
    repeat_to_fit,
    segmented_shard,
    single_owner_shard,
    zigzag_shard,
)
from meshwright_dtensor.sharding.states import format_state, parse_state
from meshwright_dtensor.testing.rank_pool import RankPool


def test_a_state_is_its_dim_but_equal_only_to_the_same_runs():
    qkv = segmented_shard(1, (64, 32, 32), 2)
    assert isinstance(qkv, IntervalShard) and isinstance(qkv, int) and int(qkv) == 1 and [5, 6][qkv] == 6
    assert qkv != 1 and qkv != 1 and qkv not in (0, 1, 2) and {1: "plain"}.get(qkv) is None
    assert qkv == segmented_shard(1, (64, 32, 32), 2) and qkv != segmented_shard(1, (32, 64, 32), 2)
    assert qkv.on(0) == segmented_shard(0, (64, 32, 32), 2) != qkv
    assert pickle.loads(pickle.dumps(qkv)) == copy.deepcopy(qkv) == qkv
    assert qkv.parts == (64, 32, 32) and zigzag_shard(0, 8, 2).parts is None


def test_what_comes_from_another_process_is_equal_to_its_own():
    here, there = (
        segmented_shard(1, (64, 32, 32), 2),
        IntervalShard(1, segmented_shard(1, (64, 32, 32), 2).intervals),
    )
    there._hash += 1  # a class, and so what hashes it, has another hash in every process
    got = pickle.loads(pickle.dumps(there))
    assert got == here and {here: "known"}[got] == "known"


def test_what_are_the_chunks_of_a_plain_shard_is_one():
    assert type(interval_shard(1, [[(0, 4)], [(4, 4)]])) is int and segmented_shard(1, (8,), 2) == 1
    assert type(interval_shard(0, [[(0, 3), (3, 1)], [(4, 3)]])) is int  # as torch.chunk cuts 7 rows
    assert type(single_owner_shard(0, 4, 1, 0)) is int


@pytest.mark.parametrize(
    ("state", "n", "text"),
    [
        (segmented_shard(0, (768,) * 3, 2), 2, "S(0; 768+768+768)"),
        (segmented_shard(1, (64, 32, 32), 4), 4, "S(1; 64+32+32)"),
        (segmented_shard(0, (4,) * 12, 2), 2, "S(0; 12*4)"),
        (zigzag_shard(1, 16, 2), 2, "S(1; 0:4,12:4 | 4:8)"),
        (single_owner_shard(0, 8, 2, 1), 2, "S(0; 0:0 | 0:8)"),
    ],
)
def test_text(state, n, text):
    assert format_state(state) == text == repr(state) and parse_state(text, n) == state
    assert isinstance(parse_state(text), int)  # checked without knowing the ranks


@pytest.mark.parametrize("text", ["S(0; 0:2 | 2:2)", "S(0; 10)"])
def test_text_of_plain_chunks_is_that_of_the_dim(text):
    with pytest.raises(ValueError, match=r"write 'S\(0\)'"):
        parse_state(text, 2)


@given(st.data())
def test_text_of_any_runs(data):
    state = data.draw(partitions())
    n = len(state.intervals) if isinstance(state, IntervalShard) else 2
    assert parse_state(format_state(state), n) == state


@pytest.mark.parametrize(
    "text", ["S(0; )", "S(0; 4+)", "S(0; 3+4)", "S(0; 0:4 | 5:4)", "S(0; 0:4 | 2:4)", "S(;4)"]
)
def test_text_that_is_no_state(text):
    with pytest.raises(ValueError, match=r"S\(|parts|gap"):
        parse_state(text, 2)


@pytest.mark.parametrize("ranks", [[[(0, 4)], [(5, 4)]], [[(0, 4)], [(2, 4)]], [], [[(1, 3)]]])
def test_what_is_no_partition_is_refused(ranks):
    with pytest.raises(ValueError, match=r"gap or overlap|at least one rank"):
        interval_shard(0, ranks)
    with pytest.raises(UnsupportedError):
        RunShard(0, ranks)


@given(st.data())
def test_regions_cover_every_element_once(data):
    shape = (data.draw(st.integers(1, 8)), data.draw(st.integers(1, 6)))
    outer = data.draw(partitions(shape[0], 2))
    lengths = outer.lengths if isinstance(outer, IntervalShard) else ()
    inner = data.draw(st.sampled_from([0, 1, "I"])) if len(set(lengths)) < 2 else 1
    if inner == 0 and isinstance(outer, IntervalShard) and data.draw(st.booleans()):
        inner = data.draw(partitions(outer.lengths[0], 2)) if outer.lengths[0] else "I"
    value = torch.arange(shape[0] * shape[1]).view(shape)
    count, back = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
    for coords in itertools.product(range(2), range(2)):
        region = region_of(shape, (2, 2), coords, (outer, inner))
        local = read_region(value, region)
        assert tuple(local.shape) == region_shape(region)
        # the model: index lists on one device
        rows, columns = ([i for a, n in intervals for i in range(a, a + n)] for intervals in region)
        assert torch.equal(local, value[rows][:, columns])
        write_region(back, region, local)
        if inner != "I" or coords[1] == 0:
            for there, _ in region_boxes(region):
                count[there[0][0] : sum(there[0]), there[1][0] : sum(there[1])] += 1
    assert torch.equal(back, value) and bool((count == 1).all())


def test_runs_are_fitted_to_more_rows():
    two_rows = segmented_shard(0, (12, 12), 2)  # [2, 12] split along the second dim, flattened
    assert repeat_to_fit(two_rows, (24, 3), 2) is two_rows
    assert repeat_to_fit(two_rows, (48,), 2) == segmented_shard(0, (12,) * 4, 2)
    for shape, n in (((36,), 2), ((24,), 3), ((), 2)):
        assert repeat_to_fit(two_rows, shape, n) is None
    assert repeat_to_fit(zigzag_shard(1, 8, 2), (5, 16), 2) == interval_shard(
        1, [[(0, 2), (6, 4), (14, 2)], [(2, 4), (10, 4)]]
    )


def test_a_rank_of_several_boxes_has_no_box():
    fused = segmented_shard(0, (4, 4), 2)
    with pytest.raises(UsageError, match="more than one box"):
        chunk_box((8, 3), (2,), (0,), (fused,))
    assert chunk_box((8, 3), (2,), (1,), (single_owner_shard(0, 8, 2, 1),)) == ((0, 8), (0, 3))
    with pytest.raises(UsageError, match="8 elements on 2 ranks"):
        region_of((6, 3), (2,), (0,), (fused,))


def states_of_dim(dim, total, n):
    """Some runs of one dim: parts, zig-zag, one owner, and an uneven scatter."""
    states = [single_owner_shard(dim, total, n, n - 1)]
    if total % n == 0 and total > n:
        states.append(segmented_shard(dim, (total - n, n), n))
    if total % (2 * n) == 0:
        states.append(zigzag_shard(dim, total, n))
    states.append(
        interval_shard(dim, [[(i, 1) for i in reversed(range(total)) if i % n in (r, n)] for r in range(n)])
    )
    return [s for s in states if isinstance(s, IntervalShard)]


@pytest.mark.slow
def test_conversion_between_all_states_on_one_axis(rank_pool: RankPool):
    for n in (2, 3):
        shape = (12, 6, 5)
        some = [s for dim in range(3) for s in states_of_dim(dim, shape[dim], n)]
        others = ["I", "X", "P", 0, 1, 2]
        pairs = [
            (a, b)
            for a, b in itertools.product(some + others, repeat=2)
            if IntervalShard in (type(a), type(b))
        ]
        cases = [(shape, (a,), (b,)) for a, b in pairs if a == b or not (isinstance(a, int) and b == "P")]
        assert len(cases) > 150
        assert all(rank_pool.run(n, run_many, (n,), cases))


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_conversion_between_states_on_two_axes(rank_pool: RankPool, data):
    shape = (8, 6)
    cases = []
    for _ in range(10):
        ends = []
        for _ in range(2):
            outer = data.draw(
                st.sampled_from(["I", "X", "P", 0, 1, *states_of_dim(0, 8, 2), *states_of_dim(1, 6, 2)])
            )
            same = [] if not isinstance(outer, IntervalShard) else [int(outer)] if outer.even else []
            free = [d for d in (0, 1) if not isinstance(outer, int) or int(outer) != d] + same
            inner = data.draw(
                st.sampled_from(["I", "X", "P", *free, *(segmented_shard(0, (2, 2), 2),) * (outer == 0)])
            )
            if (
                inner in free
                and isinstance(outer, IntervalShard)
                and int(outer) == inner
                and outer.lengths[0] < 2
            ):
                inner = "I"
            ends.append((outer, inner))
        if all(a == b or not (isinstance(a, int) and b == "P") for a, b in zip(*ends, strict=True)):
            cases.append((shape, *ends))
    assert all(rank_pool.run(4, run_many, (2, 2), cases))
