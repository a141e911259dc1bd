"""Whole training steps on GPUs that are not there: nothing on the wrong device, no copy to the host, no wait for the GPU.

Two real ranks, whose messages go over gloo, hold fake tensors of cuda, whose collectives go over torch's fake process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.testing.fake_gpu import FakeGpu, fake_gpus
from meshwright_dtensor.testing.rank_pool import RankPool

PLANS: dict[str, dict[str, int]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2, "microbatches": 2},
    "ep": {"ep": 2},
}
MODELS = {"llama": "dp tp pp", "mixtral": "ep"}
CASES_OF = [(model, plan) for model, plans in MODELS.items() for plan in plans.split()]
LAYERS_OF_MIXTRAL = 2
WAITS = {"ep": {("to host", "moe/dispatch.py"): LAYERS_OF_MIXTRAL}}
"""Plan -> what waits for the GPU in a step: an all-to-all has to know how many rows it sends and receives."""


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    with RankPool(backend="cpu:gloo,cuda:fake") as pool:
        yield pool


def seen(rank: int, size: int, name: str, pins: dict[str, int]) -> tuple[list[str], list[str]]:
    """(what waits for the GPU in the third step, what is not on the GPU after it)."""
    with fake_gpus() as gpus:
        device = mw.init("cuda")
        case = CASES[name]
        model: Any = case.model()
        # torch multiplies groups of matrices in half precision on GPUs
        dtype = torch.bfloat16 if name == "mixtral" else torch.float32
        batch = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in case.batch().items()
        }
        plan = plan_once(model.to(dtype), batch, cluster="laptop-cpu", **pins)
        model.to(device)
        batch = {key: value.to(device) for key, value in batch.items()}
        model = mw.parallelize(model, plan, batch=batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            model(**batch).loss.backward()
            mw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        with gpus.watched() as waits:
            step()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors |= {
            f"state {i}": t for i, s in enumerate(optimizer.state.values()) for t in s.values() if t.dim()
        }
        elsewhere = [f"{key} on {t.device}" for key, t in tensors.items() if t.device != device]
        return [str(wait) for wait in waits], elsewhere


@pytest.mark.parametrize(("name", "plan"), CASES_OF)
def test_a_step_waits_for_nothing(gpu_ranks: RankPool, name: str, plan: str) -> None:
    for waits, elsewhere in gpu_ranks.run(2, seen, name, PLANS[plan]):
        assert not elsewhere
        for (what, place), count in WAITS.get(plan, {}).items():
            expected = [wait for wait in waits if wait.startswith(what) and place in wait]
            assert len(expected) == count
            waits = [wait for wait in waits if wait not in expected]
        assert not waits


def noticed(rank: int, size: int) -> list[tuple[str, str]]:
    """All that a loop can do to wait for a GPU."""
    with fake_gpus() as gpus:
        mw.init("cuda")
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = (x * 2).sum()
        y.register_hook(lambda gradient: gradient * gradient.item())
        with gpus.watched() as waits:
            _wait(gpus, x.detach())
            y.backward()
        with pytest.raises(RuntimeError, match=r"on the same device|two different devices"):
            torch.ones(3) + x
        return [(wait.what, wait.operation) for wait in waits]


def _wait(gpus: FakeGpu, x: torch.Tensor) -> None:
    x[0].item()
    bool(x[0] > 0)
    x.cpu()
    torch.empty(3).copy_(x)
    x.tolist()
    torch.tensor([1.0, 2.0], device="cuda")
    torch.ones(3).to("cuda")
    for depends_on_values in (x.nonzero, lambda: x[x > 0]):
        with pytest.raises(RuntimeError):
            depends_on_values()


def test_waits_are_noticed(gpu_ranks: RankPool) -> None:
    (result,) = gpu_ranks.run(1, noticed)
    reads, to_host, to_device = (
        ("read", "_local_scalar_dense"),
        ("to host", "_to_copy"),
        ("to device", "_to_copy"),
    )
    shapes = [("shape", "nonzero"), ("shape", "index")]
    copies = [to_host, ("to host", "copy_"), to_host, to_device, to_device]
    assert result == [reads, reads, *copies, *shapes, reads]
