"""`meshwright explain`: a plan file for people, how two plan files differ, and why a plan is not another."""

from __future__ import annotations

import json
from pathlib import Path

import click

from meshwright.cli import State
from meshwright.commands.options import check_alone, check_folder
from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan


@click.command("explain")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--diff", "other", type=click.Path(path_type=Path), default=None, help="Say what changes to this plan."
)
@click.option("--world-size", type=int, default=None, help="Also check that the plan fits this many ranks.")
@click.option("--schedule", is_flag=True, help="Draw the timeline of the pipeline's schedule.")
@click.option("--png", type=click.Path(path_type=Path), default=None, help="Draw it into this file too.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    default=None,
    help="Write it as one page that needs nothing else.",
)
@click.option("--report", is_flag=True, help="Only where time and memory go, and what to buy next.")
@click.option(
    "--why-not",
    default=None,
    metavar="NAME=VALUE",
    help="Say why the plan does not use a degree or an option, as tp=4; needs --model.",
)
@click.option("--model", default=None, metavar="MODEL", help="For --why-not: the model, as for `plan`.")
@click.option(
    "--batch-size", type=int, default=8, show_default=True, help="For --why-not: rows of the batch."
)
@click.option(
    "--sequence-length", type=int, default=128, show_default=True, help="For --why-not: tokens of a row."
)
@click.option("--optimizer", default="adamw", show_default=True, help="For --why-not: as for `plan`.")
@click.option("--memory-limit", default=None, metavar="SIZE", help="For --why-not: as for `plan`.")
@click.option(
    "--cluster", default=None, help="Cluster by name, or a file of one. [default: that of the plan]"
)
@click.option("--cost-model", default=None, help="For --why-not: as for `plan`. [default: that of the plan]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    state: State,
    plan: Path,
    other: Path | None,
    world_size: int | None,
    schedule: bool,
    png: Path | None,
    html: Path | None,
    report: bool,
    why_not: str | None,
    model: str | None,
    batch_size: int,
    sequence_length: int,
    optimizer: str,
    memory_limit: str | None,
    cluster: str | None,
    cost_model: str | None,
    as_json: bool,
) -> None:
    """Say what a plan does and why; check it without taking any memory."""
    from meshwright_planner import explain

    files: dict[str, object] = {"--html": html, "--report": report}
    check_alone(
        "--diff", other is not None, {**files, "--png": png, "--schedule": schedule, "--why-not": why_not}
    )
    check_alone("--why-not", why_not is not None, {**files, "--png": png, "--schedule": schedule})
    check_alone("--schedule", schedule, files)
    check_folder("--html", html)
    check_folder("--png", png)
    loaded = ParallelPlan.load(plan)
    loaded.validate_for(world_size, axes={found.record.axis for found in state.host.strategies().values()})
    if other is not None:
        changes = loaded.diff(ParallelPlan.load(other))
        click.echo(json.dumps(changes, indent=2) if as_json else "\n".join(changes) or "the plans are equal")
        return
    if why_not is not None:
        if model is None:
            raise UsageError(
                f"--why-not {why_not} plans again, and a plan does not hold its model; give --model, and the batch"
            )
        _why_not(
            state,
            loaded,
            why_not,
            model,
            batch_size,
            sequence_length,
            optimizer,
            memory_limit,
            cluster,
            cost_model,
            as_json,
        )
        return
    if schedule:
        _timeline(loaded, png, as_json)
        return
    machine = _machine(state, loaded, cluster)
    if png is not None:
        from meshwright.commands.picture import draw

        draw(loaded, machine, state.host, png)
    if html is not None:
        from meshwright_planner.reports.page import page

        html.write_text(page(loaded, cluster=machine, host=state.host), encoding="utf-8")
    if as_json and report:
        click.echo(json.dumps(explain(loaded, cluster=machine, host=state.host).to_dict(), indent=2))
    elif as_json:
        click.echo(loaded.to_json(), nl=False)
    else:
        if not report:
            click.echo(loaded.explain())
        if loaded.predicted is not None:
            click.echo(explain(loaded, cluster=machine, host=state.host), nl=False)


def _machine(state: State, plan: ParallelPlan, name: str | None) -> Cluster | None:
    """The cluster of the plan; None where it is not known, or was found at hand, and none is named."""
    from meshwright_planner.machines.known import cluster_of

    wanted = name or plan.provenance.cluster
    if wanted is None:
        return None
    try:
        return cluster_of(wanted, state.host).running(plan.world_size)
    except PluginError:
        if name is not None:
            raise
        return None


def _why_not(
    state: State,
    plan: ParallelPlan,
    pins: str,
    model: str,
    batch_size: int,
    sequence_length: int,
    optimizer: str,
    memory_limit: str | None,
    cluster: str | None,
    cost_model: str | None,
    as_json: bool,
) -> None:
    import meshwright as mw
    from meshwright.commands.options import parse_size
    from meshwright.sources import resolve
    from meshwright_dtensor.planning import PlanRequest
    from meshwright_planner.reports.whynot import parse_pins, why_not

    wanted = parse_pins(pins)
    request = PlanRequest(
        cluster=cluster or plan.provenance.cluster,
        world_size=plan.world_size,
        cost_model=cost_model or plan.provenance.cost_model,
        optimizer=optimizer,
        memory_limit=None if memory_limit is None else parse_size(memory_limit),
        precision=None if plan.precision is None else plan.precision.parameters,
    )
    source = resolve(model, batch_size=batch_size, sequence_length=sequence_length, seed=0)
    with mw.deferred_init():
        instance = source.make()
    answer = why_not(plan, instance, source.batch, request, wanted, state.host)
    click.echo(json.dumps(answer.to_dict()) if as_json else answer, nl=as_json)


def _timeline(plan: ParallelPlan, png: Path | None, as_json: bool) -> None:
    from meshwright_pipeline.timeline import planned, text

    table = planned(plan)
    if png is not None:
        from meshwright.commands.timeline import draw

        assert plan.pipeline is not None
        draw(table, f"{plan.pipeline.schedule}, {plan.pipeline.microbatches} microbatches", png)
    if as_json:
        ranks = [[[a.kind, a.stage, a.microbatch] for a in actions] for actions in table.ranks]
        click.echo(json.dumps({"bubble": table.bubble, "alive": table.alive, "ranks": ranks}))
    else:
        click.echo(text(table))
