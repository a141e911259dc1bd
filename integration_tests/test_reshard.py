"""`mw.reshard`: a run goes from plan to plan in memory, and is none the wiser."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_checkpoints import trained, values
from torch.distributed import FileStore  # type: ignore[attr-defined]
from zoo import CASES

import meshwright as mw
from meshwright.resharding import _share_random_state
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

ROUTE: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"dp": 2, "tp": 2},
        {"zero": 3, "dp": 4, "tp": 1},
        {"pp": 2, "tp": 2},
        {"tp": 4, "sequence_parallel": True},
    ],
    "mixtral": [{"dp": 1, "ep": 2, "tp": 2}, {"zero": 1, "dp": 2, "tp": 2}],
}


def plan_of(name: str, size: int, pins: dict[str, Any]) -> ParallelPlan:
    plan = mw.plan(CASES[name].model(), CASES[name].batch(), world_size=size, cluster="laptop-cpu", **pins)
    assert isinstance(plan, ParallelPlan)
    assert (plan.zero is not None and plan.degrees["zero"] == pins["dp"]) == ("zero" in pins)
    return plan


def built(name: str, plan: ParallelPlan | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = CASES[name].model()
    if plan is not None:
        mw.parallelize(model, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def alone(rank: int, size: int, name: str, rounds: int) -> list[list[float]]:
    model, optimizer = built(name, None)
    return [trained(model, optimizer, name, 1) for _ in range(rounds)]


def goes_around(rank: int, size: int, name: str, route: list[ParallelPlan]) -> list[list[float]]:
    model, optimizer = built(name, route[0])
    losses = [trained(model, optimizer, name, 1)]
    for plan in route[1:]:
        model.eval()
        whole = max(model.parallel_plan.degrees.get("pp", 1), plan.degrees.get("pp", 1)) == 1
        before = values(model, optimizer) if whole else {}
        assert mw.reshard(model, optimizer, plan) == (model, optimizer)
        assert model.parallel_plan == plan and not model.training
        model.train()
        after = values(model, optimizer) if whole else {}
        assert before.keys() == after.keys()
        assert not [n for n in before if not torch.equal(before[n], after[n])]
        losses.append(trained(model, optimizer, name, 1))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ROUTE))
def test_a_run_goes_around(name: str, rank_pool: RankPool) -> None:
    route = [plan_of(name, 4, pins) for pins in ROUTE[name]]
    (want,) = rank_pool.run(1, alone, name, len(route))
    for losses in rank_pool.run(4, goes_around, name, route):
        close(losses, want)


def close(losses: list[list[float]], want: list[list[float]]) -> None:
    assert torch.tensor(losses).sub(torch.tensor(want)).abs().max() < 1e-5 * max(map(max, want))


def world(rank: int, size: int, path: Path) -> None:
    """A new default process group, as a launcher makes one that has got or lost ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=FileStore(str(path), size), rank=rank, world_size=size)


def grows_and_shrinks(
    rank: int, size: int, folder: Path, two: ParallelPlan, four: ParallelPlan, last: ParallelPlan
) -> list[list[float]]:
    dist.destroy_process_group()
    torch.manual_seed(rank)  # a rank that joins has other values, and another random state
    model: Any = CASES["gpt2"].model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=99.0)
    losses = []
    if rank < 2:
        world(rank, 2, folder / "two")
        model, optimizer = built("gpt2", two)
        losses.append(trained(model, optimizer, "gpt2", 1))
    world(rank, 4, folder / "four")
    mw.reshard(model, optimizer, four)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    losses.append(trained(model, optimizer, "gpt2", 1))
    mw.reshard(model, optimizer, last)
    assert dist.get_world_size() == (2 if rank < 2 else 4)
    if rank < 2:
        losses.append(trained(model, optimizer, "gpt2", 1))
    else:
        assert not optimizer.state and not optimizer.param_groups[0]["params"]
    world(rank, size, folder / "end")  # what the pool knows
    return losses


