"""ZeRO with parameters that one rank owns: the numbers of one device, and gradients that go to the owner alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.strategies.zero import Zero
from meshwright_parallel.validation.checks import check_fit

WIDTH, STEPS = 520, 2
OWNERS = {"up.weight": 1, "down.weight": 0, "small.weight": 1, "small.bias": 0}
COLUMNS = (
    ParameterRule(pattern="up.weight", placement={"tp": "S(0)"}),
    ParameterRule(pattern="down.weight", placement={"tp": "S(1)"}),
)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 3": (2, {"degrees": {"zero": 2}, "zero": {"stage": 3, "owners": OWNERS}}),
    "replicas outside": (4, {"degrees": {"dp": 2, "zero": 2}, "zero": {"stage": 1, "owners": OWNERS}}),
    "tp inside": (
        4,
        {
            "degrees": {"zero": 2, "tp": 2},
            "zero": {"stage": 2, "owners": OWNERS, "unit": 256},
            "parameters": COLUMNS,
        },
    ),
    "bf16": (
        2,
        {
            "degrees": {"zero": 2},
            "zero": {"stage": 3, "owners": OWNERS},
            "precision": {"parameters": "bf16"},
        },
    ),
}


class Net(nn.Module):
    """Two matrices that are sent alone, and small parameters; one has no gradient in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.small = nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.up(x).relu()
        return self.small(x + (y if step % 2 else self.down(y))).square().mean()


def trained(rank: int, size: int, plan: dict[str, Any] | None) -> Any:
    """Losses, parameters and states; elements of each parameter on this rank; bytes of the collectives of the last step."""
    torch.manual_seed(0)
    bf16 = plan is not None and "precision" in plan
    model: Any = Net() if bf16 else Net().double()
    if plan is not None:
        parallelize(model, ParallelPlan(world_size=size, **plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in (1, *range(STEPS), 1):
        x = torch.randn(8, WIDTH, generator=seeded(step), dtype=torch.float32 if bf16 else torch.float64)
        optimizer.zero_grad()
        with communication() as log:
            # added up over two passes
            for _ in range(2):
                loss = model(x, step)
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    values = {}
    for name, p in model.named_parameters():
        for key, x in {"": p, **optimizer.state[p]}.items():
            values[f"{name} {key}"] = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().double()
    here = {n: p.detach().to_local().numel() for n, p in model.named_parameters()} if plan is not None else {}
    return torch.tensor(losses, dtype=torch.float64), values, here, log.nbytes()


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_one_device(rank_pool: RankPool, name: str) -> None:
    ranks, plan = CASES[name]
    # in low precision, those of the same ranks with chunks
    exact = {**plan, "zero": {"stage": plan["zero"]["stage"]}} if "precision" in plan else None
    losses, values, chunks, _ = rank_pool.run(1 if exact is None else ranks, trained, exact)[0]
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if exact is None else {"rtol": 1e-6, "atol": 1e-6}
    results = rank_pool.run(ranks, trained, plan)
    for mine, held, _, _ in results:
        torch.testing.assert_close(mine, losses, **tolerance)
        for key, x in held.items():
            torch.testing.assert_close(x, values[key], **tolerance, msg=key)
    if exact is not None:
        # the control: in chunks a rank has half
        assert chunks["down.weight"] == WIDTH * WIDTH // 2
    parts = plan["degrees"].get("tp", 1)
    has = [Counter(here) for _, _, here, _ in results]
    place = [(rank // plan["degrees"].get("tp", 1)) % 2 for rank in range(ranks)]
    for rank, here in enumerate(has):
        assert here["up.weight"] == (WIDTH * WIDTH // parts if place[rank] == 1 else 0)
        assert here["down.weight"] == (WIDTH * WIDTH // parts if place[rank] == 0 else 0)


def test_a_gradient_is_sent_to_its_owner_alone(rank_pool: RankPool) -> None:
    """Large ones by a reduce; small ones in rows, of which the longest counts for each rank."""
    for *_, nbytes in rank_pool.run(2, trained, CASES["stage 3"][1]):
        # both matrices in two passes; down had no gradient, which ranks do not know of each other before
        whole = 2 * 2 * 8 * WIDTH * WIDTH
        assert nbytes["zero", "backward", "reduce"] == whole
        rows = nbytes["zero", "backward", "reduce_scatter"]
        assert rows <= 2 * 2 * 8 * (WIDTH * 9 + WIDTH // 2 + 9 + 5)
        assert nbytes["zero", "forward", "broadcast"] == whole


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"owners": {"weight": 2}}, r"zero.owners.weight is 2: zero has 2 ranks"),
        ({"owners": {"wieght": 0}}, r"zero.owners.wieght is 0: this Linear has no such parameter.*weight"),
    ],
)
def test_owners_that_do_not_fit_are_refused(change: Any, wrong: str) -> None:
    plan = ParallelPlan(world_size=2, degrees={"zero": 2}, zero={"stage": 1, **change})
    with pytest.raises(PlanError, match=wrong):
        check_fit(nn.Linear(5, 4), plan, None, discover(), 2)


def test_an_owner_of_what_others_shard_or_a_rule_places_is_refused() -> None:
    rules = (ParameterRule(pattern="weight", placement={"zero": "S(0; 0:4 | 4:0)"}),)
    plan = ParallelPlan(
        world_size=2, degrees={"zero": 2}, zero={"stage": 1, "owners": {"weight": 0}}, parameters=rules
    )
    with pytest.raises(PlanError, match="the rule 'weight' places this parameter along zero too"):
        check_fit(nn.Linear(5, 4), plan, None, discover(), 2)
    rules = (ParameterRule(pattern="weight", placement={"tp": "S(0)"}),)
    plan = ParallelPlan(
        world_size=4,
        degrees={"zero": 2, "tp": 2},
        zero={"stage": 1, "owners": {"weight": 0}},
        parameters=rules,
    )
    check_fit(nn.Linear(5, 4), plan, None, discover(), 4)
    with pytest.raises(PlanError, match="other axes shard every dim of 'weight'"):
        Zero().parameter_state_given("weight", (4,), plan, 2, {"tp": 0})
