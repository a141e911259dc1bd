"""What a step holds goes when nothing needs it: no tensor waits for the garbage collector, whose time nobody knows."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch import nn
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

ALONE = {"dp": 1, "tp": 1, "pp": 1, "cp": 1}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp x tp": ("llama", {"dp": 2, "tp": 2}),
    "zero3": ("gpt2", {"dp": 4, "zero": 3}),
    "bf16": ("llama", {"dp": 4, "precision": "bf16"}),
    "cp": ("llama", {"cp": 2, "tp": 2}),
    "ep": ("mixtral", {"ep": 2, "dp": 2}),
    "pp": ("llama", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b"}),
    "pp, a loss of the whole batch": (
        "rooted",
        {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b"},
    ),
    "pp, experts": ("mixtral", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b"}),
    "zero-bubble": ("gpt2", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "zero-bubble"}),
    "pp, recompute": ("t5", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b", "recompute": "full"}),
}


class Rooted(nn.Module):
    """With a loss that does not add up over microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CASES["llama"].model()

    def forward(self, **batch: torch.Tensor) -> Any:
        out = self.inner(**batch)
        out.loss = out.loss.sqrt()
        return out


def garbage(rank: int, size: int, name: str, pins: dict[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the tensors that a step leaves in cycles."""
    torch.manual_seed(0)
    model = Rooted() if name == "rooted" else CASES[name].model()
    batch = CASES["llama" if name == "rooted" else name].batch()
    plan = plan_once(model, batch, cluster="laptop-cpu", **{**ALONE, **pins})
    mw.parallelize(model, plan, batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        return [tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_of_a_step_is_in_a_cycle(rank_pool: RankPool, layout: str) -> None:
    assert rank_pool.run(4, garbage, *LAYOUTS[layout]) == [[]] * 4
