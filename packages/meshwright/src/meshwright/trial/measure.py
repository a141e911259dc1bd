"""Time of a few real steps under a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from meshwright_dtensor.plan import ParallelPlan

if TYPE_CHECKING:
    from torch import nn

STEPS = 5
"""Timed steps of each plan."""

WARM_UP_STEPS = 2
"""Steps of each plan before the timed ones."""


@dataclass(frozen=True)
class Measured:
    """What a plan took. seconds: of a step, on the slowest rank, the median over steps."""

    seconds: float
    steps: int


def measure(
    make: Callable[[], nn.Module], batch: Any, plan: ParallelPlan, optimizer: Callable[[Any], Any], steps: int
) -> Measured:
    """Run a few steps under a plan; to be called on every rank of the job."""
    import torch
    import torch.distributed as dist

    import meshwright as mw
    from meshwright.sources import loss_of
    from meshwright_dtensor.mesh.mesh import destroy_groups, live_process_groups

    device = mw.init()
    before = live_process_groups()
    with mw.deferred_init():
        model = make()
    mw.parallelize(model, plan, batch=batch)
    stepping = optimizer(model.parameters())
    taken = []
    for _ in range(WARM_UP_STEPS + steps):
        dist.barrier()
        start = time.perf_counter()
        loss_of(_called(model, batch)).backward()
        stepping.step()
        stepping.zero_grad()
        # kernels are launched, not done
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(float(slowest))
    del model, stepping
    destroy_groups(live_process_groups() - before)
    return Measured(median(taken[WARM_UP_STEPS:]), steps)


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
