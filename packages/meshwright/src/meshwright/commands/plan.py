"""`meshwright plan`: plan a model for a number of ranks, on this machine or on a cluster that is only a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.commands import options as opt
from meshwright.commands.progress import progress
from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.plugins import PlannerSpec
from meshwright_dtensor.strategy import Planner, PlanRequest
from meshwright_dtensor.utils.process import without_garbage_collection

if TYPE_CHECKING:
    from torch import nn

# the planner that runs the model, which therefore needs its values
RUNS = "trial"
# plans in the table of candidates, however few are asked for
COMPARED = 5


@click.command("plan")
@opt.model_options
@opt.plan_options()
@opt.number("--world-size", help="Ranks to plan for. [default: 1]")
@opt.number("--top-k", default=1, show_default=True, help="How many plans --json and -v show, best first.")
@opt.file("--output", "-o", help="Save the best plan here.")
@click.option(
    "--trial", type=click.IntRange(2), help="Run the best so many here for a few steps; the fastest wins."
)
@click.option("--compare", metavar="NAMES", help="Also ask these planners, as alpa,mcmc; all in one table.")
@click.option(
    "--verbose", "-v", is_flag=True, help="Show plans whole: placements, collectives, other candidates."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or the list of plans, as JSON.")
@click.pass_obj
def command(
    state: State,
    chosen: opt.ModelChoice,
    options: opt.PlanOptions,
    world_size: int | None,
    top_k: int,
    output: Path | None,
    trial: int | None,
    compare: str | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Plan the parallelism of a model from one run on fake tensors; no accelerator is needed."""
    opt.check_folder("--output", output)
    single = {"--output": output, "--trial": trial, "--top-k": top_k if top_k != 1 else None}
    opt.check_alone("--compare", compare is not None, single)
    opt.check_rows("--trial", trial is not None, options.values["global_batch_size"])
    request = options.request(
        state.host,
        world_size=ranks.world_size() if world_size is None else world_size,
        # refused below 1
        top_k=max(top_k, COMPARED, trial or 1) if top_k >= 1 else top_k,
    )
    planners = [request.planner, *(name.strip() for name in (compare or "").split(","))]
    with without_garbage_collection(), progress("loading", as_json) as phase:
        instance, batch = chosen.source().to_plan(values=RUNS in planners)
        phase("planning")
        if compare is not None:
            return _compare(state, instance, batch, request, planners, as_json)
        planner: Planner = state.host.get(PlannerSpec, request.planner).load()()
        plans = planner.plan(instance, batch, request)
    if ranks.rank():
        return 0
    if trial is not None:
        from meshwright.trial import tried

        plans = [*tried(plans[:trial], chosen.arguments(), request.optimizer), *plans[trial:]]
    if output is not None:
        plans[0].save(output)
    if as_json:
        data = [json.loads(plan.to_json()) for plan in plans[:top_k]]
        click.echo(json.dumps(data if top_k > 1 else data[0], indent=2))
        return 0
    from meshwright_planner import explain
    from meshwright_planner.clusters.registry import cluster_of

    size = plans[0].world_size
    machine = cluster_of(request.cluster, state.host, size).running(size)
    report = explain(plans, cluster=machine, host=state.host, what_to_buy=False)
    if verbose:
        click.echo(report)
        for place, plan in enumerate(plans[:top_k], 1):
            click.echo(f"=== plan {place} ===\n{plan.explain()}")
    saved = "PLAN" if output is None else str(output)
    click.echo(
        f"-v shows plans whole; meshwright explain {saved} --report: where time and memory go, what to buy next"
    )
    if output is not None:
        click.echo(f"saved to {output}")
    if not verbose:
        click.echo(report.brief(), nl=False)
    return 0


def _compare(
    state: State, model: nn.Module, batch: Any, request: PlanRequest, planners: list[str], as_json: bool
) -> int:
    """Print what each planner found; the exit code, that of InfeasibleError where nobody found anything."""
    from meshwright_planner.reports.compare_planners import compare

    if ranks.rank():
        return 0
    names = [name for name in dict.fromkeys(planners) if name]
    comparison = compare(model, batch, request, names, state.host)
    click.echo(json.dumps(comparison.to_dict(), indent=2) if as_json else comparison, nl=as_json)
    return 0 if comparison.plans else InfeasibleError.exit_code
