"""Geometry of shards that end at borders of units."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor import RaggedShard, RunShard, distribute
from meshwright_dtensor.errors import PlanError, UnsupportedError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.boxes import region_of
from meshwright_dtensor.sharding.intervals import chunk_intervals
from meshwright_dtensor.sharding.ragged import (
    can_gather,
    ragged_shard,
    rows_of_blocks,
    spans_along,
    unit_lengths,
)
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def test_lengths_end_at_borders_and_are_as_even_as_those_allow() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        total, ranks, unit = rng.randint(1, 200), rng.randint(1, 9), rng.randint(1, 40)
        lengths = unit_lengths(total, ranks, unit, str(rng.random()))
        assert sum(lengths) == total and len(lengths) == ranks and min(lengths) >= 0
        ends = itertools.accumulate(lengths)
        assert all(end % unit == 0 or end == total for end in ends)
        # no rank has a unit more than the fullest one of the best division
        units = math.ceil(total / unit)
        assert max(lengths) <= math.ceil(units / ranks) * unit
        chunks = tuple(n for ((_, n),) in chunk_intervals(total, ranks))
        if all(end % unit == 0 or end == total for end in itertools.accumulate(chunks)):
            assert lengths == chunks


def test_tensors_of_one_unit_are_spread_over_the_ranks() -> None:
    owners = [unit_lengths(5, 4, 5, f"layers.{i}.weight").index(5) for i in range(64)]
    assert min(owners.count(rank) for rank in range(4)) >= 8
    assert owners == [unit_lengths(5, 4, 5, f"layers.{i}.weight").index(5) for i in range(64)]


def test_rows_of_blocks() -> None:
    for shape, block in itertools.product(
        ((7,), (65, 252), (33, 256), (9, 3, 3), (4, 0)), (1, 64, 256, 2048)
    ):
        rows, row = rows_of_blocks(shape, block), math.prod(shape[1:])
        assert rows == next(n for n in range(1, block + 1) if n * row % block == 0)


def test_parts_of_a_gathered_value() -> None:
    """Each rank's part, found among the elements of the value that is gathered, is the same part of the whole."""
    cases = [
        ((2,), (ragged_shard(0, (4, 8)),)),
        ((3,), (ragged_shard(0, (0, 8, 4)),)),
        ((2, 3), (ragged_shard(0, (1, 3), repeats=3), 0)),
        ((3, 2), (0, ragged_shard(0, (1, 3)))),
        ((2, 2), (ragged_shard(0, (5, 7)), 1)),
        ((2, 2), (1, 0)),
        # plain shards inside of intervals
        ((4, 2), (ragged_shard(0, (4, 2, 0, 6)), 0)),
    ]
    for sizes, states in cases:
        axis = 1 if sizes in ((3, 2), (4, 2)) else 0
        dim = int(states[axis])
        assert can_gather((12, 6), sizes, states, axis)
        for coords in itertools.product(*map(range, sizes)):
            spans = spans_along((12, 6), sizes, coords, states, axis)
            assert spans is not None
            without = tuple("I" if i == axis else s for i, s in enumerate(states))
            gathered = [
                i for a, n in region_of((12, 6), sizes, coords, without)[dim] for i in range(a, a + n)
            ]
            held = region_of((12, 6), sizes, coords, states)[dim]
            first, length = spans[coords[axis]]
            assert gathered[first : first + length] == [i for a, n in held for i in range(a, a + n)]
    # the first rank of the outer axis has rows of both parts of the inner one, in unequal numbers
    assert not can_gather((12, 6), (2, 2), (ragged_shard(0, (4, 8)), 0), 0)
    assert not can_gather((12, 6), (2, 2), (0, 0), 0)


def distributed(rank: int, size: int) -> tuple[torch.Size, torch.Tensor, str]:
    whole = torch.arange(65 * 252.0).view(65, 252)
    mesh = init_device_mesh(device_type(), (size,), mesh_dim_names=("x",))
    tensor = distribute(whole, mesh, [RaggedShard.blocks(whole.shape, size, 256)])
    return tensor.to_local().shape, (tensor * 2).full_tensor() / 2, repr(tensor.global_layout)


def test_a_tensor_is_distributed_in_blocks(rank_pool: RankPool) -> None:
    results = rank_pool.run(2, distributed)
    assert [shape for shape, *_ in results] == [(64, 252), (1, 252)]
    for _, whole, layout in results:
        assert torch.equal(whole, torch.arange(65 * 252.0).view(65, 252))
        assert "S(0; 0:64 | 64:1)" in layout


def test_the_placement() -> None:
    assert RaggedShard(0, (64, 1)) == RunShard(0, [[(0, 64)], [(64, 1)]])
    assert repr(RaggedShard.units(1, 7, 3, 2)) == "RaggedShard(1, (2, 2, 3))"
    assert RaggedShard.blocks((8, 256), 2, 256).state(0) == 0
    for lengths in ((), (3, -1), (2, 1.5), (True, 1)):
        with pytest.raises(UnsupportedError, match="one number of elements for each rank, from 0 on"):
            RaggedShard(0, lengths)  # type: ignore[arg-type]
    for unit in (0, -4, 2.0, True, "row"):
        with pytest.raises(
            UnsupportedError, match=r"shards end at multiples of it, so it is an int from 1 on"
        ):
            RaggedShard.units(0, 8, 2, unit)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="replicate it"):
        RaggedShard.blocks((), 2, 256)


def test_the_unit_of_a_plan() -> None:
    plans = {
        unit: ParallelPlan(world_size=2, degrees={"zero": 2}, zero={"stage": 3, "unit": unit})
        for unit in (None, 256, "row", "tensor")
    }
    for unit, plan in plans.items():
        assert ParallelPlan.from_json(plan.to_json()) == plan
        assert ('"unit"' in plan.to_json()) is (unit is not None)
    assert len(set(plans.values())) == 4
    assert plans[None].diff(plans[256]) != []
    assert "in whole blocks of 256 elements" in plans[256].explain(200)
    assert "in whole tensors" in plans["tensor"].explain(200)
    for unit in (0, -3, 1.5, True, "rows", [64]):
        with pytest.raises(PlanError, match=r"zero\.unit is"):
            ParallelPlan(world_size=2, degrees={"zero": 2}, zero={"stage": 3, "unit": unit})
