"""Plans tried: a few real steps of each on ranks of this machine, and the fastest kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.strategy.planner import Planner, PlanRequest

if TYPE_CHECKING:
    from torch import nn

STEPS = 5
WARM = 2
"""Steps of each plan that are run before those that count."""

PLANS = 3
"""Plans that the planner `trial` tries where no more are asked for."""


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
    from meshwright.losses import loss_of
    from meshwright_dtensor.mesh.mesh import end_groups, groups_now

    device = mw.init()
    before = groups_now()
    with mw.deferred_init():
        model = make()
    mw.parallelize(model, plan, batch=batch)
    stepping = optimizer(model.parameters())
    taken = []
    for _ in range(WARM + steps):
        dist.barrier()
        start = time.perf_counter()
        loss_of(_called(model, batch)).backward()
        stepping.step()
        stepping.zero_grad()
        if device.type == "cuda":  # kernels are launched, not done
            torch.cuda.synchronize(device)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(float(slowest))
    del model, stepping
    end_groups(groups_now() - before)
    return Measured(median(taken[WARM:]), steps)


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def tried(plans: Sequence[ParallelPlan], arguments: Sequence[str], steps: int = STEPS) -> list[ParallelPlan]:
    """The plans, the fastest first, each with a note of what it took.

    Args:
        plans: of one world size.
        arguments: of `meshwright trial` that say what is run: "--model", ...

    Raises:
        UsageError: ranks could not run them here; what they said is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-trial-") as folder:
        files = []
        for number, plan in enumerate(plans):
            files.append(str(Path(folder) / f"plan{number}.json"))
            plan.save(files[-1])
        output = Path(folder) / "measured.json"
        # ranks of a job of their own, whatever job this process is of
        job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        environment = {name: value for name, value in os.environ.items() if name not in job}
        command = [sys.executable, "-m", "meshwright", "trial", *files, *arguments]
        command += ["--steps", str(steps), "--output", str(output)]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise UsageError(
                f"the plans could not be tried on {plans[0].world_size} ranks of this machine (exit code "
                f"{done.returncode}, see above); plan without a trial, or mend what was said"
            )
        seconds: list[float] = json.loads(output.read_text())["seconds"]
    order = sorted(range(len(plans)), key=lambda i: (seconds[i], i))
    return [_noted(plans[i], seconds[i], place, i, len(plans), steps) for place, i in enumerate(order, 1)]


def _noted(plan: ParallelPlan, seconds: float, place: int, was: int, count: int, steps: int) -> ParallelPlan:
    note = f"tried: {1e3 * seconds:.4g} ms a step (median of {steps} on this machine)"
    if plan.predicted is not None:
        note += f", {1e3 * plan.predicted.step_seconds:.4g} ms predicted"
    note += f"; number {place} of {count} measured, number {was + 1} predicted"
    own = {"notes": (*plan.provenance.notes, note), "measured_seconds": seconds}
    return plan.replace(provenance=plan.provenance.model_copy(update=own))


class TrialPlanner(Planner):
    """The default planner's best plans, run for a few steps on ranks of this machine; the fastest measured comes first."""

    name: ClassVar[str] = "trial"

    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        """See Planner.plan.

        Raises:
            UsageError: the model has no values, or cannot be handed to other processes; another number of rows than the batch has.
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
                f"has {rows} rows; give a batch of so many, or leave global_batch_size out"
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
            found = tried(plans, ["--saved", str(saved), "--optimizer", request.optimizer])
        return [_from_trial(plan) for plan in found[: request.top_k]]


def _from_trial(plan: ParallelPlan) -> ParallelPlan:
    return plan.replace(provenance=plan.provenance.model_copy(update={"planner": TrialPlanner.name}))
