"""Optimizers with states in blocks of elements: each block is one of one device, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_optimizer import TENSOR_RULES, BlockMomentum, OddNet, give_gradients
from torch import Tensor

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.boxes import region_of
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize, step_whole_blocks
from meshwright_parallel.optim.block_layouts import whole_block_states

STEPS = 3
TWO_AXES: dict[str, Any] = {"degrees": {"zero": 2, "tp": 2}, "parameters": TENSOR_RULES}
# plan, ranks, and whether parameters have to be gathered for a step in blocks of 64
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "dp2": ({"degrees": {"dp": 2}}, 2, False),
    "zero3 in chunks": ({"degrees": {"zero": 2}, "zero": {"stage": 3}}, 2, True),
    "zero1": ({"degrees": {"zero": 2}, "zero": {"stage": 1, "unit": 64}}, 2, False),
    "zero2 in blocks of 256": ({"degrees": {"zero": 2}, "zero": {"stage": 2, "unit": 256}}, 2, False),
    "zero3 on three": ({"degrees": {"zero": 3}, "zero": {"stage": 3, "unit": 64}}, 3, False),
    "zero3 in tensors": ({"degrees": {"zero": 2}, "zero": {"stage": 3, "unit": "tensor"}}, 2, False),
    "tp2 x zero2": ({**TWO_AXES, "zero": {"stage": 2, "unit": 64}}, 4, True),
}


def stepped(rank: int, size: int, plan: dict[str, Any] | None) -> Any:
    """After some steps: whole values and states by name, collectives of a step, attributes of the optimizer, its local states."""
    torch.manual_seed(0)
    model = OddNet()
    if plan is not None:
        parallelize(model, ParallelPlan(world_size=size, **plan))
    optimizer = step_whole_blocks(BlockMomentum(model.parameters()), 64, ["scale"])
    for step in range(STEPS):
        give_gradients(model, step)
        with communication() as log:
            optimizer.step()
    values: dict[str, Tensor] = {}
    held = 0
    for name, p in model.named_parameters():
        for key, x in {"": p, **optimizer.state.get(p, {})}.items():
            if isinstance(x, Tensor):
                held += x.detach().to_local().numel() if key == "codes" and plan is not None else 0
                values[f"{name}/{key}"] = (x.full_tensor() if plan is not None else x).detach()
    return values, len(log.events), (optimizer.steps, optimizer.param_groups[0]["calls"]), held


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_those_of_one_device(rank_pool: RankPool, name: str) -> None:
    plan, ranks, gathers = CASES[name]
    exact = rank_pool.run(1, stepped, None)[0]
    for values, collectives, counts, _ in rank_pool.run(ranks, stepped, plan):
        assert {key for key, x in values.items() if not torch.equal(x, exact[0][key])} == set()
        assert values.keys() == exact[0].keys()
        assert bool(collectives) == gathers
        assert counts == exact[2] == (STEPS, STEPS)


def test_states_are_shared_by_the_ranks(rank_pool: RankPool) -> None:
    """Ranks together hold each state of a large parameter once, where shards end at borders of blocks."""
    codes = [x.numel() for key, x in rank_pool.run(1, stepped, None)[0][0].items() if "codes" in key]
    ragged = [held for *_, held in rank_pool.run(2, stepped, CASES["zero1"][0])]
    # small ones that cannot be shared evenly are on every rank
    assert sum(codes) <= sum(ragged) <= sum(codes) + sum(n for n in codes if n < 4096)
    assert max(ragged) < 0.6 * sum(codes)


def unmarked(rank: int, size: int) -> list[bool]:
    """Whether scales of parts are those of the whole, of an optimizer that steps local parts itself."""
    torch.manual_seed(0)
    equal = []
    for unit in (None, 64):
        model = parallelize(
            OddNet(), ParallelPlan(world_size=size, degrees={"zero": 2}, zero={"stage": 3, "unit": unit})
        )
        give_gradients(model, 0)
        p = model.up.weight  # type: ignore[union-attr]
        whole = p.grad.full_tensor().flatten()  # type: ignore[union-attr]
        scales = {float(b.abs().max()) for b in whole.split(64)}
        mine = p.grad.to_local().flatten()  # type: ignore[union-attr]
        equal.append(all(float(b.abs().max()) in scales for b in mine.split(64)))
    return equal


def test_local_parts_are_whole_blocks(rank_pool: RankPool) -> None:
    """With a unit, an optimizer of anyone's finds whole blocks in its local parts; the control: without one it does not."""
    chunks, units = zip(*rank_pool.run(2, unmarked), strict=True)
    assert not all(chunks)
    assert all(units)


def test_layouts_of_whole_blocks() -> None:
    """Shards along an axis are gathered only where a block is on several ranks, those that leave a rank least first."""
    # zero cuts rows at blocks; tp cuts columns, and each row is one block
    assert whole_block_states((8, 64), (2, 2), (0, 1), 64) == ((0, "I"), (0, "I"))
    assert whole_block_states((8, 64), (2,), (0,), 64)[0] == (0,)
    assert whole_block_states((5, 64), (2,), (0,), 128)[0] == ("I",)
    assert whole_block_states((6, 64), (2, 3), (1, 0), 128) == (("I", 0), ("I", 0))
    assert whole_block_states((), (2,), ("I",), 64)[0] == ("I",)
    # six rows of two blocks each, over ranks with three and two rows
    states, of_blocks = whole_block_states((5, 128), (2,), (0,), 64)
    assert states == (0,)
    assert [region_of((10,), (2,), (rank,), of_blocks) for rank in range(2)] == [(((0, 6),),), (((6, 4),),)]


def test_what_does_not_fit_is_refused() -> None:
    optimizer = BlockMomentum([torch.nn.Parameter(torch.ones(4))])
    for block in (0, -64, 1.5, True, "64"):
        with pytest.raises(UsageError, match=r"give the elements of a block, an int from 1 on"):
            step_whole_blocks(optimizer, block)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a list of names"):
        step_whole_blocks(optimizer, 64, "scale")
    with pytest.raises(UsageError, match="takes an optimizer, not list"):
        step_whole_blocks([], 64)  # type: ignore[arg-type]
