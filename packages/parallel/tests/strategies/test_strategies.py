"""The strategies: what they tell the planner, how they are registered, and that none of it needs torch."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.strategy import (
    Link,
    ModelSizes,
    ParameterSize,
    SearchRequest,
    StepContext,
    Strategy,
    divisors,
)
from meshwright_parallel.strategies.data import BUCKET_BYTES, Data
from meshwright_parallel.strategies.tensor import Tensor, TensorOuter
from meshwright_parallel.strategies.zero import Zero

LINK = Link("cable", latency_s=1e-5, bandwidth_Bps=1e9)


def test_divisors() -> None:
    for n in range(1, 200):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_ring_times() -> None:
    assert LINK.seconds("all_reduce", 1e9, 1) == 0.0
    assert LINK.seconds("all_gather", 1e9, 4) == pytest.approx(0.75 + 3e-5)
    assert LINK.seconds("reduce_scatter", 1e9, 4) == LINK.seconds("all_gather", 1e9, 4)
    assert LINK.seconds("all_reduce", 1e9, 4) == 2 * LINK.seconds("all_gather", 1e9, 4)
    assert LINK.seconds("all_to_all", 1e9, 4) == pytest.approx(0.75 / 4 + 3e-5)


def test_degrees() -> None:
    assert list(Data().degrees(SearchRequest(world_size=12, batch_size=8))) == [1, 2, 4]
    assert list(Tensor().degrees(SearchRequest(world_size=12, batch_size=8))) == [1, 2, 3, 4, 6, 12]
    assert Data().batch_factor(4) == 4
    assert Tensor().batch_factor(4) == 1
    assert Data().order < Tensor().order


def test_outer_tensor_axis_is_used_where_it_is_pinned() -> None:
    """Without a pin it has one degree, so that plans and planning time stay the same."""
    outer = TensorOuter()
    assert list(outer.degrees(SearchRequest(world_size=12, batch_size=8))) == [1]
    pinned = SearchRequest(world_size=12, batch_size=8, pins={"tp_outer": 3})
    assert list(outer.degrees(pinned)) == [1, 2, 3, 4, 6, 12]
    assert list(outer.degrees(replace(pinned, pins={}, exhaustive=True))) == [1, 2, 3, 4, 6, 12]
    assert Data().order < outer.order < Tensor().order and outer.optional and outer.placement_search


def test_data_cost() -> None:
    none = Data().cost(SearchRequest(8, 8, sizes=ModelSizes(gradient_bytes=10**9)), 1, LINK)
    assert (none.exposed_seconds, none.collectives) == (0.0, ())
    request = SearchRequest(
        8, 8, sizes=ModelSizes(gradient_bytes=40 * BUCKET_BYTES), step=StepContext(backward_seconds=0.0)
    )
    bare = Data().cost(request, 4, LINK)
    assert bare.overlapped_seconds == 0.0
    assert bare.exposed_seconds == pytest.approx(40 * LINK.seconds("all_reduce", BUCKET_BYTES, 4))
    (use,) = bare.collectives
    assert (use.kind, use.count, use.nbytes, use.phase) == ("all_reduce", 40, BUCKET_BYTES, "backward")
    long = Data().cost(
        SearchRequest(
            8, 8, sizes=ModelSizes(gradient_bytes=40 * BUCKET_BYTES), step=StepContext(backward_seconds=100.0)
        ),
        4,
        LINK,
    )
    last_bucket = LINK.seconds("all_reduce", BUCKET_BYTES, 4)
    assert long.exposed_seconds == pytest.approx(last_bucket)
    assert long.exposed_seconds + long.overlapped_seconds == pytest.approx(bare.exposed_seconds)
    single = Data().cost(
        SearchRequest(8, 8, sizes=ModelSizes(gradient_bytes=1000), step=StepContext(backward_seconds=100.0)),
        4,
        LINK,
    )
    assert single.overlapped_seconds == 0.0  # a single bucket starts when the backward pass has ended


def test_bucket_memory_stays_on_a_cpu_only() -> None:
    """On a CPU the memory of all-reduce buckets stays between steps; on accelerators none does."""
    small, large = (ParameterSize((rows, 1024), (), (4, 4), True) for rows in (512, 1024))
    block, rest = (large, small), (replace(small, trainable=False), replace(large, itemsize=(4, 2)))
    request = SearchRequest(
        2, 2, sizes=ModelSizes(gradient_bytes=22 * 2**20, units=(block, block, block, rest))
    )
    assert Data().cost(request, 2, LINK).persistent_gradients == 0.0
    on_cpu = Data().cost(replace(request, step=replace(request.step, accelerated=False)), 2, LINK)
    assert (on_cpu.persistent_gradients, on_cpu.bucket_bytes) == (
        pytest.approx((3 * 2 + 4) / 22),
        BUCKET_BYTES,
    )
    costs = [
        Zero().cost(
            replace(
                request,
                sizes=replace(request.sizes, units=(block,)),
                step=replace(request.step, zero_stage=stage),
            ),
            2,
            LINK,
        )
        for stage in (1, 2, 3)
    ]
    assert not any(cost.persistent_gradients or cost.bucket_bytes for cost in costs)
    assert costs[0] == costs[1]  # both free whole gradients as they are reduce-scattered


def test_stage_3_keeps_two_blocks_unsharded() -> None:
    """One block, the next with the row that it is gathered from, and the parameters outside of blocks."""
    large, small = (ParameterSize((rows, 1024), (), (4, 2), True) for rows in (512, 256))
    request = SearchRequest(
        4, 4, step=StepContext(zero_stage=3), sizes=ModelSizes(units=((large,), (small,), (large,), (small,)))
    )
    whole = 2**20 * (2 + 1 + 2 + 1)
    held = 2**20 * (2 * 1 + 1 / 4 + 0.5)
    assert Zero().cost(request, 4, LINK).parameters == pytest.approx(1 / 4 + held / whole)


@pytest.mark.parametrize(("bound", "part"), [(0.5, 1.0), (0.999, None), (50.0, 0.0)])
def test_compute_that_waits_for_collectives_loses_nothing_to_them(bound: float, part: float | None) -> None:
    """`bound`: the backward pass relative to the communication; `part`: of the loss that it would have waited anyway."""
    total = 40 * LINK.seconds("all_reduce", BUCKET_BYTES, 4)
    step = StepContext(backward_seconds=bound * total, interference=0.2)
    cost = Data().cost(
        SearchRequest(8, 8, sizes=ModelSizes(gradient_bytes=40 * BUCKET_BYTES), step=step), 4, LINK
    )
    loss = 0.2 * cost.overlapped_seconds
    if part is None:
        assert 0 < cost.slack_seconds < loss
    else:
        assert cost.slack_seconds == pytest.approx(part * loss)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlapped_seconds_are_never_negative(stage: int) -> None:
    """Without compute all communication is exposed, to the last bit."""
    dice = random.Random(stage)
    request = SearchRequest(4, 4, step=StepContext(zero_stage=stage, accelerated=False))
    for _ in range(500):
        sizes = [ParameterSize((4 * dice.randint(256, 999), 1024), (), (4, 4), True) for _ in range(3)]
        units = tuple(tuple(dice.choices(sizes, k=dice.randint(1, 9))) for _ in range(2))
        assert (
            Zero()
            .cost(replace(request, sizes=replace(request.sizes, units=units)), 4, LINK)
            .overlapped_seconds
            >= 0.0
        )


def test_states() -> None:
    data, tensor = Data(), Tensor()
    assert data.input_state("ids", (8, 5), 8, 4) == 0
    assert data.input_state("ids", (7, 5), 7, 4) == "I"  # does not divide
    assert data.input_state("table", (5, 5), 8, 4) == "I"  # not the batch
    assert data.input_state("scalar", (), 8, 4) == "I"
    assert data.input_state("ids", (8,), None, 4) == "I"
    assert tensor.input_state("ids", (8, 5), 8, 4) == "I"
    plan = ParallelPlan(
        world_size=4,
        degrees={"dp": 2, "tp": 2},
        parameters=(
            ParameterRule(pattern="*.up.*", placement={"tp": "S(0)"}),
            ParameterRule(pattern="*", placement={}),
        ),
    )
    assert tensor.parameter_state("a.up.weight", (4, 4), plan, 2) == 0
    assert tensor.parameter_state("a.down.weight", (4, 4), plan, 2) == "I"
    assert data.parameter_state("a.up.weight", (4, 4), plan, 2) == "X"  # its gradient is summed by the engine


def test_registered_through_the_entry_point() -> None:
    host = discover()
    assert not host.problems
    strategies = host.strategies()
    for name, axis, target in (("data", "dp", Data), ("zero", "zero", Zero), ("tensor", "tp", Tensor)):
        assert strategies[name].record.axis == axis
        assert strategies[name].distribution == "meshwright-parallel"
        strategy = strategies[name].load()()
        assert type(strategy) is target
        assert isinstance(strategy, Strategy)
        assert (strategy.name, strategy.axis) == (name, axis)


@pytest.mark.parametrize(
    ("shape", "ranks"), [((20480, 81920), 1120), ((4096, 14336), 640), ((20480, 81920), 3072)]
)
def test_parameter_is_sharded_unevenly_where_no_dim_divides(shape: tuple[int, int], ranks: int) -> None:
    matrix = ParameterSize(shape, (), (4, 2), True)
    cost = Zero().cost(
        SearchRequest(
            ranks, ranks, step=StepContext(zero_stage=3), sizes=ModelSizes(units=((matrix,), (matrix,)))
        ),
        ranks,
        LINK,
    )
    assert {use.kind for use in cost.collectives} == {"all_gather", "reduce_scatter"}
    # one shard per rank, with at most a twentieth of padding
    assert 1 / ranks <= cost.optimizer <= 1.05 / ranks


def test_strategies_import_without_torch() -> None:
    code = (
        "import sys, meshwright_parallel, meshwright_parallel.plugin, meshwright_parallel.strategies.data, "
        "meshwright_parallel.strategies.context, meshwright_parallel.strategies.tensor, "
        "meshwright_parallel.strategies.zero; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_reduced_gradient_makes_a_step_slower() -> None:
    large = ParameterSize((4096, 4096), (), (4, 4), True)
    small = ParameterSize((3,), (), (4, 4), True)  # three elements for four ranks

    def step(last: tuple[ParameterSize, ...]) -> tuple[float, set[str]]:
        request = SearchRequest(
            8,
            8,
            step=StepContext(zero_stage=2, forward_seconds=100.0, backward_seconds=100.0),
            sizes=ModelSizes(units=((large,), last)),
        )
        cost = Zero().cost(request, 4, LINK)
        return cost.exposed_seconds, {use.kind for use in cost.collectives}

    sharded, kinds = step((large,))
    # exposed: the gathers of the first block and of the parameters outside of blocks, and the last reduce-scatter
    assert "all_reduce" not in kinds
    assert sharded == pytest.approx(3 * LINK.seconds("all_gather", 4 * 4096**2, 4))
    with_small, kinds = step((large, small))
    assert "all_reduce" in kinds and with_small > sharded


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_gather_of_a_pipeline_stage_overlaps_with_its_own_microbatch(microbatches: int, stage: int) -> None:
    """Gradients are reduced after the last backward, even of a single microbatch."""
    block = ParameterSize((4096, 4096), (), (4, 4), True)
    units = ((block,),) * 5
    request = SearchRequest(
        8,
        8,
        step=StepContext(
            zero_stage=stage, forward_seconds=100.0, backward_seconds=100.0, microbatches=microbatches
        ),
        sizes=ModelSizes(units=units),
    )
    gather = LINK.seconds("all_gather", 4 * 4096**2, 4)
    staged = Zero().cost(replace(request, step=replace(request.step, stages=1)), 4, LINK)
    times = microbatches if stage == 3 else 1
    backward = times if stage == 3 else 0  # the first gather of each backward
    reductions = 5 * LINK.seconds("reduce_scatter", 4 * 4096**2, 4)
    assert staged.exposed_seconds == pytest.approx(reductions + 2 * gather * times + gather * backward)
    assert staged.stall.exposed == pytest.approx(gather * (2 if stage == 3 else 1))
    assert staged.stall.microbatches == times
    assert Zero().cost(request, 4, LINK).exposed_seconds < staged.exposed_seconds
    # without compute all communication is exposed, and no more
    alone = Zero().cost(
        replace(request, step=replace(request.step, stages=3, forward_seconds=0.0, backward_seconds=0.0)),
        4,
        LINK,
    )
    assert alone.exposed_seconds == pytest.approx(
        sum(use.count * LINK.seconds(use.kind, use.nbytes, 4) for use in alone.collectives)
    )
    assert alone.overlapped_seconds == pytest.approx(0.0, abs=1e-12)