@pytest.mark.slow
def test_the_world_grows_and_shrinks(rank_pool: RankPool, tmp_path: Path) -> None:
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}),
        (4, {"tp": 2, "pp": 2}),
        (2, {"zero": 3, "dp": 2, "tp": 1}),
    ]
    plans = [plan_of("gpt2", size, pins) for size, pins in layouts]
    (want,) = rank_pool.run(1, alone, "gpt2", 3)
    losses = rank_pool.run(4, grows_and_shrinks, tmp_path, *plans, timeout=120)
    close(losses[0], want)
    close(losses[1], want)
    close(losses[2], want[1:2])
    close(losses[3], want[1:2])


def refused(rank: int, size: int, plan: ParallelPlan, good: ParallelPlan) -> dict[str, str]:
    model, optimizer = built("gpt2", good)
    told = {}

    def refuse(what: str, *arguments: Any) -> None:
        with pytest.raises(MeshwrightError) as caught:
            mw.reshard(*arguments)
        told[what] = str(caught.value)

    refuse("no plan", CASES["gpt2"].model(), None, good)
    model(**CASES["gpt2"].batch()).loss.backward()
    refuse("gradient", model, optimizer, good)
    optimizer.zero_grad()
    trained(model, optimizer, "gpt2", 1)
    before = values(model, optimizer)
    refuse("other model", model, optimizer, plan)
    refuse("ranks", model, optimizer, good.replace(world_size=8, degrees={"dp": 8}))
    refuse(
        "plans",
        model,
        optimizer,
        good.replace(sequence_parallel=True, world_size=2 + 6 * rank) if rank else good,
    )
    refuse("one optimizer", model, optimizer if rank else None, good)
    refuse("other optimizer", model, torch.optim.AdamW(CASES["gpt2"].model().parameters()), good)
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
    refuse("options", model, optimizer, good)
    optimizer.param_groups[0]["lr"] = 1e-3
    assert all(torch.equal(before[n], v) for n, v in values(model, optimizer).items())
    trained(model, optimizer, "gpt2", 1)  # it goes on as if nothing had been
    return told


@pytest.mark.slow
def test_what_is_refused_changes_nothing(rank_pool: RankPool) -> None:
    told = rank_pool.run(2, refused, plan_of("llama", 2, {"tp": 2}), plan_of("gpt2", 2, {"tp": 2}))[0]
    assert "is on no plan; call parallelize()" in told["no plan"]
    assert "has a gradient" in told["gradient"] and "zero_grad" in told["gradient"]
    assert "provenance.model" in told["other model"]
    assert "there are 2 ranks" in told["ranks"]
    assert "different plans: from rank 0 to rank 1, " in told["plans"]
    assert "sequence_parallel: false -> true" in told["plans"] and "world_size: 2 -> 8" in told["plans"]
    assert "an optimizer on ranks 1, and none on ranks 0;" in told["one optimizer"]
    assert "is not a parameter of the model" in told["other optimizer"]
    assert "group 0 of the optimizer has lr=0.002 on rank 1, and lr=0.001 on rank 0" in told["options"]


def draws_alike(rank: int, size: int) -> tuple[list[int], list[int]]:
    """The random states after rank 1 has given its own, on a device that only seems to be there."""
    torch.manual_seed(rank)
    cuda = torch.full((16,), rank, dtype=torch.uint8)
    generator = SimpleNamespace(get_state=lambda: cuda, set_state=cuda.copy_)
    with patch.object(torch.cuda, "default_generators", (generator,)):
        _share_random_state(Ranks(), [False, True], torch.device("cuda", 0))
    return torch.rand(3).tolist(), cuda.tolist()


def test_a_rank_that_joins_draws_alike_on_its_device_too(rank_pool: RankPool) -> None:
    (here, cuda), (there, other) = rank_pool.run(2, draws_alike)
    assert here == there
    assert cuda == other == [1] * 16
