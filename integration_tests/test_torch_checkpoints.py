"""What stock FSDP2 has saved with torch.distributed.checkpoint goes on in tp2 x dp2 here, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_reshard import plan_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool


def sharded(seed: int) -> tuple[Any, Any]:
    """Llama as stock FSDP2 has it."""
    torch.manual_seed(seed)
    model: Any = CASES["llama"].model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def steps(model: Any, optimizer: Any) -> list[float]:
    """Losses of two steps on the whole batch, without dropout, which FSDP2 draws otherwise."""
    losses = []
    model.eval()
    for _ in range(2):
        loss = model(**CASES["llama"].batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def digests(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    def whole(x: Any) -> torch.Tensor:
        return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()

    values = {name: whole(x) for name, x in model.state_dict(keep_vars=True).items()}
    for name, p in model.named_parameters():
        values.update({f"{name}/{key}": whole(x) for key, x in optimizer.state[p].items()})
    return values


def fsdp_saves(rank: int, size: int, path: str) -> tuple[Any, list[float]]:
    model, optimizer = sharded(0)
    steps(model, optimizer)
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optim": states}, checkpoint_id=path)
    return digests(model, optimizer), steps(model, optimizer)


def ours_goes_on(
    rank: int, size: int, plan: ParallelPlan, path: str, back: str
) -> tuple[Any, Any, list[float]]:
    torch.manual_seed(1)
    model: Any = CASES["llama"].model()
    mw.parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    mw.load(path, model=model, optimizer=optimizer, backend="dcp")
    loaded = digests(model, optimizer)
    losses = steps(model, optimizer)
    mw.save(back, model=model, optimizer=optimizer, backend="dcp")
    return loaded, digests(model, optimizer), losses


def fsdp_loads(rank: int, size: int, path: str) -> Any:
    model, optimizer = sharded(2)
    parameters, states = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optim": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
    return digests(model, optimizer)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_from_fsdp2_and_back(rank_pool: RankPool, tmp_path: Path) -> None:
    there, back = str(tmp_path / "torch"), str(tmp_path / "back")
    saved, went_on = rank_pool.run(2, fsdp_saves, there)[0]
    plan = plan_of("llama", 4, {"dp": 2, "tp": 2})
    told = rank_pool.run(4, ours_goes_on, plan, there, back)
    for loaded, _, losses in told:
        assert equal(saved, loaded)
        assert max(abs(a - b) / b for a, b in zip(losses, went_on, strict=True)) < 1e-5
    for values in rank_pool.run(2, fsdp_loads, back):
        assert equal(told[0][1], values)
