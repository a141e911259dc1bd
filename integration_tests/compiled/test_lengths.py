"""Batches of many lengths: few compilations, then calls run as they are; the numbers are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.verification.compare import whole

from .runs import batch, build

NAME = "Llama without cache"
LENGTHS = range(3, 53)


def steps(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every length, and the sum of their gradients."""
    torch.manual_seed(7)
    losses = []
    for length in LENGTHS:
        ids = torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(length))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: whole(p.grad) for name, p in model.named_parameters()}


def compared(rank: int, size: int, plan: str) -> tuple[int, int, list[str]]:
    """Compilations and compiled calls of the blocks, and why others were not."""
    losses, gradients = steps(mw.parallelize(model := build(NAME), ParallelPlan.from_json(plan)))
    expected, wanted = steps(build(NAME))
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)
    # a rank of a pipeline calls the blocks of its stage
    (row,) = [row for row in mw.debug.regions(model).rows if row.other]
    return row.graphs, row.compiled, [reason for reason, _ in row.reasons]


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2, "microbatches": 2}], ids=str)
def test_fifty_lengths_make_eight_graphs_at_most(rank_pool: RankPool, pins: dict[str, int]) -> None:
    plan: Any = mw.plan(build(NAME), batch(NAME, 0), world_size=2, compile=True, **pins)
    recorded = plan.replace(
        compile=[{"pattern": rule.pattern, "backend": "aot_eager"} for rule in plan.compile]
    )
    for graphs, compiled, reasons in rank_pool.run(2, compared, recorded.to_json(), timeout=200):
        assert 0 < graphs <= 8 and compiled > 0
        # said once, and no part is compiled for each length instead
        assert len(reasons) == 1 and "pad the batches" in reasons[0]
