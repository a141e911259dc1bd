"""`meshwright verify`: train a few steps in parallel and on one device, and compare everything a step computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.commands import options as opt
from meshwright.commands.progress import progress
from meshwright.sources import loss_of
from meshwright.stock_optimizers import HELP, OPTIMIZERS, check_stepped
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.utils.names import count_of


@click.command("verify")
@opt.model_options
@opt.plan_options(optimizers=HELP)
@opt.file("--plan", "plan_file", help="Check this plan.")
@opt.number("--world-size", help="Ranks to start here. [default: the plan's, or 4]")
@opt.number("--steps", default=2, show_default=True, help="Training steps.")
@click.option("--tolerance", type=float, help="Largest relative difference. [default: the dtype's]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_obj
def command(
    state: State,
    chosen: opt.ModelChoice,
    options: opt.PlanOptions,
    plan_file: Path | None,
    world_size: int | None,
    steps: int,
    tolerance: float | None,
    as_json: bool,
) -> int:
    """Check a plan on a model: every loss, gradient, parameter and optimizer state against one device.

    Exit code 4 when a tensor differs by more than its dtype's rounding explains. Under Adam, parameters after a step are
    reported as no measure: it turns rounding in gradients that cancel to nothing into whole steps. Its moments are compared.
    """
    optimizer = options.values["optimizer"]
    check_stepped("verify", optimizer, "check a plan with any other by mw.verify(..., optimizer=)")
    if plan_file is not None and options.given:
        given = ", ".join(options.given)
        raise UsageError(f"--plan {plan_file} fixes what {given} asks for; leave that out, or the plan")
    opt.check_rows("verify", True, options.values["global_batch_size"])
    plan = None
    if plan_file is not None:
        from meshwright_dtensor.plan import ParallelPlan

        plan = ParallelPlan.load(plan_file)
    size = ranks.check_world_size(world_size, default=plan.world_size if plan else 4)
    if plan is not None and plan.world_size != size:
        rule = f"this run has {count_of(size, 'rank')}: start {plan.world_size}, or plan for {size}"
        raise PlanError("world_size", plan.world_size, rule, str(size))
    request = options.request(state.host, world_size=size)
    if size > 1 and not ranks.is_rank():
        return ranks.launch(size, state.arguments)

    import torch
    import torch.distributed as dist

    import meshwright as mw

    mw.init()
    torch.set_num_threads(1)
    with progress("loading", as_json) as phase:
        source = chosen.source()
        if plan is None:
            phase("planning")
            with mw.deferred_init():
                instance = source.make()
            instance, plan = opt.apply_request(instance, source.batch, request)
            del instance
        phase(f"comparing {count_of(steps, 'step')} with one device")
        checks: Any = {"steps": steps, "optimizer": OPTIMIZERS[optimizer], "tolerance": tolerance}
        report = mw.verify(source.make, source.batch, plan, **checks, loss=loss_of)
    if ranks.rank() == 0:
        click.echo(json.dumps(report.to_dict()) if as_json else report.render())
    ok = report.ok
    # a rank that leaves with 4 ends the others, and the first has much to say
    dist.barrier()
    dist.destroy_process_group()
    return 0 if ok else 4
