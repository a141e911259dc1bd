"""A loop of `mw.elastic`, started by torchrun with the folder of the run; each start is on another plan.

Writes lines to FOLDER/log: {"first": step, "ranks": number} when it begins, {"step", "loss"} after a step, {"done": true} when
all steps are done. While there is a file FOLDER/slow, it pauses longer. PEER_COPIES: steps between two copies in memory; 0: none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, PipelineRule

PAUSE = 0.05
STEPS = int(os.environ.get("STEPS", "40"))
COPIES = int(os.environ.get("PEER_COPIES", "0"))
EVERY = 10**6 if COPIES else 2
"""Steps between two checkpoints. With copies in memory there is none before the end, so that nothing else can be gone on from."""
PLANS: tuple[dict[str, Any], ...] = (
    {"degrees": {"dp": 2}},
    {
        "degrees": {"pp": 2, "dp": 1},
        "pipeline": PipelineRule(stages=(("0",), ("3",)), microbatches=2),
    },
    {"degrees": {"zero": 2}, "zero": {"stage": 3}},
    {
        "degrees": {"dp": 1, "tp": 2},
        "parameters": (ParameterRule(pattern="0.weight", placement={"tp": "S(0)"}),),
    },
)
"""Of two ranks; other numbers of ranks are data parallel."""


def main(folder: Path) -> None:
    """Train to the end, or until somebody kills this rank."""
    mw.init(timeout=5)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    rows = torch.randn(24, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 8))
    starts = len(list(folder.glob("start-*")))
    chosen = PLANS[starts % len(PLANS)] if ranks == 2 else {"degrees": {"dp": ranks}}
    if ranks == 4:
        chosen = PLANS[3] | {"degrees": {"dp": 2, "tp": 2}}
    mw.parallelize(model, ParallelPlan(world_size=ranks, **chosen), batch=rows[:8])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    run = mw.elastic(
        folder / "run",
        model=model,
        optimizer=optimizer,
        state={"scheduler": scheduler},
        interval=EVERY,
        peer_copies=COPIES or None,
    )

    def tell(**what: Any) -> None:
        if rank == 0:
            with (folder / "log").open("a") as log:
                print(json.dumps(what), file=log)

    if rank == 0:
        (folder / f"start-{starts}").touch()
    tell(first=run.step, ranks=ranks)
    for step, batch in run.batches(DataLoader(rows, batch_size=8, shuffle=True), STEPS):
        loss = (model(batch) - batch.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        value = loss.item()
        tell(step=step, loss=value)
        time.sleep(PAUSE * (10 if (folder / "slow").exists() else 1))
    if not run.received:
        tell(done=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
