"""ZeRO with shards that end at borders of units: the numbers of one device, whatever the unit, the stage and the other axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.plugins import PlacementSpec, discover
from meshwright_dtensor.sharding.intervals import IntervalShard, segmented_shard, single_owner_shard
from meshwright_dtensor.sharding.states import format_state
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import clip_grad_norm_, parallelize
from meshwright_parallel.strategies.zero import Zero
from meshwright_parallel.validation.checks import check_fit

STEPS = 3
COLUMNS = (ParameterRule(pattern="up.weight", placement={"tp": "S(0)"}),)
BY_HAND = (
    ParameterRule(pattern="up.weight", placement={"zero": "S(0; 0:7 | 7:123)"}),
    # the second rank has the first rows
    ParameterRule(pattern="down.weight", placement={"zero": "S(0; 30:70 | 0:30)"}),
    ParameterRule(pattern="down.bias", placement={"zero": "S(0; 0:0 | 0:100)"}),
)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "blocks, stage 1": (2, {"degrees": {"zero": 2}, "zero": {"stage": 1, "unit": 256}}),
    "blocks, stage 3, three ranks": (3, {"degrees": {"zero": 3}, "zero": {"stage": 3, "unit": 64}}),
    "tensors, stage 2": (2, {"degrees": {"zero": 2}, "zero": {"stage": 2, "unit": "tensor"}}),
    "rules, stage 3": (
        2,
        {"degrees": {"zero": 2}, "zero": {"stage": 3}, "parameters": BY_HAND},
    ),
    "bf16, blocks": (
        2,
        {
            "degrees": {"zero": 2},
            "zero": {"stage": 3, "unit": 256},
            "precision": {"parameters": "bf16"},
        },
    ),
    "rows, tp inside of zero": (
        4,
        {"degrees": {"zero": 2, "tp": 2}, "zero": {"stage": 3, "unit": "row"}, "parameters": COLUMNS},
    ),
    "rows, tp outside of zero": (
        4,
        {"degrees": {"tp": 2, "zero": 2}, "zero": {"stage": 2, "unit": "row"}, "parameters": COLUMNS},
    ),
}


class Net(nn.Module):
    """Two blocks' worth of odd matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(100, 130), nn.Linear(130, 100)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(x).relu())).square().mean()


def trained(rank: int, size: int, plan: dict[str, Any] | None) -> Any:
    """Losses, norms, parameters and the states of their optimizer; which parameters are shared in other parts than chunks."""
    torch.manual_seed(0)
    bf16 = plan is not None and "precision" in plan
    model = Net() if bf16 else Net().double()
    if plan is not None:
        parallelize(model, ParallelPlan(world_size=size, **plan))
    clip = nn.utils.clip_grad_norm_ if plan is None else clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = []
    for step in range(STEPS):
        generator = seeded(step)
        x = torch.randn(8, 100, generator=generator, dtype=torch.float64)
        loss = model(x.float() if bf16 else x)
        loss.backward()
        numbers += [loss.item(), clip(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    values: dict[str, Tensor] = {}
    ragged = set()
    for name, p in model.named_parameters():
        for key, x in {"": p, **optimizer.state[p]}.items():
            values[f"{name} {key}"] = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().double()
        if plan is not None and any(isinstance(s, IntervalShard) for s in p.global_layout.states):  # type: ignore[attr-defined]
            ragged.add(name)
    return torch.tensor(numbers, dtype=torch.float64), values, ragged


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_one_device(rank_pool: RankPool, name: str) -> None:
    ranks, plan = CASES[name]
    # in low precision, those of the same ranks with chunks
    exact = {**plan, "zero": {"stage": plan["zero"]["stage"]}} if "precision" in plan else None
    numbers, values, _ = rank_pool.run(1 if exact is None else ranks, trained, exact)[0]
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if exact is None else {"rtol": 1e-6, "atol": 1e-6}
    for mine, held, ragged in rank_pool.run(ranks, trained, plan):
        torch.testing.assert_close(mine, numbers, **tolerance)
        for key, x in held.items():
            torch.testing.assert_close(x, values[key], **tolerance, msg=key)
        # the control: these shards are not chunks
        outside = plan["degrees"].get("tp") and next(iter(plan["degrees"])) == "tp"
        assert ("up.weight" in ragged) is not bool(outside)


@pytest.mark.parametrize(
    ("axes", "placement", "wrong"),
    [
        # two intervals of what is gathered
        (
            {"zero": 2},
            {"zero": "S(0; 0:1,3:1 | 1:2)"},
            "shards of 'weight' along zero are gathered.*one interval of that value",
        ),
        # tp computes with rows 0:2 and 2:4, of which the first rank of zero has a part of each
        ({"zero": 2, "tp": 2}, {"zero": "S(0; 0:3 | 3:1)", "tp": "S(0)"}, "S\\(0; 0:3 | 3:1\\)"),
        ({"zero": 2}, {"zero": "S(0; 0:4 | 4:1)"}, "its intervals cover 5 rows on 2 ranks"),
    ],
)
def test_intervals_that_cannot_be_gathered_are_refused(axes: Any, placement: Any, wrong: str) -> None:
    rules = (ParameterRule(pattern="weight", placement=placement),)
    size = len(axes) * 2
    plan = ParallelPlan(world_size=size, degrees=axes, zero={"stage": 1}, parameters=rules)
    with pytest.raises(PlanError, match=wrong):
        check_fit(nn.Linear(5, 4), plan, None, discover(), size)


def test_a_unit_that_another_axis_cuts_gives_chunks_of_another_dim() -> None:
    """Of 130 rows of 100 elements, 65 are on each rank of tp: no whole blocks of 256."""
    plan = ParallelPlan(world_size=4, degrees={"zero": 2, "tp": 2}, zero={"stage": 3, "unit": 256})
    assert Zero().parameter_state_given("w", (130, 100), plan, 2, {"tp": 0}) == 1
    # 128 rows are, and each rank of zero has half of both
    state = Zero().parameter_state_given("w", (256, 100), plan, 2, {"tp": 0})
    assert format_state(state) == "S(0; 128+128)"
    # columns of tp leave rows to zero
    assert (
        format_state(Zero().parameter_state_given("w", (65, 100), plan, 2, {"tp": 1})) == "S(0; 0:64 | 64:1)"
    )
    # parts of a fused projection, and one rank's expert: their intervals cut units too
    for intervals in (segmented_shard(0, (86, 170), 2), single_owner_shard(0, 256, 2, 1)):
        assert Zero().parameter_state_given("w", (256, 100), plan, 2, {"tp": intervals}) == 1
        assert Zero().parameter_state_given("w", (256,), plan, 2, {"tp": intervals}) == "X"
    # small, and less than two units
    assert Zero().parameter_state_given("w", (40, 100), plan, 2, {}) == "X"


def test_the_placement_is_registered_by_hook() -> None:
    placement = discover().all(PlacementSpec)["ragged"].load()
    assert placement.blocks((65, 100), 2, 256).lengths == (64, 1)
