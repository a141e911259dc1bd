"""Dropout under pipelines and data parallelism: every loss is that of one device.

python integration_tests/pipeline_dropout.py [steps]      # 50 by default, GPT-2 with dropout 0.1, pp 2 x dp 2, AdamW
"""

from __future__ import annotations

import sys

import torch
from plan_once import plan_once
from zoo import gpt2

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, TOKENS, VOCABULARY = 8, 12, 128
LIMIT = 1e-5


def batch(step: int) -> dict[str, torch.Tensor]:
    """Tokens of a step; some labels are ignored, unevenly over the rows."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    labels[step % ROWS] = -100
    return {"input_ids": ids, "labels": labels}


def losses(rank: int, size: int, steps: int, schedule: str) -> list[tuple[float, float]]:
    """(one device, pipeline) per step; every mask of the model is another in each."""
    torch.manual_seed(0)
    single = gpt2().train()
    torch.manual_seed(0)
    many = gpt2().train()
    plan = plan_once(
        many,
        batch(0),
        cluster="laptop-cpu",
        pp=2,
        dp=2,
        tp=1,
        cp=1,
        microbatches=2,
        schedule=schedule,
    )
    assert isinstance(plan, mw.ParallelPlan)
    many = mw.parallelize(many, plan)
    losses_of_steps: list[tuple[float, float]] = []
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (single, many)]
    for step in range(steps):
        pair = []
        for model, optimizer in zip((single, many), optimizers, strict=True):
            torch.manual_seed(100 + step)
            optimizer.zero_grad()
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            pair.append(float(loss.detach()))
        losses_of_steps.append((pair[0], pair[1]))
    return losses_of_steps


def main(arguments: list[str]) -> int:
    """Exit code 0 where all losses are those of one device."""
    steps = int(arguments[0]) if arguments else 50
    with RankPool() as pool:
        for schedule in ("1f1b", "zbv"):
            ranks = pool.run(4, losses, steps, schedule)
            assert all(losses_of_steps == ranks[0] for losses_of_steps in ranks), "ranks differ in the loss"
            worst = max(abs(single - other) / single for single, other in ranks[0])
            first, last = ranks[0][0][0], ranks[0][-1][0]
            print(
                f"{schedule}: {steps} steps, loss {first:.4f} to {last:.4f}, largest relative difference {worst:.1e}"
            )
            if worst > LIMIT:
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
