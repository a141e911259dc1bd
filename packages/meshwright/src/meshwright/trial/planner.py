"""The planner `trial`: the best predicted plans, run for a few steps each; the fastest measured plan comes first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.trial.measure import STEPS
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import Planner, PlanRequest
from meshwright_dtensor.utils.names import count_of

if TYPE_CHECKING:
    from torch import nn

PLANS = 3
"""How many plans are run, where `top_k` asks for fewer."""


def tried(plans: Sequence[ParallelPlan], arguments: Sequence[str], steps: int = STEPS) -> list[ParallelPlan]:
    """The plans, fastest first, each with a note of its measured time.

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
                f"the plans could not be tried on {count_of(plans[0].world_size, 'rank')} of this machine (exit code "
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
    update = {"notes": (*plan.provenance.notes, note), "measured_seconds": seconds}
    return plan.replace(provenance=plan.provenance.model_copy(update=update))


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
            fastest = tried(plans, ["--saved", str(saved), "--optimizer", request.optimizer])
        return [_from_trial(plan) for plan in fastest[: request.top_k]]


def _from_trial(plan: ParallelPlan) -> ParallelPlan:
    return plan.replace(provenance=plan.provenance.model_copy(update={"planner": TrialPlanner.name}))
