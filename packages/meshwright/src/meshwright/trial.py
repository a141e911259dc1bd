"""Runs plans for a few real steps on ranks of this machine, and the planner `trial`, which keeps the fastest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.stock_optimizers import FOR_OTHERS, OPTIMIZERS
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import Planner, PlanRequest
from meshwright_dtensor.utils.names import count_of

if TYPE_CHECKING:
    from torch import nn

PLANS = 3
"""How many plans are run, where `top_k` asks for fewer."""

STEPS, WARM_UP_STEPS = 5, 2
"""Timed steps of each plan, and steps before them."""


def measure(
    make: Callable[[], nn.Module], batch: Any, plan: ParallelPlan, optimizer: Callable[[Any], Any], steps: int
) -> float:
    """Seconds of a step under a plan, on the slowest rank, the median over steps; to be called on every rank of the job."""
    import torch
    import torch.distributed as dist

    import meshwright as mw
    from meshwright.sources import loss_of
    from meshwright_dtensor.devices import device_of
    from meshwright_dtensor.mesh.mesh import destroy_groups, live_process_groups
    from meshwright_dtensor.model.device import on_device

    device = mw.init()
    before = live_process_groups()
    with mw.deferred_init():
        model = make()
    batch = on_device(batch, device)
    mw.parallelize(model, plan, batch=batch)
    stepping = optimizer(model.parameters())
    args: Sequence[Any] = batch if isinstance(batch, (tuple, list)) else (batch,)
    keywords: Mapping[str, Any] = {}
    if isinstance(batch, Mapping):
        args, keywords = (), batch
    taken = []
    for _ in range(WARM_UP_STEPS + steps):
        dist.barrier()
        start = time.perf_counter()
        loss_of(model(*args, **keywords)).backward()
        stepping.step()
        stepping.zero_grad()
        # kernels are launched, not done
        device_of(device).synchronize(device)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(float(slowest))
    del model, stepping
    destroy_groups(live_process_groups() - before)
    return median(taken[WARM_UP_STEPS:])


def tried(
    plans: Sequence[ParallelPlan], arguments: Sequence[str], optimizer: str, steps: int = STEPS
) -> list[ParallelPlan]:
    """The plans, fastest first, each with a note of its measured time.

    Args:
        plans: of one world size.
        arguments: of `meshwright trial` that say what is run: "--model", ...
        optimizer: for which they were planned. One that users bring is not here: adamw steps in its place, and the notes say so.

    Raises UsageError: ranks could not run them here; what they said is on stderr.
    """
    stepping = optimizer if optimizer in OPTIMIZERS else FOR_OTHERS
    with tempfile.TemporaryDirectory(prefix="meshwright-trial-") as folder:
        files = [str(Path(folder) / f"plan{number}.json") for number in range(len(plans))]
        for plan, file in zip(plans, files):
            plan.save(file)
        output = Path(folder) / "measured.json"
        # ranks of a job of their own, whatever job this process is of
        job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        environment = {name: value for name, value in os.environ.items() if name not in job}
        command = [sys.executable, "-m", "meshwright", "trial", *files, *arguments]
        command += ["--optimizer", stepping, "--steps", str(steps), "--output", str(output)]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise UsageError(
                f"the plans could not be tried on {count_of(plans[0].world_size, 'rank')} of this machine (exit code "
                f"{done.returncode}, see above); plan without a trial, or mend what was said"
            )
        seconds: list[float] = json.loads(output.read_text())["seconds"]
    noted = []
    for place, i in enumerate(sorted(range(len(plans)), key=lambda i: (seconds[i], i)), 1):
        note = f"tried: {1e3 * seconds[i]:.4g} ms a step (median of {steps} on this machine)"
        if (predicted := plans[i].predicted) is not None:
            note += f", {1e3 * predicted.step_seconds:.4g} ms predicted"
        note += f"; number {place} of {len(plans)} measured, number {i + 1} predicted"
        if stepping != optimizer:
            note += f"; steps were those of {stepping}, since trials do not know {optimizer}"
        notes = (*plans[i].provenance.notes, note)
        noted.append(_with_origin(plans[i], notes=notes, measured_seconds=seconds[i]))
    return noted


def _with_origin(plan: ParallelPlan, **update: Any) -> ParallelPlan:
    """The plan with another provenance."""
    return plan.replace(provenance=plan.provenance.model_copy(update=update))


class TrialPlanner(Planner):
    """The default planner's best plans, run for a few steps on ranks of this machine; the fastest measured comes first."""

    name: ClassVar[str] = "trial"

    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        """See Planner.plan.

        Raises UsageError: the model has no values or cannot be handed to other processes, or another number of rows.
        """
        import torch

        from meshwright_dtensor.deferred.materialize import has_values
        from meshwright_planner.planners.eager import EagerPlanner
        from meshwright_planner.trace.batch import Batch

        if not all(has_values(p) for p in model.parameters()):
            raise UsageError(
                "planner='trial' runs the model, and its parameters have no values; build it with them, or "
                "use `meshwright plan --trial` with a --model that can be built again"
            )
        rows = Batch.of(batch).size
        if request.global_batch_size not in (None, rows):
            raise UsageError(
                f"global_batch_size={request.global_batch_size} with planner='trial', which runs the batch itself, and that "
                f"has {count_of(rows, 'row')}; give a batch of so many, or leave global_batch_size out"
            )
        plans = EagerPlanner().plan(model, batch, replace(request, top_k=max(request.top_k, PLANS)))
        with tempfile.TemporaryDirectory(prefix="meshwright-trial-") as folder:
            saved = Path(folder) / "model.pt"
            try:
                torch.save((model, batch), saved)
            except (AttributeError, TypeError, RuntimeError, OSError) as error:
                raise UsageError(
                    f"planner='trial' hands the model to other processes, and it cannot be pickled ({error}); use "
                    "`meshwright plan --trial` with --model file.py:function"
                ) from error
            fastest = tried(plans, ["--saved", str(saved)], request.optimizer)
        return [_with_origin(plan, planner=self.name) for plan in fastest[: request.top_k]]
